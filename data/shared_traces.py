"""Stage 01 shared out among workers: which shards, in which order, and what a worker is told.

With a token budget the result is the first shards, in order, up to the one that reaches it: the driver takes none out
of order, and a worker makes none behind one with which the shards before it, all finished, reach the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from data.gen_traces import make_shard, missing_shards, tokens_of, wanted_shards
from data.shards import read_notes, read_shard
from pipeline.executors import Seats
from pipeline.fan_out import FanOut, Work
from pipeline.stage import StageContext
from pipeline.worker import WorkerContext

if TYPE_CHECKING:
    from data.items import Shard
    from pipeline.progress import Progress


def share_out(ctx: StageContext, shards: Sequence[Shard], progress: Progress) -> None:
    """Until every wanted shard is published. ValueError when a worker keeps failing; StageStopped."""
    traces, count = ctx.config.traces, ctx.config.workers.count
    fan_out = FanOut(
        ctx,
        Work(
            wanted=lambda: [shard.name for shard in wanted_shards(ctx, shards)],
            waves=[[(shard.name,) for shard in missing_shards(ctx, shards)]],
            make=make_shards,
            given=lambda: {name: read_notes(ctx.folder / name).tokens for name in ctx.shards},
            validate=read_shard,
            seats=Seats(count=count, gpus=traces.tensor_parallel, gpus_from="traces.tensor_parallel"),
            in_order=traces.token_budget is not None,
        ),
        progress,
    )
    fan_out.run()
    fan_out.exchange.remove()


def make_shards(ctx: WorkerContext, names: Sequence[str], tokens: Mapping[str, int]) -> None:
    """In a worker: the shards with these names that nobody has made; `tokens` of those that the driver has already."""
    from data.items import all_items, cut
    from data.tracer import make_tracer

    items = all_items(ctx.config.traces)
    shards = cut(items, ctx.config.traces.shard_size)
    tracer = None
    for shard in shards:
        if shard.name not in names or shard.name in ctx.shards:
            continue
        if is_budget_reached(ctx, [each.name for each in shards], tokens):
            break
        tracer = tracer or make_tracer(ctx.config, items)
        make_shard(ctx, tracer, shard)


def is_budget_reached(ctx: WorkerContext, names: Sequence[str], tokens: Mapping[str, int]) -> bool:
    """Whether the shards that are finished without a gap, from the first on, hold the token budget."""
    budget, total = ctx.config.traces.token_budget, 0
    if budget is None:
        return False
    for name in names:
        record = ctx.exchange.record(name)
        if record is None and name not in tokens:
            return False
        total += tokens[name] if record is None else tokens_of(ctx.folder / name, record.sha256)
        if total >= budget:
            return True
    return False
