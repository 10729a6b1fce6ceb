"""The draft model as specdec runs it, one row a slot: the tokens of every request on the device, the draft's cache, and
what it must be fed before it can draft.

The device knows where each text ends (`state.lengths_B`), the host only how far it may be from there. So everything is
fed by its distance from the end, and nothing here waits for the device. Feeding a token that the draft has read already
writes the same keys and values again.

Shapes: B slots in use, R rows of one forward, q tokens a row, N tokens of a step, k drafts, V target vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafter import ModelDrafter, Proposal
from specdec.sampling import Features
from specdec.state import RowState
from specdec.window import Window, WindowCache
from vllm_draft_spec.memory import WINDOW_CHUNK, window_margin

CHUNK = 256  # most tokens a row in one forward, without a window
FORWARD_TOKENS = 2048  # most tokens of one forward, padding included: bounds the memory of its mask


def window_of(recent: int, sinks: int, k_max: int) -> Window:
    return Window(recent=recent, sinks=sinks, margin=window_margin(k_max))


@dataclass(frozen=True, kw_only=True)
class Feed:
    """`count` tokens of a slot: from `back` before the end of its text, or from its start (None). end: a bound on the
    position after the last one, for the host."""

    slot: int
    back: int | None
    count: int
    end: int


def forwards(feeds: Iterable[Feed], chunk: int) -> Iterator[list[Feed]]:
    """The same in pieces that fit into a forward each, a slot's in order; rows of like length share one, so that at
    most half of it is padding."""
    groups: dict[tuple[int, int], list[Feed]] = defaultdict(list)
    for feed in feeds:
        for number, start in enumerate(range(0, feed.count, chunk)):
            count = min(chunk, feed.count - start)
            back = None if feed.back is None else feed.back - start
            piece = Feed(slot=feed.slot, back=back, count=count, end=feed.end - feed.count + start + count)
            groups[number, count.bit_length()].append(piece)
    for _, group in sorted(groups.items(), key=lambda item: item[0][0]):
        rows = max(1, FORWARD_TOKENS // max(piece.count for piece in group))
        group.sort(key=lambda piece: piece.slot)
        yield from (group[i : i + rows] for i in range(0, len(group), rows))


class OwnDraft:
    """A drafter's model and cache for `num_slots` requests of up to `max_tokens` tokens each."""

    def __init__(
        self, drafter: ModelDrafter, *, target_size: int, num_slots: int, max_tokens: int, window: Window | None
    ) -> None:
        drafter.build(target_size, num_slots, max_tokens, window)
        self.drafter = drafter
        self.chunk = CHUNK if window is None else WINDOW_CHUNK
        self.device, self.cache = drafter.model.device, drafter.model.cache
        # One more than the positions, for the token that comes after the last one; and RowState's own trash column.
        self.state = RowState.empty(num_slots, max_tokens + 1, self.device)
        self.max_tokens = min(max_tokens, drafter.model.max_positions)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.drafter.model.module.parameters())

    def admit(self, slot: int, seed: int, known_n: Tensor) -> None:
        """A request whose first tokens the target does not read again, int32 [n] on the host."""
        self.state.tokens_BT[slot, : len(known_n)].copy_(known_n)
        self.state.seeds_B[slot].fill_(seed)
        if isinstance(self.cache, WindowCache):
            self.cache.first_B[slot].fill_(0)

    def move(self, source: int, to: int) -> None:
        self.cache.copy_row(source, to)
        for tensor_B in (self.state.tokens_BT, self.state.lengths_B, self.state.seeds_B):
            tensor_B[to].copy_(tensor_B[source])

    def note(
        self, slots_N: Tensor, positions_N: Tensor, tokens_N: Tensor, slots_B: Tensor, next_B: Tensor, ends_B: Tensor
    ) -> None:
        """A step read tokens_N (drafts among them that may have been rejected: what follows will overwrite them) and
        gave next_B; the texts then end at ends_B. A row whose next token is -1 gave none."""
        gave_B = next_B >= 0
        trash = self.state.tokens_BT.shape[1] - 1
        self.state.tokens_BT[slots_N, positions_N.long()] = tokens_N.long().clamp(min=0)
        self.state.tokens_BT[slots_B, torch.where(gave_B, ends_B - 1, trash)] = next_B.long().clamp(min=0)
        self.state.lengths_B[slots_B] = ends_B

    def feed(self, feeds: Iterable[Feed]) -> None:
        for group in forwards(feeds, self.chunk):
            self._forward(group)

    def skip_to(self, slots: Sequence[int], back: int) -> None:
        """With a window: the next token that these slots are fed is `back` from the end, what lies between it and the
        sinks never will be."""
        assert isinstance(self.cache, WindowCache)
        slots_R = self._on_device(slots)
        self.cache.first_B[slots_R] = self.state.lengths_B[slots_R] - back

    def propose(self, k: int, slots: Sequence[int], temperature_B: Tensor, greedy: bool, longest: int) -> Proposal:
        """k drafts for each of the slots in use, of which those in `slots` count. temperature_B: 0 for a row that takes
        the most likely token; greedy: all do. longest: a bound on the length of the texts."""
        num_rows = len(temperature_B)
        self.state.law.temperature_B[:num_rows] = temperature_B
        self.state.active_B.zero_().index_fill_(0, self._on_device(slots), True)
        features = Features(all_greedy=greedy, any_greedy=not greedy)
        return self.drafter.propose(self.state.head(num_rows), k, features, min(self.cache.capacity, longest + k))

    @torch.inference_mode()
    def rehearse(self, k: int) -> None:
        """The largest forwards there will be, for whoever measures memory; before the first request."""
        num_slots = len(self.state.lengths_B)
        rows = min(num_slots, FORWARD_TOKENS // self.chunk)
        count = min(self.chunk, self.max_tokens)
        self.feed(Feed(slot=slot, back=None, count=count, end=self.cache.capacity) for slot in range(rows))
        self.propose(k, range(num_slots), torch.ones(num_slots, device=self.device), False, self.max_tokens)

    def _forward(self, group: list[Feed]) -> None:
        q = max(feed.count for feed in group)
        slots, counts = [feed.slot for feed in group], [feed.count for feed in group]
        backs_R = self._on_device([-1 if feed.back is None else feed.back for feed in group])
        slots_R = self._on_device(slots)
        starts_R = torch.where(backs_R < 0, 0, self.state.lengths_B[slots_R] - backs_R)
        columns_Rq = starts_R[:, None] + torch.arange(q, device=self.device)
        inside_Rq = columns_Rq.clamp(0, self.state.tokens_BT.shape[1] - 1)
        tokens_Rq = self.state.tokens_BT[slots_R[:, None], inside_Rq]
        if self.drafter.vocabulary is not None:
            tokens_Rq = self.drafter.vocabulary.input_ids_V[tokens_Rq]
        side_by_side = slots[-1] - slots[0] + 1 == len(slots)
        rows = slice(slots[0], slots[-1] + 1) if side_by_side else slots_R
        live = min(self.cache.capacity, max(feed.end for feed in group))
        plan = self.cache.plan(starts_R, self._on_device(counts), q, rows, live)
        self.drafter.model.forward(tokens_Rq, plan, keep=1)

    def _on_device(self, values: Sequence[int]) -> Tensor:
        return on_device(values, self.device)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """int64, sent without waiting for what the device does."""
    return torch.tensor(list(values), dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
