"""Drafters that look tokens up in text instead of computing them: n-gram (prompt lookup) and suffix decoding.

Their proposals are deterministic, so q is one-hot and the rule accepts a token with its own target probability.
The work is on the host, between rounds: a few dictionary steps a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from specdec.drafter import Proposal, refuse_second_engine
from specdec.model import CachedModel
from specdec.sampling import Features
from specdec.slots import Slot
from specdec.state import RowState


class LookupDrafter(ABC):
    """The common part: what `guess` finds for each row goes to the device in one copy a round."""

    def attach(self, target: CachedModel, num_slots: int, capacity: int) -> None:
        refuse_second_engine(self, "_device")
        self._device = target.device
        self._num_slots = num_slots

    def admit(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.start(slot.row, slot.tokens)

    def feed(self, slots: Sequence[Slot], chunk: int) -> None:
        """The whole prompt was read when the request was admitted."""
        return

    def prepare(self, slots: Sequence[Slot], k: int, chunk: int) -> int:
        found: dict[int, list[int]] = {slot.row: self.guess(slot.row, slot.tokens, k) for slot in slots}
        width = max(map(len, found.values()))
        drafts = [found.get(row, []) for row in range(self._num_slots)]
        padded = [[len(tokens), *tokens, *[0] * (width - len(tokens))] for tokens in drafts]
        packed = torch.tensor(padded).to(self._device)
        self._num_drafts_B, self._drafts_BK = packed[:, 0], packed[:, 1:]
        return 0

    def lag(self, slot: Slot) -> int:
        return 0

    def propose(self, state: RowState, k: int, features: Features, live: int | None) -> Proposal:
        B = len(state.lengths_B)
        return Proposal(
            drafts_BK=self._drafts_BK[:B],
            draft_probs_BKV=None,
            num_drafts_B=self._num_drafts_B[:B],
            bad_B=torch.zeros_like(state.active_B),
        )

    def roll_back(self, state: RowState) -> None:
        """Nothing was kept for tokens that are not committed."""
        return

    def committed(self, slots: Sequence[Slot], before: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, before, strict=True):
            self.extend(slot.row, slot.tokens, length)

    def release(self, slot: Slot) -> None:
        self.finish(slot.row)

    @abstractmethod
    def start(self, row: int, tokens: Sequence[int]) -> None:
        """A new text in this row."""

    @abstractmethod
    def extend(self, row: int, tokens: Sequence[int], length: int) -> None:
        """The row's text grew from `length` tokens to all of `tokens`."""

    @abstractmethod
    def finish(self, row: int) -> None:
        """The row's text is complete."""

    @abstractmethod
    def guess(self, row: int, tokens: Sequence[int], k: int) -> list[int]:
        """At most k tokens that may follow; fewer, or none, when nothing is known."""


class NgramDrafter(LookupDrafter):
    """Prompt lookup (Saxena 2023): the tokens that followed the last earlier occurrence of the text's last n tokens,
    for the largest n in [min_n, max_n] that occurs.
    """

    def __init__(self, *, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n is {min_n} and max_n {max_n}; expected 1 <= min_n <= max_n")
        self.sizes = range(max_n, min_n - 1, -1)
        self._follows: dict[int, dict[tuple[int, ...], int]] = {}  # by row: n-gram -> index of what followed it

    def start(self, row: int, tokens: Sequence[int]) -> None:
        self._follows[row] = {}
        self.extend(row, tokens, 0)

    def extend(self, row: int, tokens: Sequence[int], length: int) -> None:
        follows = self._follows[row]
        for index in range(max(1, length), len(tokens)):
            for n in self.sizes:
                if n <= index:
                    follows[tuple(tokens[index - n : index])] = index

    def finish(self, row: int) -> None:
        del self._follows[row]

    def guess(self, row: int, tokens: Sequence[int], k: int) -> list[int]:
        follows = self._follows[row]
        for n in self.sizes:
            index = follows.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if index is not None:
                return list(tokens[index : index + k])
        return []
