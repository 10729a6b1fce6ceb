"""Stage 05 shared out among workers: each serves whole methods, one after the other, and hands over what it measured.

Where open loads are asked for, the method "none" comes first, alone: they are stated as shares of its best rate.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.executors import Seats
from pipeline.fan_out import FanOut, Work
from pipeline.worker import WorkerContext

if TYPE_CHECKING:
    from bench.serving_grid import Grid


def share_out(grid: Grid) -> None:
    """Until every unit is published. ValueError when a worker keeps failing; StageStopped."""
    from bench.serving_grid import LOGS, check_unit, units_of
    from bench.serving_load import loads

    ctx, bench, every = grid.ctx, grid.bench, loads(grid.bench)
    groups = [units_of(method, every) for method in bench.methods]
    units = [name for group in groups for name in group]
    is_open = any(load.rate_share is not None for load in every)
    count = min(ctx.config.workers.servers, len(groups))
    work = Work(
        wanted=lambda: units,
        waves=[groups[:1], groups[1:]] if is_open else [groups],
        make=make_methods,
        given=grid.plain_rates,
        validate=check_unit,
        seats=Seats(count=count, gpus=bench.tensor_parallel, gpus_from="bench_vllm.tensor_parallel"),
    )
    with ctx.progress(len(units), "units", done=sum(name in ctx.shards for name in units)) as progress:
        fan_out = FanOut(ctx, work, progress)
        fan_out.run()
    logs = fan_out.exchange.folder / LOGS
    if logs.is_dir():
        shutil.copytree(logs, grid.logs, dirs_exist_ok=True)
    fan_out.exchange.remove()


def make_methods(ctx: WorkerContext, names: Sequence[str], plain_rates: Mapping[str, float]) -> None:
    """In a worker: these units, method by method; `plain_rates` are those of "none" that the driver has already."""
    from bench.serving_grid import Grid, units_of
    from bench.serving_load import loads

    grid = Grid(ctx, plain_rates)
    every, mine = loads(grid.bench), set(names)
    grid.measure([method for method in grid.bench.methods if mine.intersection(units_of(method, every))], every)
