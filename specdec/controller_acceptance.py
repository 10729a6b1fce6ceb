"""Acceptance by draft position, estimated from rounds of any length.

Counts decay per tested token, never per round: decayed per round, the memory shrinks with the draft length, a short
draft makes the estimate jumpy, and the jumps move the draft length again. The last tests, so and so many of them, are
compared with all before them, and take their place when they contradict them (a change of text, of task, of batch).
What was left by a change is remembered: a load that goes back and forth between two kinds of text comes back to it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from math import exp, lgamma, log
from operator import mul

DECAY_TOKENS = 2000.0  # after so many tests a count has faded to 1/e
RECENT = (12, 24, 48, 96, 192, 384)  # tests that are compared with those before them
CHANGE_EVIDENCE = 8.5  # nats; .9 -> .35 is seen after about a dozen tests, false alarms are rare
SURPRISE = 4.0  # squared standard deviations from what was expected, below which that evidence cannot be reached
PRIOR_ALPHA, PRIOR_WEIGHT = 0.75, 2.0
NOISE_SDS = 2.5  # a position is taken to be like the one before it until it differs by this
RETURN_EVIDENCE = 6.0  # nats for a rate met before against the present one, summed from where it is least
WORTH_REMEMBERING = 40.0  # tests
REMEMBERED_TESTS = 100.0  # that a rate met before counts for when it is back
REMEMBERED = 3
UNLIKE = 1.0  # nats for any other rate, from which on what a probe saw is not taken for one met before
ALIKE = 0.1  # rates that differ by less are the same


class Decayed:
    """Counts by position, decayed per tested token with time constant `tokens`."""

    def __init__(self, tokens: float, k_max: int) -> None:
        self.tokens = tokens
        self.reached, self.accepted = [0.0] * k_max, [0.0] * k_max

    def add(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        keep = exp(-sum(reached) / self.tokens)
        for i in range(len(self.reached)):
            more = i < len(reached)
            self.reached[i] = self.reached[i] * keep + (reached[i] if more else 0.0)
            self.accepted[i] = self.accepted[i] * keep + (accepted[i] if more else 0.0)

    def begin_with(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        self.reached, self.accepted = list(reached), list(accepted)


class Recent:
    """Counts by position of the last rounds that have `tests` tests together."""

    def __init__(self, tests: int, k_max: int) -> None:
        self.tests, self._k_max = tests, k_max
        self.clear()

    @property
    def full(self) -> bool:
        return self.total >= self.tests

    def clear(self) -> None:
        self.total = 0.0
        self.reached, self.accepted = [0.0] * self._k_max, [0.0] * self._k_max
        self._rounds: deque[tuple[float, Sequence[float], Sequence[float]]] = deque()

    def add(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        self._rounds.append((sum(reached), reached, accepted))
        self._count(self._rounds[-1], 1)
        while self.total - self._rounds[0][0] >= self.tests:
            self._count(self._rounds.popleft(), -1)

    def _count(self, round: tuple[float, Sequence[float], Sequence[float]], sign: int) -> None:
        tests, reached, accepted = round
        self.total += sign * tests
        for i, (r, a) in enumerate(zip(reached, accepted, strict=False)):
            self.reached[i] += sign * r
            self.accepted[i] += sign * a

    def suffixes(self) -> Iterator["Recent"]:
        """The last round, the last two, and so on; one object that grows."""
        growing = Recent(self.tests, self._k_max)
        for round in reversed(self._rounds):
            growing._rounds.appendleft(round)
            growing._count(round, 1)
            yield growing


@dataclass
class Met:
    """A rate by position that was left; support: nats in favour of its being back, from where that sum was least;
    rounds: the counts since then."""

    rates: list[float]
    support: float = 0.0
    rounds: list[tuple[Sequence[float], Sequence[float]]] = field(default_factory=list)

    def hear(self, reached: Sequence[float], accepted: Sequence[float], now: Sequence[float]) -> bool:
        """One round's counts, with `now` believed; True when this rate is back."""
        for r, a, mine, other in zip(reached, accepted, self.rates, now, strict=False):
            here, there = (min(max(rate, 0.02), 0.98) for rate in (mine, other))
            self.support += a * log(here / there) + (r - a) * log((1 - here) / (1 - there))
        self.rounds.append((reached, accepted))
        if self.support <= 0:
            self.forget()
        return self.support > RETURN_EVIDENCE and self._fits()

    def _fits(self) -> bool:
        """Whether the counts speak for this rate more than for any other one."""
        sums = [
            [sum(values) for values in zip_longest(*side, fillvalue=0.0)] for side in zip(*self.rounds, strict=True)
        ]
        return unlike(self.rates, *sums) < 0

    def forget(self) -> None:
        self.support, self.rounds = 0.0, []


def change_evidence(accepted: float, reached: float, alpha: float) -> float:
    """Log Bayes factor of "another rate, all equally likely" against "the rate is alpha"."""
    alpha = min(max(alpha, 0.02), 0.98)
    failed = max(reached - accepted, 0.0)
    any_rate = lgamma(accepted + 1) + lgamma(failed + 1) - lgamma(reached + 2)
    return any_rate - accepted * log(alpha) - failed * log(1 - alpha)


def unlike(rates: Sequence[float], reached: Sequence[float], accepted: Sequence[float]) -> float:
    """Log Bayes factor of "another rate" against these rates by position."""
    likely = sum(r * p for r, p in zip(reached, rates, strict=False))
    return change_evidence(sum(accepted), sum(reached), likely / sum(reached))


def _as_tests(rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """Counts by position, reached and accepted, that have these rates."""
    chance, expected = 1.0, []
    for rate in rates:
        expected.append(chance)
        chance *= rate
    tests = [REMEMBERED_TESTS * each / sum(expected) for each in expected]
    return tests, [r * p for r, p in zip(tests, rates, strict=True)]


def two_rates(accepted: float, tests: float, accepted_before: float, tests_before: float) -> float:
    """Log Bayes factor of "two rates, all equally likely" against "one"."""

    def chance(good: float, bad: float) -> float:
        return lgamma(good + 1) + lgamma(bad + 1) - lgamma(good + bad + 2)

    failed, failed_before = max(tests - accepted, 0.0), max(tests_before - accepted_before, 0.0)
    apart = chance(accepted, failed) + chance(accepted_before, failed_before)
    return apart - chance(accepted + accepted_before, failed + failed_before)


class Acceptance:
    """P(position i accepted | all before it accepted) for i = 1..k_max, as `by_position`."""

    def __init__(self, k_max: int, decay_tokens: float = DECAY_TOKENS) -> None:
        self._long = Decayed(decay_tokens, k_max)
        self._recent = [Recent(tests, k_max) for tests in RECENT if tests < decay_tokens]
        self.by_position = self._estimate()
        self.changes = 0
        self._met: list[Met] = []

    @property
    def alpha(self) -> float:
        """Accepted over reached, all positions; nan before the first test."""
        reached = sum(self._long.reached)
        return sum(self._long.accepted) / reached if reached else float("nan")

    def evidence(self, position: int) -> float:
        """Tests of this position (from 1) that the estimate still rests on."""
        return self._long.reached[position - 1]

    def observe(self, reached: Sequence[float], accepted: Sequence[float]) -> bool:
        """Take a round's counts in; True when they ended in a change being seen."""
        if not any(reached):
            return False
        self._add(reached, accepted)
        before, tests = self.by_position, sum(self._long.reached)
        left = (before, tests) if self._returned(reached, accepted) else self._replace_outdated()
        self.by_position = self._estimate()
        if left is None:
            return False
        self.changes += 1
        self._remember(*left)
        return True

    def restart(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        """What came before was another regime: believe these counts alone, or a rate met before that they do not
        contradict."""
        self.changes += 1
        rates = self._fitting(reached, accepted)
        self._remember(self.by_position, sum(self._long.reached))
        self._begin_with(*(_as_tests(rates) if rates is not None else ([0.0] * len(self._long.reached),) * 2))
        self._add(reached, accepted)
        self.by_position = self._estimate()

    def expected_tokens(self) -> list[float]:
        """Tokens that a row commits in a round of k = 0..k_max drafts."""
        survival, tokens = 1.0, [1.0]
        for rate in self.by_position:
            survival *= rate
            tokens.append(tokens[-1] + survival)
        return tokens

    def _remember(self, rates: list[float], tests: float) -> None:
        """These rates were left; all sums begin again, since they were against them."""
        for each in self._met:
            each.forget()
        if tests >= WORTH_REMEMBERING:
            others = [each for each in self._met if abs(each.rates[0] - rates[0]) >= ALIKE]
            self._met = [*others, Met(list(rates))][-REMEMBERED:]

    def _returned(self, reached: Sequence[float], accepted: Sequence[float]) -> bool:
        """Whether a rate met before is back; all windows then begin with it."""
        back = [each for each in self._met if each.hear(reached, accepted, self.by_position)]
        if not back:
            return False
        met = max(back, key=lambda each: each.support)
        self._begin_with(*_as_tests(met.rates))
        for counts in met.rounds:
            self._add(*counts)
        return True

    def _fitting(self, reached: Sequence[float], accepted: Sequence[float]) -> list[float] | None:
        """The rate met before that these counts speak for most, unless they rather speak for another one."""
        nats = [unlike(each.rates, reached, accepted) for each in self._met]
        return self._met[nats.index(min(nats))].rates if min(nats, default=UNLIKE) < UNLIKE else None

    def _replace_outdated(self) -> tuple[list[float], float] | None:
        """Where recent tests contradict those before them, they take their place; returned is what was left: the rates
        before, and the number of tests they rested on."""
        evidence = [self._evidence_of_change(recent) if recent.full else 0.0 for recent in self._recent]
        if max(evidence, default=0.0) <= CHANGE_EVIDENCE:
            return None
        recent = self._since_change(self._recent[evidence.index(max(evidence))])
        left = self._before(recent)
        self._begin_with(recent.reached, recent.accepted)
        return left

    def _since_change(self, recent: Recent) -> Recent:
        """The part of these tests with which the change began, most likely: what is believed from now on should hold
        none from before."""
        evidence = [self._evidence_of_change(suffix) for suffix in recent.suffixes()]
        return next(islice(recent.suffixes(), evidence.index(max(evidence)), None))

    def _before(self, recent: Recent) -> tuple[list[float], float]:
        """Rates by position in the tests before the recent ones, and the number of those: as now believed, times one
        factor, so that it does not matter at which positions the ones and the others were tested."""
        tests = likely = 0.0
        for reached, recently, rate in zip(self._long.reached, recent.reached, self.by_position, strict=True):
            if reached > recently:  # the recent ones alone do not fade
                tests += reached - recently
                likely += (reached - recently) * rate
        accepted = max(sum(self._long.accepted) - sum(recent.accepted), 0.0)
        factor = accepted / likely if likely > 0 else 1.0
        return [min(rate * factor, 1.0) for rate in self.by_position], tests

    def _evidence_of_change(self, recent: Recent) -> float:
        """Log Bayes factor of "these tests are of another rate than those before them"."""
        tests, accepted = recent.total, sum(recent.accepted)
        rates, tests_before = self._before(recent)
        if tests_before < 1:
            return 0.0
        rate = min(max(sum(map(mul, recent.reached, rates)) / tests, 0.02), 0.98)
        if (accepted - tests * rate) ** 2 < SURPRISE * tests * rate * (1 - rate):
            return 0.0
        return two_rates(accepted, tests, tests_before * rate, tests_before)

    def _add(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        self._long.add(reached, accepted)
        for recent in self._recent:
            recent.add(reached, accepted)

    def _begin_with(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        """Believe these counts, and none before them."""
        self._long.begin_with(reached, accepted)
        for recent in self._recent:
            recent.clear()

    def _estimate(self) -> list[float]:
        """Each position's rate: that of the position before it (of all, for the first), moved towards the position's
        own as far as the two differ by more than noise does."""
        long = self._long
        rate = (sum(long.accepted) + PRIOR_WEIGHT * PRIOR_ALPHA) / (sum(long.reached) + PRIOR_WEIGHT)
        rates = []
        for reached, accepted in zip(long.reached, long.accepted, strict=True):
            excess = accepted - reached * rate
            noise = NOISE_SDS**2 * (reached * rate * (1 - rate) + 0.25)  # 0.25: counts are whole
            if excess * excess > noise:
                rate += (1 - (noise / (excess * excess)) ** 2) * excess / reached
            rates.append(rate)
        return rates
