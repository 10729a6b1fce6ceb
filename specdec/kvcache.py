"""A KV cache whose rows have lengths of their own and roll back in O(1).

Per layer one preallocated pair of [B, H, C + 1, D] buffers and one lengths vector. A forward writes each row's new
keys and values at that row's own offset; rolling a row back is making its length smaller. What lies behind the
length is stale and unreadable, since position t attends to slots s <= t only (worked example: 7 tokens cached, 4
drafts verified at slots 7..10, 1 accepted: the length becomes 8 and the next forward overwrites slots 8..10 before
anything can read them). The last slot, C, takes the writes of padding and is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.kernels import round_kernels


@dataclass(kw_only=True)
class Plan:
    """Where one forward of q tokens a row writes and what it may read.

    positions_Bq: index in the sequence, which is also the cache slot (0 for padding); slots_Bq: where to write
    (the trash slot for padding); rows: which rows of the cache, a slice where possible (a view) or int64 indices;
    live: slots [0, live) are read. What all layers share (masks, and where they write) is computed once.
    """

    positions_Bq: Tensor
    slots_Bq: Tensor
    rows: slice | Tensor
    live: int
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)
    _indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def visible(self, window: int | None, repeat: int) -> Tensor:
        """bool [B, 1, repeat * q, live]: slot s is seen from position t when t - window < s <= t."""
        slots_S = torch.arange(self.live, device=self.positions_Bq.device)
        position_Bq1 = self.positions_Bq.unsqueeze(-1)
        seen_BqS = slots_S <= position_Bq1
        if window is not None:
            seen_BqS &= slots_S > position_Bq1 - window
        return seen_BqS.unsqueeze(1).repeat(1, 1, repeat, 1)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor:
        """The same to be added to scores: 0 where seen, -inf elsewhere. Attention would make this of a bool mask in
        every layer."""
        key = (window, repeat, dtype)
        if key not in self._masks:
            visible = self.visible(window, repeat)
            self._masks[key] = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return self._masks[key]

    def index(self, heads: int, width: int) -> Tensor:
        """int64 [B * heads * q]: where the new tokens go in a buffer of `width` slots seen as [rows * heads * width,
        D]."""
        key = (heads, width)
        if key not in self._indices:
            B, device = len(self.slots_Bq), self.slots_Bq.device
            first = self.rows.start if isinstance(self.rows, slice) else 0
            row_B = torch.arange(first, first + B, device=device) if isinstance(self.rows, slice) else self.rows
            head_BH = row_B.unsqueeze(1) * heads + torch.arange(heads, device=device)
            self._indices[key] = (head_BH.unsqueeze(2) * width + self.slots_Bq.unsqueeze(1)).flatten()
        return self._indices[key]


class RaggedCache:
    """Keys and values of `num_rows` rows, `capacity` tokens each; speaks the part of transformers' cache interface
    that a decoder's attention layers use when position ids are given (`update`).

    layer_shapes: (num_kv_heads, head_dim) of each layer that owns a cache entry, by layer index. max_positions: how
    many positions the model was built for.
    """

    is_compileable = True
    is_sliding: Sequence[bool] = ()
    _placed_by_position = True  # a token's slot is its position

    def __init__(
        self,
        layer_shapes: dict[int, tuple[int, int]],
        *,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> None:
        # Layers of one shape lie together, so that a row is copied or cleared by one call for all of them. Zeros, never
        # empty memory: a masked slot still multiplies its value by 0, and 0 * NaN is NaN.
        same: dict[tuple[int, int], list[int]] = {}
        for index, shape in layer_shapes.items():
            same.setdefault(shape, []).append(index)
        self._buffers_L2BHCD = [
            torch.zeros(len(indices), 2, num_rows, heads, capacity + 1, dim, dtype=dtype, device=device)
            for (heads, dim), indices in same.items()
        ]
        found = {
            index: (keys, values)
            for indices, buffer in zip(same.values(), self._buffers_L2BHCD, strict=True)
            for index, (keys, values) in zip(indices, buffer, strict=True)
        }
        self.layers = {index: found[index] for index in layer_shapes}
        self.capacity = capacity
        self._max_positions = capacity if max_positions is None else min(capacity, max_positions)
        self.lengths_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._plan: Plan | None = None

    @property
    def num_positions(self) -> int:
        """Positions from here on are never written."""
        return self._max_positions

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pair in self.layers.values() for t in pair)

    def plan(self, start_B: Tensor, num_new_B: Tensor, q: int, rows: slice | Tensor, live: int | None) -> Plan:
        """Plan a forward of q columns: row b writes its first num_new_B[b] tokens from offset start_B[b] on.

        start_B below the row's length is the rollback (and the rewrite). A negative position (a row shorter than
        the window of tokens fed again) is padding, like the columns beyond num_new_B and positions that the model was
        not built for (drafts there never count). Sets lengths to
        start + num_new where num_new > 0. live: bound on the slots read, None for all.
        """
        kernels = round_kernels(start_B.device)
        if kernels is not None and isinstance(rows, slice) and self._placed_by_position:
            positions_Bq, slots_Bq = kernels.place(
                start_B, num_new_B, q, self.lengths_B[rows], self._max_positions, self.capacity
            )
            slots = self.capacity if live is None else live
            return Plan(positions_Bq=positions_Bq, slots_Bq=slots_Bq, rows=rows, live=slots)
        column_q = torch.arange(q, device=start_B.device)
        positions_Bq = start_B.unsqueeze(1) + column_q
        real_Bq = (column_q < num_new_B.unsqueeze(1)) & (positions_Bq >= 0) & (positions_Bq < self._max_positions)
        self.lengths_B[rows] = torch.where(num_new_B > 0, start_B + num_new_B, self.lengths_B[rows])
        return self._place(positions_Bq.masked_fill(~real_Bq, 0), real_Bq, rows, live)

    def _place(self, positions_Bq: Tensor, real_Bq: Tensor, rows: slice | Tensor, live: int | None) -> Plan:
        """The slots of these positions (0 for padding)."""
        return Plan(
            positions_Bq=positions_Bq,
            slots_Bq=positions_Bq.masked_fill(~real_Bq, self.capacity),
            rows=rows,
            live=self.capacity if live is None else live,
        )

    def bind(self, plan: Plan) -> "RaggedCache":
        """Use `plan` for the updates of the forward that follows."""
        self._plan = plan
        return self

    def inputs(self, tokens_Bq: Tensor, plan: Plan) -> dict[str, Any]:
        """Keyword arguments of a transformers decoder's forward that feeds these tokens as planned."""
        return {
            "input_ids": tokens_Bq,
            "position_ids": plan.positions_Bq,
            "past_key_values": self.bind(plan),
            "use_cache": True,
            "ragged": plan,
        }

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [B, H, q, D] at the planned slots; return each row's live keys and values [B, H, live, D]."""
        plan = self._plan
        assert plan is not None, "update without a plan"
        layer = self.layers[layer_idx]
        for buffer, new in zip(layer, (keys, values), strict=True):
            _scatter(buffer, plan, new)
        return live_part(layer[0], plan), live_part(layer[1], plan)

    def copy_row(self, source: int, to: int) -> None:
        """Row `to` becomes what row `source` is."""
        for buffer in self._buffers_L2BHCD:
            buffer[:, :, to].copy_(buffer[:, :, source])
        self.lengths_B[to].copy_(self.lengths_B[source])

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows whose contents may be NaN (a NaN behind the mask would still leak: 0 * NaN is NaN)."""
        for buffer in self._buffers_L2BHCD:
            for row in rows:  # an index would be sent to the device
                buffer[:, :, row].zero_()


def _scatter(buffer_BHCD: Tensor, plan: Plan, new_BHqD: Tensor) -> None:
    _, heads, width, dim = buffer_BHCD.shape
    buffer_BHCD.view(-1, dim).index_copy_(0, plan.index(heads, width), new_BHqD.reshape(-1, dim))


def live_part(buffer_BHCD: Tensor, plan: Plan) -> Tensor:
    """The plan's rows of a buffer up to `live` [B, H, live, D]; a view where the rows lie side by side."""
    # Narrowed first: rows given by indices are copied, and only what is read should be.
    return buffer_BHCD.narrow(2, 0, plan.live)[plan.rows]
