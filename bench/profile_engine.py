"""Stage 06: where the time of a round goes: by phase, group and kernel, against bandwidth, with and without graphs.

    python -m bench.profile_engine --config configs/demo.yaml

A unit of resume is one cell (batch, context): a folder with its rows and a Chrome trace of each phase. What is
measured is told in bench/profile_cell.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.bench_engine import inputs
from pipeline.stage import Stage, StageContext, stage_main

if TYPE_CHECKING:
    from bench.profile_cell import Shape
    from pipeline.config import Config

STAGE = Stage(name="06_profile", version=2, sections=("models", "profile"), inputs=inputs)
RESULT, ROWS, COPY = "result.json", "rows.json", "copy.json"
MOST_KERNELS = 4  # printed of a step; result.json and the report have more
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library would tell of every start and stop


class Profiler:
    """The pair of a config, loaded when the first cell that is missing needs it."""

    def __init__(self, ctx: StageContext) -> None:
        import torch

        self.ctx, self.config = ctx, ctx.config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def target(self) -> Any:
        from pipeline.models import load_target

        return load_target(self.config.models, self.device.type)

    @cached_property
    def draft(self) -> Any:
        from bench.draft_model import load_draft

        return load_draft(self.config, self.target, self.device.type)

    def measure_copy(self) -> None:
        """Publish the bandwidth of a copy on this device."""
        from bench.profile_cell import copy_gb_per_s

        self.ctx.tmp(COPY).write_text(json.dumps(copy_gb_per_s(self.device)), encoding="utf-8")
        self.ctx.publish(self.ctx.tmp(COPY), COPY, validate=_read)

    def make_cell(self, shape: Shape, folder: Path) -> None:
        """Measure one cell into a new folder."""
        from bench.draft_model import draft_name
        from bench.drafters import fresh
        from bench.profile_cell import profile_cell
        from pipeline.results import without_nan

        folder.mkdir()
        rows = profile_cell(
            self.target,
            fresh(self.draft),
            shape,
            copy_speed=_read(self.ctx.folder / COPY),
            traces=folder,
            check_stop=self.ctx.check_stop,
        )
        models = self.config.models
        names = {"target": models.target, "draft": draft_name(self.config), "dtype": models.dtype}
        names |= {"engine": "specdec", "drafter": "model", "controller": "fixed"}
        text = json.dumps([without_nan(names | row) for row in rows], indent=1, allow_nan=False)
        (folder / ROWS).write_text(text + "\n", encoding="utf-8")


def shapes(config: Config) -> dict[str, Shape]:
    """Each cell by the name of its folder, in the order of the config."""
    from bench.profile_cell import Shape

    section = config.profile
    sized = partial(Shape, k=section.k, repeats=section.repeats, temperature=section.temperature)
    return {
        f"cell-B{batch}-C{context}": sized(batch=batch, context=context)
        for batch in section.batches
        for context in section.contexts
    }


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Make the cells that are missing, then result.json from all of them."""
    profiler, cells = Profiler(ctx), shapes(ctx.config)
    if COPY not in ctx.shards:
        profiler.measure_copy()
    finished = [name for name in cells if f"{name}/{ROWS}" in ctx.shards]
    with ctx.progress(len(cells), "cells", done=len(finished)) as progress:
        for name, shape in cells.items():
            if name not in finished:
                ctx.check_stop()
                ctx.publish_folder(name, partial(profiler.make_cell, shape))
                progress.update()
    return publish_result(ctx, [row for name in cells for row in _read(ctx.folder / name / ROWS)])


def publish_result(ctx: StageContext, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write result.json and print its tables."""
    from bench.profile_tables import cost_table, group_table, kernel_table, roofline_table
    from bench.tables import to_text
    from pipeline.results import read_result, write_result

    started = str(ctx.shards.header["started"])
    result = write_result(ctx.tmp(RESULT), stage=ctx.stage, run=ctx.config.run, rows=rows, gates={}, started=started)
    ctx.publish(ctx.tmp(RESULT), RESULT, validate=read_result, rows=len(rows))
    for table in (cost_table(result), roofline_table(result), group_table(result), kernel_table(result, MOST_KERNELS)):
        print(f"\n{to_text(table)}")
    print(f"\ngraphs: {rows[0]['graphs']}; a copy moves {rows[0]['copy_gb_per_s']:.1f} GB/s (read and written)")
    print(ctx.folder / RESULT)
    return {"rows": len(rows)}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(stage_main(STAGE, body))
