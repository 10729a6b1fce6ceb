"""What vLLM's steps drafted and accepted, counted before anything is cut off at a stop or at max_tokens.

Every row of a step that gives tokens is one of three: drafting (it verified drafts; gives its accepted drafts and one
token more), plain (no draft to verify; one token), or prefill (the first token after a prompt). So always

    accepted <= drafted    and    generated = accepted + drafting + plain + prefill
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of vLLM when its output is there. names: the requests in it; prompt_tokens: tokens in it that were no
    decoding; rows: (drafts verified, drafts accepted) of each row that decoded, zeros for a plain one; prefill: rows
    that gave their first token. plain_k: the drafts of each row, where the worker could time the step (timing.plain_k).
    next_k: the drafts each row was to get in it, for the step after. times: the newest round that the worker has timed
    (timing.StepTimes), None when there is none."""

    names: frozenset[str]
    prompt_tokens: int
    rows: tuple[tuple[int, int], ...]
    prefill: int
    plain_k: int | None
    next_k: int
    times: Any = None

    @cached_property
    def kinds(self) -> Counter[tuple[int, int]]:
        """How many rows there are of each kind: of 64 rows few differ, and this runs in every step."""
        return Counter(self.rows)

    @property
    def k(self) -> int:
        """The most drafts that a row verified."""
        return max((drafted for drafted, _ in self.kinds), default=0)

    def ends_round_of(self, previous: Step | None) -> bool:
        """Whether the worker times a round that begins with the drafting of `previous` and ends with this step."""
        if previous is None or previous.plain_k is None or self.plain_k is None:
            return False
        return previous.names == self.names and previous.next_k == self.plain_k


@dataclass
class Tally:
    """Sums over steps. steps_by_k[i]: steps that verified up to i drafts a row; in the other lists index i is position
    i + 1."""

    steps_by_k: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafting: int = 0
    plain: int = 0
    prefill: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @classmethod
    def of(cls, step: Step) -> Tally:
        drafting = [(drafted, accepted, rows) for (drafted, accepted), rows in step.kinds.items() if drafted]
        tested = sum(rows for _, _, rows in drafting)
        accepted = sum(accepted * rows for _, accepted, rows in drafting)
        return cls(
            steps_by_k=[0] * step.k + [1] if step.rows else [],
            reached=_by_position((min(drafted, accepted + 1), rows) for drafted, accepted, rows in drafting),
            accepted_by_position=_by_position((accepted, rows) for _, accepted, rows in drafting),
            drafting=tested,
            plain=len(step.rows) - tested,
            prefill=step.prefill,
            drafted=sum(drafted * rows for drafted, _, rows in drafting),
            accepted=accepted,
            generated=accepted + len(step.rows) + step.prefill,
            draft_s=step.times.draft_s if step.times is not None else 0.0,
            verify_s=step.times.verify_s if step.times is not None else 0.0,
        )

    def add(self, more: Tally) -> None:
        for name, value in vars(more).items():
            mine = getattr(self, name)
            is_list = isinstance(value, list)
            setattr(self, name, list(map(sum, zip_longest(mine, value, fillvalue=0))) if is_list else mine + value)

    @property
    def alpha_by_position(self) -> list[float]:
        """Accepted over reached: each position's rate given that those before it were accepted."""
        pairs = zip_longest(self.accepted_by_position, self.reached, fillvalue=0)
        return [a / r for a, r in pairs]


def _by_position(lengths: Iterable[tuple[int, int]]) -> list[int]:
    """How many rows reach each position, from (length, rows): two of length 2 and one of length 1 give [3, 2]."""
    counts: list[int] = []
    for length, rows in lengths:
        counts += [0] * (length - len(counts))
        for i in range(length):
            counts[i] += rows
    return counts
