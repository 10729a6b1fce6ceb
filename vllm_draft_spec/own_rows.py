"""Which slot of the own draft's cache each request has, and how many of its tokens the draft has not read yet.

vLLM moves rows within its batch, and takes rows out that miss a step. A request's slot is its own, found by its name.
A forward goes over the slots up to the last one in use and reads the cache in place. A request that leaves makes a gap,
which the next one fills; moving a row copies its whole cache, so that rows are moved together only when less than half
of those slots is in use.

`missed` is an upper bound that needs no word from the device. Worked example: 3 drafts were made, so the draft has read
all tokens and the first two drafts. Whatever part of the three is accepted, of the tokens there are then it misses two
at most (all accepted: the last draft and the token after it). In each step after that with one token a row it misses
one more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MISSED_AFTER_DRAFTS = 2


@dataclass(kw_only=True)
class Row:
    """One request. missed: at most so many of its tokens the draft has not read. drafted: drafts were made at the end
    of its latest step. pending: its last token has not been read by the target. failures: how often the draft's logits
    were found not to be finite."""

    name: str
    slot: int
    missed: int = 0
    drafted: bool = False
    pending: bool = False
    failures: int = 0

    @property
    def undrafted(self) -> bool:
        """The draft failed again after it had read the text anew."""
        return self.failures > 1

    def advance(self, scheduled: int, discarded: bool) -> None:
        """A step read `scheduled` tokens of it, drafts among them; `discarded`: a part of its prompt only, so that no
        token came out."""
        grown = scheduled - self.pending + (not discarded)
        self.missed = MISSED_AFTER_DRAFTS if self.drafted else self.missed + grown
        self.pending, self.drafted = not discarded, False


class Rows:
    """The requests that have a slot."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_slot: list[Row | None] = []  # the last one is never a gap
        self._by_name: dict[str, Row] = {}

    @property
    def span(self) -> int:
        """Slots [0, span) hold all rows."""
        return len(self._by_slot)

    def get(self, name: str) -> Row | None:
        return self._by_name.get(name)

    def admit(self, name: str, known: int) -> Row:
        """A request whose first `known` tokens were read by the target before."""
        assert name not in self._by_name
        assert len(self._by_name) < self._num_slots, "vLLM runs more requests than max_num_seqs"
        if len(self._by_name) == self.span:
            self._by_slot.append(None)
        row = Row(name=name, slot=self._by_slot.index(None), missed=known)
        self._by_slot[row.slot] = self._by_name[name] = row
        return row

    def release(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Let these go, if they are here. The slots to copy then, one after another, as (from, to)."""
        for name in names:
            if (row := self._by_name.pop(name, None)) is not None:
                self._by_slot[row.slot] = None
        self._trim()
        moves = []
        if 2 * len(self._by_name) < self.span:
            while len(self._by_name) < self.span:
                row, to = self._by_slot[-1], self._by_slot.index(None)
                assert row is not None
                moves.append((row.slot, to))
                self._by_slot[to], self._by_slot[-1], row.slot = row, None, to
                self._trim()
        return moves

    def _trim(self) -> None:
        while self._by_slot and self._by_slot[-1] is None:
            self._by_slot.pop()
