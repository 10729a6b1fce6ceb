"""The controller's parts, fed with numbers instead of rounds: acceptance, costs, the missing clock, lengths by row."""

from __future__ import annotations

import ast
import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specdec.controller as controller_module
from specdec.controller import Adaptive, FixedK, Geometric, RowRound, promising_rate
from specdec.controller_acceptance import DECAY_TOKENS, Acceptance
from specdec.controller_cost import CostTable
from specdec.controller_measured import NO_CLOCK_ROUNDS, geometric_tokens
from specdec.controller_rows import RaggedCost, RowBook, plan
from specdec.stats import RoundStats

K_MAX = 8
Counts = tuple[list[int], list[int]]


def counts_of_a_round(rng: np.random.Generator, rates: Sequence[float], k: int, rows: int = 1) -> Counts:
    """Reached and accepted by position."""
    if k == 0:
        return [], []
    accepted = np.cumprod(rng.random((rows, k)) < np.asarray(rates)[:k], axis=1).astype(int)
    reached = np.concatenate([np.ones((rows, 1), int), accepted[:, :-1]], axis=1)
    return reached.sum(axis=0).tolist(), accepted.sum(axis=0).tolist()


def round_stats(k: int, *, rows: int = 1, draft_s: float, total_s: float, counts: Counts | None = None) -> RoundStats:
    reached, accepted = counts or ([rows] * k, [rows] * k)
    return RoundStats(
        k=k,
        rows=rows,
        tokens=rows + sum(accepted),
        drafted=rows * k,
        reached=tuple(reached),
        accepted=tuple(accepted),
        draft_s=draft_s,
        verify_s=total_s - draft_s,
        total_s=total_s,
    )


def timed(controller: Adaptive | Geometric, *, c: float, rows: int = 1) -> Adaptive | Geometric:
    """Start-up times of a round: 1 s, and c for each draft."""
    for k, _ in itertools.product(range(K_MAX + 1), range(5)):
        controller.observe_cost(rows, k, c * k, 1.0, 1.0 + c * k)
    return controller


# Acceptance


@pytest.mark.parametrize("alpha", [0.35, 0.9])
@pytest.mark.parametrize("lengths, rows", [((1,), 1), ((1, 8, 2), 1), ((3,), 64)])
def test_alpha_is_unbiased_after_a_thousand_drafted_tokens(alpha: float, lengths: tuple[int, ...], rows: int) -> None:
    found = []
    for seed in range(24):
        rng, acceptance, tested = np.random.default_rng(seed), Acceptance(K_MAX), 0
        for k in itertools.cycle(lengths):
            reached, accepted = counts_of_a_round(rng, [alpha] * K_MAX, k, rows)
            acceptance.observe(reached, accepted)
            tested += sum(reached)
            if tested >= 1000:
                break
        found.append(acceptance.alpha)
    assert abs(np.mean(found) - alpha) <= 0.01
    assert np.std(found) <= 0.03


def test_memory_is_counted_in_tokens_not_in_rounds() -> None:
    """Guards against decay by round, where memory shrinks with k and the choice of k chases its own noise."""
    memory = {}
    for k in (1, 8):
        acceptance = Acceptance(K_MAX)
        for _ in range(12_000 // k):
            acceptance.observe([1.0] * k, [0.9] * k)
        memory[k] = sum(acceptance.evidence(i) for i in range(1, K_MAX + 1))
    assert memory[1] == pytest.approx(DECAY_TOKENS, rel=0.02)
    assert memory[8] == pytest.approx(memory[1], rel=0.02)


def test_the_chosen_length_does_not_oscillate_on_steady_text() -> None:
    rng, controller, chosen = np.random.default_rng(3), timed(Adaptive(K_MAX), c=0.15), []
    for _ in range(2500):
        k = controller.choose(1)
        chosen.append(controller.state().k)
        counts = counts_of_a_round(rng, [0.7] * K_MAX, k)
        controller.observe(round_stats(k, draft_s=0.15 * k, total_s=1 + 0.15 * k, counts=counts))
    late = chosen[500:]
    assert set(late) <= {2, 3, 4}
    assert sum(a != b for a, b in itertools.pairwise(late)) <= 20


def test_positions_are_told_apart_although_a_short_length_rarely_reaches_them() -> None:
    rates = [0.9, 0.8, 0.7, 0.4, 0.4, 0.4, 0.4, 0.4]
    rng, acceptance = np.random.default_rng(0), Acceptance(K_MAX)
    for i in range(6000):
        acceptance.observe(*counts_of_a_round(rng, rates, 8 if i % 4 == 0 else 2))
    assert acceptance.by_position[:4] == pytest.approx(rates[:4], abs=0.12)


def test_a_change_is_seen_within_thirty_tokens_and_steady_text_is_left_alone() -> None:
    delays, false_alarms = [], 0
    for seed in range(10):
        rng, acceptance = np.random.default_rng(seed), Acceptance(K_MAX)
        for _ in range(1500):
            acceptance.observe(*counts_of_a_round(rng, [0.9] * K_MAX, 4))
        false_alarms += acceptance.changes
        tested = 0
        while acceptance.alpha > 0.6:
            reached, accepted = counts_of_a_round(rng, [0.35] * K_MAX, 4)
            acceptance.observe(reached, accepted)
            tested += sum(reached)
        delays.append(tested)
    assert np.median(delays) <= 22
    assert max(delays) <= 40
    assert false_alarms <= 2  # in 10 runs of 5,000 tokens


# Costs


def test_outliers_and_jitter_leave_the_costs_within_two_percent() -> None:
    rng, costs = np.random.default_rng(1), CostTable(K_MAX)
    for i in range(3000):
        noise = math.exp(0.05 * rng.standard_normal()) * (10 if rng.random() < 0.03 else 1)
        k = (0, 2, 4)[i % 3]
        costs.observe(1, k, 0.2 * k * noise, noise)
    assert costs.round_times(1)[:5] == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8], rel=0.02)
    assert costs.step_s(1) == pytest.approx(0.2, rel=0.02)


def test_catching_up_is_learned_apart_from_the_steady_draft() -> None:
    """Guards against the first round after k = 0 rounds making drafting look dear for good."""
    controller = timed(Adaptive(K_MAX), c=0.2)
    for pause in [3, 30, 60] * 20:
        for _ in range(pause):
            controller.observe(round_stats(0, draft_s=0.0, total_s=1.0))
        for extra in (0.2 + 0.01 * pause, 0.0):
            controller.observe(round_stats(2, draft_s=0.4 + extra, total_s=1.4 + extra))
    costs = controller._costs
    assert costs.step_s(1) == pytest.approx(0.2, rel=0.02)
    assert costs.round_s(1, 2) == pytest.approx(1.4, rel=0.02)
    assert costs.catch_up_s(1, 50) == pytest.approx(0.7, rel=0.1)


def test_all_lengths_become_dearer_together() -> None:
    """Guards against lengths timed long ago looking cheap when a growing context made every round dearer."""
    controller = timed(Adaptive(K_MAX), c=0.2)
    for i in range(500):
        growth = 1 + min(max(i - 100, 0), 200) / 400
        controller.observe(round_stats(4, draft_s=0.8 * growth, total_s=1.8 * growth))
    times = controller._costs.round_times(1)
    assert times[4] == pytest.approx(2.7, rel=0.02)
    assert times[0] == pytest.approx(1.5, rel=0.05)
    assert times[8] == pytest.approx(3.9, rel=0.05)


def test_a_sudden_lasting_rise_is_followed_within_a_few_rounds() -> None:
    costs = CostTable(K_MAX)
    for i in range(100):
        costs.observe(1, 2, 0.4, 1.0 if i < 70 else 3.0)
    assert costs.round_s(1, 2) == pytest.approx(3.4, rel=0.15)


def test_a_batch_never_timed_borrows_the_shape_and_then_times_k_0_itself() -> None:
    controller = timed(Adaptive(K_MAX), c=0.1)
    seen = []
    for _ in range(40):
        k = controller.choose(32)
        seen.append(k)
        controller.observe(round_stats(k, rows=32, draft_s=0.3 * k, total_s=2.0 + 0.3 * k))
    assert seen[0] > 0
    assert seen.count(0) == 3
    assert controller._costs.round_s(32, 0) == pytest.approx(2.0, rel=0.02)


def test_an_owner_that_cannot_split_the_round_still_gets_the_right_length() -> None:
    controller = Adaptive(K_MAX)
    rng = np.random.default_rng(0)
    for _ in range(600):
        k = controller.choose(1)
        counts = counts_of_a_round(rng, [0.7] * K_MAX, k)
        controller.observe(round_stats(k, draft_s=0.0, total_s=1 + 0.15 * k, counts=counts))
    assert controller.state().k in (3, 4)
    assert controller.state().cost_ratio == pytest.approx(0.15, rel=0.1)


# No clock


@pytest.mark.parametrize("make", [Adaptive, Geometric])
@pytest.mark.parametrize("seconds", [0.0, math.nan, -1.0, math.inf])
def test_a_controller_without_a_clock_says_so(make: type[Adaptive | Geometric], seconds: float) -> None:
    """Guards against a cost ratio that stays at an assumed value because nobody passed the times on."""
    controller = make(K_MAX)
    with pytest.raises(ValueError, match="expected measured seconds"):
        for _ in range(NO_CLOCK_ROUNDS + 1):
            k = controller.choose(4)
            controller.observe(round_stats(k, rows=4, draft_s=0.0, total_s=seconds))


def test_a_controller_that_hears_nothing_at_all_says_so() -> None:
    controller = Adaptive(K_MAX)
    with pytest.raises(ValueError, match="without the times needed"):
        for _ in range(NO_CLOCK_ROUNDS + 1):
            controller.choose(1)


def test_times_of_one_kind_of_round_only_are_not_enough() -> None:
    controller = Adaptive(K_MAX)
    with pytest.raises(ValueError, match="some with drafts and some without"):
        for _ in range(NO_CLOCK_ROUNDS + 1):
            controller.choose(1)
            controller.observe(round_stats(0, draft_s=0.0, total_s=1.0))


def test_a_drafter_with_nothing_to_propose_is_no_fault_of_the_clock() -> None:
    """Asked for drafts, told k = 0: the drafter found none. Decoding goes on, and the rounds serve as plain ones."""
    controller = Adaptive(K_MAX)
    for _ in range(3 * NO_CLOCK_ROUNDS):
        asked = controller.choose(1)
        controller.observe(replace(round_stats(0, draft_s=0.0, total_s=1.0), asked=asked))
    assert controller.choose(1) > 0


@pytest.mark.parametrize(("coverage", "drafts"), [(1.0, True), (0.2, False)])
def test_rows_without_a_draft_count_against_a_length(coverage: float, drafts: bool) -> None:
    """n-gram at batch 10, every draft accepted, a round of 4 tokens at 2.4 times the price of one: worth it when all
    rows have a draft, a loss when two of ten have."""
    controller = timed(Adaptive(K_MAX), c=0.35, rows=10)
    for _ in range(400):
        k = controller.choose(10)
        found = round(10 * coverage)
        told = round_stats(k, rows=10, draft_s=0.0, total_s=1 + 0.35 * k, counts=([found] * k, [found] * k))
        lacking = (10 - found,) + (0,) * (k - 1) if k else ()
        controller.observe(replace(told, lacking=lacking, tokens=10 + found * k))
    assert (controller.k > 0) == drafts


def test_a_clock_that_stops_later_is_a_warning() -> None:
    controller = timed(Adaptive(K_MAX), c=0.1)
    for _ in range(NO_CLOCK_ROUNDS):
        controller.observe(round_stats(controller.choose(1), draft_s=0.0, total_s=0.0))
    with pytest.warns(UserWarning, match="rest on old ones"):
        controller.choose(1)


# Choices, export, users' mistakes


def test_geometric_is_the_textbook_formula_on_measured_times() -> None:
    controller = timed(Geometric(K_MAX), c=0.3)
    for _ in range(500):
        controller.observe(round_stats(2, draft_s=0.6, total_s=1.6, counts=([100, 87], [87, 76])))
    assert controller.choose(1) == 4
    speeds = controller.state().speed_by_k
    assert speeds[4] == pytest.approx((1 - 0.87**5) / 0.13 / 2.2, rel=0.01)


def test_state_exports_what_is_believed() -> None:
    controller = timed(Adaptive(K_MAX), c=0.25)
    for _ in range(300):
        controller.observe(round_stats(2, draft_s=0.5, total_s=1.5, counts=([10, 8], [8, 6])))
    state = controller.state()
    assert state.alpha == pytest.approx(14 / 18)
    assert state.cost_ratio == pytest.approx(0.25, rel=0.01)
    assert state.speed_by_k[0] == pytest.approx(1.0, rel=0.01)
    assert len(state.speed_by_k) == K_MAX + 1


def test_the_promising_rate_lies_between_break_even_and_one() -> None:
    rate, gain, k = promising_rate([1 + 0.8 * k for k in range(K_MAX + 1)])
    assert rate == pytest.approx(0.9, abs=0.01)  # k = 1 breaks even at 0.8
    assert k == 1
    assert gain == pytest.approx(1 - 1.8 / 1.9, abs=0.01)
    assert promising_rate([1 + 1.3 * k for k in range(K_MAX + 1)])[0] is None


@pytest.mark.parametrize("make, bad", [(FixedK, -1), (FixedK, 2.0), (Adaptive, 0), (Geometric, True)])
def test_a_bad_length_is_refused(make: type[FixedK], bad: int) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        make(bad)


def test_a_calibration_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= draft_s < total_s"):
        Adaptive(K_MAX).observe_cost(1, 2, 0.0, 0.0, 0.0)


# Lengths by row


def speed_of(lengths: Sequence[int], rates: Sequence[float], cost: RaggedCost) -> float:
    tokens = sum(sum(rate**i for i in range(k + 1)) for rate, k in zip(rates, lengths, strict=True))
    return tokens / cost.seconds(len(rates), sum(lengths), max(lengths))


@pytest.mark.parametrize("kink", [1, 3])
def test_the_plan_is_the_best_there_is(kink: int) -> None:
    """Rows of three kinds; verification is flat up to `kink` drafts a row, then steep."""
    kinds = [0.25, 0.7, 0.95]
    rates = kinds * 8
    rest = [1.0 + max(0, k - kink) * 0.5 for k in range(7)]
    cost = RaggedCost(step=0.05, step_row=0.002, rest=rest)
    lengths = plan(rates, [1.0] * 6, cost, uniform=0)
    best = max(speed_of(ks * 8, rates, cost) for ks in itertools.product(range(7), repeat=3))
    assert lengths == lengths[:3] * 8
    assert speed_of(lengths, rates, cost) >= 0.995 * best


def test_rows_alike_get_one_length() -> None:
    cost = RaggedCost(step=0.1, step_row=0.0, rest=[1.0 + 0.01 * k for k in range(9)])
    assert plan([0.7] * 16, [1.0] * 8, cost, uniform=4) == [4] * 16


def test_a_row_is_known_by_its_own_tests_and_forgets_when_it_changes() -> None:
    rng, book = np.random.default_rng(0), RowBook(4)
    for rate in (0.9, 0.3):
        for _ in range(60):
            reached, accepted = counts_of_a_round(rng, [rate] * 4, 4)
            book.observe([RowRound(row="a", k=4, reached=sum(reached), accepted=sum(accepted))], alpha=0.6)
        assert book.rate("a", 0.6) == pytest.approx(rate, abs=0.12)
    assert book.rate("new", 0.6) == 0.6


# What it may import


def test_the_controller_imports_only_python_and_the_statistics() -> None:
    folder = Path(controller_module.__file__).parent
    allowed = {"specdec.stats"} | {f"specdec.{path.stem}" for path in folder.glob("controller*.py")}
    for path in folder.glob("controller*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(n in allowed or n.split(".")[0] in sys.stdlib_module_names for n in names), (path.name, names)


def test_importing_the_controller_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, specdec.controller; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_geometric_tokens_at_one() -> None:
    assert geometric_tokens(1.0, 3) == [1.0, 2.0, 3.0, 4.0]


def test_a_length_never_timed_is_never_taken_to_be_free() -> None:
    """A steep line through two noisy lengths crosses zero before k = 0; dividing by that time once ended a run."""
    table = CostTable(8)
    for _ in range(6):
        table.observe(1, 3, 0.001, 0.010)
        table.observe(1, 4, 0.001, 0.030)
    assert all(seconds > 0 for seconds in table.round_times(1))
    assert all(seconds > 0 for seconds in table.rest_times(2))


def test_a_batch_never_timed_does_not_get_its_drafts_for_nothing() -> None:
    """With one length timed in one bucket, a smaller batch once took drafting to be free and drafted its most."""
    table = CostTable(8)
    for _ in range(3):
        table.observe(8, 4, 0.040, 0.020)
        table.observe(8, 0, 0.0, 0.010)
    assert table.round_s(1, 8) > table.round_s(1, 0) + 0.030


def test_rounds_that_did_other_work_are_no_silence() -> None:
    """timed=False: neither counted as a round without a clock nor answered by asking for a plain round again."""
    controller = Adaptive(4)
    busy = RoundStats(
        k=4, rows=2, tokens=6, drafted=8, reached=(2, 2), accepted=(2, 2, 0, 0),
        draft_s=float("nan"), verify_s=float("nan"), total_s=float("nan"), timed=False,
    )  # fmt: skip
    for _ in range(200):
        assert controller.choose(2) == 4
        controller.observe(busy)
    for _ in range(3):
        controller.observe(replace(busy, timed=True, draft_s=2.0, verify_s=5.0, total_s=8.0))
    assert controller.choose(2) == 0, "a plain round is to be timed"
    controller.observe(busy)
    assert controller.choose(2) == 4, "which is not possible now"
    controller.observe(busy)
    with pytest.raises(ValueError, match="without the times"):
        for _ in range(70):
            controller.choose(2)
            controller.observe(replace(busy, timed=True))


# Loads that shift, and costs of few samples


def test_a_rate_met_before_is_known_again_within_a_dozen_tests() -> None:
    """A load that goes back and forth: the second time on, each change is seen sooner than a change to any rate can be
    (which took 70 tests and more, since the windows still held the other rate), and steady text stays what it is."""
    rng, acceptance, delays = np.random.default_rng(0), Acceptance(K_MAX), []
    for visit in range(40):
        alpha, tested, steady = ((0.87, 6), (0.35, 1))[visit % 2], 0, False
        for _ in range(120):
            reached, accepted = counts_of_a_round(rng, [alpha[0]] * K_MAX, alpha[1])
            acceptance.observe(reached, accepted)
            tested += sum(reached)
            if not steady and abs(acceptance.by_position[0] - alpha[0]) < 0.15:
                steady = True
                delays.append(tested)
        assert steady
    assert np.mean(delays[2:]) <= 15
    assert acceptance.changes <= 48  # 39 are real


def test_one_length_with_drafts_gives_the_others_their_share() -> None:
    """Guards against a line through one point: a single draft was taken to cost what four do, so that k = 1 was never
    tried where it was the best."""
    table = CostTable(8)
    for _ in range(3):
        table.observe(16, 4, 0.040, 0.020)
        table.observe(16, 0, 0.0, 0.010)
    assert table.round_s(16, 1) == pytest.approx(0.010 + 0.0125, rel=0.05)
    table.observe(16, 1, 0.040, 0.040)  # four times as long as it is by itself
    assert table.round_s(16, 1) == pytest.approx(0.010 + 0.0125, rel=0.1)


def test_two_disturbed_samples_of_four_are_no_level() -> None:
    table = CostTable(8)
    for draft_s in (0.1, 0.3, 0.1, 0.3):
        table.observe(1, 2, draft_s, 1.0)
    assert table.round_s(1, 2) == pytest.approx(1.1)


def test_a_length_judged_by_few_samples_is_looked_at_again_soon() -> None:
    """All first samples of k = 4 were disturbed by a neighbour, which bends what is taken of k = 3 too: it is found all
    the same."""
    rng, controller = np.random.default_rng(0), Adaptive(4)
    for k, factor in itertools.product((0, 2, 4), (1, 1, 1)):
        factor = 3.0 if k == 4 else factor
        controller.observe_cost(1, k, 0.1 * k * factor, factor, factor * (1.0 + 0.1 * k))
    for _ in range(400):
        k = controller.choose(1)
        counts = counts_of_a_round(rng, [0.9] * 4, k)
        controller.observe(round_stats(k, draft_s=0.1 * k, total_s=1 + 0.1 * k, counts=counts))
    assert controller.k >= 3


def test_a_draft_fed_at_k_0_too_costs_only_its_extra_forward_to_come_back() -> None:
    """As in vLLM, where a row that lags by 64 tokens is fed: then tokens missed say nothing against drafting now."""
    controller = timed(Adaptive(K_MAX), c=0.2, rows=64)
    for pause in (63, 63, 63):
        for _ in range(pause):
            controller.observe(replace(round_stats(0, rows=64, draft_s=0.0, total_s=1.0), caught_up=0))
        fed = round_stats(0, rows=64, draft_s=0.0, total_s=1.0 + 0.2 + 64 * 64 * 1e-3)
        controller.observe(replace(fed, caught_up=64 * 64))
    costs, dear = controller._costs, controller._costs.catch_up_s(64, 64 * 64)
    assert costs.round_s(64, 0) == pytest.approx(1.0, rel=0.01), "those rounds are no plain ones"
    assert dear > 2.0
    assert controller._catch_up_s(64, 64 * 64) <= 0.3
    assert controller.state(64).speed_by_k[0] == pytest.approx(1 / (1 + dear / 64), rel=0.01), "its share of each"


@pytest.mark.parametrize(("gain", "drafts"), [(1.005, True), (1.03, False)])
def test_k_0_is_taken_for_a_clear_gain_only(gain: float, drafts: bool) -> None:
    """Each way costs a catch-up, and at k = 0 a later change is seen late. Half of the drafts are accepted, so that one
    draft gives 1.5 tokens, in 1.5 times `gain` the time of none."""
    c = 1.5 * gain - 1
    controller = timed(Adaptive(K_MAX), c=c, rows=100)
    for accepted in [95] * 30 + [50] * 60:
        k = controller.choose(100)
        counts = ([100] * min(k, 1), [accepted] * min(k, 1))
        controller.observe(round_stats(k, rows=100, draft_s=c * k, total_s=1 + c * k, counts=counts))
    assert (controller.k > 0) == drafts
