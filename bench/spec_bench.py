"""Every drafter and controller over a prompt file with categories, such as Spec-Bench (arXiv 2401.07851).

    python -m bench.spec_bench --config configs/demo.yaml --prompts "$SPEC_PROMPTS/spec_bench_480.jsonl" \\
        --out results/spec_bench.json

The file is JSONL with a `category` in each row; of a conversation the first turn is used. In each category every
variant decodes the same requests, in turn there and back (bench/measure.py says how throughput is measured); the batch
is at most a quarter of a category's prompts, so that slots can be refilled. --jobs shares the categories out among
processes, which a GPU that waits for its host allows: a category's variants are all measured in one of them.
Acceptance is then what it is in one process; speeds are not, as the processes slow each other down, more at the
beginning than at the end: the report leaves them out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.cells import row
from bench.drafters import PLAIN, Label, drafter_of, labels_of, length_of
from bench.measure import EngineVariant, Workload, interleave, warm_up
from data.common import encode_prompt, stop_ids_of
from pipeline import rows
from pipeline.config import Config, load_config
from pipeline.results import read_result, write_result


def prompts_by_category(path: Path) -> dict[str, list[list[dict[str, str]]]]:
    """Messages of each row, by category. ValueError naming the line that cannot be used."""
    categories: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        problem = rows.problem_with(line)
        record = {} if problem else json.loads(line)
        if problem or not isinstance(record.get("category"), str):
            raise ValueError(f"{path}:{number}: {problem or 'no category'}; every row needs a prompt and a category")
        categories[record["category"]].append(rows.read(record)[0])
    return categories


class CategoryBench:
    """The config's pair, decoding one category after the other."""

    def __init__(self, config: Config, *, batch: int, max_tokens: int, temperature: float) -> None:
        import torch

        from bench.draft_model import load_draft
        from pipeline.models import load_target, load_tokenizer

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config, self.batch, self.max_tokens, self.temperature = config, batch, max_tokens, temperature
        self.target = load_target(config.models, device)
        self.draft = load_draft(config, self.target, device)
        self.tokenizer = load_tokenizer(config.models)

    def measure(self, category: str, messages: Sequence[Any], labels: Sequence[Label]) -> list[dict[str, Any]]:
        """One result row a variant, plain decoding first. Prompts that do not fit the target's context are left out
        and counted."""
        room = int(self.target.config.max_position_embeddings) - self.max_tokens
        encoded = [encode_prompt(self.tokenizer, each) for each in messages]
        fitting = [ids for ids in encoded if len(ids) <= room]
        if not fitting:
            print(f"{category}: none of {len(encoded)} prompts fits the target's context; left out", file=sys.stderr)
            return []
        workload = Workload(
            prompts=fitting,
            batch=max(1, min(self.batch, len(fitting) // 4)),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            stop_ids=stop_ids_of(self.target, self.tokenizer),
            seed=self.config.bench_engine.seed,
        )
        every = (PLAIN, *labels)
        variants = [self._variant(label, workload) for label in every]
        warm_up(variants, workload, lambda: None)
        measured = interleave(variants, workload, 1, lambda: None)
        names = {"target": self.config.models.target, "dtype": self.config.models.dtype, "prompt_set": category}
        return [
            names | row(label, workload, passes, measured[0]) | {"left_out": len(encoded) - len(fitting)}
            for label, passes in zip(every, measured, strict=True)
        ]

    def _variant(self, label: Label, workload: Workload) -> EngineVariant:
        return EngineVariant(
            self.target,
            drafter_of(label, self.draft),
            k=length_of(label),
            batch=workload.batch,
            capacity=workload.longest,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.spec_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share out the categories (default 1)")
    parser.add_argument("--categories", help="only these, separated by commas")
    parser.add_argument("--limit", type=int, help="the first prompts of each category (default: all)")
    args = parser.parse_args(argv)
    for name in ("batch", "max_tokens", "jobs", "limit"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a whole number from 1 on")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        config = load_config(args.config, args.set)
        categories = chosen(prompts_by_category(args.prompts), args.categories)
        categories = {name: prompts[: args.limit] for name, prompts in categories.items()}
    except (ValueError, OSError) as error:
        print(f"bench.spec_bench: {error}", file=sys.stderr)
        return 2
    if args.jobs > 1:
        return _side_by_side(args, categories, config.run, started)
    bench = CategoryBench(config, batch=args.batch, max_tokens=args.max_tokens, temperature=args.temperature)
    labels = labels_of(config.bench_engine.drafters, config.bench_engine.controllers, config.bench_engine.ks)
    measured: list[dict[str, Any]] = []
    for category, messages in categories.items():
        found = bench.measure(category, messages, labels)
        measured += found
        print("\n".join(map(_line, found)), flush=True)
        # Written after each category, so that a run that is cut short leaves what it has.
        write_result(args.out, stage="spec_bench", run=config.run, rows=measured, gates={}, started=started)
    print(f"written to {args.out}")
    return 0


def chosen(categories: dict[str, Any], names: str | None) -> dict[str, Any]:
    """The named ones, in the order of the file. ValueError for a name that the file does not have."""
    wanted = set(names.split(",")) if names else set(categories)
    if unknown := sorted(wanted - set(categories)):
        raise ValueError(f"no category {', '.join(unknown)}; the file has {', '.join(categories)}")
    return {name: prompts for name, prompts in categories.items() if name in wanted}


def shared_out(sizes: dict[str, int], jobs: int) -> list[list[str]]:
    """Categories for each process, none empty, so that the largest share of prompts is small: the largest category
    goes first, always to the process with least."""
    shares: list[list[str]] = [[] for _ in range(min(jobs, len(sizes)))]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        min(shares, key=lambda share: sum(sizes[each] for each in share)).append(name)
    return shares


def _side_by_side(args: argparse.Namespace, categories: dict[str, Any], run: str, started: str) -> int:
    """Run this module once a share, and keep the file of results up to date with what all have measured."""
    with tempfile.TemporaryDirectory() as folder:
        parts: list[Path] = []
        processes: list[subprocess.Popen[bytes]] = []
        for share in shared_out({name: len(prompts) for name, prompts in categories.items()}, args.jobs):
            parts.append(Path(folder) / f"{len(parts)}.json")
            command = ["--config", args.config, "--prompts", str(args.prompts), "--out", str(parts[-1])]
            command += [word for assignment in args.set for word in ("--set", assignment)]
            for name in ("batch", "max_tokens", "temperature"):
                command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            command += ["--categories", ",".join(share)] + (["--limit", str(args.limit)] if args.limit else [])
            processes.append(subprocess.Popen([sys.executable, "-m", "bench.spec_bench", *command]))
        while any(process.poll() is None for process in processes):
            time.sleep(1)
            _merge(args.out, parts, list(categories), run, started)
        _merge(args.out, parts, list(categories), run, started)
    failed = [process.returncode for process in processes if process.returncode]
    print(f"written to {args.out}" if not failed else f"bench.spec_bench: {len(failed)} processes failed")
    return failed[0] if failed else 0


def _merge(out: str, parts: Sequence[Path], order: list[str], run: str, started: str) -> None:
    found = [read_result(part) for part in parts if part.exists()]
    measured = [one | {"jobs": len(parts)} for result in found for one in result["rows"]]
    measured.sort(key=lambda one: order.index(one["prompt_set"]))
    if found:
        device = found[0]["device"]
        write_result(out, stage="spec_bench", run=run, rows=measured, gates={}, started=started, device=device)


def _line(one: dict[str, Any]) -> str:
    alpha = "-" if one["alpha"] != one["alpha"] else f"{one['alpha']:.3f}"
    return (
        f"{one['prompt_set']:<16}{one['drafter']:<8}{one['controller']:<10}{one['k']:>3}"
        f"{one['tokens_per_s']:>9.1f} tok/s {one['speedup']:>6.2f}x  alpha {alpha}"
        f"  tokens a round {one['tokens_per_round']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
