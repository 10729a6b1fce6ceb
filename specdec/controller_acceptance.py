"""Acceptance by draft position, estimated from rounds of any length.

Counts decay per tested token, never per round: decayed per round, the memory shrinks with the draft length, a short
draft makes the estimate jumpy, and the jumps move the draft length again. A long window gives the estimates; shorter
ones are only compared with it, and take its place when they contradict it (a change of text, of task, of batch). What
was left by a change is remembered: a load that goes back and forth between two kinds of text comes back to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, log

DECAY_TOKENS = 2000.0  # of the longest window
SHORTER = (24.0, 128.0, 512.0)
CHANGE_EVIDENCE = 5.5  # nats; .9 -> .35 is seen after about a dozen and a half tests, false alarms are rare
PRIOR_ALPHA, PRIOR_WEIGHT = 0.75, 2.0
NOISE_SDS = 2.5  # a position is taken to be like the one before it until it differs by this
RETURN_EVIDENCE = 6.0  # nats for a rate met before against the present one, summed from where it is least
WORTH_REMEMBERING = 40.0  # tests
REMEMBERED_TESTS = 100.0  # that a rate met before counts for when it is back
REMEMBERED = 3
ALIKE = 0.1  # rates that differ by less are the same


class Window:
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

    def copy_from(self, other: "Window") -> None:
        self.reached, self.accepted = list(other.reached), list(other.accepted)


@dataclass
class Met:
    """A rate by position that was left; support: nats in favour of its being back, from where that sum was least."""

    rates: list[float]
    support: float = 0.0

    def hear(self, reached: Sequence[float], accepted: Sequence[float], now: Sequence[float]) -> bool:
        """One round's counts, with `now` believed; True when this rate is back."""
        for r, a, mine, other in zip(reached, accepted, self.rates, now, strict=False):
            here, there = (min(max(rate, 0.02), 0.98) for rate in (mine, other))
            self.support += a * log(here / there) + (r - a) * log((1 - here) / (1 - there))
        self.support = max(self.support, 0.0)
        return self.support > RETURN_EVIDENCE


def windows(decay_tokens: float) -> tuple[float, ...]:
    """Time constants in tested tokens, the longest last."""
    return (*(tokens for tokens in SHORTER if tokens < decay_tokens), decay_tokens)


def change_evidence(accepted: float, reached: float, alpha: float) -> float:
    """Log Bayes factor of "another rate, all equally likely" against "the rate is alpha"."""
    alpha = min(max(alpha, 0.02), 0.98)
    failed = max(reached - accepted, 0.0)
    any_rate = lgamma(accepted + 1) + lgamma(failed + 1) - lgamma(reached + 2)
    return any_rate - accepted * log(alpha) - failed * log(1 - alpha)


class Acceptance:
    """P(position i accepted | all before it accepted) for i = 1..k_max, as `by_position`."""

    def __init__(self, k_max: int, constants: Sequence[float] = windows(DECAY_TOKENS)) -> None:
        self._windows = [Window(tokens, k_max) for tokens in constants]
        self._long = self._windows[-1]
        self.by_position = self._estimate()
        self.changes = 0
        self._met: list[Met] = []

    @property
    def alpha(self) -> float:
        """Accepted over reached, all positions, in the long window; nan before the first test."""
        reached = sum(self._long.reached)
        return sum(self._long.accepted) / reached if reached else float("nan")

    def evidence(self, position: int) -> float:
        """Tests of this position (from 1) that the estimate still rests on."""
        return self._long.reached[position - 1]

    def observe(self, reached: Sequence[float], accepted: Sequence[float]) -> bool:
        """Take a round's counts in; True when they ended in a change being seen."""
        if not any(reached):
            return False
        for window in self._windows:
            window.add(reached, accepted)
        before, tests = self.by_position, sum(self._long.reached)
        changed = self._returned(reached, accepted) or self._replace_outdated()
        self.by_position = self._estimate()
        if changed:
            self._remember(before, tests)
        return changed

    def restart(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        """Believe these counts alone: what came before was another regime."""
        self.changes += 1
        self._remember(self.by_position, sum(self._long.reached))
        for window in self._windows:
            window.reached, window.accepted = [0.0] * len(window.reached), [0.0] * len(window.reached)
            window.add(reached, accepted)
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
            each.support = 0.0
        if tests >= WORTH_REMEMBERING:
            others = [each for each in self._met if abs(each.rates[0] - rates[0]) >= ALIKE]
            self._met = [*others, Met(list(rates))][-REMEMBERED:]

    def _returned(self, reached: Sequence[float], accepted: Sequence[float]) -> bool:
        """Whether a rate met before is back; all windows then begin with it."""
        back = [each for each in self._met if each.hear(reached, accepted, self.by_position)]
        if not back:
            return False
        rates = max(back, key=lambda each: each.support).rates
        chance, expected = 1.0, []
        for rate in rates:
            expected.append(chance)
            chance *= rate
        tests = [REMEMBERED_TESTS * each / sum(expected) for each in expected]
        for window in self._windows:
            window.reached, window.accepted = tests[:], [r * p for r, p in zip(tests, rates, strict=True)]
        self.changes += 1
        return True

    def _replace_outdated(self) -> bool:
        for i, window in enumerate(self._windows[:-1]):
            reached = sum(window.reached)
            predicted = sum(r * p for r, p in zip(window.reached, self.by_position, strict=True)) / reached
            if change_evidence(sum(window.accepted), reached, predicted) > CHANGE_EVIDENCE:
                for longer in self._windows[i + 1 :]:
                    longer.copy_from(window)
                self.changes += 1
                return True
        return False

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
