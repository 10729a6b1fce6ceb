"""The plugin's controller against every fixed draft length in vLLM, by this machine's clock and by a price list.

    python -m bench.vllm_lengths --config configs/demo.yaml --out results/vllm_lengths.json

One engine, in this process, decodes each of the config's prompt sets (`bench_vllm.prompts`) for itself and then, as
the load "shifting", the two sets that differ most in measured acceptance in turn. In each load all controllers take
turns, there and back, `repeats` times. The adaptive one begins a load with nothing learned, learns in a turn of its own
before, and keeps from turn to turn what it learns, as in a server.

By the clock a turn's speed is its tokens over its seconds, which other processes disturb. Charged, its steps are added
up at the median price of their kind, from turns in which all lengths alternate (bench/step_charges.py): only what was
chosen and accepted makes a difference. `charged_from_start` counts the turn before too, and with it all learning.
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
from bench.step_charges import Prices, Recorder, Taken, prices
from bench.vllm_worker import InTurn
from data.common import encode_prompt
from pipeline import models
from pipeline.config import Config, load_config
from pipeline.results import write_result
from pipeline.sources import load_prompts
from specdec.controller import Adaptive, Controller, FixedK

SHIFTING = "shifting"
ALTERNATE = 4  # steps of a length before the next one's turn: the first may have to catch up
Batch = list[list[int]]


@dataclass
class Turn:
    """One pass over a load: its tokens, seconds by the clock, and steps."""

    tokens: int
    seconds: float
    steps: list[Taken]


@dataclass
class Variant:
    """A controller and its turns of a load; before: the turn in which one that learns begins."""

    name: str
    controller: Controller
    before: list[Turn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens a second by the clock, of each turn."""
        return [turn.tokens / turn.seconds for turn in self.turns]

    def charged(self, at: Prices, *, from_start: bool = False) -> float:
        """Tokens a second at these prices, over its turns, or from the turn before on."""
        turns = self.before + self.turns if from_start else self.turns
        return sum(turn.tokens for turn in turns) / sum(at.of(step) for turn in turns for step in turn.steps)

    @property
    def steps(self) -> list[Taken]:
        return [step for turn in self.before + self.turns for step in turn.steps]

    @property
    def acceptance(self) -> float | None:
        """Accepted over tested drafts; None where nothing was drafted."""
        reached = sum(step.reached for step in self.steps)
        return sum(step.accepted for step in self.steps) / reached if reached else None

    @property
    def mean_k(self) -> float:
        """Of the steps that decoded."""
        lengths = [step.k for step in self.steps if not step.prompt]
        return sum(lengths) / max(1, len(lengths))


def variants(k_max: int) -> list[Variant]:
    fixed = [Variant(name=f"fixed {k}", controller=FixedK(k)) for k in range(k_max + 1)]
    return [*fixed, Variant(name="adaptive", controller=Adaptive(k_max))]


def loads(config: Config, batch: int) -> dict[str, list[Batch]]:
    """Batches of prompts by prompt set. ValueError when the config has no bench_vllm section."""
    if config.bench_vllm is None:
        raise ValueError("the config has no section bench_vllm; expected one, whose prompts are decoded")
    tokenizer = models.load_tokenizer(config.models)
    found: dict[str, list[Batch]] = {}
    for source in config.bench_vllm.prompts:
        prompts = load_prompts(source.name, source.source, source.limit, config.bench_vllm.seed)
        ids = [encode_prompt(tokenizer, prompt.messages) for prompt in prompts]
        found[source.name] = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    return found


def shifting(acceptance: Mapping[str, float]) -> tuple[str, str]:
    """The sets whose measured acceptances are furthest apart, the higher first."""
    return max(acceptance, key=acceptance.__getitem__), min(acceptance, key=acceptance.__getitem__)


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


def measure(engine: Any, recorder: Recorder, each: Variant, batches: Sequence[Batch], tokens: int) -> Turn:
    """A turn: `tokens` for every prompt, greedily."""
    from vllm import SamplingParams

    pilot_of(engine).controller = each.controller
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for batch in batches:
        engine.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return Turn(tokens=tokens * sum(map(len, batches)), seconds=seconds, steps=recorder.take())


def pilot_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler._pilot


def rows_of(measured: Sequence[Variant], at: Prices, names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each controller. of_best_fixed: the median over turns of its speed over that of the fixed length that
    was fastest in the median, both of the same turn, so that a machine that slows down slows both. charged_...: against
    the fixed length that is fastest at these prices; from_start: with the turn before."""
    fixed = [each for each in measured if each.name != "adaptive"]
    best = max(fixed, key=lambda each: median(each.speeds))
    cheapest = max(fixed, key=lambda each: each.charged(at))
    rows = []
    for each in measured:
        ratios = [mine / other for mine, other in zip(each.speeds, best.speeds, strict=True)]
        row = {
            "controller": each.name,
            "tokens_per_s": median(each.speeds),
            "of_best_fixed": median(ratios),
            "charged_tokens_per_s": each.charged(at),
            "charged_of_best_fixed": each.charged(at) / cheapest.charged(at),
            "charged_from_start": each.charged(at, from_start=True) / cheapest.charged(at, from_start=True),
            "mean_k": each.mean_k,
            "acceptance": each.acceptance,
            "rounds": sum(not step.prompt for step in each.steps),
        }
        rows.append({**names, **row})
    return rows


@dataclass(frozen=True, kw_only=True)
class Extent:
    """k_max: the largest draft length; batch: requests at once; tokens: of each; repeats: turns of each controller."""

    k_max: int
    batch: int
    tokens: int
    repeats: int


def run(config: Config, sets: Mapping[str, Sequence[Batch]], extent: Extent) -> list[dict[str, Any]]:
    names = {"engine": "vllm", "target": config.models.target, "batch": extent.batch, "repeats": extent.repeats}
    done: dict[str, list[Variant]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(config, extent.k_max, extent.batch, Path(folder))
        recorder = Recorder(pilot_of(engine))
        alternating = [k for k in range(extent.k_max + 1) for _ in range(ALTERNATE)]
        priced = Variant(name="alternating", controller=InTurn(alternating))
        for load, batches in sets.items():
            priced.turns.append(measure(engine, recorder, priced, batches, extent.tokens))
            done[load] = turns(engine, recorder, batches, extent)
        pair = shifting({load: measured[extent.k_max].acceptance or 0.0 for load, measured in done.items()})
        if pair[0] != pair[1]:
            both = list(chain.from_iterable(sets[load] for load in pair))
            priced.turns.append(measure(engine, recorder, priced, both, extent.tokens))
            done[SHIFTING] = turns(engine, recorder, both, extent)
    at = prices(priced.steps, [step for measured in done.values() for each in measured for step in each.steps])
    rows = []
    for load, measured in done.items():
        named = {**names, "prompt_set": load, **({"shifts_between": list(pair)} if load == SHIFTING else {})}
        rows += rows_of(measured, at, named)
    return rows + [{**names, **record} for record in at.records()]


def turns(engine: Any, recorder: Recorder, batches: Sequence[Batch], extent: Extent) -> list[Variant]:
    """All controllers on a load, with their turns."""
    measured = variants(extent.k_max)
    adaptive = measured[-1]
    adaptive.before.append(measure(engine, recorder, adaptive, batches, extent.tokens))
    for turn in range(extent.repeats):
        for each in measured if turn % 2 == 0 else reversed(measured):
            each.turns.append(measure(engine, recorder, each, batches, extent.tokens))
    return measured


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
        sets = loads(config, args.batch)
    except ValueError as error:
        print(f"bench.vllm_lengths: {error}", file=sys.stderr)
        return 2
    rows = run(config, sets, Extent(**{name: getattr(args, name) for name in options}))
    write_result(args.out, stage="vllm_lengths", run=config.run, rows=rows, gates={}, started=started)
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())
