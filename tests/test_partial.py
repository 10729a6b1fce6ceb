"""Units of an unfinished stage go to the archive on a period and when it stops, and another node goes on with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_stage import STAGE, UNITS, ToyBody, expected_outputs, outputs, toy_config, unit_name

from pipeline import archive, files, ledger, partial
from pipeline.stage import DiskError, StageStopped, StaleError, run_stage

NAME = ".01_toy.partial"


class HardKill(BaseException):
    """Nothing runs after it, as after kill -9."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the period is measured by."""
    now = [0.0]
    monkeypatch.setattr(partial.time, "monotonic", lambda: now[0])
    return now


def run(hook: Callable[[Any, int], None] | None = None, *overrides: str, **options: bool) -> ToyBody:
    body = ToyBody(hook)
    run_stage(STAGE, toy_config(*overrides), body, **options)
    return body


def other_node(data_root: Path) -> None:
    """What is on this node's disk is not there any more."""
    shutil.rmtree(data_root / "tiny")


def stop_at(number: int, error: type[BaseException]) -> Callable[[Any, int], None]:
    def hook(ctx: Any, unit: int) -> None:
        if unit == number:
            raise error("now")

    return hook


def test_a_stopped_stage_goes_on_on_another_node(archive_root: Path, data_root: Path) -> None:
    with pytest.raises(StageStopped):
        run(stop_at(2, StageStopped))
    other_node(data_root)
    assert run().made == [2, 3]
    assert outputs(data_root / "tiny" / "01_toy") == expected_outputs()
    assert not (archive_root / "tiny" / NAME).exists()


def test_a_hard_kill_costs_at_most_a_period(archive_root: Path, data_root: Path, clock: list[float]) -> None:
    """Units at 0, 40, 80 s with a period of 60 s: the third ends after the period, and takes the others along."""

    def hook(ctx: Any, unit: int) -> None:
        clock[0] = 40.0 * unit
        if unit == 3:
            raise HardKill

    with pytest.raises(HardKill):
        run(hook, "slurm.archive_seconds=60")
    other_node(data_root)
    assert run().made == [3]


def test_within_the_period_nothing_is_copied(archive_root: Path, data_root: Path, clock: list[float]) -> None:
    with pytest.raises(HardKill):
        run(stop_at(3, HardKill), "slurm.archive_seconds=60")
    assert not (archive_root / "tiny" / NAME).exists()


def test_a_kill_while_copying_leaves_what_was_there(
    archive_root: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is written last: the units of the copy before count, the half copied one does not."""
    publish = files.publish

    def killed(tmp: Path, final: Path) -> None:
        if final.parent.name == NAME and final.name == unit_name(2):
            raise HardKill
        publish(tmp, final)

    monkeypatch.setattr(files, "publish", killed)
    with pytest.raises(HardKill):
        run(None, "slurm.archive_seconds=0")
    monkeypatch.setattr(files, "publish", publish)
    other_node(data_root)
    assert run().made == [2, 3]
    assert outputs(data_root / "tiny" / "01_toy") == expected_outputs()


def test_a_damaged_unit_is_made_again(archive_root: Path, data_root: Path) -> None:
    with pytest.raises(StageStopped):
        run(stop_at(3, StageStopped))
    other_node(data_root)
    (archive_root / "tiny" / NAME / unit_name(1)).write_bytes(b"x" * 2048)
    assert run().made == [1, 3]


def test_back_on_a_node_with_fewer_units_the_archive_wins(archive_root: Path, data_root: Path) -> None:
    with pytest.raises(HardKill):
        run(stop_at(1, HardKill))  # one unit here, none in the archive
    here = data_root / "tiny" / "01_toy"
    aside = here.rename(data_root / "here")
    with pytest.raises(StageStopped):
        run(stop_at(3, StageStopped))  # elsewhere: three
    shutil.rmtree(here)
    aside.rename(here)
    assert run().made == [3]
    assert len(list(here.parent.glob("01_toy.old-*"))) == 1


def test_with_more_units_here_these_are_kept(archive_root: Path, data_root: Path) -> None:
    with pytest.raises(StageStopped):
        run(stop_at(1, StageStopped))
    with pytest.raises(HardKill):
        run(stop_at(3, HardKill))
    assert run().made == [3]


def test_partial_work_of_other_settings_is_refused_and_force_puts_it_aside(archive_root: Path, data_root: Path) -> None:
    with pytest.raises(StageStopped):
        run(stop_at(2, StageStopped))
    other_node(data_root)
    with pytest.raises(StaleError, match="seed: 0 -> 5"):
        run(None, "traces.seed=5")
    with pytest.raises(StageStopped):
        run(stop_at(1, StageStopped), "traces.seed=5", force=True)
    other_node(data_root)
    assert run(None, "traces.seed=5").made == [1, 2, 3]  # goes on with the new work, not with the old


def test_force_survives_a_move_to_a_node_that_would_fetch_the_finished_stage(
    archive_root: Path, data_root: Path
) -> None:
    run()
    with pytest.raises(StageStopped):
        run(stop_at(1, StageStopped), force=True)
    other_node(data_root)
    assert run().made == [1, 2, 3]
    assert len(list((archive_root / "tiny").glob("01_toy.old-*"))) == 1


def test_a_copy_that_was_killed_is_gone_on_with(
    archive_root: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    other_node(data_root)
    copyfile, copied = shutil.copyfile, []

    def counting(source: Path, target: Path) -> None:
        if len(copied) == 2:
            raise HardKill
        copied.append(target.name)
        copyfile(source, target)

    monkeypatch.setattr(archive.shutil, "copyfile", counting)
    with pytest.raises(HardKill):
        run()
    assert copied == [unit_name(0), unit_name(1)]
    monkeypatch.setattr(archive.shutil, "copyfile", lambda *paths: (copied.append(paths[1].name), copyfile(*paths)))
    assert run().made == []
    assert copied[2:] == [unit_name(2), unit_name(3), ledger.NAME, "done.json"]


def test_too_little_room_for_a_copy_is_said_before_the_first_byte(
    archive_root: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    other_node(data_root)
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 100))  # type: ignore[attr-defined]
    with pytest.raises(DiskError, match="the copy needs 0 MiB, 0 MiB are free"):
        run()
    assert not list(data_root.rglob(".tmp-*"))
    assert len(expected_outputs()) == UNITS
