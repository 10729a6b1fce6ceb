"""Named sets of prompts, as config sections list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline import fields


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """A named set of prompts; `source` as in pipeline.sources.load_prompts, at most `limit` prompts of it."""

    name: str = fields.name()
    source: str
    limit: int = fields.count()


def check_prompts(prompts: tuple[PromptSource, ...]) -> None:
    """ValueError unless there are prompts, each set under its own name."""
    not_empty(prompts=prompts)
    names = [source.name for source in prompts]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"prompts: got the name {repeated[0]!r} twice, expected each source under its own name")


def not_empty(**lists: tuple[Any, ...]) -> None:
    """ValueError naming the first list that is empty."""
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name}: got an empty list, expected at least one element")
