"""vLLM's methods and the plugin's beside each other on models of given shapes, on one GPU, in one command; gate G6.

    python -m bench.vllm_speed --shapes FOLDER --out results/vllm_speed_h200.json --minutes 8
    python -m bench.vllm_speed --target FOLDER --draft FOLDER --prompts FILE --out results/vllm_speed_smollm2_h200.json

FOLDER holds the configs of target and draft as NAME.json (by default Qwen3-8B.json and Qwen3-0.6B.json). Weights are
random and made by vLLM, which leaves every time as it is; acceptance, which they would make meaningless, is imposed by
vLLM's own rejection sampler (rejection_sample_method "synthetic") and labelled "synthetic:..." in every row.

Each method is an engine in a process of its own. As many as fit on the GPU are started together and then measured in
turns (bench/vllm_turns.py), the others after them; methods and cells are in the order of what is most missed
(bench/vllm_methods.py). A row that --out holds already is not measured again: after --minutes no row is begun, and the
same command goes on. A cell that could not be measured leaves a row that says why ("not_run"), and is tried again next
time. --tiny takes a tiny pair on a CPU, with real acceptance, for trying the command out.

Without --shapes target and draft are folders with weights (the draft's head may be pruned), the prompts those of a
JSONL file that have 256 tokens or fewer, and acceptance is the pair's own ("real"), greedy and at temperature 1. Texts
go on behind their end, so that a batch stays whole. G6 is not judged from them: its acceptances are imposed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import speed_gate
from bench.shapes import config_of
from bench.vllm_engines import (
    TINY_REAL,
    Models,
    environment,
    fitting,
    job,
    possible,
    random_models,
    real_models,
    real_sizes,
    tiny_models,
)
from bench.vllm_methods import METHODS, Cell, Method, Sizes, ordered
from bench.vllm_speed_rows import Rows, line_of, short, told
from bench.vllm_turns import START_S, Slow, Wave, Worker, WorkerError

TINY = Sizes(
    batches=(1, 2),
    alphas=(),
    shifting=(),
    real=TINY_REAL,
    prompt_tokens=8,
    new_tokens=16,
    passes=1,
    passes_of_few=1,
)
AT_ONCE, TINY_AT_ONCE = 6, 1
FREE_SHARE = 0.97  # of the GPU's free memory that engines are planned into
LEAST_S = 60.0  # no wave is started with less time left, nor one whose start would take what is left
MOST_FAILURES = 2  # of a method in one call


@dataclass(kw_only=True)
class SpeedBench:
    """Waves of engines until every cell has a row or time is up. work: folder of logs and compiled code; clock:
    seconds, and `deadline` on it."""

    rows: Rows
    methods: Sequence[Method]
    sizes: Sizes
    models: Models
    work: Path
    deadline: float
    at_once: int
    clock: Callable[[], float] = time.monotonic
    _failures: Counter[str] = field(default_factory=Counter)
    _given_up: set[str] = field(default_factory=set)  # cells that failed in this call
    _start_s: float = 0.0  # of the latest wave

    def run(self) -> bool:
        """Whether all cells have been tried."""
        while cells := self._open():
            if self._too_late():
                return False
            methods, mine = self._next(cells)
            with self._started(methods) as wave:
                if not self._measure(wave, mine):
                    return False
                if self._too_late():  # for other engines: what these have left instead
                    self._measure(wave, self._open())
        return True

    def _too_late(self) -> bool:
        """For another wave."""
        return self.clock() + max(LEAST_S, 1.3 * self._start_s) > self.deadline

    def _open(self) -> list[Cell]:
        """Cells still to be measured in this call, in order."""
        return [
            cell
            for cell in self.rows.missing(ordered(self.methods, self.sizes))
            if cell.name not in self._given_up and self._failures[cell.method] < MOST_FAILURES
        ]

    def _next(self, cells: Sequence[Cell]) -> tuple[list[Method], list[Cell]]:
        """The methods of the next wave, and its cells: what comes last anywhere waits for the other methods' first."""
        urgent = [cell for cell in cells if cell.rank < 5 and not self.rows.failed(cell)] or list(cells)
        wanted = [method for method in self.methods if any(cell.method == method.name for cell in urgent)]
        chosen = fitting(wanted, self.models, self.sizes, free_gib=free_gib(), most=self.at_once)
        names = {method.name for method in chosen}
        later = urgent if len(chosen) < len(wanted) else cells
        return chosen, [cell for cell in later if cell.method in names]

    @contextmanager
    def _started(self, methods: Sequence[Method]) -> Iterator[Wave]:
        wave, begin = Wave(), self.clock()
        try:
            caches = {method.name: self._cache(method.name) for method in methods}
            for method in methods:
                folder, cache = self.work / "plugin", caches[method.name]
                env = environment(method, on_gpu=self.models.on_gpu, folder=folder, cache=cache)
                wave.add(method.name, Worker(job(method, self.models, self.sizes), env, self._log(method.name)))
            for name, error in wave.wait(min(START_S, self.deadline - self.clock())).items():
                if not isinstance(error, Slow) or self.clock() < self.deadline:  # else time ended, not the engine
                    self._failures[name] = MOST_FAILURES
                    self._not_run(name, error)
            self._start_s = self.clock() - begin
            print(f"{self._start_s:6.1f} s  engines up: {', '.join(wave.workers) or 'none'}", flush=True)
            yield wave
        finally:
            wave.stop()

    def _measure(self, wave: Wave, cells: Sequence[Cell]) -> bool:
        """The wave's cells, until time is up (False)."""
        for cell in cells:
            worker = wave.workers.get(cell.method)
            if worker is None:
                continue
            if self.clock() >= self.deadline:
                return False
            begin = self.clock()
            try:
                row = worker.measure(cell, self.sizes.passes_at(cell.batch))
                values = self._about(cell) | wave.facts[cell.method] | self._memory(cell.method) | row
            except WorkerError as error:
                values = self._about(cell) | {"not_run": short(str(error))}
                self._failures[cell.method] += 1
                self._given_up.add(cell.name)
                wave.drop(cell.method)
            self.rows.add(cell, values)
            print(f"{self.clock() - begin:6.1f} s  {line_of(cell, values)}", flush=True)
        return True

    def _not_run(self, name: str, error: WorkerError) -> None:
        """A row for each of its cells that has none."""
        for cell in ordered(self.methods, self.sizes):
            if cell.method == name and (cell.name not in self.rows.rows or self.rows.failed(cell)):
                self.rows.add(cell, self._about(cell) | {"not_run": short(str(error))})
        print(f"          {name}: not run: {short(str(error))}", flush=True)

    def _about(self, cell: Cell) -> dict[str, Any]:
        """What a row says whether it was measured or not."""
        method = next(each for each in self.methods if each.name == cell.method)
        return {
            **self.models.names,
            "engine": "vllm",
            "method": cell.method,
            "drafter": method.drafter,
            "runner": method.runner,
            "plugin": method.plugin is not None,
            "controller": cell.controller,
            "k": cell.k,
            "batch": cell.batch,
            "acceptance": cell.acceptance,
            "prompt_set": self.sizes.prompt_set,
            "prompt_tokens": self.sizes.prompt_tokens,
            "new_tokens": self.sizes.new_tokens,
            "temperature": cell.temperature,
        }

    def _memory(self, name: str) -> dict[str, Any]:
        method = next(each for each in self.methods if each.name == name)
        kib = self.models.kv_bytes(method) / 1024 if self.models.on_gpu else None
        return told(self._log(name)) | {"kv_kib_per_token": kib}

    def _log(self, name: str) -> Path:
        return self.work / "logs" / f"{_slug(name)}.log"

    def _cache(self, name: str) -> Path:
        """The method's folder for compiled code, before any engine of its wave is started: at first with what engines
        of earlier waves compiled. vLLM names all in it by what it is compiled from."""
        folder = self.work / "caches" / _slug(name)
        for other in [] if folder.exists() else sorted(folder.parent.glob("*")):
            shutil.copytree(other, folder, dirs_exist_ok=True)
        return folder


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def free_gib() -> float:
    """Memory of the GPU that engines may take; 0 without one."""
    return FREE_SHARE * torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 3 when the time ended before the cells did, 1 when a cell could not be
    measured."""
    args = _arguments(argv)
    begun = time.monotonic()
    if args.shapes and not args.tiny and not torch.cuda.is_available():
        print("bench.vllm_speed: needs an NVIDIA GPU; --tiny tries the command out on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        try:
            bench = _bench(args, work, begun)
        except ValueError as error:
            print(f"bench.vllm_speed: {error}", file=sys.stderr)
            return 2
        complete = bench.run()
    print(f"{args.out}: {'complete' if complete else 'time is up; the same command goes on'}")
    if failed := [name for name, row in bench.rows.rows.items() if "not_run" in row]:
        print(f"bench.vllm_speed: {len(failed)} cells were not run, the first: {failed[0]}", file=sys.stderr)
    if not complete:
        return 3
    return 1 if failed else 0


def _bench(args: argparse.Namespace, work: Path, begun: float) -> SpeedBench:
    """ValueError for arguments that do not go together, and for configs that cannot be used."""
    if unknown := sorted(set(args.methods or ()) - {method.name for method in METHODS}):
        raise ValueError(f"--methods: no {unknown[0]!r}; there are: {', '.join(method.name for method in METHODS)}")
    obstacle: str | None = "the pair is a tiny one"
    sizes, run = Sizes(), "qwen3-shapes"
    if args.tiny:
        models, sizes = tiny_models(work / "models"), TINY
    elif args.shapes is None:
        target, run = Path(args.target), Path(args.target).name
        models, sizes = real_models(target, Path(args.draft)), real_sizes(target, args.prompts)
        obstacle = "acceptance is the pair's own; the gate asks for imposed ones"
    else:
        models = random_models(args.shapes, args.target, args.draft, work / "models")
        configs = [config_of(args.shapes, name) for name in (args.target, args.draft)]
        obstacle = speed_gate.obstacle(torch.cuda.get_device_name(), *configs)
    chosen = [method for method in METHODS if args.methods is None or method.name in args.methods]
    return SpeedBench(
        rows=Rows(out=args.out, run=args.run or run, obstacle=obstacle),
        methods=possible(chosen, models),
        sizes=sizes,
        models=models,
        work=work,
        deadline=begun + 60 * args.minutes,
        at_once=args.at_once or (TINY_AT_ONCE if args.tiny else AT_ONCE),
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.vllm_speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=Path, help="folder with the configs as NAME.json")
    parser.add_argument("--target", default="Qwen3-8B", help="its config's name there (default Qwen3-8B), or a folder")
    parser.add_argument("--draft", default="Qwen3-0.6B", help="the same (default Qwen3-0.6B)")
    parser.add_argument("--prompts", type=Path, help="JSONL, for a target and draft that are folders")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--run", help="the result's name for this run (default: qwen3-shapes, or the target's)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="these alone (default: all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no row is begun (default 60)")
    parser.add_argument("--at-once", type=int, help=f"engines on the GPU together, if they fit (default {AT_ONCE})")
    parser.add_argument("--work", type=Path, help="keep logs and compiled code there (default: nowhere)")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, on a CPU")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes}; expected a number above 0")
    if args.shapes is None and args.prompts is None and not args.tiny:
        parser.error("--shapes FOLDER is missing, or --prompts FILE with a --target and a --draft that are folders")
    if args.at_once is not None and args.at_once < 1:
        parser.error(f"--at-once is {args.at_once}; expected a whole number from 1 on")
    return args


if __name__ == "__main__":
    sys.exit(main())
