"""A draft length for each row of a round.

Every row has its own acceptance rate, pulled to the batch's while it has few tests. Drafting one more token in row b
pays when the chance S that it is accepted exceeds its price at the present speed; a further draft step pays when what
its rows gain together covers the step. The plan is found by Dinkelbach's method: fix the speed, choose the lengths
that gain at it, compute the speed they give, repeat (it rises until it is the best there is).
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import exp, log

from specdec.controller_acceptance import change_evidence

ROW_TOKENS = 160.0  # a row's memory, in tested tokens
IDLE_TOKENS = 600.0  # the same in committed tokens while it is not tested: its rate returns to the batch's, so that
# it is tried again
RECENT_TOKENS = 12.0
ROW_CHANGE_EVIDENCE = 5.0  # nats
ROW_PULL = 12.0  # tests that the batch's rate counts for in a row
LEVELS = 4.0  # rows are grouped by rate in steps of 1 / LEVELS of log odds, so that planning stays cheap
PROFILE_TOKENS = 2000.0
WORTH_PLANNING = 1.04  # lengths by row must promise this much over one length


@dataclass(frozen=True, kw_only=True)
class RowRound:
    """What a round did to one row. row: a name that stays with the request; k drafts, of which the first `reached`
    were tested (or would have been, had the drafter had so many to propose) and the first `accepted` accepted; lag:
    tokens by which its draft is behind after the round, None when only the rounds without drafts are to be counted."""

    row: Hashable
    k: int
    reached: int
    accepted: int
    lag: int | None = None


@dataclass(frozen=True, kw_only=True)
class RaggedCost:
    """Seconds of a round whose rows draft different lengths: a draft step over n rows costs step + n step_row;
    verification what it costs when every row drafts the mean length, `rest` being its time by that length."""

    step: float
    step_row: float
    rest: Sequence[float]

    def seconds(self, rows: int, drafted: int, steps: int) -> float:
        """`steps` draft steps that draft `drafted` tokens in all."""
        low = min(drafted // rows, len(self.rest) - 2)
        verify = self.rest[low] + (drafted / rows - low) * (self.rest[low + 1] - self.rest[low])
        return verify + steps * self.step + drafted * self.step_row


@dataclass
class _Row:
    """Decayed tests of a row, over ROW_TOKENS and over RECENT_TOKENS; lag: tokens that the draft has not been fed."""

    reached: float = 0.0
    accepted: float = 0.0
    recent_reached: float = 0.0
    recent_accepted: float = 0.0
    lag: int = 0

    def rate(self, alpha: float) -> float:
        return (self.accepted + ROW_PULL * alpha) / (self.reached + ROW_PULL)

    def observe(self, reached: int, accepted: int, alpha: float) -> None:
        """The short memory takes the long one's place when it contradicts it."""
        before = self.rate(alpha)
        keep, keep_recent = exp(-reached / ROW_TOKENS), exp(-reached / RECENT_TOKENS)
        self.reached, self.accepted = self.reached * keep + reached, self.accepted * keep + accepted
        self.recent_reached = self.recent_reached * keep_recent + reached
        self.recent_accepted = self.recent_accepted * keep_recent + accepted
        if change_evidence(self.recent_accepted, self.recent_reached, before) > ROW_CHANGE_EVIDENCE:
            self.reached, self.accepted = self.recent_reached, self.recent_accepted

    def age(self) -> None:
        """A token was committed untested: what the row showed slowly loses its meaning."""
        keep = exp(-1 / IDLE_TOKENS)
        self.reached, self.accepted = self.reached * keep, self.accepted * keep


@dataclass
class RowBook:
    """Estimates of the rows now decoded, and how far the draft lags behind in each."""

    k_max: int
    rows: dict[Hashable, _Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._expected, self._accepted = [0.0] * self.k_max, [0.0] * self.k_max

    def observe(self, rounds: Sequence[RowRound], alpha: float) -> None:
        self._observe_profile(rounds, alpha)
        for seen in rounds:
            row = self.rows.setdefault(seen.row, _Row())
            if seen.reached:
                row.observe(seen.reached, seen.accepted, alpha)
            else:
                row.age()
            counted = 0 if seen.k > 0 else row.lag + 1
            row.lag = counted if seen.lag is None else seen.lag

    def keep_only(self, names: Sequence[Hashable]) -> None:
        """Forget the rows that are no longer decoded."""
        if len(self.rows) > 2 * len(names):
            kept = set(names)
            self.rows = {name: row for name, row in self.rows.items() if name in kept}

    def forget_rates(self) -> None:
        """Acceptance has changed: what the rows showed before says nothing now."""
        for row in self.rows.values():
            row.reached = row.accepted = row.recent_reached = row.recent_accepted = 0.0

    def lag(self, name: Hashable) -> int:
        return self.rows[name].lag if name in self.rows else 0

    def rate(self, name: Hashable, alpha: float) -> float:
        row = self.rows.get(name)
        return row.rate(alpha) if row is not None else alpha

    def imputed(self, rounds: Sequence[RowRound], alpha: float) -> tuple[int, float]:
        """Rows that did not draft, and how many of them would have had their first draft accepted by what is known of
        them. Counted with the tested ones, they keep the batch's rate that of all rows: good rows alone would look
        like a change for the better."""
        idle = [seen.row for seen in rounds if seen.k == 0]
        return len(idle), sum(self.rate(name, alpha) for name in idle)

    def profile(self) -> list[float]:
        """By position: acceptance relative to what the rows' own rates let expect (1 where nothing was seen). The
        batch's rate by position will not do: later positions are reached by good rows, which makes them look better."""
        return [(a + ROW_PULL) / (e + ROW_PULL) for a, e in zip(self._accepted, self._expected, strict=True)]

    def _observe_profile(self, rounds: Sequence[RowRound], alpha: float) -> None:
        keep = exp(-sum(seen.reached for seen in rounds) / PROFILE_TOKENS)
        self._expected = [e * keep for e in self._expected]
        self._accepted = [a * keep for a in self._accepted]
        for seen in rounds:
            rate = self.rate(seen.row, alpha)
            for i in range(seen.reached):
                self._expected[i] += rate
                self._accepted[i] += i < seen.accepted


def plan(rates: Sequence[float], profile: Sequence[float], cost: RaggedCost, uniform: int) -> list[int]:
    """The draft lengths of the rows that give most tokens per second; all `uniform` where that is nearly as good.

    With a given number of draft steps, time depends only on how many tokens are drafted in all, so the best drafts
    are always those most likely to be accepted: take them in that order, for each number of steps, and look.
    """
    rows, grouped = len(rates), [_group(rate) for rate in rates]
    sizes = Counter(grouped)
    chances = {group: _survival(group, profile) for group in sizes}
    drafts = sorted(((s, -i, g) for g in sizes for i, s in enumerate(chances[g])), reverse=True)
    plain = sum(sizes[g] * (1 + sum(chances[g][:uniform])) for g in sizes)
    best, best_speed = None, WORTH_PLANNING * plain / cost.seconds(rows, rows * uniform, uniform)
    for steps in range(len(profile) + 1):
        tokens, drafted = float(rows), 0
        for chance, minus_i, group in [(1.0, 0, None), *drafts]:
            if -minus_i < steps and group is not None:
                tokens, drafted = tokens + sizes[group] * chance, drafted + sizes[group]
            speed = tokens / cost.seconds(rows, drafted, steps)
            if speed > best_speed:
                best, best_speed = (steps, chance, minus_i), speed
    if best is None:
        return [uniform] * rows
    steps, *last = best
    lengths = {g: sum((s, -i) >= tuple(last) for i, s in enumerate(chances[g][:steps])) for g in sizes}
    return [lengths[group] for group in grouped]


def _group(rate: float) -> int:
    rate = min(max(rate, 0.01), 0.99)
    return round(LEVELS * log(rate / (1 - rate)))


def _survival(group: int, profile: Sequence[float]) -> list[float]:
    rate, chance, chances = 1 / (1 + exp(-group / LEVELS)), 1.0, []
    for factor in profile:
        chance *= min(rate * factor, 1.0)
        chances.append(chance)
    return chances
