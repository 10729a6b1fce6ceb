"""The plugin's controller against every fixed draft length in vLLM, by this machine's clock.

    python -m bench.vllm_lengths --config configs/demo.yaml --out results/vllm_lengths.json

One engine, in this process, decodes each of the config's prompt sets (`bench_vllm.prompts`) for itself and then, as the
load "shifting", one set after the other. In each load all controllers take turns, there and back, `repeats` times after
one unmeasured turn; each begins a load with nothing learned and keeps from turn to turn what it learns, as in a server.
tests/test_plugin_scheduler.py asks the same of exact, simulated times.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from bench.serving_drafts import folder_of
from bench.serving_methods import CPU_SETTINGS, SWITCH, record_of_checkout
from data.common import encode_prompt
from pipeline import models
from pipeline.config import Config, load_config
from pipeline.results import write_result
from pipeline.sources import load_prompts
from specdec.controller import Adaptive, Controller, FixedK

SHIFTING = "shifting"
Batch = list[list[int]]


@dataclass
class Variant:
    """A controller and its speeds, tokens a second, one for each measured turn of a load."""

    name: str
    controller: Controller
    speeds: list[float] = field(default_factory=list)


def variants(k_max: int) -> list[Variant]:
    fixed = [Variant(name=f"fixed {k}", controller=FixedK(k)) for k in range(k_max + 1)]
    return [*fixed, Variant(name="adaptive", controller=Adaptive(k_max))]


def loads(config: Config, batch: int) -> dict[str, list[Batch]]:
    """Batches of prompts by load. ValueError when the config has no bench_vllm section."""
    if config.bench_vllm is None:
        raise ValueError("the config has no section bench_vllm; expected one, whose prompts are decoded")
    tokenizer = models.load_tokenizer(config.models)
    found: dict[str, list[Batch]] = {}
    for source in config.bench_vllm.prompts:
        prompts = load_prompts(source.name, source.source, source.limit, config.bench_vllm.seed)
        ids = [encode_prompt(tokenizer, prompt.messages) for prompt in prompts]
        found[source.name] = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    return {**found, SHIFTING: list(chain.from_iterable(found.values()))} if len(found) > 1 else found


def start_engine(config: Config, k_max: int, batch: int, folder: Path) -> Any:
    """vLLM with the plugin, in this process; `folder` gets the record by which vLLM finds the plugin."""
    for name, value in {**CPU_SETTINGS, SWITCH: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(record_of_checkout(folder)))
    from vllm import LLM

    assert config.bench_vllm is not None
    draft = {"method": "draft_model", "model": folder_of("$DRAFT", config), "num_speculative_tokens": k_max}
    return LLM(
        str(models.resolve(config.models.target)),
        dtype=config.models.dtype,
        max_model_len=config.bench_vllm.max_model_len,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        enforce_eager=True,
        speculative_config=draft,
    )


def measure(engine: Any, each: Variant, batches: Sequence[Batch], tokens: int) -> float:
    """Tokens a second of a turn: `tokens` for every prompt, greedily."""
    from vllm import SamplingParams

    pilot = engine.llm_engine.engine_core.engine_core.scheduler._pilot
    pilot.controller = each.controller
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for batch in batches:
        engine.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    return tokens * sum(map(len, batches)) / (time.perf_counter() - start)


def rows_of(measured: Sequence[Variant], names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each controller; of_best_fixed: the median over turns of its speed over that of the fixed length
    that was fastest in the median. Both sides are of the same turn, so a machine that slows down slows both."""
    best = max((each for each in measured if each.name != "adaptive"), key=lambda each: median(each.speeds))
    rows = []
    for each in measured:
        ratios = [mine / other for mine, other in zip(each.speeds, best.speeds, strict=True)]
        row = {"controller": each.name, "tokens_per_s": median(each.speeds), "of_best_fixed": median(ratios)}
        rows.append({**names, **row})
    return rows


def run(
    config: Config, work: Mapping[str, Sequence[Batch]], *, k_max: int, batch: int, tokens: int, repeats: int
) -> list[dict[str, Any]]:
    names = {"engine": "vllm", "target": config.models.target, "batch": batch, "repeats": repeats}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(config, k_max, batch, Path(folder))
        for load, batches in work.items():
            measured = variants(k_max)
            for turn in range(repeats + 1):
                for each in measured if turn % 2 == 0 else reversed(measured):
                    speed = measure(engine, each, batches, tokens)
                    if turn:
                        each.speeds.append(speed)
            rows += rows_of(measured, {**names, "prompt_set": load})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.vllm_lengths", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", required=True)
    options = {"k_max": 4, "batch": 1, "tokens": 128, "repeats": 3}
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args(argv)
    for name in options:
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a whole number from 1 on")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        config = load_config(args.config, args.set)
        work = loads(config, args.batch)
    except ValueError as error:
        print(f"bench.vllm_lengths: {error}", file=sys.stderr)
        return 2
    rows = run(config, work, k_max=args.k_max, batch=args.batch, tokens=args.tokens, repeats=args.repeats)
    write_result(args.out, stage="vllm_lengths", run=config.run, rows=rows, gates={}, started=started)
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
