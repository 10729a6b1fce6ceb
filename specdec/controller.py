"""Controllers: how many tokens to draft in the next round.

    controller = Adaptive(k_max=8)
    k = controller.choose(rows)         # before a round
    controller.observe(round_stats)     # after it, with the seconds measured by whoever owns the clock

FixedK always drafts k. Geometric maximises the textbook formula with measured costs. Adaptive, the default, adds what
that formula gets wrong; docs/controller.md has its formulas. None of them imports more than Python and specdec.stats.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from specdec.controller_acceptance import DECAY_TOKENS
from specdec.controller_cost import usable
from specdec.controller_measured import ControllerState, Geometric, Measured, checked_k_max, geometric_tokens
from specdec.controller_probe import REGIME_TOKENS, Outlook, Prober
from specdec.controller_rows import RaggedCost, RowBook, RowRound, plan
from specdec.stats import RoundStats

__all__ = ["Adaptive", "Controller", "ControllerState", "FixedK", "Geometric", "PerRow", "RowRound"]

EXPLORE_SHARE = 0.001  # time that rounds beside the best length may lose
EXPLORE_ROUNDS = 8  # the fewest rounds between two of them
ENOUGH_TESTS, ENOUGH_OCCASIONS = 40.0, 40  # what makes a neighbouring length known
FIRST_OCCASIONS, FIRST_SHARE = 8, 20  # times of so few may be wrong by much: until then so many times the share,
FIRST_ROUNDS = 2.5  # or until as many visits have cost so many rounds
PLAIN_ROUNDS = 3  # at k = 0 when it is looked at: the draft catches up once for all of them
NEAR_PLAIN = 1.25  # so close a gain over k = 0 is worth timing k = 0 again
SURE = 0.98  # rates are not tested for above this
ENTRY_ROUNDS = 32
PROOF, PROOF_BY_FEW = 20.0, 200.0  # likelihood ratios that end a probe; a few rows make all others catch up
PAYBACK_TOKENS = 400  # tokens a row in which catching up must have paid
TO_SWITCH = 1.01  # so much faster must k = 0 be to be taken, or drafting to come back: each way costs, and at k = 0
# rates are known roughly
PLANNED_ROWS = 8  # below it the longest row sets the cost, and one length for all does as well


@runtime_checkable
class Controller(Protocol):
    """k_max: the largest length it may choose."""

    k_max: int

    def choose(self, rows: int) -> int:
        """The draft length, 0 to k_max, of the next round over `rows` rows."""
        ...

    def observe(self, round: RoundStats) -> None:
        """What the round did, and how long it took."""
        ...

    def observe_cost(self, rows: int, k: int, draft_s: float, verify_s: float, total_s: float) -> None:
        """One timing of a round of this shape, made at start-up; nothing is learned about acceptance."""
        ...


@runtime_checkable
class PerRow(Controller, Protocol):
    """A controller that may give the rows of one round different lengths."""

    def choose_rows(self, names: Sequence[Hashable]) -> list[int]:
        """The draft length of each row; a name is what stays with a request."""
        ...

    def observe_rows(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        """In place of `observe`, for a round whose lengths came from `choose_rows`."""
        ...


class FixedK:
    """Always k drafts."""

    def __init__(self, k: int) -> None:
        self.k_max = checked_k_max(k, lowest=0)

    def choose(self, rows: int) -> int:
        return self.k_max

    def observe(self, round: RoundStats) -> None:
        """Nothing is learned."""

    def observe_cost(self, rows: int, k: int, draft_s: float, verify_s: float, total_s: float) -> None:
        """Nothing is learned."""


class Adaptive(Measured):
    """Acceptance by position, measured costs by batch and k, k = 0 with budgeted probes, and a little exploration.

    k_max: the largest draft length. decay_tokens: tested tokens after which a count has faded to 1/e. explore_share: of
    the time, the part that rounds beside the best length may lose. plan_rows: let `choose_rows` give rows of one round
    different lengths, each by its own acceptance; without it all rows draft the same, but for probes. It pays where
    rows differ and verification is compute-bound (docs/controller.md has figures).
    """

    def __init__(
        self,
        k_max: int = 8,
        *,
        plan_rows: bool = False,
        decay_tokens: float = DECAY_TOKENS,
        explore_share: float = EXPLORE_SHARE,
    ) -> None:
        super().__init__(k_max, decay_tokens=decay_tokens)
        self._plan_rows, self._explore_share = plan_rows, explore_share
        self._prober = Prober()
        self._book = RowBook(self.k_max)
        self._since_beside, self._since_plain, self._plain_left, self._turn = 0, 0, 0, 1
        self._since_entry, self._changes = 0, 0
        self._tokens_seen = 0.0

    def choose(self, rows: int) -> int:
        untimed = self._untimed(rows)
        if untimed is not None:
            return untimed
        speeds = self._speeds(rows)
        self._k = self._paid_back(rows, speeds, self._missed * rows)
        if self._k > 0:
            self._prober.leave()
            return self._explored(rows, speeds)
        return self._probed(rows, rows, self._missed * rows)

    def choose_rows(self, names: Sequence[Hashable]) -> list[int]:
        """A draft length for each row; a name is what stays with a request (its ticket). Report the round with
        `observe_rows`. Rows that draft nothing need no catching up, so probes at k = 0 draft in a few rows only."""
        rows = len(names)
        untimed = self._untimed(rows)
        if untimed is not None:
            return [untimed] * rows
        self._book.keep_only(names)
        speeds = self._speeds(rows)
        self._k = self._paid_back(rows, speeds, sum(self._book.lag(name) for name in names))
        lengths = self._planned(names) if self._plan_rows and rows >= PLANNED_ROWS else [self._k] * rows
        if any(lengths):
            self._prober.leave()
            return lengths if min(lengths) < max(lengths) else [self._explored(rows, speeds)] * rows
        scouts = sorted(range(rows), key=lambda b: self._book.lag(names[b]))[: max(1, min(rows // 16, 8))]
        k = self._probed(rows, len(scouts), sum(self._book.lag(names[b]) for b in scouts))
        return [k if b in scouts else 0 for b in range(rows)]

    def observe(self, round: RoundStats) -> None:
        missed_tokens = self._caught_up(round, self._missed * round.rows)
        super().observe(round)
        self._observe_probe(round, round.rows, missed_tokens)

    def observe_rows(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        """In place of `observe`, for a round whose lengths came from `choose_rows`."""
        lengths = [row.k for row in rows]
        missed_tokens = self._caught_up(round, sum(self._book.lag(row.row) for row in rows if row.k > 0))
        if max(lengths) == min(lengths):
            self._observe_times(round, missed_tokens)
        elif round.timed and usable(round.total_s):
            self._silent = 0
            if not missed_tokens:
                predicted_s = self._ragged(round.rows).seconds(round.rows, sum(lengths), max(lengths))
                self._costs.observe_ragged(round.rows, predicted_s, round.total_s)
        self._acceptance.observe(*self._completed(round, rows))
        self._book.observe(rows, self._acceptance.by_position[0])
        self._observe_probe(round, sum(k > 0 for k in lengths), missed_tokens)

    def _completed(self, round: RoundStats, rows: Sequence[RowRound]) -> tuple[Sequence[float], Sequence[float]]:
        """Reached and accepted by position, with rows that were left out counted as they are believed to be. Not in a
        probe: there the few tested rows speak for all."""
        if round.k == 0 or self._prober.active:
            return round.wanted, round.accepted
        idle, likely = self._book.imputed(rows, self._acceptance.by_position[0])
        return [round.wanted[0] + idle, *round.wanted[1:]], [round.accepted[0] + likely, *round.accepted[1:]]

    def state(self, rows: int = 1) -> ControllerState:
        return replace(super().state(rows), probes=self._prober.bursts)

    def _paid_back(self, rows: int, speeds: Sequence[float], missed_tokens: int) -> int:
        """The fastest length; but 0 is only taken for a clear gain, and only left for one that soon pays for catching
        the draft up."""
        k = self._hold(speeds)
        if self._k > 0:
            drafting = self._hold([0.0, *speeds[1:]])
            return k if k > 0 or speeds[0] > TO_SWITCH * speeds[drafting] else drafting
        if k == 0:
            return k
        saved_s = PAYBACK_TOKENS * (1 / speeds[0] - TO_SWITCH / speeds[k])
        return k if saved_s > self._catch_up_s(rows, missed_tokens) else 0

    def _explored(self, rows: int, speeds: Sequence[float]) -> int:
        """The present length; now and then one beside it, or none, each as seldom as its loss demands."""
        self._since_beside, self._since_plain, self._turn = self._since_beside + 1, self._since_plain + 1, -self._turn
        for k in (self._k + self._turn, self._k - self._turn):
            if k > 0 and self._worth_a_round(rows, k, speeds, self._since_beside):
                self._since_beside = 0
                return k
        if self._plain_left == 0 and self._worth_a_round(rows, 0, speeds, self._since_plain):
            self._plain_left = PLAIN_ROUNDS
        if self._plain_left:
            self._plain_left, self._since_plain = self._plain_left - 1, 0
            return 0
        return self._k

    def _worth_a_round(self, rows: int, k: int, speeds: Sequence[float], since: int) -> bool:
        if since < EXPLORE_ROUNDS or not self._unknown(rows, k, speeds):
            return False
        loss_s = max(0.0, 1 - speeds[k] / speeds[self._k]) * self._costs.round_s(rows, k)
        loss_s = loss_s * PLAIN_ROUNDS + self._catch_up_s(rows, rows * PLAIN_ROUNDS) if k == 0 else loss_s
        occasions, round_s = self._costs.occasions(rows, k), self._costs.round_s(rows, self._k)
        first = occasions < FIRST_OCCASIONS and occasions * loss_s < FIRST_ROUNDS * round_s
        return since * self._explore_share * (FIRST_SHARE if first else 1) * round_s >= loss_s

    def _unknown(self, rows: int, k: int, speeds: Sequence[float]) -> bool:
        """Whether a round of k drafts would teach something that could change the choice."""
        if k > self.k_max:
            return False
        if k == 0:
            return speeds[0] * NEAR_PLAIN > speeds[self._k]
        few_tests = k > self._k and self._acceptance.evidence(k) < ENOUGH_TESTS
        return few_tests or self._costs.occasions(rows, k) < ENOUGH_OCCASIONS

    def _probed(self, rows: int, drafting: int, missed_tokens: int) -> int:
        """0, or the length of a probe round in which `drafting` of the rows draft."""
        if not self._prober.active and not self._prober.due(lambda: self._outlook(rows, drafting, missed_tokens)):
            return 0
        return min(self._prober.k, self.k_max)

    def _outlook(self, rows: int, drafting: int, missed_tokens: int) -> Outlook:
        plain_s = self._costs.round_s(rows, 0)
        believed = tuple(self._acceptance.by_position)
        tokens = rows + drafting * believed[0]
        round_times = [seconds / plain_s for seconds in self._costs.round_times(rows)]
        promising, gain, k = promising_rate(round_times)
        return Outlook(
            loss_s=self._loss_s(rows, drafting, 1, missed_tokens, tokens),
            step_s=plain_s,
            believed=believed,
            promising=promising,
            gain=gain,
            proof=PROOF if drafting == rows else PROOF_BY_FEW,
            k=k,
            regime=(self._tokens_seen / rows + REGIME_TOKENS) / (self._acceptance.changes + 1),
        )

    def _loss_s(self, rows: int, drafting: int, k: int, missed_tokens: int, tokens: float) -> float:
        """Seconds that a round of k drafts in some rows takes longer than its tokens would have taken at k = 0."""
        if drafting == rows:
            seconds = self._costs.round_s(rows, k)
        else:
            verify_s = drafting * k * self._costs.verify_token_s(rows, k)
            seconds = self._costs.round_s(rows, 0) + k * self._costs.step_s(drafting) + verify_s
        return seconds + self._catch_up_s(drafting, missed_tokens) - tokens / rows * self._costs.round_s(rows, 0)

    def _observe_probe(self, round: RoundStats, drafting: int, missed_tokens: int) -> None:
        self._tokens_seen += round.tokens
        if not self._costs.comparable:
            return
        if round.k == 0:
            self._prober.idle(self._costs.round_s(round.rows, 0))
        elif self._prober.active:
            self._prober.spend(self._loss_s(round.rows, drafting, round.k, missed_tokens, round.tokens))
            if self._prober.observe(round.wanted, round.accepted):
                self._acceptance.restart(*self._prober.seen)
                self._book.forget_rates()

    def _planned(self, names: Sequence[Hashable]) -> list[int]:
        alpha = self._acceptance.by_position[0]
        rates = [self._book.rate(name, alpha) for name in names]
        return self._entered(names, plan(rates, self._book.profile(), self._ragged(len(names)), self._k), rates)

    def _entered(self, names: Sequence[Hashable], lengths: list[int], rates: Sequence[float]) -> list[int]:
        """Rows whose draft lags behind come back together, a few every ENTRY_ROUNDS rounds: one forward catches them
        up, where each on its own would cost a forward nearly every round. After a change all of them come at once."""
        self._since_entry += 1
        lagging = [b for b, name in enumerate(names) if lengths[b] and self._book.lag(name)]
        changed = self._acceptance.changes != self._changes
        if changed or len(lagging) == sum(k > 0 for k in lengths):
            entering = lagging
        elif self._since_entry >= ENTRY_ROUNDS:
            entering = sorted(lagging, key=lambda b: -rates[b])[: max(1, len(names) // 16)]
        else:
            entering = []
        if entering:
            self._since_entry, self._changes = 0, self._acceptance.changes
        held = set(lagging) - set(entering)
        return [0 if b in held else k for b, k in enumerate(lengths)]

    def _ragged(self, rows: int) -> RaggedCost:
        step, step_row = self._costs.step_by_rows(rows)
        return RaggedCost(step=step, step_row=step_row, rest=self._costs.rest_times(rows))


def promising_rate(round_times: Sequence[float]) -> tuple[float | None, float, int]:
    """The rate to look for when not drafting, given the time of a round of k drafts over one without: half way
    between the least that pays and 1, with the share of time it saves and its best k. None when no rate pays."""
    k_max = len(round_times) - 1

    def speeds(alpha: float) -> list[float]:
        return [tokens / t for tokens, t in zip(geometric_tokens(alpha, k_max), round_times, strict=True)]

    if max(speeds(1.0)[1:]) <= 1.0:
        return None, 0.0, 1
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if max(speeds(middle)[1:]) > 1.0 else (middle, high)
    found = speeds((high + 1) / 2)
    k = max(range(1, k_max + 1), key=found.__getitem__)
    return min((high + 1) / 2, SURE), 1 - 1 / found[k], k
