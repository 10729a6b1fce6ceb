"""What a draft that attends to its latest tokens alone costs in acceptance, and what it leaves of vLLM's KV cache.

    python -m bench.draft_window --config configs/demo.yaml --texts jsonl:FILE --out results/draft_window.json

Each text is --context tokens of the source's prompts, one behind the other. The target's law p and the draft's q are
compared after each of its last --measured tokens: the mean of sum min(p, q) is the rate at which a draft sampled there
at temperature 1 is accepted (Leviathan et al., arXiv 2211.17192, section 3), the share of equal likeliest tokens that
at temperature 0. The texts are not the target's own, so that acceptance is lower than in use; what the window takes of
it is the point.

`pool_lost` is how much fewer tokens a cache of given size holds with the draft than without, in requests of --context
tokens: vLLM's draft keeps every token beside the target's, the plugin's own draft (vllm_draft_spec.memory) a ring a
request. By the configs in --shapes, or those of the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.draft_model import load_draft
from bench.memory import kv_bytes_by_config
from bench.shapes import config_of
from bench.tables import number
from data.common import encode_prompt
from pipeline.config import load_config
from pipeline.models import load_target, load_tokenizer
from pipeline.results import write_result
from pipeline.sources import load_prompts
from specdec.drafter import ModelDrafter
from specdec.window import Window
from train.intervals import ratio_interval

CHUNK = 128  # tokens a forward: the ring is longer by so many
DRAFTED = 8 + 2  # and by drafts that were rolled back, and what a row may have missed
FULL = "full"
SHORT_PROMPT = 16  # tokens: hardly any is shorter, so that not more are asked for than are needed


@dataclass(frozen=True)
class Shapes:
    """Bytes of keys and values a token."""

    target: int
    draft: int

    def lost(self, slots: int, context: int) -> float:
        """Share of a pool's tokens that is lost when each request of `context` tokens keeps `slots` for its draft."""
        return 1 - context * self.target / (context * self.target + slots * self.draft)


def texts_of(tokenizer: Any, prompts: Sequence[Any], context: int) -> Iterator[Tensor]:
    """Token ids [context] of the prompts one behind the other; the rest at the end is left out."""
    ids: list[int] = []
    for prompt in prompts:
        ids += encode_prompt(tokenizer, prompt.messages)
        if len(ids) >= context:
            yield torch.tensor(ids[:context])
            ids = []


@torch.inference_mode()
def target_law(target: Any, text_T: Tensor, measured: int) -> Tensor:
    """p after each of the last tokens, float32 [measured, V]."""
    logits_1mV = target(text_T.unsqueeze(0).to(target.device), logits_to_keep=measured).logits
    law_mV: Tensor = logits_1mV[0].float().softmax(-1)
    return law_mV


@torch.inference_mode()
def draft_law(draft: ModelDrafter, text_T: Tensor, measured: int) -> Tensor:
    """q there, fed in chunks as in use."""
    model, laws = draft.model, []
    tokens_T = text_T.to(model.device)
    if draft.vocabulary is not None:
        tokens_T = draft.vocabulary.input_ids_V[tokens_T]
    for start in range(0, len(tokens_T), CHUNK):
        tokens_1q = tokens_T[None, start : start + CHUNK]
        q = tokens_1q.shape[1]
        at_1, count_1 = (torch.tensor([value], device=model.device) for value in (start, q))
        logits_1qV = model.forward(tokens_1q, model.cache.plan(at_1, count_1, q, slice(0, 1), None), keep=q)
        if start + q > len(tokens_T) - measured:
            if draft.vocabulary is not None:
                logits_1qV = draft.vocabulary.expand(logits_1qV)
            laws.append(logits_1qV[0].float().softmax(-1))
    return torch.cat(laws)[-measured:]


def measure(config: Any, target: Any, texts: Sequence[Tensor], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for the draft that sees everything, and one for each window."""
    loaded = load_draft(config, target, str(target.device))
    draft = loaded if isinstance(loaded, ModelDrafter) else ModelDrafter(loaded)
    shapes = shapes_of(target, draft, args)
    laws = [target_law(target, text_T, args.measured) for text_T in texts]
    whole: dict[str, float] = {}
    for size in (None, *args.windows):
        window = None if size is None else Window(recent=size, sinks=args.sinks, margin=CHUNK + DRAFTED)
        draft.build(target.get_output_embeddings().weight.shape[0], 1, args.context, window)
        pairs_2P2 = np.zeros((2, len(texts), 2))
        for i, (text_T, p_mV) in enumerate(zip(texts, laws, strict=True)):
            q_mV = draft_law(draft, text_T, args.measured)
            pairs_2P2[0, i] = float(torch.minimum(p_mV, q_mV).sum()), args.measured
            pairs_2P2[1, i] = float((p_mV.argmax(-1) == q_mV.argmax(-1)).sum()), args.measured
        sums_22 = pairs_2P2.sum(1)
        found = dict(zip(("alpha_t1", "alpha_t0"), map(float, sums_22[:, 0] / sums_22[:, 1]), strict=True))
        whole = whole or found
        slots = draft.model.cache.capacity
        yield {
            "target": config.models.target,
            "dtype": config.models.dtype,
            "window": FULL if size is None else size,
            "sinks": 0 if size is None else args.sinks,
            "context": args.context,
            "texts": len(texts),
            "tokens": len(texts) * args.measured,
            **found,
            "alpha_t1_ci": ratio_interval(pairs_2P2[0]),
            **{f"{name}_lost": whole[name] - value for name, value in found.items()},
            "slots": slots,
            "pool_lost": shapes.lost(slots, args.context),
        }


def shapes_of(target: Any, draft: ModelDrafter, args: argparse.Namespace) -> Shapes:
    if args.shapes is not None:
        both = (config_of(args.shapes, name) for name in (args.shapes_target, args.shapes_draft))
        return Shapes(*(kv_bytes_by_config(each, torch.bfloat16) for each in both))
    return Shapes(*(kv_bytes_by_config(each.config, each.dtype) for each in (target, draft._source)))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    args = _arguments(argv)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        config = load_config(args.config, args.set)
        prompts = load_prompts("texts", args.texts, args.limit * args.context // SHORT_PROMPT + 1, args.seed)
        texts = list(islice(texts_of(load_tokenizer(config.models), prompts, args.context), args.limit))
        if not texts:
            raise ValueError(f"{args.texts}: {len(prompts)} prompts are under {args.context} tokens; lower --context")
        target = load_target(config.models, "cuda" if torch.cuda.is_available() else "cpu")
        rows: list[dict[str, Any]] = []
        for row in measure(config, target, texts, args):
            rows.append(row | {"source": args.texts})
            print(", ".join(f"{name} {number(row[name])}" for name in ("window", "alpha_t1", "alpha_t0", "pool_lost")))
            write_result(args.out, stage="draft_window", run=config.run, rows=rows, gates={}, started=started)
    except ValueError as error:
        print(f"bench.draft_window: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.draft_window", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--texts", required=True, metavar="SOURCE", help="prompt source, as in configs")
    parser.add_argument("--limit", type=int, default=8, help="most texts")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--measured", type=int, default=512, help="of its tokens, the last ones")
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 512, 1024], help="latest tokens seen")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens seen besides")
    parser.add_argument("--shapes", type=Path, help="folder of configs as NAME.json, for pool_lost")
    parser.add_argument("--shapes-target", default="Qwen3-8B", metavar="NAME")
    parser.add_argument("--shapes-draft", default="Qwen3-0.6B", metavar="NAME")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    for name in ("limit", "measured", "context", "sinks"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; expected a whole number from 1 on")
    if args.measured > args.context:
        parser.error(f"--measured is {args.measured}; expected at most --context ({args.context})")
    if min(args.windows) < 1:
        parser.error(f"--windows holds {min(args.windows)}; expected whole numbers from 1 on")
    return args


if __name__ == "__main__":
    sys.exit(main())
