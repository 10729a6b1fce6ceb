"""kill -9 at every file operation of a stage, and at random calls: always resumable, always the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from dying import calls_from_now, die_at, die_at_call, fork
from toy_stage import STAGE, UNITS, ToyBody, expected_outputs, outputs, toy_config, unit_name

from pipeline import manifest
from pipeline.stage import StageContext, run_stage

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


def calls_of_a_unit() -> int:
    at: list[int] = []
    count = None

    def before_unit(ctx: StageContext, number: int) -> None:
        nonlocal count
        count = count or calls_from_now()
        at.append(count())

    try:
        run_stage(STAGE, toy_config("run=counted"), ToyBody(before_unit))
    finally:
        sys.setprofile(None)
    return at[2] - at[1]


def test_killed_at_random_calls(data_root: Path) -> None:
    """Amid the first three units of each run, between two file operations too; the result is byte for byte that of a
    run left alone."""
    units, calls, rng = 12, calls_of_a_unit(), random.Random(1)
    folder = data_root / "tiny" / "01_toy"
    for _ in range(5):
        kills = 0
        while killed_amid_units(int(rng.uniform(0, 3) * calls), units):
            kills += 1
            assert kills < 1000
        assert kills >= units // 3
        assert outputs(folder) == expected_outputs(units=units)
        done = manifest.read(folder)
        assert done is not None
        assert {record.name for record in manifest.file_records(done)} == {unit_name(number) for number in range(units)}
        assert manifest.damaged(folder, manifest.file_records(done), rehash=True) == []
        shutil.rmtree(folder)


def killed_amid_units(moment: int, units: int) -> bool:
    """Whether a forked run had units to make: it is killed at this call of the making."""

    def before_unit(ctx: StageContext, number: int) -> None:
        if not begun:
            begun.append(number)
            die_at_call(moment + 1)

    begun: list[int] = []
    code = fork(lambda: run_stage(STAGE, toy_config(), ToyBody(before_unit, units)))
    assert code in {0, -signal.SIGKILL}
    return code != 0
