"""Are greedy texts with the plugin those without speculation, token for token, in vLLM on this machine?

    python -m bench.vllm_identity --target FOLDER --draft FOLDER --out results/vllm_identity_h200.json
    python -m bench.vllm_identity --out FILE        # a pair of random weights, made on the spot

Sixteen prompts at once at temperature 0, in bfloat16 and float32 (on a CPU float32 alone), with vLLM's draft model and
with the plugin's own draft, with and without its fast forward; at four drafts a step, and at lengths that change in
every step. The reference is the same vLLM, on the same model runner, without speculation. Where a text parts, the
target's weights as served are run by transformers in float32 over what both texts have in common: a tie is a divergence
whose two tokens are closer there than rounding in the served precision makes them (bench.serving_checks.TIE).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cell_rows import write_as_they_come
from bench.memory import GIB
from bench.serving_checks import LOGPROBS, TIE, compare, parting
from bench.tiny_models import noisy_copy, tiny_model
from bench.vllm_engines import environment, shared_arguments, with_whole_head
from bench.vllm_methods import DRAFT, OWN, Method
from bench.vllm_speed_rows import short
from bench.vllm_turns import START_S, Wave, Worker, WorkerError
from data.common import encode_prompt
from pipeline.results import gate

STAGE = "vllm_identity"
K_MAX = 8
LENGTHS = {"4 drafts": (4,), "changing": (8, 1, 0, 4, 2, 0, 0, 7, 3, 6, 5)}
POOL_GIB = 2
DRAFTING = {"method": "draft_model", "model": DRAFT}
METHODS = (
    Method(name="none", drafter="none", controller="none"),
    Method(name="plugin", drafter="model", k=K_MAX, speculative=DRAFTING, plugin={}),
    Method(name="plugin-own", drafter="model", k=K_MAX, speculative=DRAFTING, plugin=OWN),
    Method(name="plugin-own-fast", drafter="model", k=K_MAX, speculative=DRAFTING, plugin=OWN | {"fast": True}),
)
PROMPTS = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a Python function that reverses the words of a sentence.",
    "A train leaves at 14:10 and arrives at 17:45. How long does the journey take?",
    "Explain in three sentences how a bicycle stays upright.",
    "List five uses of vinegar in the kitchen.",
    "Translate into French: The library closes at six in the evening.",
    "What is 17 times 23? Show the steps.",
    "Write a short poem about rain on a tin roof.",
    "Why do leaves change their colour in autumn?",
    "Give the recipe of a simple pancake batter for four people.",
    "Sort these numbers from small to large: 8, 3, 19, 1, 12, 7.",
    "What does the SQL statement SELECT COUNT(*) FROM orders do?",
    "Describe the water cycle to a child.",
    "Who wrote Hamlet, and what is the play about?",
    "Write a polite letter that cancels a dentist's appointment.",
    "Which planets of the solar system have rings?",
)


def prompts_of(target: Path) -> list[list[int]]:
    """Ids of PROMPTS by the target's chat template; as many random prompts for a target without a tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    if (target / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
        return [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    vocab = AutoConfig.from_pretrained(target, local_files_only=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (5 + 3 * n,), generator=generator).tolist() for n in range(len(PROMPTS))]


def random_pair(folder: Path) -> tuple[Path, Path]:
    """A target whose next token depends on its text, and a draft that often agrees with it."""
    size = {"vocab": 2048, "layers": 4, "hidden": 512, "head_dim": 64}
    target = tiny_model(dtype=torch.float32, logit_std=3.0, max_positions=1024, **size)  # type: ignore[arg-type]
    target.save_pretrained(folder / "target")
    noisy_copy(target, noise=0.05, seed=1).save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def drafts_of(draft: Path) -> dict[str, str]:
    """The folder that each method drafts with."""
    whole = with_whole_head(draft)
    return {method.name: str((whole if method.name == "plugin" else draft).resolve()) for method in METHODS}


def _name(method: Method, dtype: str) -> str:
    return f"{method.name}-{dtype}"


class Identity:
    """The texts of every method and precision."""

    def __init__(self, target: Path, draft: Path, work: Path, tokens: int) -> None:
        self.target, self.drafts, self.work, self.tokens = target, drafts_of(draft), work, tokens
        self.prompts = prompts_of(target)
        self.on_gpu = torch.cuda.is_available()

    def rows(self, dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
        """One a method, precision and way of choosing lengths, and one a text that parts. All engines are up
        together."""
        wave = Wave()
        try:
            for name, (method, dtype) in {_name(m, d): (m, d) for d in dtypes for m in METHODS}.items():
                cache = self.work / f"cache-{name}"
                env = environment(method, on_gpu=self.on_gpu, folder=self.work / "plugin", cache=cache)
                wave.add(name, Worker(self._job(method, dtype), env, self.work / "logs" / f"{name}.log"))
            failed = wave.wait(START_S)
            for dtype in dtypes:
                yield from self._of_dtype(wave, failed, dtype)
        finally:
            wave.stop()

    def _of_dtype(self, wave: Wave, failed: Mapping[str, WorkerError], dtype: str) -> Iterator[dict[str, Any]]:
        plain, *others = METHODS
        for method in METHODS:
            if error := failed.get(_name(method, dtype)):
                yield self._not_run(method.name, dtype, error)
        if _name(plain, dtype) in failed:
            return
        try:
            texts = wave.workers[_name(plain, dtype)].ask(self._asked((0,), LOGPROBS), "texts")["texts"]
        except WorkerError as error:
            yield self._not_run(plain.name, dtype, error)
            return
        for method in others:
            if worker := wave.workers.get(_name(method, dtype)):
                yield from self._compared(worker, method.name, dtype, texts)

    def _compared(
        self, worker: Worker, name: str, dtype: str, plain: Sequence[Mapping[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        for label, ks in LENGTHS.items():
            about = {"method": name, "dtype": dtype, "lengths": label}
            try:
                answer = worker.ask(self._asked(ks, None), "texts")
            except WorkerError as error:
                yield self._not_run(name, dtype, error) | about
                return
            apart = [self._divergence(n, text, plain[n], dtype) for n, text in enumerate(answer["texts"])]
            found = [about | row for row in apart if row is not None]
            yield {
                **about,
                **compare(answer["texts"], plain, dtype),
                "tied_in_float32": sum(row["tie"] for row in found),
                "tokens": sum(len(text["ids"]) for text in plain),
                "drafted": answer["counts"]["drafted"],
                "accepted": answer["counts"]["accepted"],
            }
            yield from found

    def _divergence(
        self, n: int, mine: Mapping[str, Any], plain: Mapping[str, Any], dtype: str
    ) -> dict[str, Any] | None:
        """Where text n parts, and how close the two tokens are by a replay in float32; None when it does not part."""
        at = parting(mine["ids"], plain["ids"])
        if at is None:
            return None
        logits_V = replay(self.target, [*self.prompts[n], *plain["ids"][:at]], dtype, self.on_gpu)
        one, other = (float(logits_V[text["ids"][at]]) for text in (plain, mine))
        top = logits_V.topk(2).values
        gap = abs(one - other)
        return {
            "text": n,
            "position": at,
            "token": mine["ids"][at],
            "plain_token": plain["ids"][at],
            "gap_float32": gap,
            "top2_gap_float32": float(top[0] - top[1]),
            "tie": gap <= TIE[dtype],
        }

    def _asked(self, ks: tuple[int, ...], logprobs: int | None) -> dict[str, Any]:
        return {"prompts": self.prompts, "new_tokens": self.tokens, "logprobs": logprobs, "ks": ks}

    def _not_run(self, name: str, dtype: str, error: WorkerError) -> dict[str, Any]:
        print(f"{name}, {dtype}: not run: {short(str(error))}", flush=True)
        return {"method": name, "dtype": dtype, "not_run": short(str(error))}

    def _job(self, method: Method, dtype: str) -> dict[str, Any]:
        given = shared_arguments(
            str(self.target.resolve()),
            dtype,
            longest=max(map(len, self.prompts)) + self.tokens + 4 * K_MAX,
            rows=len(self.prompts),
            pool_bytes=POOL_GIB * GIB if self.on_gpu else None,
        )
        if method.plugin is not None:
            model = self.drafts[method.name]
            given["speculative_config"] = {**method.speculative, "model": model, "num_speculative_tokens": method.k}
            given["additional_config"] = {"specdec": dict(method.plugin)}
        return {"llm": given, "ks": [], "batches": []}


@torch.inference_mode()
def replay(target: Path, ids: Sequence[int], dtype: str, on_gpu: bool) -> torch.Tensor:
    """The target's logits, float32 [V], behind `ids`, by transformers; weights as they are served in `dtype`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype), local_files_only=True)
    model.float().to("cuda" if on_gpu else "cpu").eval()
    logits_V: torch.Tensor = model(torch.tensor([ids], device=model.device)).logits[0, -1].float().cpu()
    return logits_V


def identity_gate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All texts the same, or parted at ties that float32 confirms."""
    stopped = [f"{row['method']}, {row['dtype']}: {row['not_run']}" for row in rows if "not_run" in row]
    counted = [row for row in rows if "texts" in row]
    texts = sum(row["texts"] for row in counted)
    same, tied = (sum(row[name] for row in counted) for name in ("texts_same", "tied_in_float32"))
    told = f"{same} of {texts} texts token for token, {tied} part at a tie, in {len(counted)} cases"
    if same + tied < texts:
        return gate("fail", value=same, limit=texts, reason=told)
    if stopped or not counted:
        return gate("not run", value=same, limit=texts, reason=f"{told}; not run: {'; '.join(stopped)}")
    return gate("pass", value=same, limit=texts, reason=told)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 when the gate does not pass."""
    parser = argparse.ArgumentParser(prog="bench.vllm_identity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, help="model folder (default: random weights)")
    parser.add_argument("--draft", type=Path, help="model folder, its head may be pruned")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--run", default="identity", help="the result's name for this run")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(TIE), help="default: bfloat16 float32; float32 on a CPU")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--work", type=Path, help="keep logs and compiled code there (default: nowhere)")
    args = parser.parse_args(argv)
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    for folder in filter(None, (args.target, args.draft)):
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} holds no config.json; expected a model's folder, as transformers saves one")
    if args.new_tokens < 1:
        parser.error(f"--new-tokens is {args.new_tokens}; expected a whole number from 1 on")
    dtypes = args.dtypes or (["bfloat16", "float32"] if torch.cuda.is_available() else ["float32"])
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        target, draft = (args.target, args.draft) if args.target else random_pair(work / "models")
        pair = Identity(target, draft, work, args.new_tokens)
        names = {"target": target.name, "draft": draft.name}
        rows = (names | row for row in pair.rows(dtypes))
        passes = write_as_they_come(rows, args.out, stage=STAGE, run=args.run, gate="G6 greedy", judge=identity_gate)
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
