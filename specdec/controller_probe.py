"""When to draft although not drafting looks best, and when to believe what that shows.

At k = 0 nothing is learned about acceptance, so drafting is probed: rounds with drafts, repeated as long as they look
promising (a sequential probability ratio test of "the old rate" against "a rate that pays"). Probes are paid from an
allowance that grows by a fixed share of the time spent at k = 0, so that all of them together cannot slow decoding by
more. docs/controller.md has the formulas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt

BUDGET = 0.013  # share of the time at k = 0 that probes may lose
SHORTEST, LONGEST = 8, 64  # tokens a row between probes: at first, and at most where the budget allows it
HOPELESS = 2048  # the same where not even full acceptance would pay: only costs can change that
REGIME_TOKENS = 2000  # how long acceptance is taken to stay as it is, until changes have been seen
OFTEN_TOKENS, MOST_BUDGET = 1000.0, 2.0  # the budget grows where changes come more often, up to so many times
FRESH = 2.0  # probe rounds that the allowance holds when drafting has just been left
REJECT = log(0.3)
LONGEST_BURST = 48  # rounds


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a probe costs, and what it may bring: `loss_s` seconds lost by one probe round if nothing has changed,
    `step_s` a round at k = 0, `believed` the present rates by position, `promising` the rate to test for (None: no
    rate pays), `gain` the share of time saved at that rate, `proof` the likelihood ratio to believe it at, `k` the
    draft length that is best there, `regime` the tokens for which acceptance is taken to stay as it is."""

    loss_s: float
    step_s: float
    believed: tuple[float, ...]
    promising: float | None
    gain: float
    proof: float
    k: int
    regime: float = REGIME_TOKENS

    def interval(self) -> float:
        """Tokens a row between probes.

        Losing l every I tokens and, once in L tokens, noticing a change I / 2 tokens late at a gain of g a token
        costs l / I + g I / (2 L) a token: least at I = sqrt(2 l L / g).
        """
        if self.promising is None:
            return HOPELESS
        loss = max(self.loss_s / self.step_s, 0.0)
        return min(LONGEST, sqrt(2 * loss * self.regime / max(self.gain, 1e-3)))


class Prober:
    """State of the probing at k = 0; `active` while a burst of probe rounds runs."""

    def __init__(self) -> None:
        self.active = False
        self.bursts = 0
        self._interval = 0.0  # the very first probe comes at once
        self._ask_at = 0.0
        self._allowance_s: float | None = None
        self._idle_tokens = 0
        self._generosity = 1.0
        self._support = 0.0
        self._rounds = 0
        self._outlook: Outlook | None = None
        self._seen: tuple[list[float], list[float]] = ([], [])

    @property
    def k(self) -> int:
        """Draft length of the burst's next round: one token until the evidence is in favour."""
        assert self._outlook is not None
        return self._outlook.k if self._support > 0 else 1

    @property
    def seen(self) -> tuple[list[float], list[float]]:
        """Reached and accepted by position since the burst began."""
        return self._seen

    def idle(self, step_s: float) -> None:
        """A round at k = 0 has been decoded."""
        self._idle_tokens += 1
        if self._allowance_s is not None:
            self._allowance_s += BUDGET * self._generosity * step_s

    def spend(self, seconds: float) -> None:
        self._allowance_s = (self._allowance_s or 0.0) - seconds

    def due(self, outlook: Callable[[], Outlook]) -> bool:
        """Whether to begin a burst now; begins it. `outlook` is only asked when the interval is over."""
        if self._idle_tokens < self._ask_at:
            return False
        now = outlook()
        self._ask_at = self._idle_tokens + 4  # when it is not due, asking every round would cost more than it brings
        self._generosity = min(max(OFTEN_TOKENS / now.regime, 1.0), MOST_BUDGET)
        limit = FRESH * max(now.loss_s, 0.0)
        self._allowance_s = limit if self._allowance_s is None else min(self._allowance_s, limit)
        hopeless = now.promising is None and self._idle_tokens < HOPELESS
        if hopeless or self._allowance_s < now.loss_s:
            return False
        self.active, self._outlook, self._support, self._rounds = True, now, 0.0, 0
        self._seen = ([], [])
        self.bursts += 1
        return True

    def observe(self, reached: Sequence[float], accepted: Sequence[float]) -> bool:
        """One round of a burst; True when it shows that acceptance has become a rate that pays."""
        assert self._outlook is not None
        self._rounds += 1
        self._seen = (_added(self._seen[0], reached), _added(self._seen[1], accepted))
        pays = self._outlook.promising or 0.95
        believed = [min(max(p, 0.02), 0.97) for p in self._outlook.believed]
        self._support += sum(
            a * log(pays / old) + (r - a) * log((1 - pays) / (1 - old))
            for r, a, old in zip(reached, accepted, believed, strict=False)
        )
        shown = self._support >= log(self._outlook.proof)
        if shown or self._support <= REJECT or self._rounds >= (LONGEST_BURST if self._outlook.promising else 2):
            self._end()
        return shown

    def leave(self) -> None:
        """Drafting is on: the next time it is switched off, the first probe comes soon again."""
        self.active, self._idle_tokens, self._allowance_s = False, 0, None
        self._interval = self._ask_at = float(SHORTEST)

    def _end(self) -> None:
        assert self._outlook is not None
        self.active, self._idle_tokens = False, 0
        self._interval = self._ask_at = min(max(2 * self._interval, SHORTEST), max(self._outlook.interval(), SHORTEST))


def _added(left: Sequence[float], right: Sequence[float]) -> list[float]:
    longest = max(len(left), len(right))
    padded = [[*side, *[0.0] * (longest - len(side))] for side in (left, right)]
    return [a + b for a, b in zip(*padded, strict=True)]
