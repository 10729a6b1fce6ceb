"""Stage 05 around vLLM: servers, loads, units, rows and the gate, with a stand-in for vLLM (tests/fake_vllm.py); and
what is read from its recorded outputs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from draft_folders import pruned_draft
from serving_stand_in import DRAFT, config_with, rows_of, use_stand_in

from bench import bench_serving, serving_grid, serving_server
from bench.bench_serving import STAGE, body
from bench.serving_checks import CHECKPOINTS, compare, g6, smoke_method
from bench.serving_load import Load, client_arguments, load_row, price
from bench.serving_methods import server_command, with_folders
from bench.serving_metrics import Counters, acceptance, consistent, memory, parse_counters
from bench.serving_server import ServerCommand, ServerError, last_error, serving
from pipeline.config import DraftConfig, load_config
from pipeline.config_bench_vllm import MethodConfig
from pipeline.results import read_result
from pipeline.stage import StageStopped, run_stage

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
RECORDED = json.loads((ROOT / "tests" / "vllm_bench_serve.json").read_text())
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 25.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 130.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 39.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 13.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 26.0
vllm:generation_tokens_total{engine="0",model_name="m"} 107.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
"""
LOG_OF_GPU = """\
(EngineCore pid=9) INFO 11-30 02:38:20 [kv_cache_utils.py:1] GPU KV cache size: 411,232 tokens
(EngineCore pid=9) INFO 11-30 02:38:20 [kv_cache_utils.py:2] Maximum concurrency for 4,096 tokens per request: 100.40x
"""
LOG_OF_DEATH = """\
(EngineCore pid=4301) ERROR 11-30 02:37:40 [core.py:133] Traceback (most recent call last):
(EngineCore pid=4301) ERROR 11-30 02:37:40 [core.py:133] ValueError: MLP speculators need a checkpoint
(APIServer pid=4100) Traceback (most recent call last):
(APIServer pid=4100) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(APIServer pid=4100) ERROR 11-30 03:44:54 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore ...
"""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch)


def nothing() -> None:
    """Nobody asks to stop."""


def command(**env: str) -> ServerCommand:
    return ServerCommand(arguments=("MODEL",), env=env)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


# What vLLM reports


def test_counters_are_summed_over_engines_and_positions_sorted() -> None:
    counters = parse_counters(METRICS)
    assert counters == Counters(
        rounds=65, drafted=130, accepted=39, accepted_by_position=(26, 13), generated=107, requests=5
    )
    later = Counters(rounds=66, drafted=132, accepted=41, accepted_by_position=(27, 14), generated=110, requests=6)
    assert later.since(counters) == Counters(
        rounds=1, drafted=2, accepted=2, accepted_by_position=(1, 1), generated=3, requests=1
    )


def test_alpha_by_position_is_conditional_on_reaching_the_position() -> None:
    fields = acceptance(parse_counters(METRICS))
    assert fields["alpha_by_position"] == [26 / 65, 13 / 26]
    assert fields["alpha"] == 39 / (65 + 26)
    assert fields["accepted_share"] == 39 / 130
    assert fields["tokens_per_round"] == 1 + 39 / 65
    assert set(acceptance(parse_counters("")).values()) == {None}


def test_the_plugin_tells_what_was_reached_when_the_draft_length_changes() -> None:
    """40 rounds of 2 drafts and 25 of 1: 26 first tokens accepted of 65, 13 second ones of the 16 that were drafted."""
    more = "vllm:specdec_plain_rounds_total 3.0\n"
    more += "".join(f'vllm:specdec_position_reached_total{{position="{j}"}} {n}.0\n' for j, n in ((1, 65), (2, 16)))
    counters = parse_counters(METRICS + more)
    assert (counters.plain_steps, counters.reached_by_position) == (3, (65, 16))
    assert acceptance(counters)["alpha_by_position"] == [26 / 65, 13 / 16]
    assert acceptance(counters)["alpha"] == 39 / 81


@pytest.mark.parametrize(
    "change, holds",
    [
        ({}, True),
        ({"accepted": 200}, False),  # more than were drafted
        ({"generated": 110}, False),  # more than were made
        ({"generated": 98}, False),  # more cut off than 5 requests can lose at k = 2
        ({"plain_steps": 2, "generated": 111}, True),
    ],
)
def test_counters_must_add_up(change: dict[str, int], holds: bool) -> None:
    counted = {"rounds": 65, "drafted": 130, "accepted": 39, "generated": 107, "requests": 5, "plain_steps": 0}
    assert consistent(counted | change, 2)[0] is holds


def test_memory_is_read_from_both_forms_of_log() -> None:
    on_cpu = "CPU KV cache size: 20,480 tokens, Maximum concurrency for 1,024 tokens per request: 20.00x"
    assert memory(on_cpu) == {"kv_tokens": 20480, "context_limit": 1024, "max_concurrency": 20.0}
    assert memory(LOG_OF_GPU) == {"kv_tokens": 411232, "context_limit": 4096, "max_concurrency": 100.4}
    assert set(memory("").values()) == {None}


def test_the_cause_of_a_death_is_found_before_the_words_that_point_at_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG_OF_DEATH)
    assert last_error(log) == "ValueError: MLP speculators need a checkpoint"
    log.write_text("one\n\n(Worker pid=1) INFO 11-30 02:37:40 [core.py:133] two\n")
    assert last_error(log) == "two"


def test_a_row_from_a_recorded_result(tmp_path: Path) -> None:
    config = config_with(tmp_path, [], price_per_hour=3.6)
    row = load_row(config, Load(concurrency=2), None, RECORDED, parse_counters(METRICS), devices=2)
    assert row["tokens_per_s"] == RECORDED["output_throughput"]
    assert (row["ttft_ms"], row["ttft_p99_ms"]) == (RECORDED["p50_ttft_ms"], RECORDED["p99_ttft_ms"])
    assert row["e2el_p90_ms"] == RECORDED["p90_e2el_ms"]
    assert row["itl_chunk_ms"] == RECORDED["p50_itl_ms"]
    assert row["usd_per_million_tokens"] == pytest.approx(7.2 / 3600 / RECORDED["output_throughput"] * 1e6)
    assert (row["load"], row["batch"], row["prompt_set"]) == ("closed", 2, "arithmetic")
    with pytest.raises(ValueError, match="1 requests failed"):
        load_row(config, Load(concurrency=2), None, RECORDED | {"failed": 1}, Counters(), devices=1)


def test_price_of_a_million_tokens() -> None:
    assert price(3.6, 1000.0) == pytest.approx(1.0)
    assert price(3.6, 0.0) is None


# What vLLM is told


def test_the_load_generator_is_told_the_load(tmp_path: Path) -> None:
    bench = config_with(tmp_path, [], concurrencies=[8], requests=4, requests_per_slot=3).bench_vllm
    assert bench is not None
    places = {"url": "http://x", "model": Path("m"), "prompts": Path("p.jsonl"), "out": tmp_path / "out.json"}
    closed = client_arguments(bench, Load(concurrency=8), None, **places)
    assert closed[closed.index("--max-concurrency") + 1] == "8"
    assert closed[closed.index("--num-prompts") + 1] == "24"
    assert "--request-rate" not in closed
    opened = client_arguments(bench, Load(rate_share=0.5), 1.25, **places)
    assert opened[opened.index("--request-rate") + 1] == "1.25"
    assert "--max-concurrency" not in opened


def test_a_speculative_config_is_passed_through_but_for_names_of_folders(tmp_path: Path, data_root: Path) -> None:
    given = {"method": "draft_model", "model": "$TARGET", "schedule": [[1, 4, 3]], "other": None, "price": "$5"}
    config = config_with(tmp_path, [{"name": "x", "speculative_config": given, "env": {"A": 1}, "arguments": ["--y"]}])
    assert config.bench_vllm is not None
    made = server_command(config, config.bench_vllm.methods[1], on_gpu=False, folder=tmp_path)
    passed = json.loads(made.arguments[made.arguments.index("--speculative-config") + 1])
    assert passed == given | {"model": made.arguments[0]}
    assert Path(passed["model"], "config.json").is_file()
    assert "--y" in made.arguments
    assert "--enforce-eager" in made.arguments
    assert (made.env["A"], made.env["SPECDEC_PLUGIN"]) == ("1", "0")
    assert (
        "--enforce-eager"
        not in server_command(config, config.bench_vllm.methods[0], on_gpu=True, folder=tmp_path).arguments
    )


@pytest.mark.parametrize("draft, loaded", [("own", "pruned"), ("vllm", "pruned-whole-")])
def test_only_vllm_needs_a_pruned_head_made_whole(tmp_path: Path, data_root: Path, draft: str, loaded: str) -> None:
    config = config_with(tmp_path, [{"name": "ours", "speculative_config": DRAFT, "plugin": {"draft": draft}}])
    given = DraftConfig(model=str(pruned_draft(tmp_path / "pruned")))
    config = replace(config, models=replace(config.models, target="tiny:llama", draft=given))
    assert config.bench_vllm is not None
    made = server_command(config, config.bench_vllm.methods[1], on_gpu=False, folder=tmp_path)
    passed = json.loads(made.arguments[made.arguments.index("--speculative-config") + 1])
    assert Path(passed["model"]).name.startswith(loaded)
    assert (Path(passed["model"]).name == "pruned") == (draft == "own")


def test_the_plugin_is_switched_on_with_its_settings_and_can_be_found(tmp_path: Path, data_root: Path) -> None:
    config = config_with(tmp_path, [{"name": "ours", "speculative_config": DRAFT, "plugin": {"controller": "fixed"}}])
    assert config.bench_vllm is not None
    made = server_command(config, config.bench_vllm.methods[1], on_gpu=True, folder=tmp_path)
    assert made.env["SPECDEC_PLUGIN"] == "1"
    passed = made.arguments[made.arguments.index("--additional-config") + 1]
    assert json.loads(passed) == {"specdec": {"controller": "fixed"}}
    show = (
        "import importlib.metadata as m; print(m.entry_points(group='vllm.general_plugins')['vllm_draft_spec'].value)"
    )
    env = os.environ | {"PYTHONPATH": made.env["PYTHONPATH"]}
    done = subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True, check=True)
    assert "vllm_draft_spec:register" in done.stdout


def test_texts_that_only_look_like_names_of_folders_stay(tmp_path: Path) -> None:
    assert with_folders({"a": ["$HOME", 1, None]}, config_with(tmp_path, [])) == {"a": ["$HOME", 1, None]}


@pytest.mark.parametrize(
    "methods, message",
    [
        ([{"name": "a"}, {"name": "a"}], "each once"),
        ([{"name": "a", "speculative_config": [1]}], "expected keys and values"),
        ([{"name": "a", "speculative_conf": {}}], "did you mean 'speculative_config'"),
    ],
)
def test_bad_methods_are_refused(tmp_path: Path, methods: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_with(tmp_path, methods)


def test_none_must_come_first_and_not_speculate(tmp_path: Path) -> None:
    for override in ("bench_vllm.methods=[{name: a}]", "bench_vllm.methods.0.speculative_config={method: ngram}"):
        with pytest.raises(ValueError, match="none"):
            load_config(TINY, [override])


# Servers


def test_a_server_is_stopped_with_its_group(tmp_path: Path) -> None:
    with serving(command(), tmp_path / "log", minutes=1, check_stop=nothing) as server:
        assert server.get("/health") == "{}"
        pid = server.process.pid
        assert os.getpgid(pid) == pid
    assert not alive(pid)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_server.stop, "__defaults__", (0.5,))
    with serving(command(FAKE="ignores SIGTERM"), tmp_path / "log", minutes=1, check_stop=nothing) as server:
        pid = server.process.pid
    assert not alive(pid)


def test_a_server_that_dies_gives_its_own_error_and_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"exit code 1\): ValueError: this draft does not fit") as caught:
        with serving(command(FAKE="dies"), tmp_path / "log", minutes=1, check_stop=nothing):
            pass
    assert caught.value.last_lines[1:] == ["ValueError: this draft does not fit", "bye"]


def test_a_port_that_is_taken_in_between_is_left_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # listening too, it would keep the question for its health waiting for 5 s
        ports = [taken.getsockname()[1], serving_server.free_port(serving_server.HOST)]
        monkeypatch.setattr(serving_server, "free_port", lambda host: ports.pop(0))
        with serving(command(), tmp_path / "log", minutes=1, check_stop=nothing) as server:
            assert server.get("/health") == "{}"
    assert ports == []


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 of the stage leaves no server behind: the server's standard input ends."""
    program = f"""
import sys, time
from pathlib import Path
from bench import serving_server
serving_server.PROGRAM = ("-m", "tests.fake_vllm", "serve")
command = serving_server.ServerCommand(arguments=("MODEL",), env={{}})
with serving_server.serving(command, Path({str(tmp_path / "log")!r}), minutes=1, check_stop=lambda: None) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as stage:
        assert stage.stdout is not None
        pid = int(stage.stdout.readline())
        assert alive(pid)
        stage.kill()
    wait_for(lambda: not alive(pid))


# The stage


def test_the_grid_gives_rows_memory_texts_and_the_gate(tmp_path: Path, data_root: Path) -> None:
    config = config_with(tmp_path, [{"name": "draft", "speculative_config": DRAFT, "plugin": {}}])
    folder = run_stage(STAGE, config, body)
    rows = rows_of(folder)
    assert [(row["method"], row["batch"], row["rate_share"]) for row in rows] == [
        (method, batch, share) for method in ("none", "draft") for batch, share in ((1, None), (4, None), (None, 0.5))
    ]
    assert {row["not_run"] for row in rows} == {None}
    assert rows[5]["rate"] == 0.5 * RECORDED["request_throughput"]
    assert (rows[3]["speedup"], rows[5]["speedup"]) == (1.0, None)
    assert (rows[3]["kv_tokens"], rows[3]["max_concurrency"]) == (20480, 20.0)
    assert (rows[3]["texts"], rows[3]["texts_same"]) == (16, 16)
    assert (rows[3]["drafter"], rows[3]["controller"], rows[3]["k"]) == ("model", "adaptive", 2)
    record = read_result(folder / "result.json")["gates"]["G6"]
    assert record["state"] == "fail"  # the stand-in's recorded times are the same with and without
    assert (record["value"], record["limit"]) == (1.0, 0.98)
    points = [row for row in read_result(folder / "result.json")["rows"] if "gate" in row]
    assert {point["state"] for point in points} == {"pass"}


def test_methods_that_cannot_run_are_rows_with_the_servers_reason(tmp_path: Path, data_root: Path) -> None:
    methods = [
        {"name": "bad", "speculative_config": {"method": "mtp"}, "env": {"FAKE": "dies"}},
        {"name": "frail", "speculative_config": DRAFT, "env": {"FAKE": "dies under load"}},
        {"name": "last", "speculative_config": DRAFT},
    ]
    rows = rows_of(run_stage(STAGE, config_with(tmp_path, methods), body))
    by_method = {name: [row for row in rows if row["method"] == name] for name in ("bad", "frail", "last")}
    assert all("ValueError: this draft does not fit" in row["not_run"] for row in by_method["bad"])
    assert all("RuntimeError: out of memory" in row["not_run"] for row in by_method["frail"])
    assert by_method["bad"][0]["last_lines"] == [
        'File ".../x.py", line 1',
        "ValueError: this draft does not fit",
        "bye",
    ]
    assert by_method["frail"][0]["texts_same"] == 16
    assert {row["not_run"] for row in by_method["last"]} == {None}


def test_without_vllm_every_row_says_so(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_grid, "vllm_version", lambda: None)
    folder = run_stage(STAGE, config_with(tmp_path, [{"name": "draft", "speculative_config": DRAFT}]), body)
    assert {row["not_run"] for row in rows_of(folder)} == {"vLLM is not installed"}
    record = read_result(folder / "result.json")["gates"]["G6"]
    assert record["state"] == "not run"
    assert "vLLM is not installed" in record["reason"]
    assert bench_serving.main(["--smoke", "--config", str(tmp_path / "serving.yaml")]) == 1


def test_a_config_without_the_section_is_a_gate_that_was_not_run(tmp_path: Path, data_root: Path) -> None:
    content = yaml.safe_load(TINY.read_text())
    del content["bench_vllm"]
    path = tmp_path / "without.yaml"
    path.write_text(yaml.safe_dump(content))
    record = read_result(run_stage(STAGE, load_config(path), body) / "result.json")["gates"]["G6"]
    assert (record["state"], record["reason"]) == ("not run", "the config has no section bench_vllm")


def test_a_half_done_grid_goes_on_with_what_is_missing(
    tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tmp_path, [{"name": "draft", "speculative_config": DRAFT}])
    made: list[str] = []
    publish = serving_grid.Grid._publish

    def stop_after_three(grid: serving_grid.Grid, name: str, content: Any) -> None:
        if len(made) == 3:
            raise StageStopped("enough")
        made.append(name)
        publish(grid, name, content)

    monkeypatch.setattr(serving_grid.Grid, "_publish", stop_after_three)
    with pytest.raises(StageStopped):
        run_stage(STAGE, config, body)
    first = list(made)
    made.clear()
    monkeypatch.setattr(serving_grid.Grid, "_publish", lambda *given: (made.append(given[1]), publish(*given)))
    rows = rows_of(run_stage(STAGE, config, body))
    assert first == ["texts-none.json", "load-none-c1.json", "load-none-c4.json"]
    assert made == ["load-none-r0.5.json", "texts-draft.json"] + [f"load-draft-{x}.json" for x in ("c1", "c4", "r0.5")]
    assert len(rows) == 6


STAGE_PROGRAM = """
import sys
from bench import bench_serving, serving_grid, serving_load, serving_server
serving_server.PROGRAM = ("-m", "tests.fake_vllm", "serve")
serving_load.PROGRAM = ("-m", "tests.fake_vllm", "client")
serving_grid.vllm_version = lambda: "vllm 0"
sys.exit(bench_serving.main(sys.argv[1:]))
"""


def test_sigterm_stops_the_stage_and_its_server_in_the_middle_of_a_load(tmp_path: Path, data_root: Path) -> None:
    config_with(tmp_path, [], arguments=["--marker-of-this-test"])
    options = ["--config", str(tmp_path / "serving.yaml")]
    env = os.environ | {"FAKE": "hangs"}
    with subprocess.Popen([sys.executable, "-c", STAGE_PROGRAM, *options], cwd=ROOT, env=env) as stage:
        log = data_root / "tiny" / "05_bench_vllm" / "logs" / "none.log"
        wait_for(lambda: log.is_file() and "under load" in log.read_text(), 300)
        servers = marked_processes()
        stage.send_signal(signal.SIGTERM)
        assert stage.wait(1200) == 75
    assert servers
    assert not [pid for pid in servers if alive(pid)]


def marked_processes() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"--marker-of-this-test" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# Checkpoints and the gate


@pytest.mark.parametrize("fake, code", [("", 0), ("wrong text", 1), ("dies", 1)])
def test_smoke_ends_with_an_exit_code(tmp_path: Path, data_root: Path, fake: str, code: int) -> None:
    config_with(tmp_path, [{"name": "draft", "speculative_config": DRAFT, "env": {"FAKE": fake}}])
    options = ["--smoke", "--config", str(tmp_path / "serving.yaml")]
    assert bench_serving.main(options) == code
    points = read_result(data_root / "tiny" / "05_smoke" / "result.json")["rows"]
    assert [point["check"] for point in points] == list(CHECKPOINTS)
    failed = [point["check"] for point in points if point["state"] == "fail"]
    expected = {"": [], "wrong text": [CHECKPOINTS[4]], "dies": list(CHECKPOINTS)}
    assert failed == expected[fake]
    assert bench_serving.main(options) == code  # done already: the same answer


def test_a_divergence_is_a_tie_only_where_the_plain_server_says_so() -> None:
    plain = [{"ids": [1, 2], "top": [{"1": -0.1, "5": -0.15}, {"2": -0.1, "6": -3.0}]}] * 4
    texts = [{"ids": [1, 2]}, {"ids": [5, 2]}, {"ids": [1, 6]}, {"ids": [1, 9]}]
    told = compare(texts, plain, "bfloat16")
    assert (told["texts_same"], told["texts_tied"], told["texts_gap"]) == (1, 1, None)
    assert compare(texts[:2], plain[:2], "float32")["texts_tied"] == 0
    assert compare(texts[2:3], plain[:1], "bfloat16")["texts_gap"] == pytest.approx(2.9)
    assert compare([{"ids": [1]}], plain[:1], "bfloat16")["texts_same"] == 0


PASSED = [{"check": name, "state": "pass", "reason": "seen"} for name in CHECKPOINTS]


@pytest.mark.parametrize(
    "speeds, state",
    [({1: 1.2, 8: 0.99}, "pass"), ({1: 0.99, 8: 1.2}, "fail"), ({1: 1.2, 8: 0.9}, "fail"), ({}, "not run")],
)
def test_g6_wants_speed_at_one_request_and_no_loss_at_any(speeds: dict[int, float], state: str) -> None:
    rows = [{"plugin": True, "batch": batch, "speedup": speed} for batch, speed in speeds.items()]
    slower = [{"plugin": True, "batch": batch, "speedup": 0.1} for batch in speeds]  # the best of the plugin's counts
    others = [{"plugin": False, "batch": 1, "speedup": 0.5}]
    assert g6(PASSED, [*rows, *slower, *others])["state"] == state


def test_g6_fails_with_a_checkpoint_and_says_which() -> None:
    points = [*PASSED[:-1], {"check": CHECKPOINTS[-1], "state": "fail", "reason": "they do not add up"}]
    record = g6(points, [])
    assert (record["state"], record["value"]) == ("fail", 5)
    assert "they do not add up" in record["reason"]
    assert g6([], [])["state"] == "not run"


def test_the_checkpoints_are_about_the_plugin_if_it_is_there() -> None:
    none, ngram = MethodConfig(name="none"), MethodConfig(name="n", speculative_config={"method": "ngram"})
    draft = MethodConfig(name="d", speculative_config={"method": "draft_model"})
    ours = MethodConfig(name="o", speculative_config={"method": "draft_model"}, plugin={})
    for methods, name in (([none, ngram, draft, ours], "o"), ([none, ngram, draft], "d"), ([none, ngram], "n")):
        chosen = smoke_method(methods)
        assert chosen is not None
        assert chosen.name == name
    assert smoke_method([none]) is None
