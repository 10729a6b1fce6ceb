"""Feeding known tokens to a model's cache: prompts, and what a draft missed while k was 0."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.model import CachedModel


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Tokens that belong at slots start, start + 1, ... of one row."""

    row: int
    start: int
    tokens: Sequence[int]


def feed(model: CachedModel, feeds: Sequence[Feed]) -> None:
    """One padded forward for each group of feeds of like length (at most half of a forward is padding)."""
    groups: dict[int, list[Feed]] = defaultdict(list)
    for item in feeds:
        groups[len(item.tokens).bit_length()].append(item)
    for group in groups.values():
        _feed_group(model, sorted(group, key=lambda item: item.row))


def _feed_group(model: CachedModel, group: list[Feed]) -> None:
    q = max(len(item.tokens) for item in group)
    device = model.device
    padded = [[*item.tokens, *[0] * (q - len(item.tokens))] for item in group]
    plan = model.cache.plan(
        torch.tensor([item.start for item in group], device=device),
        torch.tensor([len(item.tokens) for item in group], device=device),
        q,
        _row_index([item.row for item in group], device),
        max(item.start + len(item.tokens) for item in group),
    )
    model.forward(torch.tensor(padded, device=device), plan, keep=1)


def _row_index(rows: list[int], device: torch.device) -> slice | Tensor:
    """A slice when the rows lie side by side (the cache is then read in place), else indices (a copy)."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
