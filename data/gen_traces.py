"""Stage 01: completions of the target with its top-8 probabilities, in shards of prompts.

    python -m data.gen_traces --config configs/demo.yaml

A shard (shard_size prompts with all their completions) is the unit of resume. What is in it depends on its
prompts and the config alone: every completion has its own seed, and a shard starts in an empty engine. With a
token budget the result is the first shards, in order, up to the one that reaches it: whoever made them, and however
often the run was interrupted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.stage import Stage, StageContext, stage_main

if TYPE_CHECKING:
    from data.items import Shard
    from data.shards import ShardNotes

STAGE = Stage(name="01_gen_traces", version=3, sections=("models.target", "models.dtype", "traces"))
SKIPPED_SHOWN = 20


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Make the shards that are missing; counts of all of them."""
    from data.items import all_items, cut
    from data.tracer import backend_kind

    kind = backend_kind(ctx.config)
    items = all_items(ctx.config.traces)
    shards = cut(items, ctx.config.traces.shard_size)
    check_same_backend(ctx, kind)
    missing = missing_shards(ctx, shards)
    if missing:
        how = f"backend {kind}" + (" (traces.backend: auto)" if ctx.config.traces.backend == "auto" else "")
        ctx.log(f"{len(shards)} shards of {len(items)} prompts, {len(missing)} to make; {how}")
        make_missing(ctx, items, shards, missing)
    return summary(ctx, [shard.name for shard in wanted_shards(ctx, shards)])


def make_missing(ctx: StageContext, items: Sequence[Any], shards: Sequence[Shard], missing: Sequence[Shard]) -> None:
    """Here, one after the other, or shared out among workers."""
    with ctx.progress(len(shards), "shards", done=len(shards) - len(missing)) as progress:
        if ctx.config.workers.count:
            from data.shared_traces import share_out

            share_out(ctx, shards, progress)
            return
        from data.tracer import make_tracer

        tracer = make_tracer(ctx.config, items)
        for shard in missing:
            if shard not in wanted_shards(ctx, shards):
                break
            make_shard(ctx, tracer, shard)
            progress.update()


def make_shard(ctx: StageContext, tracer: Any, shard: Shard) -> None:
    """Generate, write, read back and publish one shard; nothing of it stays when a signal stops the stage."""
    from data.shards import read_shard, write_shard

    records, skipped = tracer.trace(shard.items, ctx.check_stop)
    write_shard(ctx.tmp(shard.name), records, skipped)
    ctx.publish(ctx.tmp(shard.name), shard.name, validate=read_shard, rows=len(records))


def wanted_shards(ctx: StageContext, shards: Sequence[Shard]) -> Sequence[Shard]:
    """The shards that belong to the result as far as is known: with a token budget, none behind the shard with which
    the tokens of those before it, all finished, reach it."""
    budget, tokens = ctx.config.traces.token_budget, 0
    if budget is None:
        return shards
    for index, shard in enumerate(shards):
        if shard.name not in ctx.shards:
            return shards
        tokens += tokens_of(ctx.folder / shard.name, ctx.shards[shard.name].sha256)
        if tokens >= budget:
            return shards[: index + 1]
    return shards


@functools.cache
def tokens_of(path: Path, sha256: str) -> int:
    """The completion tokens of a finished shard. Asked again after every further shard, read once: the same hash means
    the same shard."""
    from data.shards import read_notes

    return read_notes(path).tokens


def missing_shards(ctx: StageContext, shards: Sequence[Shard]) -> list[Shard]:
    """The wanted shards that are not finished."""
    return [shard for shard in wanted_shards(ctx, shards) if shard.name not in ctx.shards]


def check_same_backend(ctx: StageContext, kind: str) -> None:
    """ValueError when "auto" meant another backend to the process that made the finished shards."""
    from data.shards import read_notes

    names = {name for shard in ctx.shards for name in read_notes(ctx.folder / shard).backends}
    others = sorted(name for name in names if name.split()[0] != kind)
    if others:
        raise ValueError(
            f"{ctx.folder} holds shards made by {others[0]}, and traces.backend={ctx.config.traces.backend} means "
            f"{kind} here; install what made them, or run with --force to move them aside"
        )


def summary(ctx: StageContext, names: Sequence[str]) -> dict[str, Any]:
    """Counts over the shards, also printed, with every skipped prompt by its id."""
    from data.shards import read_notes

    notes = [read_notes(ctx.folder / name) for name in names]
    tokens = sum(note.tokens for note in notes)
    size = sum(ctx.shards[name].bytes for name in names)
    counts = {
        "rows": sum(note.records for note in notes),
        "tokens": tokens,
        "skipped": sum(len(note.skipped) for note in notes),
        "bytes_per_token": round(size / tokens, 2) if tokens else None,
        "backends": sorted({name for note in notes for name in note.backends}),
    }
    for line in _skipped_lines(notes):
        ctx.log(line)
    if not counts["rows"]:
        raise ValueError(
            f"no completion was made: all {counts['skipped']} prompts were skipped; give others, see above"
        )
    ctx.log(
        f"{counts['rows']} completions, {tokens} tokens, {size} bytes on disk: "
        f"{counts['bytes_per_token']} bytes a token; {counts['skipped']} skipped"
    )
    return counts


def _skipped_lines(notes: Sequence[ShardNotes]) -> Iterator[str]:
    skipped = [item for note in notes for item in note.skipped]
    for item in skipped[:SKIPPED_SHOWN]:
        yield f"skipped {item.prompt_id}: {item.reason}"
    if len(skipped) > SKIPPED_SHOWN:
        yield f"skipped {len(skipped) - SKIPPED_SHOWN} more; the metadata of each shard lists its own"


if __name__ == "__main__":
    sys.exit(stage_main(STAGE, body))
