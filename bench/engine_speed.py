"""The engine's speed on models of given shapes: step times, tokens a second, and others beside it, in one run.

    python -m bench.engine_speed --shapes FOLDER --out results/engine_speed_h200.json --minutes 9

FOLDER holds the configs of target and draft as NAME.json (by default Qwen3-8B.json and Qwen3-0.6B.json, whose shapes
gate G5 is about). Weights are random and made on the device, which leaves every time as it is; acceptance, which they
would make meaningless, is imposed and labelled "synthetic:..." (bench/synthetic.py). Needs one GPU; vLLM is measured
where it is installed, in a process of its own, so the package need not share this one's versions.

What is measured, and in which order, is in bench/engine_cells.py. A row that --out holds already is not measured
again: after --minutes the bench ends between two rows with what it has, and the same command goes on. A cell that
could not be measured leaves a row that says why ("not_run"), and is tried again next time. --tiny takes few and short
cells, for trying the command out on any machine with configs of small models.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import engine_beside, speed_gate
from bench.cell_rows import CellRows
from bench.engine_cells import VARIANTS, Cell, Sizes, ordered
from bench.engine_rounds import SpeedEngine
from bench.engine_steps import measure_steps
from bench.profile_cell import copy_gb_per_s
from bench.report_data import is_number
from bench.shapes import Pair, config_of, random_pair

FAULT = "ended with"  # what a row says of a cell that no ValueError ended
TINY: Mapping[str, Any] = {
    "batches": (1, 2),
    "contexts": (24,),
    "ks": (4,),
    "few_ks": (4,),
    "alphas": (0.87,),
    "prompt_tokens": 8,
    "new_tokens": 16,
    "repeats": 2,
    "passes": 1,
    "passes_of_few": 1,
}


def variants_here(device: str) -> list[str]:
    """The best first; all but one need a GPU."""
    return list(reversed(VARIANTS)) if device == "cuda" else ["eager"]


class Rows(CellRows):
    stage = "engine_speed"

    def judged(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        found = with_speedups(self.rows.values())
        judged = speed_gate.g5(speed_gate.best_variant(found), self.obstacle)
        return found + judged["rows"], {"G5": judged["gate"]}


def with_speedups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row of the engine with drafts beside the plain one of its variant and batch."""
    found = [dict(row) for row in rows]
    plain = {
        (row["variant"], row["batch"]): row["tokens_per_s"]
        for row in found
        if row.get("engine") == "specdec" and row.get("drafter") == "none" and "tokens_per_s" in row
    }
    for row in found:
        base = plain.get((row.get("variant"), row.get("batch")))
        if row.get("engine") == "specdec" and "tokens_per_s" in row and base:
            row["speedup"] = row["tokens_per_s"] / base
    return found


class SpeedBench:
    """Measures cells one after the other; the last engine is kept for cells of the same variant and batch."""

    def __init__(self, pair: Pair, shapes: Path, sizes: Sizes) -> None:
        self.pair, self.shapes, self.sizes = pair, shapes, sizes
        self.copy_gb_per_s = copy_gb_per_s(pair.device)
        self._engine: SpeedEngine | None = None
        self._impossible: dict[tuple[str, int], str] = {}
        self._vllm_rows: dict[int, dict[str, Any]] | None = None

    def row(self, cell: Cell) -> dict[str, Any]:
        """ValueError saying why the cell cannot be measured."""
        if self._engine is None or not self._engine.is_for(cell):
            self._make_room()
        return self.pair.names | self._measured(cell)

    def _make_room(self) -> None:
        """For another engine, or for another process."""
        self._engine = None
        gc.collect()  # an engine whose forward was taken over refers to itself; its caches are gigabytes
        if self.pair.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measured(self, cell: Cell) -> dict[str, Any]:
        match cell.what:
            case "speed":
                return self._speed(cell)
            case "steps":
                return measure_steps(self.pair, cell, self.sizes, self.copy_gb_per_s)
            case "transformers":
                return engine_beside.measure_transformers(self.pair, cell, self.sizes)
            case "assisted":
                return engine_beside.measure_assisted(self.pair, cell, self.sizes)
            case _:
                return self._vllm(cell)

    def _speed(self, cell: Cell) -> dict[str, Any]:
        if self._engine is None:
            self._engine = self._made(cell)
        return self._engine.measure(cell)

    def _made(self, cell: Cell) -> SpeedEngine:
        """An engine that cannot be made is not tried again for each of its cells."""
        shape = (cell.variant, cell.batch)
        if shape in self._impossible:
            raise ValueError(self._impossible[shape])
        try:
            return SpeedEngine(self.pair, cell, self.sizes)
        except (ValueError, torch.OutOfMemoryError) as error:
            self._impossible[shape] = str(error)
            raise

    def _vllm(self, cell: Cell) -> dict[str, Any]:
        if self._vllm_rows is None:  # one process for all batches
            self._vllm_rows = {}
            dtype, target = self.pair.names["dtype"], self.pair.target_name
            rows = engine_beside.measure_vllm(self.shapes, target, self.sizes.batches, self.sizes, dtype)
            self._vllm_rows = {row["batch"]: row for row in rows}
        if cell.batch not in self._vllm_rows:
            raise ValueError("vLLM gave no row of this batch; the first of its cells says why")
        return self._vllm_rows[cell.batch]


def measure_all(bench: SpeedBench, rows: Rows, deadline: float, clock: Any = time.monotonic) -> bool:
    """Every cell that is missing, until the deadline, last those that could not be measured before; whether all have
    been tried."""
    for cell in rows.missing(ordered(bench.sizes)):
        if clock() >= deadline:
            return False
        start = clock()
        try:
            row = bench.row(cell)
        except (ValueError, torch.OutOfMemoryError) as error:
            row = {"batch": cell.batch, "not_run": _first_line(error)}
        except Exception as error:  # a fault of ours or of a kernel: the other cells are measured all the same
            traceback.print_exc()
            row = {"batch": cell.batch, "not_run": f"{FAULT} {type(error).__name__}: {_first_line(error)}"}
        rows.add(cell, row)
        print(f"{clock() - start:6.1f} s  {line_of(cell, row)}", flush=True)
    return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def line_of(cell: Cell, row: Mapping[str, Any]) -> str:
    """What a terminal shows of a row."""
    if "not_run" in row:
        return f"{cell.name}: not run: {row['not_run']}"
    names = ("tokens_per_s", "mean_k", "alpha", "round_ms", "target_step_ms", "draft_step_ms", "host_ms", "capture_s")
    values = [f"{name} {row[name]:.4g}" for name in names if is_number(row.get(name))]
    return f"{cell.name}: {', '.join(values)}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 3 when the time ended before the cells did, 1 when a cell ended with a fault."""
    args = _arguments(argv)
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        print("bench.engine_speed: needs an NVIDIA GPU; --tiny tries the command out anywhere", file=sys.stderr)
        return 2
    try:
        found = args.variants or variants_here(device)
        sizes = Sizes(variants=found, **(TINY if args.tiny else {}))
        configs = [config_of(args.shapes, name) for name in (args.target, args.draft)]
        name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
        rows = Rows(out=args.out, run=args.run, obstacle=speed_gate.obstacle(name, *configs))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        pair = random_pair(args.shapes, args.target, args.draft, device, dtype)
    except ValueError as error:
        print(f"bench.engine_speed: {error}", file=sys.stderr)
        return 2
    complete = measure_all(SpeedBench(pair, args.shapes, sizes), rows, started + 60 * args.minutes)
    print(f"{args.out}: {'complete' if complete else 'time is up; the same command goes on'}")
    if faults := [name for name, row in rows.rows.items() if str(row.get("not_run", "")).startswith(FAULT)]:
        print(f"bench.engine_speed: {len(faults)} cells ended with a fault, the first: {faults[0]}", file=sys.stderr)
        return 1
    return 0 if complete else 3


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.engine_speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", required=True, type=Path, help="folder with the configs as NAME.json")
    parser.add_argument("--target", default="Qwen3-8B")
    parser.add_argument("--draft", default="Qwen3-0.6B")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--run", default="qwen3-shapes", help="the result's name for this run")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="the best first (default: all there are)")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no row is begun (default 30)")
    parser.add_argument("--tiny", action="store_true", help="few and short cells")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes}; expected a number above 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
