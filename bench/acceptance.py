"""Acceptance of a config's draft beside the stock one (as many of the target's own layers), and gate G3.

    python -m bench.acceptance --config configs/demo.yaml --out results/acceptance.json \
        --in-domain gsm8k jsonl:train.jsonl 16 --out-of-domain code human_eval 16

Sets are prompt sources as in configs. Not a stage: for a draft that some other run trained.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from bench.draft_model import load_draft
from data.common import encode_prompt, stop_ids_of
from pipeline.config import load_config
from pipeline.models import keep_layers, load_target, load_tokenizer
from pipeline.results import write_result
from pipeline.sources import load_prompts
from specdec.drafter import ModelDrafter
from train.evaluate import Setting, compare, g3_gate, line


def num_layers(draft: Any) -> int:
    """How many layers a draft has, whether it is a model or a drafter of one."""
    model = draft._source if isinstance(draft, ModelDrafter) else draft
    return int(model.config.num_hidden_layers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    args = _arguments(argv)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        config = load_config(args.config, args.set)
        tokenizer = load_tokenizer(config.models)
        sets = {
            name: [
                encode_prompt(tokenizer, prompt.messages)
                for prompt in load_prompts(name, source, args.skip + int(limit), args.seed)[args.skip :]
            ]
            for name, source, limit in [*args.in_domain, *args.out_of_domain]
        }
    except ValueError as error:
        print(f"bench.acceptance: {error}", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(config.models, device)
    stop_ids = stop_ids_of(target, tokenizer)
    setting = Setting(k=args.k, batch=args.batch, max_tokens=args.max_tokens, stop_ids=stop_ids, seed=args.seed)
    name = config.models.draft.model or config.models.draft.trained or "draft"
    layers = num_layers(load_draft(config, target, device))
    drafts = {"stock": partial(keep_layers, target, layers), name: partial(load_draft, config, target, device)}
    rows: list[dict[str, Any]] = []
    inside = [name for name, _, _ in args.in_domain]
    for domain, prompts in sets.items():
        found = compare(target, drafts, {domain: prompts}, setting)
        names = {"target": config.models.target, "dtype": config.models.dtype, "in_domain": int(domain in inside)}
        rows += [names | row for row in found]
        print("\n".join(map(line, found)), flush=True)
        write_result(
            args.out, stage="acceptance", run=config.run, rows=rows, gates={"G3": g3_gate(rows)}, started=started
        )
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.acceptance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    triple: dict[str, Any] = {"nargs": 3, "action": "append", "metavar": ("NAME", "SOURCE", "LIMIT")}
    parser.add_argument("--in-domain", required=True, **triple)
    parser.add_argument("--out-of-domain", default=[], **triple)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and of sampling")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first prompts of every set")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
