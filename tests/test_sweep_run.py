"""A whole sweep in a set time: deadlines, second starts, texts used again, and a result that the report reads. Small
programs stand in for train.sweep_traces and train.sweep."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import training_report
from pipeline.results import read_result
from train import sweep_run, timed_jobs
from train.timed_jobs import Job, wait_for

ROOT = Path(__file__).resolve().parent.parent
OPTION = "import json, pathlib, sys, time\ndef option(name): return sys.argv[sys.argv.index(name) + 1]\n"
WRITER = (
    OPTION
    + """
import numpy as np
from train.texts import Text, save_texts
if option("--out").endswith("part-1.npz") and "--plain" not in sys.argv:
    sys.exit("no graphs here")
ids = np.arange(5, dtype=np.int32)
save_texts(pathlib.Path(option("--out")), [Text(source="sums", prompt=ids, completion=ids)] * 3)
"""
)
TRAINER = (
    OPTION
    + """
out, cells = pathlib.Path(option("--out")), json.loads(option("--cells"))
if out.name == "failing" and sys.argv.count("--batch-tokens") < 2:
    sys.exit("out of memory")
try:
    time.sleep(60 if out.name == "endless" else 0)
except KeyboardInterrupt:
    print("trained after 1 s", flush=True)
rows = []
for number, cell in enumerate([{**cells[0], "name": "stock", "loss": "none"}, *cells]):
    alpha = {"alpha_t1": 0.1 * number, "alpha_t1_ci": [0.0, 0.5], "alpha_t0": 0.2, "alpha_t0_ci": None}
    row = {**cell, "tokens_trained": 7, "steps": 1, "minutes": 0.1, "head_mass": 0.9}
    rows += [{**row, "domain": "sums", **alpha}, {**row, "domain": "greedy only", "alpha_t0": 0.2}]
    (out / cell["name"]).mkdir(parents=True)
    (out / cell["name"] / "provenance.json").write_text("{}")
device = {"name": "a stand-in", "kind": "cpu", "count": 1}
(out / "rows.json").write_text(json.dumps({"rows": rows, "curves": {}, "device": device}))
"""
)


def cell(name: str) -> dict[str, Any]:
    return {"name": name, "loss": "ce", "layers": 2, "head": 64, "tokens": 1e3, "lr": 1e-3}


def process(name: str, *groups: str) -> dict[str, Any]:
    cells = [{"name": group, "cells": [cell(f"{group}-{n}") for n in (1, 2)]} for group in groups]
    return {"name": name, "groups": cells, "options": ["--batch-tokens", "64"]}


def plan_of(*processes: dict[str, Any]) -> dict[str, Any]:
    texts = {"seconds": 5, "save_s": 5, "parts": 2, "options": ["--rows", "4"], "heldout_options": []}
    seconds = {"imports_s": 0, "save_s": 3, "collect_s": 0}
    rest = {"smaller": ["--batch-tokens", "32"], "choose": "losses", "choose_by": ["sums"], "note": "Of tests."}
    return {"run": "toy", "target": "toy", "texts": texts, "processes": list(processes)} | seconds | rest


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line on a plan, with stand-ins and FOLDER tmp_path/out."""
    monkeypatch.setattr(sweep_run, "WRITER", (sys.executable, "-c", WRITER))
    monkeypatch.setattr(sweep_run, "TRAINER", (sys.executable, "-c", TRAINER))
    monkeypatch.setattr(sweep_run, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(sweep_run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(timed_jobs, "POLL_SECONDS", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def call(plan: dict[str, Any], seconds: float = 40.0) -> int:
        (tmp_path / "plan.json").write_text(json.dumps(plan, indent=1))
        arguments = ["--plan", "plan.json", "--prompts", "p.npz", "--heldout-prompts", "h.npz", "--out", "out"]
        monkeypatch.chdir(tmp_path)
        return sweep_run.main([*arguments, "--minutes", str(seconds / 60)])

    return call


def job(tmp_path: Path, name: str, code: str, seconds: float = 20.0, **options: Any) -> Job:
    command = [sys.executable, "-c", code]
    return Job(name, command, tmp_path / f"{name}.log", deadline=time.monotonic() + seconds, **options)


def test_an_interrupt_comes_before_the_kill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wait = "import time\ntry:\n    print('begun', flush=True)\n    time.sleep(30)\nexcept KeyboardInterrupt:\n    "
    jobs = [job(tmp_path, "saves", wait + "print('saved after 3 s')"), job(tmp_path, "hangs", wait + "time.sleep(30)")]
    while not all("begun" in each.log.read_text() for each in jobs):
        time.sleep(0.05)
    now = time.monotonic()
    for each, seconds in zip(jobs, (15, 1), strict=True):
        each.interrupt, each.deadline = now + 0.3, now + seconds
    assert wait_for(jobs) == {"saves"}
    lines = capfd.readouterr().out
    assert "saves: saved after 3 s" in lines
    assert "hangs: interrupt" in lines
    assert "hangs: killed at its deadline" in lines
    assert "saves: killed" not in lines


def test_what_a_killed_process_started_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert wait_for([job(tmp_path, "parent", code, 0.7)]) == set()
    time.sleep(1.5)
    assert not mark.exists()


def test_a_job_that_fails_starts_once_more(tmp_path: Path) -> None:
    starts = []

    def again() -> Job:
        starts.append(1)
        return job(tmp_path, "fails", "raise SystemExit('again')")

    assert wait_for([job(tmp_path, "fails", "raise SystemExit('first')", again=again)]) == set()
    assert len(starts) == 1
    assert (tmp_path / "fails.log").read_text().split() == ["first", "again"]


def test_no_process_outlives_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = job(tmp_path, "sleeper", "import time; time.sleep(30)")

    def interrupted(_: Job) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait_for([sleeper])
    monkeypatch.undo()
    assert sleeper.poll() == -9


def test_a_sweep_starts_again_what_failed_and_writes_a_result(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(process("failing", "losses", "shapes"), process("good", "own"))
    assert run(plan) == 0
    result = read_result(tmp_path / "out" / sweep_run.RESULT)
    assert [(row["group"], row["draft"]) for row in result["rows"]] == [
        ("losses", "stock"), ("losses", "losses-1"), ("losses", "losses-2"), ("shapes", "shapes-1"),
        ("shapes", "shapes-2"), ("own", "stock"), ("own", "own-1"), ("own", "own-2"),
    ]  # fmt: skip
    assert result["device"]["name"] == "a stand-in"
    assert "Training texts: 6 sums; 0.00 million" in result["note"], "both parts, one by its second start"
    assert "The best of `losses` by sums is `failing/losses-2`." in result["note"]
    assert "deadline" not in result["note"]
    assert (tmp_path / "out" / "failing" / "losses-2").is_dir()
    page = training_report.render({"draft_sweep.json": result})
    assert "Group `shapes`" in page
    assert "Of tests." in page

    monkeypatch.setattr(sweep_run, "WRITER", (sys.executable, "-c", "raise SystemExit('not to be called')"))
    assert run(plan) == 0, "the texts are there"
    assert len([*(tmp_path / "out").glob("good.old-*")]) == 1


def test_an_endless_training_is_interrupted_and_its_rows_are_kept(run: Callable[..., int], tmp_path: Path) -> None:
    plan = plan_of(process("endless", "losses"))
    plan["texts"]["parts"] = 1
    start = time.monotonic()
    assert run(plan, seconds=8) == 0
    assert time.monotonic() - start < 8
    assert len(read_result(tmp_path / "out" / sweep_run.RESULT)["rows"]) == 3


def test_without_texts_or_time_there_is_no_result(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(plan_of(process("good", "losses")), seconds=1) == 1
    assert "good: not started, 0 s are left to train" in capfd.readouterr().out
    for path in (tmp_path / "out").glob("*.npz"):
        path.unlink()
    monkeypatch.setattr(sweep_run, "WRITER", (sys.executable, "-c", "raise SystemExit('no such prompts')"))
    assert run(plan_of(process("good", "losses"))) == 1
    assert "part-0: ended with 1: no such prompts" in capfd.readouterr().out
    assert not (tmp_path / "out" / sweep_run.RESULT).exists()


def test_a_wrong_plan_is_refused(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(process("good", "losses"))
    plan["processes"][0]["groups"][0]["cells"][0]["layer"] = 3
    assert run(plan) == 2
    assert "unknown key 'processes[0].groups[0].cells[0].layer'; did you mean 'layers'?" in capsys.readouterr().err
    assert run(plan_of(process("good", "losses")) | {"choose": "loses"}) == 2
    assert "choose: got 'loses', expected a group; did you mean 'losses'?" in capsys.readouterr().err
    assert run(plan_of(process("good", "losses"), process("good", "own"))) == 2
    assert "processes: got ['good', 'good'], expected each once" in capsys.readouterr().err
