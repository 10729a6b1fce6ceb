"""Stage 01: completions of the target with its top-8 probabilities, in shards of prompts.

    python -m data.gen_traces --config configs/demo.yaml

A shard (shard_size prompts with all their completions) is the unit of resume. What is in it depends on its
prompts and the config alone: every completion has its own seed, and a shard starts with empty slots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.sources import load_prompts
from pipeline.stage import Stage, StageContext, stage_main

if TYPE_CHECKING:
    from data.shards import ShardNotes
    from pipeline.config import TracesConfig
    from pipeline.sources import Prompt

STAGE = Stage(name="01_gen_traces", version=1, sections=("models", "traces"))
SKIPPED_SHOWN = 20


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Make the shards that are missing; counts of all of them."""
    from data.engine_backend import Tracer

    shards = shard_prompts(all_prompts(ctx.config.traces), ctx.config.traces.shard_size)
    names = [f"shard-{index:05d}.parquet" for index in range(len(shards))]
    todo = [(name, prompts) for name, prompts in zip(names, shards, strict=True) if name not in ctx.shards]
    if todo:
        tracer = Tracer(ctx.config, [prompt for prompts in shards for prompt in prompts])
        with ctx.progress(len(names), "shards", done=len(names) - len(todo)) as progress:
            for name, prompts in todo:
                make_shard(ctx, tracer, name, prompts)
                progress.update()
    return summary(ctx, names)


def make_shard(ctx: StageContext, tracer: Any, name: str, prompts: Sequence[Prompt]) -> None:
    """Generate, write, read back and publish one shard; nothing of it stays when a signal stops the stage."""
    from data.shards import read_shard, write_shard

    records, skipped = tracer.trace(prompts, ctx.check_stop)
    write_shard(ctx.tmp(name), records, skipped)
    ctx.publish(ctx.tmp(name), name, validate=read_shard, rows=len(records))


def all_prompts(config: TracesConfig) -> list[Prompt]:
    """The prompts of every source, in order. ValueError when two have the same id: seeds hang on ids."""
    prompts = [
        prompt
        for source in config.prompts
        for prompt in load_prompts(source.name, source.source, source.limit, config.seed)
    ]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"two prompts have the id {prompt.id!r}; expected ids that differ over all sources")
        seen.add(prompt.id)
    return prompts


def shard_prompts(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    """Consecutive ranges of `size` prompts; the last one may be shorter."""
    return [prompts[first : first + size] for first in range(0, len(prompts), size)]


def summary(ctx: StageContext, names: Sequence[str]) -> dict[str, Any]:
    """Counts over all shards, also printed, with every skipped prompt by its id."""
    from data.shards import read_notes

    notes = [read_notes(ctx.folder / name) for name in names]
    tokens = sum(note.tokens for note in notes)
    size = sum(ctx.shards[name].bytes for name in names)
    counts = {
        "rows": sum(note.records for note in notes),
        "tokens": tokens,
        "skipped": sum(len(note.skipped) for note in notes),
        "bytes_per_token": round(size / tokens, 2) if tokens else None,
    }
    for line in _skipped_lines(notes):
        ctx.log(line)
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
