"""The engine bench: what is counted and what not, order of measuring, intervals, and the stage's resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cells, cpu_speed, measure, spec_bench
from bench.bench_engine import RESULT, STAGE, body
from bench.cells import alpha_interval, measure_cell, median_interval
from bench.drafters import PLAIN, drafter_of, labels_of, length_of
from bench.grid import Bench, with_own_pair
from bench.measure import EngineVariant, Pass, TransformersVariant, Workload
from bench.tiny_models import tiny_model
from data.common import encode_prompt, stop_ids_of
from pipeline.config import load_config
from pipeline.models import load_target, load_tokenizer
from pipeline.results import gate, read_result
from pipeline.stage import run_stage
from specdec import AcceptanceStats, Request, RoundStats

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
WORKLOAD = Workload(
    prompts=((1, 2, 3), (4, 5, 6, 7, 8), (3, 3), (9, 9, 9, 9)),
    batch=2,
    temperature=1.0,
    max_tokens=8,
    stop_ids=(5,),
    seed=0,
)


def never() -> None:
    """A check_stop that lets everything run."""


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    shape: dict[str, Any] = {"vocab": 32, "dtype": torch.float32}
    return tiny_model("llama", layers=2, **shape), tiny_model("llama", layers=1, seed=1, **shape)


def round_stats(**changes: Any) -> RoundStats:
    base = RoundStats(
        k=2, rows=2, tokens=4, drafted=4, reached=(2, 1), accepted=(1, 1), draft_s=0.02, verify_s=0.05, total_s=0.08
    )
    return replace(base, **changes)


def test_only_full_rounds_count_and_every_pass_has_some(pair: tuple[Any, Any]) -> None:
    """The tail, in which slots stay empty, would favour whoever finishes together."""
    target, draft = pair
    variant = EngineVariant(target, draft, k=2, batch=2, capacity=WORKLOAD.longest)
    measured = variant.run(WORKLOAD.requests(0, 0))
    assert {stats.rows for stats in variant.seen} == {1, 2}
    assert {stats.rows for stats in measured.rounds} == {2}
    assert 0 < sum(stats.tokens for stats in measured.rounds) < measured.tokens
    assert measured.tokens == sum(stats.tokens for stats in variant.seen)
    assert sum(stats.total_s for stats in variant.seen) < measured.wall_s


def test_tokens_per_second_is_tokens_over_time_of_full_rounds() -> None:
    rounds = [round_stats(), round_stats(tokens=2, total_s=0.04)]
    measured = Pass(texts=[[0] * 50] * 2, wall_s=2.0, rounds=rounds)
    assert measure.tokens_per_s(measured) == pytest.approx(6 / 0.12)
    assert measure.tokens_per_s_wall(measured) == 50
    times = measure.round_times_ms(measured)
    assert times["draft_step_ms"] == pytest.approx(10)
    assert times["overhead_ms"] == pytest.approx((10 - 30) / 2)


def test_requests_cover_the_prompts_and_keep_slots_full() -> None:
    halves = [WORKLOAD.requests(0, half) for half in (0, 1)]
    assert [len(half) for half in halves] == [4, 4]
    one_slot = replace(WORKLOAD, batch=1)
    prompts = [request.id for half in (0, 1) for request in one_slot.requests(0, half)]
    assert prompts == [0, 1, 2, 3]
    seeds = {
        request.params.seed for repeat in range(3) for half in (0, 1) for request in WORKLOAD.requests(repeat, half)
    }
    assert len(seeds) == 24


class Recorder:
    """A variant that notes when it ran, on a machine that gets slower from pass to pass."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def run(self, requests: Sequence[Request]) -> Pass:
        self.log.append(self.name)
        return Pass(texts=[[0] * 50] * 2, wall_s=1.0 + 0.1 * len(self.log))


def test_a_steady_drift_of_the_machine_cancels() -> None:
    """Measured one after the other, the last of three equal variants would look slower than the first."""
    log: list[str] = []
    measured = measure.interleave([Recorder(name, log) for name in "abc"], WORKLOAD, 2, never)
    assert "".join(log) == "abccba" * 2
    for repeat in range(2):
        speeds = {round(measure.tokens_per_s_wall(passes[repeat]), 9) for passes in measured}
        assert len(speeds) == 1


def test_a_stop_is_noticed_between_two_passes() -> None:
    log: list[str] = []

    def stop() -> None:
        if len(log) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.interleave([Recorder(name, log) for name in "abc"], WORKLOAD, 1, stop)
    assert log == ["a", "b"]


@pytest.mark.parametrize(
    "count, expected, level",
    [
        (2, (0, 1), 0.5),
        (3, (0, 2), 0.75),
        (6, (0, 5), 0.96875),
        (8, (0, 7), 0.9921875),
        (9, (1, 7), 0.9609375),
        (20, (5, 14), 0.9586105),
    ],
)
def test_median_interval_is_of_order_statistics(count: int, expected: tuple[int, int], level: float) -> None:
    low, high, found = median_interval([float(i) for i in range(count)][::-1])
    assert (low, high) == expected
    assert found == pytest.approx(level)


def test_median_interval_covers_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(4000, 9, generator=generator).pow(3)  # the median is 0.125
    covered = sum(low <= 0.125 <= high for low, high, _ in map(median_interval, samples.tolist()))
    assert covered / 4000 == pytest.approx(0.9609, abs=0.015)


def acceptance(prompt: int, accepted: int, reached: int) -> tuple[int, AcceptanceStats]:
    return prompt, AcceptanceStats(rounds=reached, tokens=reached, reached=[reached], accepted=[accepted])


def test_alpha_interval_takes_prompts_for_the_unit() -> None:
    """Repeats of the same greedy text must not make the interval narrower."""
    once = [acceptance(0, 10, 100), acceptance(1, 50, 100), acceptance(2, 90, 100)]
    assert alpha_interval(once) == alpha_interval(once * 5)
    low, high = alpha_interval(once) or (0.5, 0.5)
    assert low < 0.2
    assert high > 0.8
    assert alpha_interval([acceptance(0, 1, 2)]) is None
    assert alpha_interval([acceptance(0, 0, 0), acceptance(1, 0, 0)]) is None


def test_rows_of_a_cell(pair: tuple[Any, Any]) -> None:
    labels = labels_of(["model", "none", "ngram"], ["fixed", "adaptive"], [2, 1, 0])
    rows = measure_cell(pair[0], {None: pair[1]}, labels, WORKLOAD, repeats=2)
    assert [(row["engine"], row["drafter"], row["controller"], row["k"]) for row in rows] == [
        ("specdec", "none", "none", 0),
        ("transformers", "none", "none", 0),
        ("specdec", "model", "fixed", 1),
        ("specdec", "model", "fixed", 2),
        ("specdec", "model", "adaptive", 2),
        ("specdec", "ngram", "fixed", 1),
        ("specdec", "ngram", "fixed", 2),
        ("specdec", "ngram", "adaptive", 2),
    ]
    plain, other, _, drafted, adaptive = rows[:5]
    assert drafted["mean_k"] == 2.0
    assert 0.0 <= adaptive["mean_k"] <= 2.0
    assert plain["speedup"] == 1.0
    assert "speedup_ci" not in plain
    assert "speedup" not in other
    assert plain["tokens_per_round"] == 1.0
    assert drafted["speedup"] > 0
    assert 0 < drafted["alpha"] < 1
    assert len(drafted["alpha_by_position"]) == 2
    assert drafted["target_step_ms"] == plain["verify_ms"]
    assert drafted["ci_level"] == 0.5
    assert "draft_step_ms" not in plain


def test_alpha_is_the_engines_own_count(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    variant = EngineVariant(target, draft, k=3, batch=2, capacity=WORKLOAD.longest)
    measured = variant.run(WORKLOAD.requests(0, 0))
    values = cells.acceptance_values(measured.acceptance)
    assert values["alpha"] == variant.engine.stats.alpha
    assert values["tokens_per_round"] == variant.engine.stats.tokens_per_round


def test_a_draft_that_is_the_target_is_accepted_always(pair: tuple[Any, Any]) -> None:
    target, _ = pair
    greedy = replace(WORKLOAD, temperature=0.0, stop_ids=())
    labels = labels_of(["model"], ["fixed"], [3])
    (drafted,) = [row for row in measure_cell(target, {None: target}, labels, greedy, repeats=1) if row["k"] == 3]
    assert drafted["alpha"] == 1.0
    assert drafted["tokens_per_round"] == pytest.approx(4.0, abs=0.01)


def test_a_failed_request_and_a_batch_that_never_fills_are_errors(pair: tuple[Any, Any]) -> None:
    variant = EngineVariant(pair[0], None, k=0, batch=2, capacity=4)
    with pytest.raises(ValueError, match=r"benchmark prompt 0: .*capacity is 4"):
        variant.run(WORKLOAD.requests(0, 0))
    idle = Pass(texts=[[1]], wall_s=1.0)
    with pytest.raises(ValueError, match="in no round were all 2 slots decoding"):
        cells.row(PLAIN, WORKLOAD, [idle], [idle])


def test_unknown_names_are_refused() -> None:
    for bad in ({"drafter": "oracle"}, {"controller": "none", "drafter": "tree"}):
        with pytest.raises(ValueError, match="expected none, model, ngram or suffix"):
            drafter_of(replace(PLAIN, **bad), None)
    with pytest.raises(ValueError, match="expected none, fixed, geometric or adaptive"):
        length_of(replace(PLAIN, controller="oracle"))


def test_transformers_tokens_are_those_up_to_the_stop(pair: tuple[Any, Any]) -> None:
    """Equal to our own greedy count: padding after a stop is not output."""
    target, _ = pair
    greedy = replace(WORKLOAD, temperature=0.0, max_tokens=12, stop_ids=(5, 7, 9, 11))
    ours = EngineVariant(target, None, k=0, batch=2, capacity=greedy.longest).run(greedy.requests(0, 0))
    theirs = TransformersVariant(target, batch=2).run(greedy.requests(0, 0))
    assert ours.texts == theirs.texts
    assert ours.tokens < 12 * len(greedy.requests(0, 0))


def test_chat_prompts_and_stop_ids(data_root: Path) -> None:
    models = load_config(CONFIG).models
    target, tokenizer = load_target(models, "cpu"), load_tokenizer(models)
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert stop_ids_of(target, tokenizer) == (tokenizer.eos_token_id,)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "dtype, same, state", [("float32", 8, "pass"), ("float32", 7, "fail"), ("bfloat16", 7, "pass")]
)
def test_a_greedy_text_that_differs_fails_g2_where_numerics_are_exact(dtype: str, same: int, state: str) -> None:
    rows = [{"texts": 8, "texts_as_plain": 8, "dtype": dtype}, {"texts": 8, "texts_as_plain": same, "dtype": dtype}]
    judged = with_own_pair(gate("pass", value=1.0, limit=1.0, reason="tiny"), rows)
    assert judged["state"] == state
    assert f"{8 + same} of 16" in judged["reason"]
    assert judged["value"] == (1.0 if state == "pass" else 15 / 16)


SMALL = ("bench_engine.law_samples=200", "bench_engine.greedy_ks=[2]", "bench_engine.batches=[2]")


def run(*overrides: str, force: bool = False) -> dict[str, Any]:
    folder = run_stage(STAGE, load_config(CONFIG, [*SMALL, *overrides]), body, force=force)
    return read_result(folder / RESULT)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """G1 and G2 have their own tests."""
    for name in ("g1", "g2"):
        found = {"rows": [{"gate": name.upper(), "passed": True}], "gate": gate("pass", value=0, limit=1, reason="-")}
        monkeypatch.setattr(Bench, name, lambda self, found=found: found)


@pytest.mark.usefixtures("gates")
def test_the_stage_measures_the_whole_grid_and_says_so(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run()
    rows = [row for row in result["rows"] if "gate" not in row]
    fixed = {(r["drafter"], r["k"], r["temperature"]) for r in rows if r["controller"] in ("none", "fixed")}
    assert fixed == {(drafter, k, t) for t in (0.0, 1.0) for drafter, k in (("none", 0), ("model", 1), ("model", 2))}
    assert {(r["drafter"], r["k"]) for r in rows if r["controller"] == "adaptive"} == {("model", 2)}
    assert {row["draft"] for row in rows if row["drafter"] == "model"} == {"keep_layers=2"}
    assert result["gates"].keys() == {"G1", "G2", "G4", "G5"}
    greedy = [row for row in rows if row["temperature"] == 0]
    assert len(greedy) == 5
    assert all(row["texts_as_plain"] == row["texts"] == 8 for row in greedy)
    printed = capsys.readouterr().out
    assert "speed vs k=0" in printed
    assert "tokens a round" in printed


@pytest.mark.usefixtures("gates")
def test_finished_cells_are_kept_and_changes_refused(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the second cell costs that cell alone."""
    measured: list[float] = []
    real = Bench.cell

    def failing(self: Bench, source: Any, temperature: float, *load: int) -> dict[str, Any]:
        measured.append(temperature)
        if measured == [0.0, 1.0]:
            raise KeyboardInterrupt
        return real(self, source, temperature, *load)

    monkeypatch.setattr(Bench, "cell", failing)
    with pytest.raises(KeyboardInterrupt):
        run()
    run()
    assert measured == [0.0, 1.0, 1.0]
    run()
    assert measured == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"bench_engine\.max_tokens: 12 -> 13"):
        run("bench_engine.max_tokens=13")


@pytest.mark.usefixtures("gates")
def test_a_prompt_too_long_for_the_bench_is_named(data_root: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x" * 5000}))
    with pytest.raises(ValueError, match=r"long/1: 50\d\d prompt tokens, expected at most 4084"):
        run(f'bench_engine.prompts=[{{name: long, source: "jsonl:{tmp_path}/p.jsonl", limit: 1}}]')


@pytest.mark.slow
def test_kill_9_costs_one_unit(data_root: Path) -> None:
    """With the real gates, from the command line; the result of a stopped run is as complete as any."""
    settings = [option for override in SMALL for option in ("--set", override)]
    command = [sys.executable, "-m", "bench.bench_engine", "--config", str(CONFIG), *settings]
    folder = data_root / "tiny" / STAGE.name
    killing = [sys.executable, "-m", "tests.killed_amid_unit", "1", str(int(signal.SIGKILL))]
    killed = subprocess.run([*killing, *command[2:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (kept,) = folder.glob("cell-*.json")
    before = kept.read_bytes()
    assert not (folder / RESULT).exists()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert kept.read_bytes() == before
    result = read_result(folder / RESULT)
    assert result["command"].startswith("python -m bench.bench_engine --config")
    assert {row["temperature"] for row in result["rows"] if "gate" not in row} == {0.0, 1.0}
    states = {name: record["state"] for name, record in result["gates"].items()}
    assert states == {"G1": "pass", "G2": "pass", "G4": "pass", "G5": "not run"}


def test_processes_share_the_categories_out_evenly() -> None:
    shares = spec_bench.shared_out({"a": 10, "b": 80, "c": 10, "d": 80, "e": 10}, 3)
    assert sorted(sorted(share) for share in shares) == [["a", "c", "e"], ["b"], ["d"]]
    assert spec_bench.shared_out({"a": 1}, 4) == [["a"]]


def test_spec_bench_measures_every_variant_in_every_category(tmp_path: Path, data_root: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"category": "a", "turns": ["What?", "Why?"]}, {"category": "b", "prompt": "Say it."}]
    prompts.write_text("\n".join(json.dumps(line) for line in [*lines, lines[0]]))
    out = tmp_path / "result.json"
    options = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "6"]
    assert spec_bench.main(["--config", str(CONFIG), *options, "--jobs", "2"]) == 0
    rows = read_result(out)["rows"]
    variants = [("none", "none", 0), ("model", "fixed", 1), ("model", "fixed", 2), ("model", "adaptive", 2)]
    assert [(r["drafter"], r["controller"], r["k"]) for r in rows] == variants * 2
    assert [r["prompt_set"] for r in rows] == ["a"] * 4 + ["b"] * 4
    assert {r["batch"] for r in rows} == {1}
    assert all(r["texts_as_plain"] == r["texts"] > 0 for r in rows)
    assert spec_bench.main(["--config", str(CONFIG), *options, "--categories", "c"]) == 2
    prompts.write_text("\n".join(json.dumps(line) for line in [lines[1], {"category": "a", "prompt": "long " * 9000}]))
    assert spec_bench.main(["--config", str(CONFIG), *options]) == 0
    assert {r["prompt_set"] for r in read_result(out)["rows"]} == {"b"}
    for wrong in ("--limit", "--jobs", "--batch", "--max-tokens"):
        with pytest.raises(SystemExit):
            spec_bench.main(["--config", str(CONFIG), *options, wrong, "0"])
    prompts.write_text(json.dumps({"prompt": "no category"}))
    assert spec_bench.main(["--config", str(CONFIG), *options]) == 2


@pytest.mark.parametrize("wrong", [("--prompts", "1"), ("--repeats", "0"), ("--max-tokens", "0")])
def test_cpu_speed_refuses_sizes_it_cannot_measure(tmp_path: Path, capsys, wrong: tuple[str, str]) -> None:
    """Before it measures: a comparison without prompts would end a run of minutes."""
    with pytest.raises(SystemExit, match="2"):
        cpu_speed.main(["--config", str(CONFIG), "--out", str(tmp_path / "out.json"), *wrong])
    assert f"{wrong[0]} is {wrong[1]}" in capsys.readouterr().err
