"""The engine's speed bench on models of a few thousand weights: what it measures, labels, resumes and reports."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import engine_beside, engine_speed, engine_vllm, report, speed_gate
from bench.engine_cells import Cell, Sizes, ordered
from bench.engine_rounds import engine_of
from bench.engine_speed import Rows, SpeedBench, measure_all, with_speedups
from bench.engine_steps import check_room
from bench.shapes import config_of, random_pair
from bench.synthetic import ImposedAcceptance, label
from bench.tiny_models import noisy_copy, tiny_model
from pipeline.results import gate, read_result
from specdec import Engine, Request, SamplingParams
from specdec import graphs as graphs_module
from specdec import model as model_module
from tests.tape import Tape

SHAPES = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    folder = tmp_path / "shapes"
    folder.mkdir()
    for name, layers, tied in (("Big", 2, False), ("Small", 1, True)):
        config = SHAPES | {"num_hidden_layers": layers, "tie_word_embeddings": tied}
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


def no_vllm(*_: object) -> list[dict[str, Any]]:
    raise ValueError("vLLM is not installed")


def run(shapes: Path, out: Path, *more: str) -> int:
    names = ["--shapes", str(shapes), "--target", "Big", "--draft", "Small", "--out", str(out)]
    return engine_speed.main([*names, "--tiny", *more])


# ---- imposed acceptance ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_position_is_accepted_as_often_as_imposed(temperature: float) -> None:
    """Within 4.5 standard deviations of its own binomial law: a false alarm once in 40,000 runs."""
    target = tiny_model(vocab=32)
    engine = Engine(target, noisy_copy(target, noise=0.3, seed=1), k=3, num_slots=20, capacity=110)
    alphas = (0.9, 0.5, 0.2)
    ImposedAcceptance(engine, alphas)
    params = [SamplingParams(max_tokens=100, temperature=temperature, seed=seed) for seed in range(40)]
    done = engine.generate([Request(prompt_ids=[1, 2, 3], params=each) for each in params])
    assert [len(each.token_ids) for each in done] == [100] * 40
    for alpha, reached, accepted in zip(alphas, engine.stats.reached, engine.stats.accepted, strict=True):
        assert reached > 300
        assert abs(accepted - alpha * reached) < 4.5 * math.sqrt(reached * alpha * (1 - alpha))


@pytest.mark.parametrize("alpha, tokens_per_round", [(0.0, 1.0), (1.0, 5.0)])
def test_all_or_nothing(alpha: float, tokens_per_round: float) -> None:
    target = tiny_model(vocab=32)
    engine = Engine(target, noisy_copy(target, noise=0.3, seed=1), k=4, num_slots=1, capacity=64)
    ImposedAcceptance(engine, 0.5).set(alpha)
    engine.generate([Request(prompt_ids=[1], params=SamplingParams(max_tokens=20))])
    assert engine.stats.tokens_per_round == tokens_per_round
    with pytest.raises(ValueError, match=r"alpha is 1.5; expected at most 4 numbers from 0 to 1"):
        ImposedAcceptance(engine, 1.5)


def test_another_acceptance_reaches_graphs_that_were_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    monkeypatch.setattr(graphs_module, "capture_for", lambda device: tape)
    target = tiny_model(vocab=32)
    engine = Engine(target, noisy_copy(target, noise=0.3, seed=1), k=4, num_slots=1, capacity=64, graphs=True)
    imposed = ImposedAcceptance(engine, 0.0)
    found = []
    for alpha in (0.0, 1.0):
        imposed.set(alpha)
        before = engine.stats
        engine.generate([Request(prompt_ids=[1], params=SamplingParams(max_tokens=20))])
        found.append((engine.stats.tokens - before.tokens) / (engine.stats.rounds - before.rounds))
    assert found == [1.0, 5.0]
    assert engine.captured.made == 3


# ---- the bench ----


def test_every_cell_stands_once_the_most_wanted_first() -> None:
    sizes = Sizes(variants=("fast+graphs", "fast", "graphs", "eager"))
    cells = ordered(sizes)
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[0] == Cell(what="speed", variant="fast+graphs", batch=1)
    first = cells[:42]
    assert {cell.batch for cell in first if cell.what == "speed"} == {1, 4, 16, 64}
    assert {cell.what for cell in first} == {"speed", "vllm", "steps", "transformers", "assisted"}
    fixed = {(c.batch, c.alpha, c.k) for c in cells if c.controller == "fixed" and c.variant == "fast+graphs"}
    assert fixed == {(b, a, k) for b in sizes.batches for a in sizes.alphas for k in sizes.ks}
    assert {(c.variant, c.batch, c.context) for c in cells if c.what == "steps"} == {
        (v, b, c) for v in sizes.variants for b in sizes.batches for c in sizes.contexts
    }


def test_tiny_bench_measures_labels_and_resumes(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of cell, two variants (a tape for the graphs); the second call finds all but what was not run."""
    monkeypatch.setattr(engine_beside, "measure_vllm", no_vllm)
    tape = Tape()
    monkeypatch.setattr(graphs_module, "capture_for", lambda device: tape)
    out = tmp_path / "engine_speed.json"
    assert run(shapes, out, "--variants", "graphs", "eager") == 0
    result = read_result(out)
    rows = {row["cell"]: row for row in result["rows"]}
    sizes = Sizes(variants=("graphs", "eager"), **engine_speed.TINY)
    assert sorted(rows) == sorted(cell.name for cell in ordered(sizes))
    assert {row["not_run"] for row in rows.values() if "not_run" in row} == {
        "vLLM is not installed",
        "vLLM gave no row of this batch; the first of its cells says why",
    }
    for cell in ordered(sizes):
        row = rows[cell.name]
        if cell.what in ("speed", "assisted") and cell.alpha is not None:
            assert row["acceptance"] == label(cell.alpha) == f"synthetic:{cell.alpha:g}"
        if cell.what == "speed":
            assert row["tokens_per_s"] > 0
            assert row["speedup"] > 0
            assert row.get("graphs", 0) > 0 or cell.variant == "eager"
            assert (row["alpha"] is None) == (row["mean_k"] == 0)
        if cell.what == "steps":
            assert len(row["verify_ms"]) == 4
            assert row["target_step_ms"] > row["target_floor_ms"] > 0
    assert result["gates"]["G5"]["state"] == "not run"
    page = report.render({"results/engine_speed.json": result})
    for words in (
        "synthetic:0.87",
        "specdec graphs",
        "transformers eager",
        "Not run:",
        "first draft step",
        "vLLM is not",
    ):
        assert words in page, words
    capsys.readouterr()
    assert run(shapes, out, "--variants", "graphs", "eager") == 0
    tried = [line for line in capsys.readouterr().out.splitlines() if " s  " in line]
    assert len(tried) == 2
    assert all("not run" in line for line in tried)
    assert read_result(out)["started"] == result["started"]
    with pytest.raises(SystemExit):
        run(shapes, out, "--minutes", "0")
    assert run(shapes, out, "--run", "another") == 2


class Counted:
    """A bench whose rows take a minute each."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.now = sizes, 0.0

    def clock(self) -> float:
        return self.now

    def row(self, cell: Cell) -> Mapping[str, Any]:
        self.now += 60
        if cell.controller == "fixed":
            raise ValueError("this one cannot be measured\nsecond line")
        return {"engine": "specdec", "drafter": "none", "variant": "eager", "batch": cell.batch, "tokens_per_s": 1.0}


def test_time_ends_between_two_cells_and_the_next_call_goes_on(tmp_path: Path) -> None:
    sizes = Sizes(variants=("eager",), **engine_speed.TINY)
    cells = ordered(sizes)
    failing = [cell for cell in cells if cell.controller == "fixed"]
    for minutes, expected in ((3, 2), (3, 4), (1e6, len(cells) - len(failing))):
        rows = Rows(out=tmp_path / "out.json", run="tiny", obstacle="no GPU")
        bench: Any = Counted(sizes)
        complete = measure_all(bench, rows, deadline=60 * minutes - 10, clock=bench.clock)
        assert complete == (minutes > 3)
        found = [row for row in read_result(tmp_path / "out.json")["rows"] if "not_run" not in row]
        assert len(found) == expected
    failed = [row for row in read_result(tmp_path / "out.json")["rows"] if "not_run" in row]
    assert [row["not_run"] for row in failed] == ["this one cannot be measured"] * len(failing)
    again = Rows(out=tmp_path / "out.json", run="tiny", obstacle="no GPU").missing(cells)
    assert again == failing


def test_a_fault_of_one_cell_is_shown_and_the_others_are_measured(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = SpeedBench._measured

    def faulty(self: SpeedBench, cell: Cell) -> dict[str, Any]:
        if cell.what == "steps":
            raise TypeError("a bug\nin two lines")
        return whole(self, cell) if cell.controller == "none" and cell.what == "speed" else {"batch": cell.batch}

    monkeypatch.setattr(SpeedBench, "_measured", faulty)
    assert run(shapes, tmp_path / "out.json", "--variants", "eager") == 1
    reasons = {row.get("not_run") for row in read_result(tmp_path / "out.json")["rows"]}
    assert reasons == {None, "ended with TypeError: a bug"}
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "2 cells ended with a fault, the first: steps, eager, batch 1, context 24" in told


def test_without_a_gpu_only_the_tiny_bench_runs(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine_speed.main(["--shapes", str(shapes), "--out", str(tmp_path / "out.json")]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert run(shapes, tmp_path / "out.json", "--draft", "Huge") == 2
    assert "configs in that folder: Big, Small" in capsys.readouterr().err
    assert engine_speed.variants_here("cpu") == ["eager"]
    assert engine_speed.variants_here("cuda")[-2:] == ["graphs", "eager"]


def test_a_variant_that_fell_back_is_not_measured_under_its_name(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on without kernels or graphs that it cannot make; a row that says it had them would be false."""
    pair, sizes = (
        random_pair(shapes, "Big", "Small", "cpu", torch.float32),
        Sizes(variants=("fast",), **engine_speed.TINY),
    )
    bench = SpeedBench(pair, shapes, sizes)
    made = []
    monkeypatch.setattr(model_module, "fast_decoder", lambda *_, **__: made.append(1))
    for k in (2, 4):
        with pytest.raises(ValueError, match="the fast forward is off"):
            bench.row(Cell(what="speed", variant="fast", alpha=0.5, controller="fixed", k=k))
    assert len(made) == 2  # target and draft of the first attempt
    with pytest.raises(ValueError, match="the fast forward is off"):
        bench.row(Cell(what="steps", variant="fast", context=24))

    def no_capture(*_: object) -> None:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(graphs_module, "capture_for", lambda device: Tape())
    monkeypatch.setattr(graphs_module, "timed_capture", no_capture)
    with pytest.raises(ValueError, match="no graphs: no graph today"):
        bench.row(Cell(what="speed", variant="graphs"))


def test_a_context_that_does_not_fit_is_said_to(shapes: Path) -> None:
    pair = random_pair(shapes, "Big", "Small", "cpu", torch.float32)
    check_room(pair, 1, 256)
    with pytest.raises(ValueError, match="built for 256 tokens"):
        check_room(pair, 1, 257)
    (shapes / "Odd.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ValueError, match="no config of a model that transformers knows"):
        config_of(shapes, "Odd")


def test_a_fast_variant_that_fell_back_is_not_measured(shapes: Path) -> None:
    """In float64 no kernel is used; eager times must not stand under the name of the fast ones."""
    pair = random_pair(shapes, "Big", "Small", "cpu", torch.float64)
    engine_of(pair, "eager", k=2, num_slots=1, capacity=16)
    with pytest.raises(ValueError, match="the fast forward is off"):
        engine_of(pair, "fast", k=2, num_slots=1, capacity=16)


@pytest.mark.parametrize("alpha, calls", [(0.0, 20), (1.0, 4)])
def test_transformers_assisted_generation_is_given_the_same_acceptance(shapes: Path, alpha: float, calls: int) -> None:
    """Each call of the target yields one token, or four drafts and one more."""
    pair = random_pair(shapes, "Big", "Small", "cpu", torch.float32)
    seen: list[int] = []
    pair.target.register_forward_hook(lambda *_: seen.append(1))
    sizes = replace(Sizes(variants=("eager",)), prompt_tokens=8, new_tokens=20, passes=1)
    row = engine_beside.measure_assisted(pair, Cell(what="assisted", method="4 tokens", alpha=alpha), sizes)
    assert row["acceptance"] == label(alpha)
    assert len(seen) == 2 * calls  # one pass before the one that is timed
    assert not pair.target._forward_hooks_with_kwargs


# ---- gate G5 ----

PLAIN = {
    "engine": "specdec", "drafter": "none", "controller": "none", "k": 0, "batch": 1, "temperature": 0.0,
    "prompt_set": "random", "prompt_tokens": 256, "acceptance": None, "variant": "graphs", "round_ms": 4.0,
    "tokens_per_s": 250.0,
}  # fmt: skip
DRAFTED = PLAIN | {
    "drafter": "model", "controller": "fixed", "k": 4, "acceptance": "synthetic:0.87", "round_ms": 7.0,
    "tokens_per_s": 551.0, "draft": "small",
}  # fmt: skip
VLLM = PLAIN | {"engine": "vllm", "tokens_per_s": 200.0, "method": "generate"}


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return speed_gate.g5(speed_gate.best_variant(with_speedups(rows)), None)["gate"]


def test_g5_takes_the_fastest_variant_and_holds_vllm_against_it() -> None:
    slow = [row | {"variant": "eager", "round_ms": 30.0, "tokens_per_s": 40.0} for row in (PLAIN, DRAFTED)]
    low = DRAFTED | {"acceptance": "synthetic:0.35", "tokens_per_s": 900.0}
    found = judged([*slow, low, PLAIN, DRAFTED, VLLM])
    expected = (1 - 0.87**5) / (1 - 0.87) * 4 / 7
    assert (found["state"], found["value"]) == ("pass", pytest.approx(expected))
    assert "plain decoding 250 tokens/s, vLLM's 200" in found["reason"]
    assert judged([PLAIN, DRAFTED, VLLM | {"tokens_per_s": 251.0}])["state"] == "fail"
    assert judged([PLAIN, DRAFTED | {"round_ms": 8.0}, VLLM])["state"] == "fail"
    assert judged([PLAIN, DRAFTED])["state"] == "pass"
    assert judged([PLAIN, VLLM]) == gate(
        "not run", limit=2.0, reason="the grid has no fixed length of a draft model at batch 1"
    )


# ---- others beside it ----


def test_vllm_that_is_not_there_or_fails_says_so(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(variants=("eager",), **engine_speed.TINY)
    monkeypatch.setattr(engine_beside.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        engine_beside.measure_vllm(shapes, "Big", [1], sizes, "float32")
    monkeypatch.setattr(engine_beside.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engine_beside.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="vLLM ended with 1"):
        engine_beside.measure_vllm(shapes, "Big", [1], sizes, "float32")
    with pytest.raises(ValueError, match="took longer than 0 s"):
        engine_beside._run(["sh", "-c", "sleep 100 & sleep 100"], 0.3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_decodes_the_benchs_requests(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    sizes = replace(Sizes(variants=("eager",)), prompt_tokens=8, new_tokens=8, passes=1)
    one, two = engine_beside.measure_vllm(shapes, "Big", [1, 2], sizes, "float32")
    assert (one["batch"], two["batch"], one["engine"]) == (1, 2, "vllm")
    assert one["tokens_per_s"] > 0
    assert callable(engine_vllm.main)
