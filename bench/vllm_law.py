"""Does sampled text of vLLM with the plugin follow the target's law on this machine? Gate G1's test, in vLLM.

    python -m bench.vllm_law --out results/vllm_law_h200.json

A tiny pair of random weights with a vocabulary of 8, so that the joint law of the first three tokens can be enumerated
without a cache, by transformers on the CPU in float64 over the weights as they are served. Lengths change in every step
while the texts are drawn. A p-value is asked to stay above 1e-5 and the total variation within what samples of the law
itself show (bench/law_stats.py); texts drawn at temperature 0.9 must not pass for texts at 0.8. vLLM without
speculation stands beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.cell_rows import write_as_they_come
from bench.law import Oracle, count_cells, enumerate_law
from bench.law_stats import LawCheck, check_law
from bench.memory import GIB
from bench.tiny_models import noisy_copy, tiny_model
from bench.vllm_engines import environment, shared_arguments
from bench.vllm_identity import METHODS
from bench.vllm_methods import Method
from bench.vllm_speed_rows import short
from bench.vllm_turns import START_S, Wave, Worker, WorkerError
from pipeline.results import gate
from specdec import SamplingParams

STAGE = "vllm_law"
VOCAB, DEPTH, SAMPLES, ROWS, K_MAX = 8, 3, 4000, 64, 4
PROMPT = (1, 5, 2, 7, 3, 3, 0)
LENGTHS = (2, 0, 4, 1, 0, 3)
SMALLEST_P = 1e-5
FAMILIES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-k with top-p": {"temperature": 1.2, "top_k": 5, "top_p": 0.85},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3
    },
    "allowed ids": {"temperature": 1.0, "allowed_ids": (0, 2, 3, 5, 6)},
}  # fmt: skip
PLAIN, CONTROL, ANOTHER = "none", "temperature 0.9 as 0.8", {"temperature": 0.9}
ENGINES = tuple(method for method in METHODS if method.name in (PLAIN, "plugin", "plugin-own-fast"))


def pair(folder: Path, dtype: str) -> tuple[Path, Path]:
    """Target and draft, whose weights are numbers of that dtype."""
    size = {"vocab": VOCAB, "layers": 2, "hidden": 128, "head_dim": 64}
    target = tiny_model(dtype=torch.float32, logit_std=2.0, **size)  # type: ignore[arg-type]
    for name, model in (("target", target), ("draft", noisy_copy(target, noise=0.3, seed=2))):
        model.to(getattr(torch, dtype)).save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def law_of(target: Path, settings: Mapping[str, Any]) -> Any:
    """The joint law of the first DEPTH tokens, as bench.law.enumerate_law gives it."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True).double()
    return enumerate_law(Oracle(model), PROMPT, SamplingParams(max_tokens=DEPTH + 2, **settings), DEPTH)


def rows(dtypes: Sequence[str], samples: int, work: Path) -> Iterator[dict[str, Any]]:
    """One a method, dtype and family, and one of each control. All engines are up together."""
    pairs = {dtype: pair(work / dtype, dtype) for dtype in dtypes}
    wave = Wave()
    try:
        for dtype in dtypes:
            for method in ENGINES:
                name = f"{method.name}-{dtype}"
                env = environment(
                    method, on_gpu=torch.cuda.is_available(), folder=work / "plugin", cache=work / f"cache-{name}"
                )
                wave.add(name, Worker(job(method, *pairs[dtype], dtype), env, work / "logs" / f"{name}.log"))
        laws = {dtype: {name: law_of(pairs[dtype][0], FAMILIES[name]) for name in FAMILIES} for dtype in dtypes}
        failed = wave.wait(START_S)
        pool = ThreadPoolExecutor()  # nothing is timed: all draw at once
        found = {
            name: pool.submit(
                lambda one, dtype: list(drawn(one, laws[dtype], samples)), worker, name.rpartition("-")[2]
            )
            for name, worker in wave.workers.items()
        }
        for dtype in dtypes:
            for method in ENGINES:
                about, name = {"method": method.name, "dtype": dtype}, f"{method.name}-{dtype}"
                try:
                    if name in failed:
                        raise failed[name]
                    yield from (about | row for row in found[name].result())
                except WorkerError as error:
                    yield about | {"not_run": short(str(error))}
    finally:
        wave.stop()


def job(method: Method, target: Path, draft: Path, dtype: str) -> dict[str, Any]:
    pool = GIB if torch.cuda.is_available() else None
    given = shared_arguments(str(target.resolve()), dtype, longest=64, rows=ROWS, pool_bytes=pool)
    if method.plugin is not None:
        model = {"model": str(draft.resolve()), "num_speculative_tokens": K_MAX}
        given["speculative_config"] = {**method.speculative, **model}
        given["additional_config"] = {"specdec": dict(method.plugin)}
    return {"llm": given, "ks": [], "batches": []}


def drawn(worker: Worker, laws: Mapping[str, Any], samples: int) -> Iterator[dict[str, Any]]:
    first = next(iter(FAMILIES))
    for name, settings in (FAMILIES | {CONTROL: ANOTHER}).items():
        asked = {"allowed_token_ids" if key == "allowed_ids" else key: value for key, value in settings.items()}
        texts = {"prompts": [PROMPT] * samples, "new_tokens": DEPTH + 2, "logprobs": None, "ks": LENGTHS}
        answer = worker.ask(texts | {"sampling": asked}, "texts")
        counts = count_cells([text["ids"] for text in answer["texts"]], VOCAB, DEPTH)
        seen = check_law(counts, laws[first if name == CONTROL else name], seed=0)
        yield {
            "settings": name,
            "samples": samples,
            "tv": seen.tv,
            "tv_limit": seen.tv_limit,
            "p_value": seen.p_value,
            "impossible": seen.impossible,
            "drafted": answer["counts"]["drafted"],
            "accepted": answer["counts"]["accepted"],
            "as_expected": follows(seen) != (name == CONTROL),
        }


def follows(seen: LawCheck) -> bool:
    return seen.tv_ok and seen.p_value > SMALLEST_P


def law_gate(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Texts follow the law in every family and with every method, and each control is told apart."""
    stopped = [f"{row['method']}, {row['dtype']}: {row['not_run']}" for row in found if "not_run" in row]
    counted = [row for row in found if "samples" in row]
    tried = [row for row in counted if row["method"] == PLAIN or 0 < row["accepted"] < row["drafted"]]
    good = sum(row["as_expected"] for row in tried)
    least = min((row["p_value"] for row in counted if row["settings"] != CONTROL), default=None)
    told = f"{good} of {len(counted)} cases as expected"
    if idle := len(counted) - len(tried):
        told += f"; drafts were not both accepted and rejected in {idle}"
    if good < len(counted):
        return gate("fail", value=least, limit=SMALLEST_P, reason=told)
    if stopped or not counted:
        return gate("not run", value=least, limit=SMALLEST_P, reason="; ".join([told, *stopped]))
    return gate("pass", value=least, limit=SMALLEST_P, reason=told)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 when the gate does not pass."""
    parser = argparse.ArgumentParser(prog="bench.vllm_law", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--run", default="law", help="the result's name for this run")
    dtypes = ["bfloat16", "float32"] if torch.cuda.is_available() else ["float32"]
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=dtypes)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--work", type=Path, help="keep logs and compiled code there (default: nowhere)")
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error(f"--samples is {args.samples}; expected a whole number from 1 on")
    names = {"target": "random", "draft": "noisy copy"}
    with tempfile.TemporaryDirectory() as scratch:
        found = (names | row for row in rows(args.dtypes, args.samples, args.work or Path(scratch)))
        passes = write_as_they_come(found, args.out, stage=STAGE, run=args.run, gate="G6 sampled", judge=law_gate)
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
