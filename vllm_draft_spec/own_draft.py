"""The draft model as specdec runs it, one row a slot: the tokens of every request on the device, the draft's cache, and
what it must be fed before it can draft. A draft step works on buffers that stay where they are, so that it can be
replayed as a CUDA graph.

The device knows where each text ends (`state.lengths_B`), the host only how far it may be from there. So everything is
fed by its distance from the end, and nothing here waits for the device. Feeding a token that the draft has read already
writes the same keys and values again.

Shapes: B slots in use, R rows of one forward, q tokens a row, N tokens of a step, k drafts, V target vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.drafter import ModelDrafter, Proposal
from specdec.graphs import GraphRounds, row_counts
from specdec.round import EagerRounds
from specdec.sampling import Features, verify_drafts
from specdec.state import RowState
from specdec.window import Window, WindowCache
from vllm_draft_spec.drafting import on_device, sent
from vllm_draft_spec.memory import WINDOW_CHUNK, window_margin

CHUNK = 256  # most tokens a row in one forward, without a window
FORWARD_TOKENS = 2048  # most tokens of one forward, padding included: bounds the memory of its mask


def window_of(recent: int, sinks: int, k_max: int) -> Window:
    return Window(recent=recent, sinks=sinks, margin=window_margin(k_max))


@dataclass(frozen=True, kw_only=True)
class Feed:
    """`count` tokens of a slot: from `back` before the end of its text on, or where that is None from `start` on.
    end: a bound on the position after the last one, for the host."""

    slot: int
    back: int | None = None
    start: int = 0
    count: int
    end: int


def forwards(feeds: Iterable[Feed], chunk: int) -> Iterator[list[Feed]]:
    """The same in pieces that fit into a forward each: a slot's in order, what is counted from the text's start first,
    and only one of a slot in a forward. Rows of like length share one, so that at most half of it is padding."""
    groups: dict[tuple[bool, int, int], list[Feed]] = defaultdict(list)
    for feed in feeds:
        for number, offset in enumerate(range(0, feed.count, chunk)):
            count = min(chunk, feed.count - offset)
            piece = replace(
                feed,
                back=None if feed.back is None else feed.back - offset,
                start=feed.start + offset,
                count=count,
                end=feed.end - feed.count + offset + count,
            )
            groups[feed.back is not None, number, count.bit_length()].append(piece)
    for _, group in sorted(groups.items(), key=lambda item: item[0]):
        rows = max(1, FORWARD_TOKENS // max(piece.count for piece in group))
        group.sort(key=lambda piece: piece.slot)
        yield from (group[i : i + rows] for i in range(0, len(group), rows))


class OwnDraft:
    """A drafter's model and cache for `num_slots` requests of up to `max_tokens` tokens each, `k_max` drafts at a time.

    graphs: draft steps are replayed as CUDA graphs (specdec.graphs), each made when it is first needed. fast: the
    forward of specdec.fast, where that can be used; None: on a GPU."""

    def __init__(
        self,
        drafter: ModelDrafter,
        *,
        target_size: int,
        num_slots: int,
        max_tokens: int,
        k_max: int,
        window: Window | None = None,
        graphs: bool = False,
        fast: bool | None = None,
    ) -> None:
        drafter.build(target_size, num_slots, max_tokens, window, fast=fast)
        # No target here: of a round only its drafts are made.
        model, eager = drafter.model, EagerRounds(drafter.model, 0, verify_drafts)
        self.rounds: EagerRounds | GraphRounds = eager
        if graphs:
            self.rounds = GraphRounds(eager, model, num_slots=num_slots, k_max=k_max, vocab_size=target_size)
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
        if len(known_n):
            # A token that vLLM has not got back from the device stands there as -1.
            self.state.tokens_BT[slot, : len(known_n)].copy_(sent(known_n.long().clamp(min=0), self.device))
        self.state.seeds_B[slot].fill_(seed)
        if isinstance(self.cache, WindowCache):
            self.cache.first_B[slot].fill_(0)

    def clear(self, slot: int) -> None:
        """Nothing is in the draft's cache of this slot any more: what was may have been NaN."""
        self.cache.clear_rows([slot])
        if isinstance(self.cache, WindowCache):
            self.cache.first_B[slot].fill_(0)

    def move(self, source: int, to: int) -> None:
        self.cache.copy_row(source, to)
        for tensor_B in (self.state.tokens_BT, self.state.lengths_B, self.state.seeds_B):
            tensor_B[to].copy_(tensor_B[source])

    def note(self, slots_N: Tensor, positions_N: Tensor, tokens_N: Tensor) -> None:
        """A step read these, drafts among them that may have been rejected: what follows will overwrite them."""
        self.state.tokens_BT[slots_N, positions_N.long()] = tokens_N.long().clamp(min=0)

    def note_ends(self, slots_B: Tensor, next_B: Tensor, ends_B: Tensor) -> None:
        """It gave next_B, and the texts then end at ends_B. A row whose next token is -1 gave none. Needed before these
        slots are fed or draft; otherwise the step that reads next_B notes it."""
        gave_B = next_B >= 0
        trash = self.state.tokens_BT.shape[1] - 1
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
        """k drafts for each of the slots in use, of which those in `slots` count; good until the next call.
        temperature_B: 0 for a row that takes the most likely token; greedy: all do. longest: a bound on the length of
        the texts."""
        used = len(temperature_B)
        self.state.law.temperature_B[:used] = temperature_B
        self.state.active_B.zero_().index_fill_(0, self._on_device(slots), True)
        features = Features(all_greedy=greedy, any_greedy=not greedy)
        # A ring is always read whole; to say so keeps one graph from becoming many.
        live = self.cache.capacity if isinstance(self.cache, WindowCache) else min(self.cache.capacity, longest + k)
        return self.rounds.propose(self.drafter, self.state.head(self.rounds.rows(used)), k, features, live)

    @torch.inference_mode()
    def rehearse(self, k: int) -> None:
        """The largest forwards there will be, and with graphs every number of rows, for whoever measures memory; before
        the first request."""
        num_slots = len(self.state.lengths_B)
        rows = min(num_slots, FORWARD_TOKENS // self.chunk)
        count = min(self.chunk, self.max_tokens)
        self.feed(Feed(slot=slot, count=count, end=self.cache.capacity) for slot in range(rows))
        sizes = row_counts(num_slots) if isinstance(self.rounds, GraphRounds) else [num_slots]
        for used in sizes:
            for greedy in (True, False):
                self.propose(k, range(used), torch.ones(used, device=self.device), greedy, self.max_tokens)

    def _forward(self, group: list[Feed]) -> None:
        q = max(feed.count for feed in group)
        slots, counts = [feed.slot for feed in group], [feed.count for feed in group]
        from_end_R = self._on_device([feed.back is not None for feed in group])
        offsets_R = self._on_device([feed.start if feed.back is None else -feed.back for feed in group])
        slots_R = self._on_device(slots)
        starts_R = self.state.lengths_B[slots_R] * from_end_R + offsets_R
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
