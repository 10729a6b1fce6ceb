"""From vLLM's steps to the controller's rounds: what is counted, what is timed, and what neither. No vLLM is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.controller import Adaptive, FixedK
from specdec.stats import RoundStats
from vllm_draft_spec.pilot import Pilot
from vllm_draft_spec.tally import Step, Tally

NAN = float("nan")


class Told:
    """A controller that writes down what it is told."""

    k_max = 4

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.rounds, self.costs = list(lengths), [], []  # type: ignore[var-annotated]

    def choose(self, rows: int) -> int:
        return self.lengths.pop(0)

    def observe(self, round: RoundStats) -> None:
        self.rounds.append(round)

    def observe_cost(self, rows: int, k: int, draft_s: float, verify_s: float, total_s: float) -> None:
        self.costs.append((rows, k, draft_s, verify_s, total_s))


def times(k: int, *, draft_s: float = 0.0, verify_s: float = 10.0, batch: int = 2, caught_up: int = 0) -> Any:
    return SimpleNamespace(draft_s=draft_s, verify_s=verify_s, batch=batch, k=k, caught_up=caught_up)


def step(*rows: tuple[int, int], next_k: int = 0, names: str = "ab", **more: Any) -> Step:
    facts = {"prompt_tokens": 0, "prefill": 0, **more}
    lengths = {drafted for drafted, _ in rows}
    alone = len(lengths) == 1 and not facts["prompt_tokens"]
    facts.setdefault("plain_k", lengths.pop() if alone else None)
    return Step(names=frozenset(names), rows=rows, next_k=next_k, **facts)


def pilot_of(controller: Any, **options: Any) -> tuple[Pilot, list[float]]:
    now = [0.0]
    return Pilot(controller, clock=lambda: now[0], **options), now


def test_counts_hold_together() -> None:
    """Two drafting rows (3 of 3 and 1 of 3 accepted), a plain row, an ended prompt: 4 accepted + 2 + 1 + 1 tokens."""
    counts = Tally.of(step((3, 3), (3, 1), (0, 0), prefill=1, prompt_tokens=9, times=times(3, draft_s=3.0)))
    assert vars(counts) == {
        "steps_by_k": [0, 0, 0, 1],
        "reached": [2, 2, 1],
        "accepted_by_position": [2, 1, 1],
        "drafting": 2,
        "plain": 1,
        "prefill": 1,
        "drafted": 6,
        "accepted": 4,
        "generated": 8,
        "draft_s": 3.0,
        "verify_s": 10.0,
    }
    assert counts.alpha_by_position == [1.0, 0.5, 1.0]
    counts.add(Tally.of(step((1, 0), (1, 0))))
    assert counts.steps_by_k == [0, 1, 0, 1]
    assert counts.reached == [4, 2, 1]
    assert counts.accepted_by_position == [2, 1, 1]
    assert Tally.of(step(prefill=1, prompt_tokens=5)).steps_by_k == []


def test_a_round_is_a_draft_and_its_verification() -> None:
    """The second step tells of the drafts of the first; what lies between the worker's parts is paid by each round."""
    controller = Told(3, 3, 3)
    pilot, now = pilot_of(controller)
    for at in (0.0, 16.0, 32.0):
        now[0] = at
        assert pilot.choose(2) == 3
        told = times(3, draft_s=3.0, verify_s=10.0) if at else None
        pilot.observe(step((3, 3), (3, 1), next_k=3, times=told))
    expected = RoundStats(
        k=3,
        rows=2,
        tokens=6,
        drafted=6,
        reached=(2, 2, 1),
        accepted=(2, 1, 1),
        lacking=(0, 0, 0),
        asked=3,
        caught_up=0,
        draft_s=3.0,
        verify_s=10.0,
        total_s=16.0,
    )
    assert controller.rounds[1] == controller.rounds[2] == expected
    assert not controller.rounds[0].timed
    assert controller.costs == []


def test_what_lies_between_the_parts_is_less_without_drafts() -> None:
    """Three seconds with drafts and half a second without: k = 0 must not be given the drafts' three."""
    controller = Told(3, 3, 0, 0, 0, 3, 3)
    pilot, now = pilot_of(controller)
    for k, next_k, took_s in (
        (3, 3, 16.0),
        (3, 3, 16.0),
        (3, 0, 16.0),
        (0, 0, 10.5),
        (0, 0, 10.5),
        (0, 3, 10.5),
        (3, 3, 16.0),
    ):
        now[0] += took_s
        pilot.choose(2)
        rows = ((3, 1), (3, 1)) if k else ((0, 0), (0, 0))
        pilot.observe(step(*rows, next_k=next_k, times=times(k, draft_s=3.0 if k else 0.0, verify_s=10.0)))
    assert [round.total_s for round in controller.rounds[1:4]] == [16.0, 16.0, 10.5]
    assert [round.total_s for round in controller.rounds[4:]] == [10.5, 10.5, 16.0]


def test_a_step_without_drafts_takes_all_its_time_at_k_0() -> None:
    """A head on the target reads each step's tokens even when it drafts nothing."""
    controller = Told(0, 0)
    pilot, now = pilot_of(controller)
    for at in (0.0, 12.0):
        now[0] = at
        pilot.choose(2)
        pilot.observe(step((0, 0), (0, 0), times=times(0, draft_s=1.0) if at else None))
    assert (controller.rounds[1].draft_s, controller.rounds[1].total_s) == (0.0, 12.0)


@pytest.mark.parametrize(
    "second, timed",
    [
        (step((3, 1), (3, 1), next_k=3), True),  # a clock that says nothing is a fault
        (step((3, 1), (3, 1), next_k=3, prompt_tokens=40), False),
        (step((3, 1), (3, 1), next_k=3, names="ac"), False),
        (step((3, 1), next_k=3, names="a"), False),
        (step((3, 1), (2, 1), next_k=3), False),  # a drafter that found less
        (step((2, 1), (2, 1), next_k=3), False),
        (step((3, 1), (3, 1), next_k=3, plain_k=None), False),  # a request that is new
    ],
)
def test_only_rounds_alone_must_have_times(second: Step, timed: bool) -> None:
    controller = Told(3, 3)
    pilot, _ = pilot_of(controller)
    for one in (step((3, 1), (3, 1), next_k=3), second):
        pilot.choose(2)
        pilot.observe(one)
    last = controller.rounds[1]
    assert last.timed is timed
    assert last.total_s != last.total_s


def test_late_times_are_not_lost_nor_given_to_another_length() -> None:
    """A GPU's times come a step later: those of k = 3 with a step that verified 1."""
    controller = Told(3, 1, 1, 1)
    pilot, _ = pilot_of(controller)
    pilot.observe(step((0, 0), (0, 0), next_k=3))
    pilot.observe(step((3, 1), (3, 1), next_k=1))
    pilot.observe(step((1, 1), (1, 1), next_k=1, times=times(3, draft_s=3.0)))
    pilot.observe(step((1, 1), (1, 1), next_k=1, times=times(1, draft_s=1.0, caught_up=8)))
    pilot.observe(step((1, 1), (1, 1), next_k=1, times=times(3, draft_s=9.0, caught_up=8)))
    assert controller.costs == [pytest.approx((2, 3, 3.0, 10.0, 13.0), abs=1e-5)]
    assert [round.timed for round in controller.rounds] == [False, True, False, True, False]
    assert (controller.rounds[3].draft_s, controller.rounds[3].caught_up) == (1.0, 8)


def test_prompts_in_chunks_do_not_use_up_choices() -> None:
    controller = Told(4, 2)
    pilot, _ = pilot_of(controller)
    lengths = []
    for _ in range(3):
        lengths.append(pilot.choose(1))
        pilot.observe(step(prompt_tokens=64, names="a", next_k=1))
    lengths.append(pilot.choose(1))
    pilot.observe(step((1, 1), names="a", next_k=4))
    lengths.append(pilot.choose(1))
    assert lengths == [4, 4, 4, 4, 2]
    assert len(controller.rounds) == 1


def test_a_row_without_a_draft_counts_against_the_length() -> None:
    controller = Told(3, 3)
    pilot, _ = pilot_of(controller)
    for one in (step((3, 0), (3, 0), next_k=3), step((2, 2), (0, 0), next_k=3)):
        pilot.choose(2)
        pilot.observe(one)
    last = controller.rounds[1]
    assert (last.reached, last.accepted, last.lacking) == ((1, 1), (1, 1, 0), (1, 0, 1))
    assert last.wanted == (2, 1, 1)


def test_requests_of_two_steps_need_no_times() -> None:
    """Each is new in its first step, of which the worker cannot time the drafts; the second is its last."""
    pilot, _ = pilot_of(Adaptive(4))
    for _ in range(200):
        pilot.observe(step(prefill=1, prompt_tokens=5, names="a", next_k=pilot.choose(1)))
        pilot.observe(step((pilot.k, 0), names="a", next_k=pilot.choose(1)))
        pilot.rest()


def run(pilot: Pilot, now: list[float], steps: int, **more: Any) -> None:
    """Steps of two rows that accept every draft, timed unless `more` says otherwise."""
    k = 0
    for _ in range(steps):
        now[0] += 10.5 + k
        told = times(k, draft_s=float(k))
        following = pilot.choose(2)
        pilot.observe(step((k, k), (k, k), next_k=following, **{"times": told, **more}))
        k = following


def test_a_clock_that_never_speaks_ends_drafting(plugin_log: pytest.LogCaptureFixture) -> None:
    """Otherwise the cost ratio would stay at its first value, and nothing would show it; and a server goes on."""
    pilot, now = pilot_of(Adaptive(4))
    run(pilot, now, 60, times=None)
    assert pilot.k > 0
    run(pilot, now, 40, times=None)
    assert pilot.k == 0
    [line] = [record.getMessage() for record in plugin_log.records if record.levelname == "ERROR"]
    for piece in ("nothing is drafted", "SPECDEC_PLUGIN=1", "controller: fixed", "64 rounds without the times"):
        assert piece in line


def test_busy_times_are_no_fault_of_the_clock() -> None:
    """A server that reads prompts in every step from its first on goes on, drafting some tokens."""
    pilot, now = pilot_of(Adaptive(6))
    run(pilot, now, 300, times=None, prompt_tokens=32)
    assert pilot.k == 4
    run(pilot, now, 60)
    assert pilot.k == 6


def test_the_report_sums_up_and_starts_again() -> None:
    pilot, now = pilot_of(Adaptive(4), draft_kv_tokens=640)
    run(pilot, now, 200)
    first = pilot.report()
    counts: Any = first["counts"]
    assert counts["accepted"] == counts["drafted"] > 0
    assert counts["generated"] == counts["accepted"] + counts["drafting"] + counts["plain"] + counts["prefill"]
    assert sum(counts["steps_by_k"]) == 200
    gauges: Any = first["gauges"]
    assert (gauges["k"], gauges["draft_kv_tokens"]) == (4, 640)
    assert gauges["cost_ratio"] == pytest.approx(1 / 10.5, rel=0.05)
    assert gauges["expected_speedup"] == pytest.approx(5 / (14.5 / 10.5), rel=0.1)
    assert gauges["realised_speedup"] == pytest.approx(5 / (14.5 / 10.5), rel=0.15)
    assert pilot.report()["counts"] == vars(Tally())


def test_the_log_line_comes_by_the_clock(plugin_log: pytest.LogCaptureFixture) -> None:
    pilot, now = pilot_of(Adaptive(4), log_interval_s=1000.0, draft_kv_tokens=640)
    run(pilot, now, 150)
    assert len(plugin_log.records) == int(now[0] // 1000)
    text = plugin_log.records[-1].getMessage()
    for part in ("draft length 4 (steps by length: ", "accepted by position: 1.00 1.00", "of k = 0", "640 tokens"):
        assert part in text
    fixed, now = pilot_of(FixedK(2))
    run(fixed, now, 5)
    assert "draft length 2 (steps by length: 0: 1, 2: 4); accepted by position: 1.00 1.00; 26 tok" in fixed.line()


def test_rest_is_not_a_long_step() -> None:
    """Requests that come after a pause: the pause is no part of a round."""
    pilot, now = pilot_of(Told(*[3] * 9))
    one = step((3, 3), (3, 3), next_k=3, times=times(3, draft_s=3.0))
    for at in (14.0, 1000.0, 1014.0):
        if at == 1000.0:
            pilot.rest()
        now[0] = at
        pilot.choose(2)
        pilot.observe(replace(one))
    rounds: Any = pilot.controller
    assert [round.total_s for round in rounds.rounds] == [13.0, 13.0, 14.0]
