"""Replays a trace under a cost table and a controller; and the yardsticks: oracle, best fixed k, k by batch size.

The controller sees noisy times (jitter and outliers, as measured ones have); the clock that speeds are computed from
adds up the tables' exact ones, so that luck with outliers does not decide between controllers. B rows of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specdec.controller import Adaptive, Controller, RowRound
from specdec.controller_measured import geometric_tokens
from specdec.simulate_costs import CostModel
from specdec.simulate_traces import Trace
from specdec.stats import RoundStats


class Disturbance(Protocol):
    """What makes measured times other than the true ones."""

    def sample(self, rng: np.random.Generator) -> float:
        """The next round's measured time over its true one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Log-normal jitter of standard deviation `jitter`; a share of rounds takes `factor` times as long."""

    jitter: float = 0.02
    outliers: float = 0.01
    factor: float = 5.0

    def sample(self, rng: np.random.Generator) -> float:
        return float(np.exp(self.jitter * rng.standard_normal())) * (self.factor if rng.random() < self.outliers else 1)


@dataclass
class Run:
    """seconds: exact time. By round: mean draft length, drafting rows, tokens per row committed so far."""

    tokens: int = 0
    seconds: float = 0.0
    k: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Batch:
    """The rows now decoded: which request each holds, how far it is, how many tokens its draft has missed."""

    trace: Trace
    requests: np.ndarray
    offsets: np.ndarray
    lag: np.ndarray
    next_request: int

    @classmethod
    def start(cls, trace: Trace, slots: int) -> "Batch":
        rows = min(slots, len(trace.lengths_R))
        return cls(trace, np.arange(rows), np.zeros(rows, int), np.zeros(rows, int), rows)

    def fed(self, lengths: np.ndarray, feed_after: int | None) -> np.ndarray:
        """bool [B]: rows whose draft catches up in a round of these lengths."""
        late = self.lag >= feed_after if feed_after is not None else np.zeros(len(self.lag), bool)
        return ((lengths > 0) & (self.lag > 0)) | late

    def advance(self, lengths: np.ndarray, accepted: np.ndarray, fed: np.ndarray) -> int:
        """Commit a round, refill the rows that are done; the number of tokens committed."""
        remaining = self.trace.lengths_R[self.requests] - self.offsets
        committed = np.minimum(accepted + 1, remaining)
        self.offsets = self.offsets + committed
        self.lag = np.where(lengths > 0, 0, np.where(fed, 1, self.lag + 1))
        for row in np.flatnonzero(committed == remaining):
            if self.next_request < len(self.trace.lengths_R):
                self.requests[row], self.offsets[row], self.lag[row] = self.next_request, 0, 0
                self.next_request += 1
        alive = self.offsets < self.trace.lengths_R[self.requests]
        self.requests, self.offsets, self.lag = self.requests[alive], self.offsets[alive], self.lag[alive]
        return int(committed.sum())


class Policy(Protocol):
    """What `simulate` asks: draft lengths [B] before a round, and takes its statistics after it."""

    def lengths(self, batch: Batch) -> np.ndarray: ...

    def observe(self, round: RoundStats, rows: Sequence[RowRound]) -> None: ...


@dataclass
class OneLength:
    """A controller that chooses one length for the batch."""

    controller: Controller

    def lengths(self, batch: Batch) -> np.ndarray:
        rows = len(batch.requests)
        return np.full(rows, self.controller.choose(rows))

    def observe(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        self.controller.observe(round)


@dataclass
class LengthByRow:
    """An Adaptive that chooses a length for each row."""

    controller: Adaptive

    def lengths(self, batch: Batch) -> np.ndarray:
        return np.array(self.controller.choose_rows(batch.requests.tolist()))

    def observe(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        self.controller.observe_rows(round, rows)


@dataclass
class Truth:
    """Knows every row's rates and every cost; one length for the batch, the best for this very round."""

    cost: CostModel
    k_max: int

    def lengths(self, batch: Batch) -> np.ndarray:
        rows = len(batch.requests)
        chances = batch.trace.chances(batch.requests, batch.offsets, self.k_max)
        tokens = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(chances, axis=1).mean(axis=0))])
        speeds = tokens / [self.cost.round_s(rows, k) for k in range(self.k_max + 1)]
        return np.full(rows, int(np.argmax(speeds)))

    def observe(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        pass


@dataclass
class ByBatchSize:
    """vLLM's way: a fixed k for each batch size, here the best one for the trace's mean acceptance."""

    cost: CostModel
    k_max: int
    alpha: float

    def lengths(self, batch: Batch) -> np.ndarray:
        rows = len(batch.requests)
        return np.full(rows, best_length(self.cost, rows, geometric_tokens(self.alpha, self.k_max)))

    def observe(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        pass


def best_length(cost: CostModel, rows: int, tokens: Sequence[float]) -> int:
    """The k that gives most tokens per second, when `tokens[k]` are expected of a row."""
    return max(range(len(tokens)), key=lambda k: tokens[k] / cost.round_s(rows, k))


def calibrate(
    controller: Controller, cost: CostModel, *, rows: int, repeats: int, noise: Disturbance, seed: int
) -> None:
    """Time every bucket up to `rows` and every length, as an engine does at start."""
    rng = np.random.default_rng(seed)
    bucket = 1
    while bucket < 2 * rows:
        for k in range(controller.k_max + 1):
            for _ in range(repeats):
                draft_s = k * cost.step(bucket) * noise.sample(rng)
                verify_s = cost.verify(bucket, bucket * (k + 1)) * noise.sample(rng)
                controller.observe_cost(bucket, k, draft_s, verify_s, draft_s + verify_s)
        bucket *= 2


def simulate(
    trace: Trace,
    cost: CostModel,
    policy: Policy,
    *,
    slots: int,
    seed: int = 0,
    noise: Disturbance | None = None,
    max_rounds: int | None = None,
) -> Run:
    """Decode the requests of the trace, `slots` at a time, until a row is done and none is left to take its place (or
    for `max_rounds` rounds): speeds are those of full slots, not of the last rows trickling out."""
    noise, rng = noise or Noise(), np.random.default_rng(seed)
    batch, run = Batch.start(trace, slots), Run()
    full = len(batch.requests)
    while len(batch.requests) == full and len(run.k) != max_rounds:
        lengths = policy.lengths(batch)
        accepted = trace.accepted(batch.requests, batch.offsets, lengths)
        fed = batch.fed(lengths, cost.feed_after)
        caught_up = int(batch.lag[fed].sum())
        draft_s = cost.draft_s(lengths) + cost.catch_up_s(int(fed.sum()), caught_up)
        verify_s = cost.verify_s(lengths)
        rows = _row_rounds(batch.requests, lengths, accepted)
        tokens = batch.advance(lengths, accepted, fed)
        policy.observe(_stats(lengths, accepted, tokens, caught_up, draft_s, verify_s, noise.sample(rng)), rows)
        run.tokens, run.seconds = run.tokens + tokens, run.seconds + draft_s + verify_s
        run.k.append(float(lengths.mean()))
        run.progress.append(run.tokens / slots)
        run.clock.append(run.seconds)
    return run


def _row_rounds(requests: np.ndarray, lengths: np.ndarray, accepted: np.ndarray) -> list[RowRound]:
    reached = np.minimum(accepted + 1, lengths)
    return [
        RowRound(row=row, k=k, reached=r, accepted=a)
        for row, k, r, a in zip(requests.tolist(), lengths.tolist(), reached.tolist(), accepted.tolist(), strict=True)
    ]


def _stats(
    lengths: np.ndarray,
    accepted: np.ndarray,
    tokens: int,
    caught_up: int,
    draft_s: float,
    verify_s: float,
    noise: float,
) -> RoundStats:
    k = int(lengths.max())
    position = np.arange(k)[:, None]
    return RoundStats(
        k=k,
        rows=len(lengths),
        tokens=tokens,
        drafted=int(lengths.sum()),
        reached=tuple(((accepted >= position) & (lengths > position)).sum(axis=1).tolist()),
        accepted=tuple((accepted > position).sum(axis=1).tolist()),
        caught_up=caught_up,
        draft_s=draft_s * noise,
        verify_s=verify_s * noise,
        total_s=(draft_s + verify_s) * noise,
    )
