"""Controllers against the truth, without a model: `python -m specdec.simulate`.

Replays acceptance traces under cost tables (specdec.simulate_costs) and prints, for each table, batch and trace, the
oracle's speed over k = 0 and the others' share of it. The last line of output is JSON with one record a cell.

    python -m specdec.simulate --tables h200-first cpu --batches 1 64 --traces phases 0.87
    python -m specdec.simulate --traces recorded.jsonl --plot k.svg
    python -m specdec.simulate --times results/vllm_lengths.json --batches 1 --k-max 3
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import specdec
from specdec.controller import Adaptive, FixedK, Geometric
from specdec.simulate_costs import CostModel, cost_models
from specdec.simulate_measured import read_times
from specdec.simulate_run import (
    ByBatchSize,
    LengthByRow,
    Noise,
    OneLength,
    Policy,
    Run,
    Truth,
    calibrate,
    simulate,
)
from specdec.simulate_traces import Trace, mixed_rows, phases, read_recorded, stationary

TRACES = ("phases", "positions", "mixed", "dies")
DEFAULT_TABLES = ("h200-first", "h200-floor", "cpu")
COLUMNS = ("best fixed", "k = 0", "by batch", "geometric", "adaptive", "by row", "by row, planned")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line of the table; speeds in tokens per second by policy, and the runs of those worth plotting."""

    table: str
    batch: int
    trace: str
    best_fixed: int
    speeds: dict[str, float]
    runs: dict[str, Run]

    def record(self) -> dict[str, object]:
        oracle = self.speeds["oracle"]
        shares = {name: round(speed / oracle, 4) for name, speed in self.speeds.items() if name != "oracle"}
        where = {"table": self.table, "batch": self.batch, "trace": self.trace, "best_fixed_k": self.best_fixed}
        return {**where, "oracle_speedup": round(oracle / self.speeds["k = 0"], 4), "share_of_oracle": shares}


def make_trace(name: str, batch: int, tokens: int, seed: int) -> Trace:
    """A synthetic trace by name, a stationary one by its rate ("0.87"), or a recorded one by its file.

    phases: 0.9 and 0.35 in turn; positions: later drafts are accepted less; mixed: requests of 0.3, 0.7 and 0.95
    following one another in the slots; dies: 0.9, then 0.2, then 0.9 again.
    """
    if name == "phases":
        return phases((0.9, 0.35), phase_tokens=tokens // 2, count=4, requests=batch, seed=seed)
    if name == "dies":
        return phases((0.9, 0.2), phase_tokens=tokens // 2, count=3, requests=batch, seed=seed)
    if name == "positions":
        return stationary(0.9, requests=batch, tokens=tokens, seed=seed, by_position=(1.0, 0.92, 0.85, 0.78, 0.7, 0.6))
    if name == "mixed":
        return mixed_rows((0.3, 0.7, 0.95), requests=8 * batch, tokens=max(tokens // 8, 32), seed=seed)
    if Path(name).is_file():
        return read_recorded(Path(name))
    try:
        return stationary(float(name), requests=batch, tokens=tokens, seed=seed)
    except ValueError:
        raise ValueError(
            f"the trace is {name!r}; expected one of {', '.join(TRACES)}, a rate from 0 to 1, or a recorded file"
        ) from None


def run_cell(cost: CostModel, trace: Trace, *, batch: int, k_max: int, seed: int, noise: Noise) -> Cell:
    """Every policy on one trace under one table."""

    def run(policy: Policy) -> Run:
        return simulate(trace, cost, policy, slots=batch, seed=seed, noise=noise)

    def timed(controller: Adaptive | Geometric) -> Any:
        calibrate(controller, cost, rows=batch, repeats=5, noise=noise, seed=seed + 1)
        return controller

    fixed = {k: run(OneLength(FixedK(k))) for k in range(k_max + 1)}
    best = max(fixed, key=lambda k: fixed[k].speed)
    runs = {
        "oracle": run(Truth(cost, k_max)),
        "best fixed": fixed[best],
        "k = 0": fixed[0],
        "by batch": run(ByBatchSize(cost, k_max, trace.mean_alpha)),
        "geometric": run(OneLength(timed(Geometric(k_max)))),
        "adaptive": run(OneLength(timed(Adaptive(k_max)))),
        "by row": run(LengthByRow(timed(Adaptive(k_max)))),
        "by row, planned": run(LengthByRow(timed(Adaptive(k_max, plan_rows=True)))),
    }
    speeds = {name: done.speed for name, done in runs.items()}
    return Cell(table=cost.name, batch=batch, trace=trace.name, best_fixed=best, speeds=speeds, runs=runs)


def table_lines(cells: Sequence[Cell]) -> list[str]:
    """The cells as a Markdown table: the oracle's speed over k = 0, then each policy's share of the oracle's speed."""
    head = ["table", "batch", "trace", "oracle", "best k", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in cells:
        oracle = cell.speeds["oracle"]
        shares = [f"{cell.speeds[name] / oracle:.3f}" for name in COLUMNS]
        first = [cell.table, str(cell.batch), cell.trace, f"{oracle / cell.speeds['k = 0']:.3f}x", str(cell.best_fixed)]
        lines.append("| " + " | ".join([*first, *shares]) + " |")
    return lines


def plot_lengths(cells: Sequence[Cell], path: Path) -> None:
    """Draft length over committed tokens a row, the oracle's and the adaptive controller's; the format by suffix.

    Raises ValueError when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    figure = Figure(figsize=(9, 2.2 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), squeeze=False)[:, 0]
    for axis, cell in zip(axes, cells, strict=True):
        for name, style in (("oracle", {"color": "0.6", "linewidth": 2.5}), ("adaptive", {"linewidth": 0.9})):
            axis.step(cell.runs[name].progress, cell.runs[name].k, label=name, where="pre", **style)
        axis.set(title=f"{cell.table}, batch {cell.batch}, {cell.trace}", xlabel="tokens a row", ylabel="k")
        axis.legend(loc="upper right")
    figure.savefig(path)


def tables(names: Sequence[str] | None, times: Path | None) -> list[CostModel]:
    """Those named and those of the file; three where neither is given. ValueError for a file without times."""
    measured = list(read_times(times).values()) if times else []
    known = cost_models()
    return [known[name] for name in names or (() if times else DEFAULT_TABLES)] + measured


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m specdec.simulate", description=__doc__.split("\n")[0])
    parser.add_argument("--tables", nargs="+", choices=list(cost_models()), help="h200-first, h200-floor and cpu")
    parser.add_argument("--times", type=Path, help="result file of an engine: its measured step times as tables")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--traces", nargs="+", default=["0.35", "0.87", "phases", "mixed"])
    parser.add_argument("--tokens", type=int, default=2000, help="tokens a row (phases: twice that in all)")
    parser.add_argument("--k-max", type=int, default=8)
    parser.add_argument("--jitter", type=float, default=0.02, help="log-normal noise of measured times")
    parser.add_argument("--outliers", type=float, default=0.01, help="share of rounds that take 5 times as long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write draft length over time to this .svg or .png")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    noise = Noise(jitter=options.jitter, outliers=options.outliers)
    cells = []
    try:
        for cost in tables(options.tables, options.times):
            for batch in options.batches:
                for name in options.traces:
                    trace = make_trace(name, batch, options.tokens, options.seed)
                    cell = run_cell(cost, trace, batch=batch, k_max=options.k_max, seed=options.seed, noise=noise)
                    cells.append(cell)
                    print("\n".join(table_lines(cells)[0 if len(cells) == 1 else -1 :]), flush=True)
        if options.plot:
            plot_lengths(cells, options.plot)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = json.dumps({"schema": 1, **provenance(arguments), "rows": [cell.record() for cell in cells]})
    if options.out:
        options.out.write_text(report + "\n", encoding="utf-8")
    print(report)
    return 0


def provenance(arguments: Sequence[str] | None) -> dict[str, object]:
    command = ["python", "-m", "specdec.simulate", *(sys.argv[1:] if arguments is None else arguments)]
    versions = {"python": platform.python_version(), "numpy": np.__version__, "specdec": specdec.__version__}
    return {"stage": "simulate", "command": " ".join(command), "versions": versions}


if __name__ == "__main__":
    sys.exit(main())
