"""What controllers that measure have in common, and the plain one of them, Geometric."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.controller_acceptance import DECAY_TOKENS, Acceptance
from specdec.controller_cost import CostTable, usable
from specdec.stats import RoundStats

NO_CLOCK_ROUNDS = 64
HYSTERESIS = 1.002  # a new length must be this much faster


@dataclass(frozen=True, kw_only=True)
class ControllerState:
    """For export: acceptance over all positions and by position, c (a draft step over a round without drafts), the
    expected tokens per second and row of each k from 0, the present k, changes of acceptance seen, probes made."""

    alpha: float
    alpha_by_position: tuple[float, ...]
    cost_ratio: float
    speed_by_k: tuple[float, ...]
    k: int
    changes: int
    probes: int


class Measured:
    """Times what it must before it compares lengths, and refuses to go on without a clock (ValueError): an assumed
    cost ratio drafts far too long, or never, and nothing shows it."""

    def __init__(self, k_max: int, *, decay_tokens: float = DECAY_TOKENS) -> None:
        self.k_max = checked_k_max(k_max, lowest=1)
        self._costs = CostTable(self.k_max)
        self._acceptance = Acceptance(self.k_max, decay_tokens)
        self._k = 0
        self._missed = 0  # rounds at k = 0 since the draft was last fed
        self._fed_every = 0  # rounds at k = 0 after which the owner feeds the draft there too; 0: never seen
        self._asked, self._silent = 0, 0
        self._last_times: tuple[float, float] | None = None
        self._told = True  # whether the last round's time was its own: what cannot be timed is not asked for

    @property
    def k(self) -> int:
        """The length believed best; a round may draft another to probe, explore or time."""
        return self._k

    def observe(self, round: RoundStats) -> None:
        self._observe_times(round, self._caught_up(round, self._missed * round.rows))
        self._acceptance.observe(round.wanted, round.accepted)
        if _fed_at_0(round):
            self._fed_every = self._missed + 1
        self._missed = 0 if round.k > 0 or _fed_at_0(round) else self._missed + 1

    def observe_cost(self, rows: int, k: int, draft_s: float, verify_s: float, total_s: float) -> None:
        if not usable(total_s) or not 0 <= draft_s < total_s:
            raise ValueError(
                f"a round of {rows} rows and k = {k} took draft_s = {draft_s}, verify_s = {verify_s}, total_s = "
                f"{total_s}; expected seconds with 0 <= draft_s < total_s"
            )
        self._costs.observe(rows, k, draft_s, total_s - draft_s)
        self._silent = 0

    def state(self, rows: int = 1) -> ControllerState:
        """What is believed now, for a batch of `rows`; speed_by_k is empty until times allow a comparison."""
        plain_s = self._costs.round_s(rows, 0)
        return ControllerState(
            alpha=self._acceptance.alpha,
            alpha_by_position=tuple(self._acceptance.by_position),
            cost_ratio=self._costs.step_s(rows) / plain_s if plain_s > 0 else float("nan"),
            speed_by_k=tuple(self._speeds(rows)) if self._costs.comparable else (),
            k=self._k,
            changes=self._acceptance.changes,
            probes=0,
        )

    def _caught_up(self, round: RoundStats, counted: int) -> int:
        return counted if round.caught_up is None else round.caught_up

    def _observe_times(self, round: RoundStats, missed_tokens: int) -> None:
        """missed_tokens: what the draft had to be fed in this round, over all rows, before it could draft."""
        self._told = round.timed
        if not round.timed:
            self._asked, self._silent = max(self._asked - 1, 0), max(self._silent - 1, 0)
            return
        self._last_times = (round.draft_s, round.total_s)
        if not usable(round.total_s) or not 0 <= round.draft_s < round.total_s:
            return
        self._silent = 0
        if round.asked is not None and round.asked > round.k:
            self._asked = 0  # the drafter had nothing to propose: not for want of a clock
        if missed_tokens and (round.k > 0 or _fed_at_0(round)):
            self._costs.observe_catch_up(round.rows, round.k, missed_tokens, round.total_s)
        else:
            self._costs.observe(round.rows, round.k, round.draft_s, round.total_s - round.draft_s)

    def _catch_up_s(self, rows: int, missed_tokens: float) -> float:
        """What feeding the draft now costs. Where it is fed at k = 0 too, only the extra forward: what its tokens cost
        comes in any case, later."""
        if missed_tokens > 0 and self._fed_every:
            return self._costs.catch_up.seconds(0, self._costs.step_s(rows))
        return self._costs.catch_up_s(rows, missed_tokens)

    def _untimed(self, rows: int) -> int | None:
        """A length that has to be timed before lengths can be compared; None when none has."""
        self._silent += 1
        if not self._costs.comparable:
            self._asked += 1
            if self._asked > NO_CLOCK_ROUNDS:
                self._refuse()
            return min(4, self.k_max) if not self._told or self._costs.count_drafted(rows) < 3 else 0
        if self._silent > NO_CLOCK_ROUNDS:
            if self._silent == NO_CLOCK_ROUNDS + 1:
                warnings.warn(f"no times for {NO_CLOCK_ROUNDS} rounds: draft lengths rest on old ones", stacklevel=3)
            return None
        plain_missing = self._told and self._costs.count_drafted(rows) >= 4 and self._costs.count(rows, 0) < 3
        return 0 if plain_missing and self._k > 0 else None

    def _refuse(self) -> None:
        raise ValueError(
            f"{NO_CLOCK_ROUNDS} rounds without the times needed to choose a draft length (some with drafts and some "
            f"without): the last round reported (draft_s, total_s) = {self._last_times}; expected measured seconds, "
            f"0 <= draft_s < total_s. Report them in RoundStats, call observe_cost at start, or use FixedK"
        )

    def _tokens(self) -> list[float]:
        """Expected tokens of a row in a round, by k."""
        return self._acceptance.expected_tokens()

    def _speeds(self, rows: int) -> list[float]:
        """Expected tokens per second and row, by k; with what feeding the draft at k = 0 takes of its time."""
        plain_s, *drafting_s = self._costs.round_times(rows)
        if every := self._fed_every:
            plain_s += self._costs.catch_up_s(rows, every * rows) / every
        return [tokens / seconds for tokens, seconds in zip(self._tokens(), (plain_s, *drafting_s), strict=True)]

    def _hold(self, speeds: Sequence[float]) -> int:
        """The fastest length; the present one as long as it is about as fast."""
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return self._k if speeds[best] <= HYSTERESIS * speeds[self._k] else best


def _fed_at_0(round: RoundStats) -> bool:
    return round.k == 0 and bool(round.caught_up)


class Geometric(Measured):
    """One acceptance rate for all positions: the k from 1 that maximises (1 - a^(k+1)) / (1 - a) over the measured
    round time. It never stops drafting: at k = 0 it would learn nothing more."""

    def choose(self, rows: int) -> int:
        untimed = self._untimed(rows)
        if untimed is not None:
            return untimed
        self._k = self._hold([0.0, *self._speeds(rows)[1:]])
        return self._k

    def _tokens(self) -> list[float]:
        alpha = self._acceptance.alpha
        return geometric_tokens(alpha if alpha >= 0 else self._acceptance.by_position[0], self.k_max)


def geometric_tokens(alpha: float, k_max: int) -> list[float]:
    """(1 - a^(k+1)) / (1 - a) for k = 0..k_max, as a sum so that a = 1 needs no care."""
    tokens = [1.0]
    for k in range(1, k_max + 1):
        tokens.append(tokens[-1] + alpha**k)
    return tokens


def checked_k_max(k_max: int, *, lowest: int) -> int:
    if not isinstance(k_max, int) or isinstance(k_max, bool) or k_max < lowest:
        raise ValueError(f"the draft length is {k_max!r}; expected a whole number from {lowest} on")
    return k_max
