"""Between vLLM's steps and specdec's controller: it asks for the next draft length and tells what the last one did.

A step of vLLM verifies the drafts of the step before and then drafts for the step after. A round, as the controller
means it, is a draft and its verification, so it is put together from two steps:

    step 1  ...........  drafts 3      a round of k = 3: the drafting of step 1,
    step 2  verifies 3,  drafts 5      and what step 2 accepted
    step 3  verifies 5,  ...

The worker puts the times together in the same way and sends them with the step's output. With asynchronous scheduling
step 3 is scheduled before step 2 has come back: the choice for it knows one round less.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

from specdec.controller import Controller
from specdec.controller_cost import Level, bucket_of
from specdec.controller_measured import ControllerState, Measured
from specdec.stats import RoundStats
from vllm_draft_spec.tally import Step, Tally

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
NAN = float("nan")
GAIN_KEEP = 0.995  # of the realised speedup's sums, by round
LEAST_S = 1e-6
STATE_ROUNDS = 16
NO_TIMES = (
    "nothing is drafted from here on: vLLM's worker sends no times of its steps, as if it ran without vllm_draft_spec. "
    "Install the package and set SPECDEC_PLUGIN=1 for all of vLLM's processes, on every node, and leave worker_cls as "
    "it is; or pass the specdec setting controller: fixed, which needs no times"
)


class Pilot:
    """Owns a controller. draft_kv_tokens: tokens by which the draft makes the KV cache smaller, for the report; clock:
    seconds."""

    def __init__(
        self,
        controller: Controller,
        *,
        log_interval_s: float = 0.0,
        draft_kv_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller, self.k = controller, 0
        self._draft_kv_tokens, self._clock, self._log_interval_s = draft_kv_tokens, clock, log_interval_s
        self._decoded = True  # since the last choice
        self._blind = False
        self._previous: Step | None = None
        self._came_at: float | None = None
        self._state: ControllerState | None = None
        self._since_state = 0
        self._between: dict[tuple[int, bool], Level] = {}  # by bucket of rows, and whether there are drafts
        self._gain_tokens, self._gain_plain = 0.0, 0.0
        self._unsent, self._unlogged = Tally(), Tally()
        self._logged_at = clock()

    def choose(self, batch: int) -> int:
        """Drafts for each row of a step over `batch` requests. As long as nothing has been decoded (prompts in several
        chunks), the last choice stands: a choice without a round would look like a round without a clock. 0 once steps
        have come without their times for so long that the controller refuses: a server goes on at its plain speed."""
        if self._decoded:
            self.k, self._decoded = 0 if self._blind else self._choice(batch), False
        return self.k

    def _choice(self, batch: int) -> int:
        try:
            return self.controller.choose(batch)
        except ValueError as error:
            logger.error("%s (%s)", NO_TIMES, error)
            self._blind = True
            return 0

    def observe(self, step: Step) -> None:
        """A step has come back."""
        now = self._clock()
        period_s = now - self._came_at if self._came_at is not None else NAN
        counts = Tally.of(step)
        if step.rows:
            self._decoded = True
            self._observe_round(step, counts, period_s)
        self._unsent.add(counts)
        self._unlogged.add(counts)
        self._previous, self._came_at = step, now
        if 0 < self._log_interval_s <= now - self._logged_at:
            logger.info("%s", self.line())
            self._unlogged, self._logged_at = Tally(), now

    def rest(self) -> None:
        """No request is left: the time until the next step is not that step's."""
        self._previous = self._came_at = None

    def report(self) -> dict[str, object]:
        """Counts since the last report, and what is believed now; plain numbers and lists, to be sent elsewhere."""
        counts, self._unsent = self._unsent, Tally()
        return {"counts": vars(counts), "gauges": self._gauges()}

    def line(self) -> str:
        """What the log says about the time since its last line."""
        counts, gauges = self._unlogged, self._gauges()
        lengths = ", ".join(f"{k}: {steps}" for k, steps in enumerate(counts.steps_by_k) if steps)
        rates = " ".join(f"{rate:.2f}" for rate in counts.alpha_by_position)
        parts = [
            f"draft length {self.k} (steps by length: {lengths or 'none'})",
            f"accepted by position: {rates or 'none drafted'}",
            f"{counts.generated} tokens, of them {counts.accepted} of {counts.drafted} drafted",
        ]
        if "expected_speedup" in gauges:
            parts.append(f"a draft step takes {gauges['cost_ratio']:.3f} of a step without drafts")
            parts.append(f"expected {gauges['expected_speedup']:.2f}x of k = 0")
        if "realised_speedup" in gauges:
            parts.append(f"realised {gauges['realised_speedup']:.2f}x")
        return "; ".join([*parts, f"the draft's KV takes {self._draft_kv_tokens} tokens"])

    def _gauges(self) -> dict[str, object]:
        gauges: dict[str, object] = {"k": self.k, "draft_kv_tokens": self._draft_kv_tokens}
        state = self._state
        if state is not None:
            gauges["alpha_by_position"] = list(state.alpha_by_position)
        if state is not None and state.speed_by_k:
            gauges["cost_ratio"] = state.cost_ratio
            gauges["expected_speedup"] = state.speed_by_k[state.k] / state.speed_by_k[0]
        if self._gain_plain > 0:
            gauges["realised_speedup"] = self._gain_tokens / self._gain_plain
        return gauges

    def _observe_round(self, step: Step, counts: Tally, period_s: float) -> None:
        previous, k = self._previous, step.k
        asked = previous.next_k if previous is not None else k
        expected = step.ends_round_of(previous)
        alike = step.times is not None and step.next_k == k == step.times.k and not step.times.caught_up
        if expected and alike:
            self._observe_between(step, period_s)
        times = step.times if step.times is not None and self._fits(step, k) else None
        observed = RoundStats(
            k=k,
            rows=len(step.rows),
            tokens=counts.generated - step.prefill,
            drafted=counts.drafted,
            reached=tuple(counts.reached),
            accepted=tuple(counts.accepted_by_position) + (0,) * (max(k, asked) - len(counts.accepted_by_position)),
            lacking=_lacking(step, asked),
            asked=asked,
            caught_up=times.caught_up if times is not None else 0,
            timed=times is not None or (expected and step.times is None),
            draft_s=times.draft_s if times is not None and k else 0.0,
            verify_s=times.verify_s if times is not None else NAN,
            total_s=self._total_s(times) if times is not None else NAN,
        )
        if step.times is not None and times is None:
            self._observe_late(step.times)
        self.controller.observe(observed)
        if isinstance(self.controller, Measured):
            self._believe(self.controller, len(step.names))
            self._realised(observed)

    def _fits(self, step: Step, k: int) -> bool:
        """Whether the times that came with a step are those of rounds like the one it ends."""
        return (
            not step.prompt_tokens and step.times.k == k and bucket_of(step.times.batch) == bucket_of(len(step.names))
        )

    def _observe_late(self, times: Any) -> None:
        """A GPU's times come when it has passed their end, which may be with a later step that is not like theirs."""
        if not times.caught_up:
            draft_s = times.draft_s if times.k else 0.0
            self.controller.observe_cost(times.batch, times.k, draft_s, times.verify_s, self._total_s(times))

    def _observe_between(self, step: Step, period_s: float) -> None:
        """What a step takes beyond the worker's two parts (scheduling, sampling, sending). It is paid once a round
        however long the draft, but without drafts it may be less; so it is learned in steps among their like, and
        added to each round."""
        between_s = period_s - step.times.draft_s - step.times.verify_s
        if isfinite(between_s):
            key = bucket_of(step.times.batch), step.times.k > 0
            self._between.setdefault(key, Level()).observe(max(between_s, LEAST_S), again=False)

    def _total_s(self, times: Any) -> float:
        bucket, drafts = bucket_of(times.batch), times.k > 0
        level = self._between.get((bucket, drafts)) or self._between.get((bucket, not drafts))
        return float(times.draft_s + times.verify_s + (level.seconds if level is not None else 0.0))

    def _believe(self, controller: Measured, rows: int) -> None:
        """What is shown of the controller's beliefs; asked now and then, since asking costs time in every step."""
        state = self._state
        fresh = state is not None and state.k == controller.k and self._since_state < STATE_ROUNDS
        if state is None or not fresh or not state.speed_by_k:
            self._state, self._since_state = controller.state(rows), 0
        self._since_state += 1

    def _realised(self, observed: RoundStats) -> None:
        """Tokens of timed rounds against the tokens that steps at k = 0 would have given in the same time."""
        state = self._state
        if observed.total_s > 0 and state is not None and state.speed_by_k:
            plain = observed.rows * observed.total_s * state.speed_by_k[0]
            self._gain_tokens = GAIN_KEEP * self._gain_tokens + observed.tokens
            self._gain_plain = GAIN_KEEP * self._gain_plain + plain


def _lacking(step: Step, asked: int) -> tuple[int, ...]:
    """By position, rows that came so far and had no draft there although one was asked for."""
    counts = [0] * asked
    for (drafted, accepted), rows in step.kinds.items():
        if accepted == drafted < asked:
            counts[drafted] += rows
    return tuple(counts)
