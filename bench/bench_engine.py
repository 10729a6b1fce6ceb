"""Stage 04: the engine's speed over a grid of drafts, draft lengths and loads, and the gates G1, G2, G4 and G5.

    python -m bench.bench_engine --config configs/demo.yaml

A unit of resume is one cell (prompt set, temperature, batch, context) with k = 0 and every k measured in turn on the
same requests, so that each speed is a ratio of neighbours in time; and one gate. How throughput is measured
is told in bench/measure.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.stage import Stage, StageContext, stage_main

if TYPE_CHECKING:
    from pipeline.config import Config, PromptSource


def inputs(config: Config) -> tuple[str, ...]:
    """The stage that trains the drafts, when the config says that some of them are trained there."""
    trained = config.models.draft.trained is not None or config.bench_engine.drafts
    return ("03_train_draft",) if trained else ()


STAGE = Stage(name="04_bench_engine", version=2, sections=("models", "bench_engine"), inputs=inputs)
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One unit of the grid."""

    prompts: PromptSource
    temperature: float
    batch: int
    context: int

    @property
    def file(self) -> str:
        context = f"-C{self.context}" if self.context else ""
        return f"cell-{self.prompts.name}-T{self.temperature:g}-B{self.batch}{context}.json"


def cells(config: Config) -> list[Cell]:
    """The grid, in the order of the config."""
    bench = config.bench_engine
    return [
        Cell(prompts=prompts, temperature=temperature, batch=batch, context=context)
        for prompts in bench.prompts
        for temperature in bench.temperatures
        for batch in bench.batches
        for context in bench.contexts
    ]


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Make the cells and gates that are missing, then result.json from all of them."""
    from bench.adaptive import g4
    from bench.grid import Bench

    bench = Bench(ctx.config, ctx.check_stop)
    units: dict[str, Callable[[], Mapping[str, Any]]] = {
        cell.file: partial(bench.cell, cell.prompts, cell.temperature, cell.batch, cell.context)
        for cell in cells(ctx.config)
    }
    measured = list(units)
    units |= {"gate-G1.json": bench.g1, "gate-G2.json": bench.g2}
    units |= {"gate-G4.json": lambda: g4(_rows(ctx, measured)), "gate-G5.json": lambda: bench.g5(_rows(ctx, measured))}
    finished = [name for name in units if name in ctx.shards]
    with ctx.progress(len(units), "cells and gates", done=len(finished)) as progress:
        for name, make in units.items():
            if name not in ctx.shards:
                ctx.check_stop()
                _publish_unit(ctx, name, make())
                progress.update()
    return _publish_result(ctx, list(units))


def _rows(ctx: StageContext, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of these units, all of them made by now."""
    return [row for name in names for row in _read(ctx.folder / name)["rows"]]


def _publish_unit(ctx: StageContext, name: str, content: Mapping[str, Any]) -> None:
    """One unit's rows, and for a gate its record."""
    from pipeline.results import without_nan

    text = json.dumps(without_nan(dict(content)), indent=1, allow_nan=False) + "\n"
    ctx.tmp(name).write_text(text, encoding="utf-8")
    ctx.publish(ctx.tmp(name), name, validate=_read, rows=len(content["rows"]))


def _publish_result(ctx: StageContext, names: Sequence[str]) -> dict[str, Any]:
    """Join the units, print the table and the gates."""
    from bench.grid import with_own_pair
    from bench.tables import TIMES, gate_table, speed_table, to_text
    from pipeline.results import read_result, write_result

    units = {name: _read(ctx.folder / name) for name in names}
    rows = _rows(ctx, names)
    gates = {name[5:7]: unit["gate"] for name, unit in units.items() if "gate" in unit}
    gates["G2"] = with_own_pair(gates["G2"], rows)
    result = write_result(
        ctx.tmp(RESULT),
        stage=ctx.stage,
        run=ctx.config.run,
        rows=rows,
        gates=gates,
        started=str(ctx.shards.header["started"]),
    )
    ctx.publish(ctx.tmp(RESULT), RESULT, validate=read_result, rows=len(rows))
    print(f"\n{to_text(speed_table(result).drop(columns=TIMES))}\n\n{to_text(gate_table(result))}\n")
    print(ctx.folder / RESULT)
    return {"rows": len(rows), "gates": {name: record["state"] for name, record in gates.items()}}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(stage_main(STAGE, body))
