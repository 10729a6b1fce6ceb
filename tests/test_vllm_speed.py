"""The speed bench of vLLM's methods: turns, resume, failures, gate and report by a stand-in for the engines; in a slow
test a tiny pair in real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import serving_report, vllm_speed, vllm_speed_gate, vllm_speed_tables, vllm_turns
from bench.vllm_engines import (
    REAL,
    Models,
    arguments,
    environment,
    fitting,
    job,
    possible,
    random_models,
    real_models,
)
from bench.vllm_methods import METHODS, Method, Sizes, ordered
from bench.vllm_speed_rows import told
from bench.vllm_worker import Counts, SpeedEngine, round_times
from pipeline import tiny
from pipeline.results import read_result
from tests.draft_folders import pruned_draft

ROOT = Path(__file__).resolve().parent.parent
NONE, OURS, _, NATIVE = METHODS[:4]
NGRAM = next(method for method in METHODS if method.name == "ngram")
SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "num_hidden_layers": 3, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder by which the stand-in is told what to do; three methods: none, draft-k4, ngram."""
    monkeypatch.setattr(vllm_turns, "PROGRAM", ("-m", "tests.vllm_speed_stand_in"))
    monkeypatch.setattr(vllm_speed, "METHODS", (NONE, NATIVE, NGRAM))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    planned(tmp_path)
    return tmp_path


def planned(folder: Path, **what: Any) -> None:
    names = {"none": "none", "draft_model": "draft-k4", "ngram": "ngram"}
    plan = {"names": names, "fails": [], "hangs": [], "breaks": {}, "slow": {}}
    (folder / "plan.json").write_text(json.dumps(plan | what))


def run(folder: Path, *more: str) -> int:
    return vllm_speed.main(["--tiny", "--out", str(folder / "out.json"), "--at-once", "3", *more])


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["cell"]: row for row in read_result(folder / "out.json")["rows"]}


def turns(folder: Path) -> list[str]:
    return (folder / "turns.log").read_text().splitlines()


def test_engines_start_together_and_measure_in_turns(stand_in: Path) -> None:
    """The slowest to start is measured first, after the others were up for long."""
    planned(stand_in, slow={"none": 0.5})
    assert run(stand_in) == 0
    said = turns(stand_in)
    measuring = said.index("begin none")
    assert sorted(line for line in said[:measuring] if line.startswith("up")) == ["up draft-k4", "up ngram", "up none"]
    assert len(said[measuring:]) == 12
    for begin, end in zip(said[measuring::2], said[measuring + 1 :: 2], strict=True):
        assert (begin.split()[0], end.split()[0]) == ("begin", "end")
        assert begin.split()[1] == end.split()[1]
    rows = rows_of(stand_in)
    assert len(rows) == 6
    assert {row["acceptance"] for row in rows.values()} == {None, "real (a noisy copy drafts)"}
    assert rows["draft-k4, batch 2, fixed 4, real (a noisy copy drafts)"]["speedup"] == 1.0
    assert rows["none, batch 2, none"]["start_s"] == 1.5


def test_what_is_measured_is_not_measured_again_and_what_failed_is(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(stand_in, fails=["ngram"], breaks={"draft-k4": [1, 2]})
    assert run(stand_in) == 1
    rows = rows_of(stand_in)
    assert rows["none, batch 1, none"]["tokens_per_s"] == 100.0
    broken = [row["not_run"] for row in rows.values() if row["method"] == "draft-k4"]
    assert broken == ["RuntimeError: a kernel is missing"] * 2
    reasons = [row["not_run"] for row in rows.values() if row["method"] == "ngram"]
    assert len(reasons) == 2
    assert reasons[0].startswith("it ended with 3: ValueError: this engine cannot start")
    assert turns(stand_in).count("start draft-k4") == 2  # another engine for the cell after the one that broke it
    (stand_in / "turns.log").unlink()
    planned(stand_in)
    capsys.readouterr()
    assert run(stand_in) == 0
    assert "start none" not in turns(stand_in)
    assert all("tokens_per_s" in row for row in rows_of(stand_in).values())
    page = serving_report.render({"results/vllm_speed.json": read_result(stand_in / "out.json")})
    assert "| draft-k4 | 4 | real (a noisy copy drafts) | 100 (1.00x) | 200 (1.00x) |" in page
    assert run(stand_in, "--run", "another") == 2


def test_a_cell_that_breaks_its_engine_is_not_tried_again_in_the_same_call(stand_in: Path) -> None:
    planned(stand_in, breaks={"draft-k4": [1]})
    assert run(stand_in, "--methods", "none", "draft-k4") == 1
    assert [turns(stand_in).count(f"{what} draft-k4") for what in ("start", "begin")] == [2, 2]
    assert [name for name, row in rows_of(stand_in).items() if "not_run" in row] == [
        "draft-k4, batch 1, fixed 4, real (a noisy copy drafts)"
    ]


def test_an_engine_that_hangs_is_killed_and_the_others_go_on(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    whole = vllm_turns.Worker.__init__

    def noted(self: vllm_turns.Worker, *args: Any) -> None:
        whole(self, *args)
        started.append(self.process.pid)

    measure = vllm_turns.Worker.measure
    monkeypatch.setattr(vllm_turns.Worker, "__init__", noted)
    monkeypatch.setattr(vllm_turns.Worker, "measure", lambda self, cell, passes: measure(self, cell, passes, 1.0))
    planned(stand_in, hangs=["draft-k4"])
    assert run(stand_in, "--methods", "none", "draft-k4") == 1
    rows = rows_of(stand_in)
    assert [name for name, row in rows.items() if "tokens_per_s" in row] == [
        "none, batch 1, none",
        "none, batch 2, none",
    ]
    assert {row["not_run"] for row in rows.values() if "not_run" in row} == {"no answer within 1 s"}
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_time_ends_between_two_rows_and_the_next_call_goes_on(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clocked(vllm_speed.SpeedBench):
        def _about(self, cell: Any) -> dict[str, Any]:
            now[0] += 60  # each row takes a minute
            return super()._about(cell)

    def bench(*args: Any) -> vllm_speed.SpeedBench:
        made = whole(*args)
        fields = {name: getattr(made, name) for name in ("rows", "methods", "sizes", "models", "work", "at_once")}
        now[0] = 0.0
        return Clocked(**fields, deadline=60 * (3 - 0.5), clock=lambda: now[0])

    whole = vllm_speed._bench
    monkeypatch.setattr(vllm_speed, "_bench", bench)
    for code, expected in ((3, 3), (0, 6)):
        assert run(stand_in) == code
        assert len(rows_of(stand_in)) == expected
    assert turns(stand_in).count("start draft-k4") == 2


def test_time_that_takes_no_other_engines_is_for_the_cells_of_those_that_are_up(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fit at once; what comes last for them waits for the third as long as there is time for its start."""
    ngram = replace(NGRAM, name="ours", controller="adaptive", ks=(2,))
    monkeypatch.setattr(vllm_speed, "METHODS", (NONE, ngram, NATIVE))
    planned(stand_in, names={"none": "none", "draft_model": "draft-k4", "ngram": "ours"})
    assert run(stand_in, "--at-once", "2") == 0
    order = [(row["method"], row["controller"]) for row in rows_of(stand_in).values()]
    assert order.index(("draft-k4", "fixed")) < order.index(("ours", "fixed"))
    (stand_in / "out.json").unlink()
    monkeypatch.setattr(vllm_speed.SpeedBench, "_too_late", lambda self: bool(self.rows.rows))
    assert run(stand_in, "--at-once", "2") == 3
    order = [(row["method"], row["controller"]) for row in rows_of(stand_in).values()]
    assert order.count(("ours", "fixed")) == 2
    assert ("draft-k4", "fixed") not in order


def test_an_engine_begins_with_what_earlier_waves_compiled(stand_in: Path, tmp_path: Path) -> None:
    assert run(stand_in, "--methods", "none", "--work", str(tmp_path / "work")) == 0
    caches = tmp_path / "work" / "caches"
    (caches / "none").mkdir(parents=True, exist_ok=True)
    (caches / "none" / "compiled").write_text("x")
    (stand_in / "out.json").unlink()
    assert run(stand_in, "--methods", "none", "ngram", "--work", str(tmp_path / "work")) == 0
    assert (caches / "ngram" / "compiled").read_text() == "x"


def test_a_pair_of_real_weights(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of a file, greedy and sampled; each temperature beside its own plain decoding; no gate."""
    for name in ("target", "draft"):
        (stand_in / name).mkdir()
        tiny.make("qwen3", stand_in / name)
    file = stand_in / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Why?", "What is it?", "x" * 900)))
    named = ["--target", str(stand_in / "target"), "--draft", str(stand_in / "draft")]
    given = [*named, "--prompts", str(file), "--out", str(stand_in / "out.json")]
    assert vllm_speed.main([*given, "--methods", "none", "draft-k4"]) == 0
    result = read_result(stand_in / "out.json")
    assert result["run"] == "target"
    assert result["gates"]["G6"]["state"] == "not run"
    assert len(result["rows"]) == 16
    row = next(row for row in result["rows"] if row["cell"] == "draft-k4, batch 64, fixed 4, real, T = 1")
    assert (row["speedup"], row["temperature"], row["prompt_set"]) == (1.0, 1.0, "questions")
    assert row["prompt_tokens"] < 100
    page = serving_report.render({"results/x.json": result})
    assert "| draft-k4 | 4 | real, T = 1 |" in page
    assert "greedy unless T is named" in page
    assert vllm_speed.main([*named[:2], "--draft", str(stand_in), *given[4:]]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_arguments(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stand_in, "--methods", "eagle9") == 2
    assert "no 'eagle9'; there are: none, draft-k4, ngram" in capsys.readouterr().err
    for wrong in (["--minutes", "0"], ["--at-once", "0"]):
        with pytest.raises(SystemExit):
            run(stand_in, *wrong)
    with pytest.raises(SystemExit):
        vllm_speed.main(["--out", str(stand_in / "x.json")])


def test_a_machine_that_only_measures_needs_no_package_for_data() -> None:
    """A GPU's bare image has torch, transformers and vLLM."""
    lacking = "import sys; sys.modules.update(dict.fromkeys(['pyarrow', 'datasets', 'submitit', 'datasketch']))"
    command = f"{lacking}; import bench.vllm_speed, bench.vllm_worker, bench.vllm_identity, bench.vllm_law"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- the plan ----


def test_every_cell_stands_once_and_the_aims_come_first() -> None:
    cells = ordered(METHODS, Sizes())
    assert len({cell.name for cell in cells}) == len(cells)
    first = [cell for cell in cells if cell.rank == 0]
    assert cells[: len(first)] == first
    assert {cell.acceptance for cell in first} == {None, "synthetic:0.87"}
    assert {cell.method for cell in first} >= {NONE.name, OURS.name}
    assert all(cell.controller in ("none", "adaptive") for cell in first)
    later = [(cell.batch, cell.alphas) for cell in cells if cell.method == OURS.name and cell.rank in (1, 2)]
    assert later[:4] == [(64, (0.35,)), (64, (0.6,)), (16, (0.35,)), (16, (0.6,))]
    assert later[-4:] == [(batch, (0.87, 0.35)) for batch in (64, 16, 4, 1)]
    others = [cell for cell in cells if cell.rank == 3]
    assert {cell.acceptance for cell in others} == {None, "synthetic:0.87", "synthetic: 2.3 tokens a round"}
    assert {cell.batch for cell in others} == {1, 16, 64}
    ours = [cell for cell in cells if cell.method == OURS.name]
    adaptive = {(cell.batch, cell.acceptance) for cell in ours if cell.controller == "adaptive"}
    shifting = "synthetic:0.87 and 0.35 in turn"
    assert adaptive == {
        (batch, told)
        for batch in (1, 4, 16, 64)
        for told in ("synthetic:0.87", "synthetic:0.6", "synthetic:0.35", shifting)
    }
    assert {cell.k for cell in ours if cell.controller == "fixed"} == {0, 2, 4, 6, 8}
    assert all(cell.alphas == () and cell.acceptance is None for cell in ours if cell.k == 0)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    for name, layers in (("Big", 3), ("Small", 1)):
        (tmp_path / f"{name}.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    return random_models(tmp_path, "Big", "Small", tmp_path / "made")


def test_what_an_engine_is_started_with(models: Models, tmp_path: Path) -> None:
    sizes = Sizes()
    for method in METHODS:
        told = json.loads(json.dumps(job(method, models, sizes)))
        config = told["llm"].get("speculative_config", {})
        assert ("speculative_config" in told["llm"]) == (method.controller != "none")
        if config:
            assert config["rejection_sample_method"] == "synthetic"
            assert config["num_speculative_tokens"] == method.k
            assert len(config.get("synthetic_acceptance_rates", [0] * method.k)) == method.k
        if "model" in config:
            assert (Path(config["model"]) / "config.json").is_file()
        assert told["llm"]["max_model_len"] >= 512 + method.k + 1
        rows, per_token = 64, models.kv_bytes(method)
        assert told["llm"]["kv_cache_memory_bytes"] >= rows * (512 + method.k) * per_token
    token = 2 * 32 * 2  # keys and values of a head, in bfloat16
    assert models.kv_bytes(NATIVE) == 4 * token
    assert models.kv_bytes(OURS) == models.kv_bytes(NONE) == 3 * token
    v2 = next(method for method in METHODS if method.runner == "V2")
    env = {m.name: environment(m, on_gpu=True, folder=tmp_path, cache=tmp_path / "c") for m in (NONE, OURS, v2)}
    assert [env[m.name]["VLLM_USE_V2_MODEL_RUNNER"] for m in (NONE, OURS, v2)] == ["0", "0", "1"]
    assert [env[m.name]["SPECDEC_PLUGIN"] for m in (NONE, OURS, v2)] == ["0", "1", "0"]
    assert (Path(env[OURS.name]["PYTHONPATH"].split(":")[0]) / "specdec-0.dist-info").is_dir()


def test_vllm_drafts_with_a_whole_head_and_the_plugin_with_the_pruned_one(data_root: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    tiny.make("llama", target)
    pair = real_models(target, pruned_draft(tmp_path / "pruned"))
    told = {m.name: arguments(m, pair, REAL) for m in possible(METHODS, pair) if m.drafter == "model"}
    drafts = {name: Path(given["speculative_config"]["model"]).name for name, given in told.items()}
    assert drafts[OURS.name] == "pruned"
    assert drafts["draft-k4"] == drafts["plugin"] != "pruned"
    assert all("load_format" not in given for given in told.values())
    assert "rejection_sample_method" not in told["draft-k4"]["speculative_config"]
    assert "eagle3" not in [method.name for method in possible(METHODS, pair)]


def test_engines_that_fit_together(models: Models) -> None:
    sizes = Sizes()
    each = models.gib(NATIVE, sizes)
    assert models.gib(NONE, sizes) < each < models.gib(NONE, sizes) + 3
    methods: list[Method] = [replace(NATIVE, name=str(i)) for i in range(5)]
    names = [
        [method.name for method in fitting(methods, models, sizes, free_gib=free, most=most)]
        for free, most in ((3.5 * each, 9), (3.5 * each, 2), (0.1, 9))
    ]
    assert names == [["0", "1", "2"], ["0", "1"], ["0"]]


# ---- figures ----


def test_counts_are_by_row_and_round() -> None:
    """Two rounds of 4 drafts, 4 and 1 accepted (5 and 2 tokens), and 3 without drafts; one request's first token."""
    counts = Counts()
    counts.add(4, 4)
    counts.add(4, 1)
    counts.add(0, 0)
    assert (counts.rounds, counts.reached) == (2, 6)
    assert counts.values(tokens=11, requests=1) == {"mean_k": 8 / 5, "alpha": 5 / 6, "tokens_per_round": 3.5}
    assert Counts().values(tokens=9, requests=1) == {"mean_k": 0.0, "alpha": None, "tokens_per_round": 1.0}


def test_what_a_log_says_of_a_start(tmp_path: Path) -> None:
    lines = (
        "INFO [gpu_model_runner.py:5348] Model loading took 15.27 GiB memory and 2.345678 seconds",
        "INFO [monitor.py:53] torch.compile took 24.31 s in total",
        "INFO [core.py:341] init engine (profile, create kv cache, warmup model) took 61.02 s (compilation: 24.31 s)",
    )
    (tmp_path / "log").write_text("\n".join(lines))
    found = told(tmp_path / "log")
    assert (found["load_s"], found["compile_s"], found["init_s"]) == (2.345678, 24.31, 61.02)


def test_times_are_of_whole_batches() -> None:
    from vllm_draft_spec.timing import StepTimes

    times = [StepTimes(draft_s=0.004 * k, verify_s=0.01, batch=4, k=k) for k in (1, 2, 4)]
    others = [StepTimes(draft_s=9.0, verify_s=9.0, batch=3, k=2), StepTimes(draft_s=0.0, verify_s=0.006, batch=4, k=0)]
    assert round_times(times + others, 4) == {
        "round_draft_ms": pytest.approx(8), "draft_step_ms": pytest.approx(4), "verify_ms": pytest.approx(10),
        "ks": [0, 1, 2, 4], "rounds_by_k": [1, 1, 1, 1],
        "draft_ms_by_k": pytest.approx([0, 4, 8, 16]), "verify_ms_by_k": pytest.approx([6, 10, 10, 10]),
    }  # fmt: skip
    assert round_times([], 4) == {}


def test_passes_take_the_given_prompts_one_after_the_other() -> None:
    engine = SpeedEngine.__new__(SpeedEngine)
    engine.job = {"prompts": [[1], [2, 2], [3]]}
    assert [engine.prompts(2, seed) for seed in range(3)] == [[[1], [2, 2]], [[3], [1]], [[2, 2], [3]]]


def test_decoding_begins_when_every_request_has_a_token() -> None:
    """Two requests of 5 tokens; a step of their prompts takes 100 s by the clock, and each one after it 1 s."""
    engine = SpeedEngine.__new__(SpeedEngine)
    engine.job, engine._all_read = {"vocab": 9, "prompt_tokens": 3, "prompts": []}, None
    requests = [SimpleNamespace(num_output_tokens=0) for _ in range(2)]
    clock = {"now": 0.0}

    def step(gave: tuple[int, int], seconds: float) -> None:
        clock["now"] += seconds
        for request, tokens in zip(requests, gave, strict=True):
            request.num_output_tokens += tokens

    engine.scheduler = SimpleNamespace(running=requests, update_from_output=step)
    engine._note_when_prompts_are_read()

    def generate(*_: object, **__: object) -> list[Any]:
        for gave, seconds in (((1, 0), 100.0), ((0, 1), 100.0), ((2, 3), 1.0), ((2, 1), 1.0)):
            engine.scheduler.update_from_output(gave, seconds)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(5))]) for _ in requests]

    engine.llm = SimpleNamespace(generate=generate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.vllm_worker.time.perf_counter", lambda: clock["now"])
        patch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
        done = engine.run(2, seed=0, new_tokens=5)
    assert vars(done + done) == {"tokens": 20, "seconds": 404.0, "decoded": 16, "decoding_s": 4.0}


# ---- gate G6 ----


def measured(
    method: str, controller: str, speeds: dict[int, float], acceptance: str | None = None
) -> list[dict[str, Any]]:
    about = {"method": method, "runner": "V1", "plugin": method != "none", "controller": controller}
    return [about | {"batch": b, "tokens_per_s": s, "acceptance": acceptance} for b, s in speeds.items()]


PLAIN = measured("none", "none", {1: 200, 4: 800, 16: 3000, 64: 10000})
FAST = measured("ours", "adaptive", {1: 430, 4: 1600, 16: 5000, 64: 13300}, "synthetic:0.87")
LOW = measured("ours", "adaptive", {1: 198, 4: 800, 16: 3000, 64: 10000}, "synthetic:0.35")


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return vllm_speed_gate.g6(vllm_speed_gate.with_speedups(rows), None)


def test_g6_asks_for_no_loss_anywhere_and_shows_the_aims() -> None:
    found = judged([*PLAIN, *FAST, *LOW])
    assert found["gate"]["state"] == "pass"
    assert found["gate"]["value"] == pytest.approx(0.99)
    assert "430 of 420 at 1" in found["gate"]["reason"]
    aims = {row["case"]: row["aim_met"] for row in found["rows"] if row["aim"]}
    assert aims == {
        "batch 1, synthetic:0.87": True,
        "batch 4, synthetic:0.87": True,
        "batch 16, synthetic:0.87": False,
        "batch 64, synthetic:0.87": True,
    }
    slow = [row | {"tokens_per_s": 195.0} if row["batch"] == 1 else row for row in LOW]
    assert judged([*PLAIN, *FAST, *slow])["gate"]["state"] == "fail"
    part = judged([*PLAIN, *FAST, *LOW[:2]])["gate"]
    assert part["state"] == "not run"
    assert "not measured yet: batch 16, synthetic:0.35; batch 64, synthetic:0.35" in part["reason"]
    assert judged(PLAIN)["gate"]["reason"] == "no adaptive cell was measured"
    assert vllm_speed_gate.g6([], "a CPU")["gate"]["reason"] == "a CPU"


def test_g6_takes_the_setting_whose_worst_cell_is_best() -> None:
    other = [row | {"method": "other", "tokens_per_s": row["tokens_per_s"] * 1.1} for row in FAST + LOW]
    assert judged([*PLAIN, *FAST, *LOW, *other])["gate"]["value"] == pytest.approx(0.99 * 1.1)


def test_speeds_are_against_the_same_runner() -> None:
    v2 = [row | {"runner": "V2", "tokens_per_s": 2 * row["tokens_per_s"]} for row in PLAIN]
    eagle = measured("eagle3", "fixed", {1: 300})[0] | {"runner": "V2"}
    *_, row = vllm_speed_gate.with_speedups([*PLAIN, *v2, eagle])
    assert (row["speedup"], row["of_plain_v1"], row["of_plain_v2"]) == (0.75, 1.5, 0.75)
    sampled = [row | {"temperature": 1.0, "tokens_per_s": row["tokens_per_s"] / 2} for row in (PLAIN[0], FAST[0])]
    *_, row = vllm_speed_gate.with_speedups([*PLAIN, *sampled])
    assert row["speedup"] == pytest.approx(430 / 200)


def test_whole_calls_are_shown_beside_decoding() -> None:
    rows = [row | {"k": 0, "tokens_per_s_wall": row["tokens_per_s"] / 2} for row in PLAIN[:1]]
    rows += [row | {"k": 8, "tokens_per_s_wall": row["tokens_per_s"] / 4} for row in FAST[:1]]
    table = vllm_speed_tables.whole_passes(rows)
    assert table["batch 1"].tolist() == ["100 (1.00x)", "108 (1.07x)"]
    assert not len(vllm_speed_tables.whole_passes(PLAIN))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_engines_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods and one that cannot start; all in one wave, and nothing again in the second call."""
    pytest.importorskip("vllm")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # on a CPU the fast forward falls back instead
    broken = replace(NGRAM, name="broken", speculative={"method": "unheard of"})
    ours = replace(OURS, ks=(0,), k=3)
    monkeypatch.setattr(vllm_speed, "METHODS", (NONE, ours, broken))
    assert run(tmp_path) == 1
    rows = rows_of(tmp_path)
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        by_method.setdefault(row["method"], []).append(row)
    assert all("validation error for SpeculativeConfig" in row["not_run"] for row in by_method["broken"])
    assert all(row["tokens_per_s"] > 0 for row in by_method["none"] + by_method[ours.name])
    assert all(row["mean_k"] == 0 for row in by_method[ours.name] if row["k"] == 0)
    assert all(row["kv_tokens"] > 0 for row in by_method["none"])
    monkeypatch.setattr(vllm_speed, "METHODS", (NONE, ours))
    before = {name: row["tokens_per_s"] for name, row in rows.items() if "tokens_per_s" in row}
    assert run(tmp_path) == 1  # rows of a method that is gone stay
    after = rows_of(tmp_path)
    assert {name: row["tokens_per_s"] for name, row in after.items() if "tokens_per_s" in row} == before
