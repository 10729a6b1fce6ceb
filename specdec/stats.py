"""Counts of what was drafted and accepted, and the derived rates.

A draft position counts as *reached* in a round when every earlier position was accepted and no stop id lies
before it; acceptance by position is conditional on that. (Dividing by all drafts instead mixes the rate with the
rates before it, and under a changing k with the choice of k.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


@dataclass
class AcceptanceStats:
    """Totals over `rounds` row-rounds (one row in one round). Index i of the lists is draft position i + 1."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(
            rounds=self.rounds + other.rounds,
            tokens=self.tokens + other.tokens,
            drafted=self.drafted + other.drafted,
            reached=_added(self.reached, other.reached),
            accepted=_added(self.accepted, other.accepted),
        )

    @property
    def alpha(self) -> float:
        """Accepted over reached, all positions; nan when nothing was drafted."""
        return sum(self.accepted) / sum(self.reached) if sum(self.reached) else float("nan")

    @property
    def alpha_by_position(self) -> list[float]:
        return [a / r if r else float("nan") for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Mean over row-rounds (not over requests) of the tokens committed in a round; nan before the first."""
        return self.tokens / self.rounds if self.rounds else float("nan")


def came_to(furthest: Iterable[int], k: int) -> list[int]:
    """How many of the numbers came to position 1, 2, ... k, each being the furthest position that one came to."""
    ended = [0] * (k + 1)
    for position in furthest:
        ended[position] += 1
    return list(accumulate(ended[:0:-1]))[::-1]


@dataclass
class Tally:
    """AcceptanceStats of one row in the making: a few additions a round."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    k: int = 0
    reached: list[int] = field(default_factory=list)  # of each round, how many positions
    accepted: list[int] = field(default_factory=list)

    def add(self, *, tokens: int, drafted: int, reached: int, accepted: int, k: int) -> None:
        """One round of k drafts."""
        self.rounds += 1
        self.tokens += tokens
        self.drafted += drafted
        self.k = max(self.k, k)
        self.reached.append(reached)
        self.accepted.append(accepted)

    @property
    def stats(self) -> AcceptanceStats:
        return AcceptanceStats(
            rounds=self.rounds,
            tokens=self.tokens,
            drafted=self.drafted,
            reached=came_to(self.reached, self.k),
            accepted=came_to(self.accepted, self.k),
        )


@dataclass(frozen=True, kw_only=True)
class RoundStats:
    """One round over `rows` active rows; times in seconds, `overhead_s` is what is neither draft nor verify.

    k is what was verified: less than what was asked for when no row had so long a proposal. lacking: by position, rows
    that came so far and had no draft there; what a length is worth depends on them too, acceptance does not.
    draft_s includes feeding the drafter the caught_up tokens (over all rows) that it missed in rounds without drafts;
    None leaves the count to whoever saw those rounds. timed: False where the round also did other work (a prefill), so
    that its times say nothing; unlike times that are missing, that is no fault of the clock.
    """

    k: int
    rows: int
    tokens: int
    drafted: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    lacking: tuple[int, ...] = ()
    asked: int | None = None
    caught_up: int | None = None
    timed: bool = True
    draft_s: float
    verify_s: float
    total_s: float

    @property
    def overhead_s(self) -> float:
        return self.total_s - self.draft_s - self.verify_s

    @property
    def wanted(self) -> tuple[int, ...]:
        """Rows, by position, that reached it or would have if they had had a draft there."""
        return tuple(_added(self.reached, self.lacking))

    @property
    def acceptance(self) -> AcceptanceStats:
        return AcceptanceStats(
            rounds=self.rows,
            tokens=self.tokens,
            drafted=self.drafted,
            reached=list(self.reached),
            accepted=list(self.accepted),
        )
