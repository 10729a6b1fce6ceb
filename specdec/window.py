"""A cache that keeps a row's first tokens and its latest ones (StreamingLLM, Xiao et al., arXiv 2309.17453). For a
draft: what it sees changes how many of its tokens are accepted, never the output's law.

The first `sinks` positions have a slot each. The others share a ring: position p lies at slot sinks + (p - sinks) mod
ring, so that a slot tells, for a query at position t, which position it must hold: the latest one up to t that falls on
it. Positions stay true, unlike in the paper, where they are counted inside the cache: the text is as long as the model
was built for, and a token keeps the keys that it was written with.

Shapes: B rows, q new tokens a row, S slots.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.kvcache import Plan, RaggedCache


@dataclass(frozen=True, kw_only=True)
class Window:
    """recent: how many positions a token sees, its own included; sinks: how many first ones it sees besides. margin:
    how far the latest token ever written may lie ahead of a token that is fed (the columns of one forward, and drafts
    that were rolled back); the ring is longer by so much, or they would overwrite what that token must see."""

    recent: int
    sinks: int
    margin: int

    @property
    def ring(self) -> int:
        return self.recent + self.margin

    @property
    def slots(self) -> int:
        return self.sinks + self.ring


@dataclass(kw_only=True)
class WindowPlan(Plan):
    """first_B: positions below it that are no sinks were never written (skipped, or another request's)."""

    span: Window
    first_B: Tensor

    def visible(self, window: int | None, repeat: int) -> Tensor:
        """bool [B, 1, repeat * q, S]; `window`: the model's own, which holds for the sinks too."""
        span, position_Bq1 = self.span, self.positions_Bq.unsqueeze(-1)
        slots_S = torch.arange(self.live, device=position_Bq1.device)
        held_BqS = position_Bq1 - (position_Bq1 - slots_S) % span.ring
        oldest_Bq1 = (position_Bq1 - span.recent + 1).clamp(min=span.sinks)
        # Itself a token always sees, also one before `first` that is fed again: a softmax of nothing is NaN.
        first_Bq1 = torch.maximum(oldest_Bq1, self.first_B.view(-1, 1, 1))
        ring_BqS = held_BqS >= torch.minimum(first_Bq1, position_Bq1.clamp(min=span.sinks))
        is_sink_S = slots_S < span.sinks
        seen_BqS = torch.where(is_sink_S, slots_S <= position_Bq1, ring_BqS)
        if window is not None:
            seen_BqS &= torch.where(is_sink_S, slots_S, held_BqS) > position_Bq1 - window
        return seen_BqS.unsqueeze(1).repeat(1, 1, repeat, 1)


class WindowCache(RaggedCache):
    """A RaggedCache whose rows take `window.slots` slots however long they grow. Tokens may be skipped: feed the sinks,
    set `first_B`, go on from there. After a roll back by more than the window's margin the row must be fed again."""

    _placed_by_position = False

    def __init__(
        self, layer_shapes: dict[int, tuple[int, int]], *, window: Window, max_positions: int, **options: Any
    ) -> None:
        super().__init__(layer_shapes, capacity=window.slots, **options)
        self.window = window
        self._max_positions = max_positions
        self.first_B = torch.zeros_like(self.lengths_B)

    def _place(self, positions_Bq: Tensor, real_Bq: Tensor, rows: slice | Tensor, live: int | None) -> Plan:
        """All slots are read whatever `live` says: a slot's place says nothing of its age."""
        sinks, ring = self.window.sinks, self.window.ring
        assert positions_Bq.shape[1] <= self.window.margin, "more columns than the ring has room for"
        slots_Bq = torch.where(positions_Bq < sinks, positions_Bq, sinks + (positions_Bq - sinks) % ring)
        return WindowPlan(
            positions_Bq=positions_Bq,
            slots_Bq=slots_Bq.masked_fill(~real_Bq, self.capacity),
            rows=rows,
            live=self.capacity,
            span=self.window,
            first_B=self.first_B[rows],
        )

    def copy_row(self, source: int, to: int) -> None:
        super().copy_row(source, to)
        self.first_B[to].copy_(self.first_B[source])
