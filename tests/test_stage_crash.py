"""kill -9 at every file operation of a stage, and at random moments: always resumable, always the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dying import die_at, fork
from toy_stage import STAGE, TINY, UNITS, ToyBody, expected_outputs, outputs, toy_config, unit_name

from pipeline import manifest
from pipeline.stage import run_stage

ROOT = TINY.parent.parent
MOST_FILE_EVENTS = 200


def run_in_child(root: Path, event_number: int | None) -> tuple[bool, int]:
    """(killed, units made) of one run of the toy stage in a forked process."""
    reader, writer = os.pipe()
    note = os.write

    def child() -> None:
        if event_number is not None:
            die_at(event_number, root)
        run_stage(STAGE, toy_config(), ToyBody(lambda ctx, number: note(writer, b"x")))
        assert manifest.read(root / "tiny" / "01_toy")

    code = fork(child)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        started = len(stream.read())
    assert code in {0, -signal.SIGKILL}
    return code != 0, started


def test_killed_at_every_file_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every n: a run killed at its n-th file operation, then one that finishes; at most one unit is made twice."""
    for event_number in range(1, MOST_FILE_EVENTS):
        root = tmp_path / str(event_number)
        root.mkdir()
        monkeypatch.setenv("SPEC_DATA_ROOT", str(root))
        killed, started = run_in_child(root, event_number)
        folder = root / "tiny" / "01_toy"
        units_at_death = sum(path.stat().st_size == 2048 for path in folder.glob("unit-*"))
        assert units_at_death == len(outputs(folder)), f"a unit is partly there after operation {event_number}"
        survived, started_again = run_in_child(root, None)
        assert not survived
        assert outputs(folder) == expected_outputs(), f"killed at operation {event_number}"
        assert not list(folder.glob(".tmp-*"))
        assert started + started_again <= UNITS + 1, f"more than a unit lost at operation {event_number}"
        if not killed:
            assert event_number > 10 * UNITS, "the stage makes fewer file operations than this test relies on"
            return
    raise AssertionError("the stage never finished")


def test_killed_at_every_file_operation_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder, each run killed a few operations further on than a resume needs: progress is never lost."""
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))
    rng = random.Random(0)
    runs = 0
    while run_in_child(tmp_path, rng.randrange(8, 32))[0]:
        runs += 1
        assert runs < 100
    assert runs >= 2
    assert outputs(tmp_path / "tiny" / "01_toy") == expected_outputs()


def test_killed_from_outside_at_random_moments(data_root: Path) -> None:
    """kill -9 to a real process in a loop; the result is byte for byte that of a run left alone."""
    units = 12
    environment = {**os.environ, "TOY_SLEEP": "0.01", "TOY_UNITS": str(units), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "toy_stage.py"), "--config", str(TINY)]
    rng = random.Random(1)
    kills = 0
    for _ in range(40):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            process.communicate(timeout=rng.uniform(0.1, 0.35))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
        else:
            assert process.returncode == 0
            break
    else:
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    folder = data_root / "tiny" / "01_toy"
    assert kills
    assert outputs(folder) == expected_outputs(units=units)
    done = manifest.read(folder)
    assert done is not None
    assert {record.name for record in manifest.file_records(done)} == {unit_name(number) for number in range(units)}
    assert manifest.damaged(folder, manifest.file_records(done), rehash=True) == []
