"""Result files, gates and the report: what is not of the schema is refused; what must be proved is
demanded."""

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import gates, report, serving_report, training_report
from bench.report_data import read_run
from bench.tables import gate_table, to_text
from pipeline import manifest, results
from pipeline.files import ASIDE
from pipeline.results import SCHEMA, command_line, gate, read_result, to_frame, write_result
from pipeline.tables import to_markdown

ROOT = Path(__file__).resolve().parent.parent
PASSED = gate("pass", value=1.5, limit=4.0, reason="3 comparisons")


def speed_row(**changes: Any) -> dict[str, Any]:
    row = {
        "target": "tiny",
        "draft": "keep_layers=2",
        "dtype": "float32",
        "prompt_set": "a",
        "engine": "specdec",
        "drafter": "model",
        "controller": "fixed",
        "k": 2,
        "batch": 1,
        "temperature": 0.0,
        "repeats": 3,
        "tokens_per_s": 50.0,
        "tokens_per_s_ci": [49.0, 52.0],
        "tokens_per_s_wall": 45.0,
        "speedup": 1.25,
        "alpha": 0.5,
        "alpha_by_position": [0.6, 0.4],
        "ci_level": 0.75,
    }
    return row | changes


def write(path: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "stage": "04_bench_engine",
        "run": "demo",
        "rows": [speed_row()],
        "gates": {"G1": PASSED, "G2": PASSED},
        "started": "2026-01-01T00:00:00+00:00",
    }
    write_result(path, **(values | changes))
    return path


def test_a_result_reads_back_with_its_provenance(tmp_path: Path) -> None:
    result = read_result(write(tmp_path / "r.json"))
    assert result["schema"] == SCHEMA
    assert result["rows"] == [speed_row()]
    assert result["versions"]["python"]
    assert result["device"]["count"] >= 1
    assert result["command"] == command_line()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_nan_becomes_null_and_infinity_is_refused_without_a_file(tmp_path: Path) -> None:
    rows = [speed_row(alpha=float("nan"), alpha_by_position=[float("nan")])]
    assert read_result(write(tmp_path / "r.json", rows=rows))["rows"][0]["alpha_by_position"] == [None]
    with pytest.raises(ValueError):
        write(tmp_path / "inf.json", rows=[speed_row(alpha=float("inf"))])
    assert not (tmp_path / "inf.json").exists()


@pytest.mark.parametrize("key", ["schema", "command", "git", "versions", "device", "started", "rows", "gates"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "r.json")
    result = json.loads(path.read_text())
    del result[key]
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=rf"r\.json: missing \['{key}'\]"):
        read_result(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": [{"k": {"a": 1}}]}, r"rows\[0\]: k is"),
        ({"gates": {"G1": {"state": "pass"}}}, r"gate G1: missing"),
        ({"gates": {"G1": PASSED | {"state": "ok"}}}, "state 'ok', expected one of"),
    ],
)
def test_writing_checks_too(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "r.json", **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": NaN}', '{"schema": 1'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json"):
        read_result(tmp_path / "r.json")


def test_many_files_become_one_frame(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json"), write(tmp_path / "b.json", run="other", rows=[speed_row(k=1), speed_row()])]
    frame = to_frame(paths)
    assert list(frame["run"]) == ["demo", "other", "other"]
    assert list(frame.columns[:4]) == ["file", "run", "stage", "device"]
    assert frame["k"].sum() == 5


@pytest.mark.parametrize(
    "found, code, message",
    [
        ({"G1": PASSED, "G2": PASSED}, 0, ""),
        ({"G1": PASSED | {"state": "fail"}, "G2": PASSED}, 1, "G1 failed: 3 comparisons"),
        ({"G1": PASSED, "G2": PASSED | {"state": "fail"}}, 1, "G2 failed"),
        ({"G1": PASSED}, 1, "G2 is missing"),
        ({"G1": PASSED, "G2": PASSED | {"state": "not run"}}, 1, "G2 was not run"),
        ({"G1": PASSED, "G2": PASSED, "G5": gate("fail", value=1.2, limit=2, reason="CPU only")}, 0, ""),
        ({"G1": PASSED, "G2": PASSED, "G5": gate("fail", value=1.2, limit=2)}, 1, "G5 failed without its value"),
        ({"G1": PASSED, "G2": PASSED, "G5": gate("fail", reason="slow")}, 1, "G5 failed without its value"),
        ({"G1": PASSED, "G2": PASSED, "G6": gate("not run", reason="no vLLM")}, 0, ""),
        ({"G1": PASSED, "G2": PASSED, "G6": gate("not run")}, 1, "G6 was not run, and no reason"),
    ],
)
def test_exit_code_of_the_gates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: dict[str, Any], code: int, message: str
) -> None:
    path = write(tmp_path / "r.json", gates=found)
    assert gates.main([str(path)]) == code
    printed = capsys.readouterr()
    assert message in printed.err
    assert all(name in printed.out for name in found)


def test_only_the_stage_that_must_prove_a_gate_is_asked_for_it(tmp_path: Path) -> None:
    assert gates.main([str(write(tmp_path / "r.json", stage="03_train_draft", gates={}))]) == 0


def test_gates_without_a_result_say_what_to_run(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gates.main(["--config", str(ROOT / "configs" / "tiny.yaml")]) == 2
    assert "04_bench_engine.sh" in capsys.readouterr().err
    assert gates.main(["nowhere.json"]) == 2


def test_report_depends_on_the_files_alone(tmp_path: Path) -> None:
    first, second = write(tmp_path / "b.json"), write(tmp_path / "a.json", run="another")
    texts = []
    for order in ([first, second], [second, first]):
        out = tmp_path / f"out{len(texts)}.md"
        assert report.main(["--results", *map(str, order), "--out", str(out)]) == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert "| a | 0 | 1 | model (keep_layers=2) | 2 | 50 [49, 52] | 1.25 | 0.5 |" in texts[0]
    assert texts[0].index("## 04_bench_engine: another") < texts[0].index("## 04_bench_engine: demo")


def test_report_shows_the_evidence_of_a_gate(tmp_path: Path) -> None:
    rows = [speed_row(), {"gate": "G1", "case": "t1", "tv": 0.0123456, "passed": True}]
    text = report.render({"r.json": read_result(write(tmp_path / "r.json", rows=rows))})
    assert "| t1 | 0.0123 | True |" in text


def test_what_force_moved_aside_is_no_part_of_a_run(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An old result beside the new one: its gates were judged, and its speeds mixed into the pages."""
    run = data_root / "tiny"
    for stage, state in (("04_bench_engine", "pass"), (f"04_bench_engine{ASIDE}20260101-000000", "fail")):
        (run / stage).mkdir(parents=True)
        write(run / stage / "result.json", gates={"G1": PASSED | {"state": state}, "G2": PASSED})
    config = str(ROOT / "configs" / "tiny.yaml")
    assert gates.main(["--config", config]) == 0
    assert (
        report.page_main(["--config", config], render=lambda results: " ".join(results), out_name="x.md", prog="x") == 0
    )
    assert (run / "x.md").read_text() == "04_bench_engine/result.json"
    assert list(read_run(run).results) == ["04_bench_engine/result.json"]


def test_report_of_a_run_without_results_says_so_and_writes_nothing(
    data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--config", str(ROOT / "configs" / "tiny.yaml")]) == 2
    assert "no stage has a result.json there" in capsys.readouterr().err
    assert not list(data_root.rglob("*"))


def test_report_of_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 2
    assert "--results" in capsys.readouterr().err


@pytest.mark.parametrize("page", [report, training_report, serving_report])
def test_committed_report_is_what_the_committed_results_give(page: ModuleType) -> None:
    """A page of results was never edited by hand, and no result was replaced without it."""
    found = ROOT / page.OUT
    committed = {f"results/{path.name}": read_result(path) for path in sorted((ROOT / "results").glob("*.json"))}
    assert found.exists() == any(result["stage"] in page.STAGES for result in committed.values())
    if found.exists():
        assert found.read_text() == page.render(committed)


def test_tables_align_and_escape() -> None:
    table = gate_table({"gates": {"G1": gate("pass", value=0.123456, limit=4, reason="a|b")}})
    assert to_text(table).splitlines()[1].split() == ["G1", "pass", "0.123", "4", "a|b"]
    assert to_markdown(table).splitlines()[2] == "| G1 | pass | 0.123 | 4 | a\\|b |"


def test_a_copy_without_history_takes_its_revision_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_GIT_REVISION", "abc123")
    assert results.git_revision() == "abc123"


def test_a_result_in_the_checkout_does_not_make_it_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench that writes its file after every set would call itself dirty from the second on."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    monkeypatch.setattr(manifest, "CHECKOUT", tmp_path)
    monkeypatch.delenv("SPEC_GIT_REVISION", raising=False)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "new.json").write_text("{}")
    (tmp_path / "RESULTS_ENGINE.md").write_text("")
    assert len(results.git_revision()) == 40
    (tmp_path / "code.py").write_text("")
    assert results.git_revision().endswith("-dirty")
