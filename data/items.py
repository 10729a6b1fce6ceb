"""What stage 01 works on, in order, cut into shards: prompts to complete or texts to score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import TracesConfig
from pipeline.sources import load_prompts


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The unit of resume: a range of items, and the file that their records go to."""

    name: str
    items: Sequence[Any]


def all_items(config: TracesConfig) -> list[Any]:
    """The prompts (backend "score": texts) of every source, interleaved. ValueError when two have the same id: seeds
    hang on ids."""
    from data.texts import load_texts

    sets: list[Sequence[Any]] = []
    for source in config.prompts:
        if config.backend == "score":
            sets.append(load_texts(source.name, source.source, source.limit))
        else:
            sets.append(load_prompts(source.name, source.source, source.limit, config.seed))
    items = interleave(sets)
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ValueError(f"two prompts have the id {item.id!r}; expected ids that differ over all sources")
        seen.add(item.id)
    return items


def interleave(sets: Sequence[Sequence[Any]]) -> list[Any]:
    """All elements, each set in its own order and spread evenly, so that any beginning has the mix of the whole.

    Of 4 and 2 elements: a0 b0 a1 a2 b1 a3. A token budget keeps a beginning.
    """
    placed = [
        ((2 * index + 1) / len(each), number, item)
        for number, each in enumerate(sets)
        for index, item in enumerate(each)
    ]
    return [item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]


def cut(items: Sequence[Any], size: int) -> list[Shard]:
    """Consecutive ranges of `size` items; the last one may be shorter."""
    ranges = [items[first : first + size] for first in range(0, len(items), size)]
    return [Shard(name=f"shard-{index:05d}.parquet", items=each) for index, each in enumerate(ranges)]
