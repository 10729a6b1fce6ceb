"""The controller's guarantees, measured in the simulator: seeds are fixed and no clock is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.controller import Adaptive, Controller, FixedK, Geometric
from specdec.controller_measured import geometric_tokens
from specdec.simulate import main
from specdec.simulate_costs import CostModel, cost_models, imaginary
from specdec.simulate_measured import read_times
from specdec.simulate_run import (
    Batch,
    LengthByRow,
    Noise,
    OneLength,
    Policy,
    Run,
    Truth,
    best_length,
    calibrate,
    simulate,
)
from specdec.simulate_traces import Trace, mixed_rows, phases, read_recorded, stationary, write_tests

K_MAX = 8
COSTS = cost_models()


def calibrated(cost: CostModel, rows: int, *, seed: int = 7, plan_rows: bool = False) -> Adaptive:
    controller = Adaptive(K_MAX, plan_rows=plan_rows)
    calibrate(controller, cost, rows=rows, repeats=5, noise=Noise(), seed=seed)
    return controller


def speed_at(cost: CostModel, rows: int, alpha: float, k: int) -> float:
    """Exact tokens per second and row at a fixed k."""
    return geometric_tokens(alpha, k)[k] / cost.round_s(rows, k)


def best_speed(cost: CostModel, rows: int, alpha: float) -> float:
    return max(speed_at(cost, rows, alpha, k) for k in range(K_MAX + 1))


@dataclass
class Watched(OneLength):
    """Keeps what the controller believed best in each round: probes and exploration left out."""

    def __post_init__(self) -> None:
        self.believed: list[int] = []

    def lengths(self, batch: Batch) -> np.ndarray:
        lengths = super().lengths(batch)
        assert isinstance(self.controller, Adaptive)
        self.believed.append(self.controller.k)
        return lengths


def believed_speed(policy: Watched, cost: CostModel, rows: int, alpha: float, skip: int) -> float:
    """The exact speed of the lengths believed best after `skip` rounds."""
    tokens, lengths = geometric_tokens(alpha, K_MAX), policy.believed[skip:]
    return sum(tokens[k] for k in lengths) / sum(cost.round_s(rows, k) for k in lengths)


# Steady acceptance


@pytest.mark.parametrize("c", [0.08, 0.15, 0.3, 0.8])
@pytest.mark.parametrize("alpha", [0.35, 0.45, 0.7, 0.87, 0.95])
def test_the_chosen_length_is_as_fast_as_the_best(alpha: float, c: float) -> None:
    cost = imaginary(c)
    policy = Watched(calibrated(cost, 1))
    run = simulate(stationary(alpha, requests=1, tokens=3000, seed=1), cost, policy, slots=1)
    chosen = believed_speed(policy, cost, 1, alpha, skip=len(policy.believed) // 3)
    assert chosen >= 0.995 * best_speed(cost, 1, alpha)
    assert run.speed >= 0.98 * speed_at(cost, 1, alpha, 0)


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("table", ["h200-first", "h200-floor", "c=0.3", "cpu"])
@pytest.mark.parametrize("by_row", [False, True])
def test_large_batches_lose_nothing_where_verification_is_dear(table: str, rows: int, by_row: bool) -> None:
    cost = COSTS[table]
    for alpha in (0.35,) if by_row else (0.35, 0.9):
        trace = stationary(alpha, requests=rows, tokens=600, seed=2)
        policy: Policy = (LengthByRow if by_row else OneLength)(calibrated(cost, rows))
        run = simulate(trace, cost, policy, slots=rows)
        assert run.speed >= 0.98 * simulate(trace, cost, OneLength(FixedK(0)), slots=rows).speed
        best = best_length(cost, rows, geometric_tokens(alpha, K_MAX))
        if not by_row and speed_at(cost, rows, alpha, best) > 1.05 * speed_at(cost, rows, alpha, 0):
            assert run.speed >= 0.97 * simulate(trace, cost, OneLength(FixedK(best)), slots=rows).speed


@pytest.mark.parametrize("c, alpha", [(1.0, 0.9), (3.0, 0.9), (0.8, 0.0), (0.3, 0.05)])
def test_drafting_that_never_pays_costs_at_most_two_percent(c: float, alpha: float) -> None:
    cost = imaginary(c)
    run = simulate(stationary(alpha, requests=1, tokens=3000, seed=0), cost, OneLength(calibrated(cost, 1)), slots=1)
    assert run.speed >= 0.98


def test_no_probe_is_spent_where_not_even_full_acceptance_would_pay() -> None:
    policy = OneLength(calibrated(imaginary(3.0), 1))
    run = simulate(stationary(0.9, requests=1, tokens=1500, seed=0), imaginary(3.0), policy, slots=1)
    assert set(run.k) == {0.0}


@pytest.mark.parametrize("c, alpha", [(0.15, 0.8), (0.8, 0.35)])
def test_without_start_up_times_it_finds_the_same_lengths(c: float, alpha: float) -> None:
    cost = imaginary(c)
    policy = Watched(Adaptive(K_MAX))
    run = simulate(stationary(alpha, requests=1, tokens=4000, seed=3), cost, policy, slots=1)
    chosen = believed_speed(policy, cost, 1, alpha, skip=len(policy.believed) // 2)
    assert chosen >= 0.99 * best_speed(cost, 1, alpha)
    assert run.speed >= 0.98


def test_later_positions_that_are_accepted_less_shorten_the_draft() -> None:
    """The formula with one rate for all positions drafts too long here."""
    cost, by_position = imaginary(0.15), (1.0, 1.0, 0.5, 0.5, 0.5)
    trace = stationary(0.9, requests=1, tokens=4000, seed=4, by_position=by_position)
    geometric = Geometric(K_MAX)
    calibrate(geometric, cost, rows=1, repeats=5, noise=Noise(), seed=7)
    speeds = {}
    for name, controller in (("adaptive", calibrated(cost, 1)), ("geometric", geometric), ("best", FixedK(2))):
        speeds[name] = simulate(trace, cost, OneLength(controller), slots=1).speed
    assert speeds["adaptive"] >= 0.985 * speeds["best"]
    assert speeds["adaptive"] > 1.01 * speeds["geometric"]


# Acceptance that changes


@pytest.mark.parametrize("table", ["c=0.08", "c=0.15", "c=0.3", "c=0.8", "h200-first", "h200-floor"])
def test_phases_are_followed(table: str) -> None:
    """2,000 tokens a row at 0.9 and at 0.35 in turn, against the length that is best in each phase and the best
    single one; both from exact speeds."""
    cost = COSTS[table]
    trace = phases((0.9, 0.35), phase_tokens=2000, count=2, requests=1, seed=6)
    run = simulate(trace, cost, OneLength(calibrated(cost, 1)), slots=1)
    oracle = simulate(trace, cost, Truth(cost, K_MAX), slots=1).speed
    alphas = (0.9, 0.35)
    best = min(range(K_MAX + 1), key=lambda k: sum(1 / speed_at(cost, 1, alpha, k) for alpha in alphas))
    single = simulate(trace, cost, OneLength(FixedK(best)), slots=1).speed
    assert run.speed >= 0.95 * oracle
    assert run.speed - single >= 0.6 * (oracle - single)


def tokens_to_recover(run: Run, change: int) -> float:
    """Tokens a row from the change until all of the next ten rounds draft in most rows; inf if they never do."""
    lengths, progress = np.array(run.k), np.array(run.progress)
    first = int(np.searchsorted(progress, change))
    for i in range(first, len(lengths) - 10):
        if lengths[i : i + 10].min() >= 0.9:
            return float(progress[i] - change)
    return float("inf")


@pytest.mark.parametrize("table, low, high", [("c=0.3", 0.2, 0.9), ("c=0.8", 0.35, 0.95), ("cpu", 0.25, 0.9)])
def test_drafting_returns_within_two_hundred_tokens(table: str, low: float, high: float) -> None:
    cost, waits = COSTS[table], []
    for seed in range(6):
        trace = phases((low, high), phase_tokens=700, count=2, requests=1, seed=seed)
        run = simulate(trace, cost, OneLength(calibrated(cost, 1, seed=seed)), slots=1, seed=seed)
        waits.append(tokens_to_recover(run, 700))
    assert sorted(waits)[-2] <= 200  # the first draft of a probe is rejected now and then, at any rate


@pytest.mark.parametrize("table, rows, low", [("h200-first", 64, 0.3), ("c=0.15", 64, 0.1), ("c=0.08", 128, 0.05)])
def test_large_batches_return_as_fast_when_few_rows_probe(table: str, rows: int, low: float) -> None:
    """With all rows drafting in a probe, feeding the draft all that all rows had missed would cost too much."""
    cost = COSTS[table]
    trace = phases((low, 0.95), phase_tokens=600, count=2, requests=rows, seed=0)
    run = simulate(trace, cost, LengthByRow(calibrated(cost, rows)), slots=rows)
    assert tokens_to_recover(run, 600) <= 200
    before = run.clock[int(np.searchsorted(run.progress, 590))]
    assert 590 * cost.round_s(rows, 0) >= 0.98 * before


# Lengths by row


@pytest.mark.parametrize("table", ["h200-floor", "c=0.15"])
def test_lengths_by_row_gain_where_rows_differ_and_verification_is_dear(table: str) -> None:
    cost, trace = COSTS[table], mixed_rows((0.3, 0.95), requests=64, tokens=3000, seed=5)
    speeds = {
        planned: simulate(
            trace, cost, LengthByRow(calibrated(cost, 64, plan_rows=planned)), slots=64, max_rounds=250
        ).speed
        for planned in (False, True)
    }
    assert speeds[True] >= 1.03 * speeds[False]


@pytest.mark.parametrize("fed", [True, False])
def test_large_batches_come_back_where_the_draft_is_fed_at_k_0_too(fed: bool) -> None:
    """As the plugin's is, after 64 tokens: then a probe of all rows costs little. Elsewhere it would cost too much, and
    `choose` stays at k = 0 (docs/controller.md)."""
    cost = replace(COSTS["h200-first"], feed_after=64 if fed else None)
    trace = phases((0.25, 0.9), phase_tokens=400, count=2, requests=64, seed=0)
    run = simulate(trace, cost, OneLength(Adaptive(4)), slots=64)
    fixed = [simulate(trace, cost, OneLength(FixedK(k)), slots=64).speed for k in range(4)]
    assert run.speed >= 0.98 * fixed[0]
    assert (tokens_to_recover(run, 400) <= 100) == fed
    assert (run.speed > 1.02 * max(fixed)) == fed


# The simulator itself


@pytest.mark.parametrize("k, alpha, tokens_a_round", [(0, 0.5, 1), (3, 1.0, 4), (3, 0.0, 1)])
def test_time_and_tokens_add_up(k: int, alpha: float, tokens_a_round: int) -> None:
    cost = imaginary(0.25)
    run = simulate(stationary(alpha, requests=2, tokens=120, seed=0), cost, OneLength(FixedK(k)), slots=2)
    assert run.tokens == 240
    assert len(run.k) == 120 / tokens_a_round
    assert run.seconds == pytest.approx(len(run.k) * (cost.verify(2, 2 * (k + 1)) + k * cost.step(2)))


def test_a_fixed_length_reaches_its_expected_speed() -> None:
    cost = imaginary(0.15)
    run = simulate(stationary(0.7, requests=1, tokens=20_000, seed=0), cost, OneLength(FixedK(3)), slots=1)
    assert run.speed == pytest.approx(speed_at(cost, 1, 0.7, 3), rel=0.01)


def test_the_first_draft_after_a_pause_pays_for_what_was_missed() -> None:
    class Pause(FixedK):
        rounds = 0

        def choose(self, rows: int) -> int:
            self.rounds += 1
            return 0 if self.rounds <= 10 else 1

    cost = imaginary(0.25)
    trace = stationary(0.0, requests=1, tokens=12, seed=0)
    run = simulate(trace, cost, OneLength(Pause(1)), slots=1)
    steady = 10 * cost.verify(1, 1) + 2 * cost.round_s(1, 1)
    assert run.seconds == pytest.approx(steady + cost.step(1) + 10 * cost.feed_token_s)


def test_the_tables_hold_the_measured_figures() -> None:
    cost = COSTS["h200-first"]
    assert cost.round_s(1, 4) == pytest.approx(10.8e-3, rel=0.01)
    assert cost.round_s(16, 4) == pytest.approx(13.4e-3, rel=0.01)
    assert cost.round_s(64, 4) == pytest.approx(24.5e-3, rel=0.03)
    assert COSTS["h200-floor"].step(1) / COSTS["h200-floor"].verify(1, 1) == pytest.approx(0.14, rel=0.02)


def recorded_tests(trace: Trace, k: int) -> list[tuple[int, int, int]]:
    """What an engine at fixed k writes down while decoding the trace, one row after the other."""
    tests = []
    for row, length in enumerate(trace.lengths_R):
        offset = 0
        while offset < length:
            accepted = int(trace.accepted(np.array([row]), np.array([offset]), np.array([k]))[0])
            tests += [(row, i + 1, int(i < accepted)) for i in range(min(accepted + 1, k))]
            offset += accepted + 1
    return tests


def test_a_recorded_trace_replays_to_the_same_rounds(tmp_path: Path) -> None:
    trace = stationary(0.7, requests=3, tokens=200, seed=8)
    write_tests(tmp_path / "t.jsonl", recorded_tests(trace, 4))
    replayed = read_recorded(tmp_path / "t.jsonl")
    assert recorded_tests(replayed, 4) == recorded_tests(trace, 4)


@pytest.mark.parametrize("line", ["[0, 0, 1]", "[0, 1]", "{}", "[0, 1, 2]", "nonsense"])
def test_a_bad_line_of_a_recorded_trace_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(f"[0, 1, 1]\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl:2: got"):
        read_recorded(tmp_path / "t.jsonl")


def test_the_command_prints_a_table_and_json_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot, out = tmp_path / "k.svg", tmp_path / "s.json"
    arguments = ["--tables", "c=0.3", "--batches", "2", "--traces", "phases", "--tokens", "100", "--k-max", "4"]
    assert main([*arguments, "--plot", str(plot), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])["rows"][0]
    assert lines[0].startswith("| table | batch")
    assert record["share_of_oracle"]["adaptive"] > 0.8
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == [record]
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_an_unknown_trace_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "phasess", "--batches", "1"]) == 2
    assert "expected one of phases" in capsys.readouterr().err


def test_all_controllers_keep_the_protocol() -> None:
    controllers: list[Controller] = [FixedK(3), Geometric(4), Adaptive(4)]
    assert [controller.k_max for controller in controllers] == [3, 4, 4]


def result_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return path


def test_measured_times_of_a_result_become_tables(tmp_path: Path) -> None:
    prices = [
        {"step_rows": 2, "step_k": k, "draft_ms": 10.0 * k, "verify_ms": 50.0 + 5 * k, "between_ms": 1.0}
        for k in (0, 1, 3)
    ]
    tables = read_times(result_file(tmp_path / "lengths.json", [{"controller": "fixed 1"}, *prices]))
    cost = tables["lengths"]
    assert [cost.round_s(2, k) for k in range(5)] == pytest.approx([0.051, 0.066, 0.081, 0.096, 0.111])
    assert cost.step(2) == pytest.approx(0.010)
    speed = {"batch": 16, "method": "ours", "ks": [0, 2], "draft_ms_by_k": [0, 4], "verify_ms_by_k": [6, 8]}
    lone = {"batch": 4, "method": "ours", "ks": [2], "draft_ms_by_k": [1], "verify_ms_by_k": [1]}
    tables = read_times(result_file(tmp_path / "speed.json", [speed, lone]))
    assert list(tables) == ["speed ours"]
    assert tables["speed ours"].round_s(16, 1) == tables["speed ours"].round_s(4, 1) == pytest.approx(0.009)


def test_a_file_without_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--times", str(result_file(tmp_path / "x.json", [{"batch": 1}]))]) == 2
    assert "no step times by draft length" in capsys.readouterr().err
    assert main(["--times", str(tmp_path / "missing.json")]) == 2
    assert "not a result file" in capsys.readouterr().err
