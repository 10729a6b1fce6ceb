"""The archive: finished folders go there, come back to a node that lacks them, and damage on the way is noticed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from toy_stage import DOWNSTREAM, STAGE, UNITS, ToyBody, expected_outputs, outputs, toy_config, unit_name

from pipeline import archive, manifest
from pipeline.stage import StaleError, run_stage


def run(*overrides: str, **options: bool) -> tuple[Path, ToyBody]:
    body = ToyBody()
    return run_stage(STAGE, toy_config(*overrides), body, **options), body


def lose(folder: Path) -> None:
    """A job that starts on another node finds none of its node-local files."""
    shutil.rmtree(folder.parent)


def test_a_finished_stage_is_archived_and_comes_back(archive_root: Path) -> None:
    folder, _ = run()
    archived = archive_root / "tiny" / "01_toy"
    assert outputs(archived) == expected_outputs()
    done = (folder / "done.json").read_bytes()
    lose(folder)
    _, body = run()
    assert body.made == []
    assert outputs(folder) == expected_outputs()
    assert (folder / "done.json").read_bytes() == done


def test_an_input_comes_back(archive_root: Path) -> None:
    folder, _ = run()
    lose(folder)
    body = ToyBody(lambda ctx, number: (ctx.input("01_toy") / unit_name(number)).read_bytes())
    run_stage(DOWNSTREAM, toy_config(), body)
    assert body.made == list(range(UNITS))
    assert outputs(folder) == expected_outputs()


def test_an_archived_stage_of_other_settings_is_stale(archive_root: Path) -> None:
    folder, _ = run()
    lose(folder)
    with pytest.raises(StaleError, match="seed: 0 -> 5"):
        run("traces.seed=5")
    run("traces.seed=5", force=True)
    assert outputs(archive_root / "tiny" / "01_toy") == expected_outputs(seed=5)
    (old,) = (archive_root / "tiny").glob("01_toy.old-*")
    assert outputs(old) == expected_outputs(seed=0)


def test_force_starts_over_from_nothing_archived(archive_root: Path) -> None:
    """Checkpoints of the unfinished stage would otherwise be continued after --force."""
    work = archive_root / "tiny" / "01_toy.work-0123456789ab"
    work.mkdir(parents=True)
    (work / "checkpoint").write_text("old")
    for _ in range(2):
        run(force=True)
        assert not work.exists()
        (old,) = work.parent.glob("01_toy.work-*")
        assert (old / "checkpoint").read_text() == "old"


def test_a_damaged_archive_is_not_taken(archive_root: Path, data_root: Path) -> None:
    folder, _ = run()
    lose(folder)
    victim = archive_root / "tiny" / "01_toy" / unit_name(1)
    victim.write_bytes(b"x" * 2048)
    with pytest.raises(ValueError, match=f"{unit_name(1)} has another sha256.*the copy is not kept"):
        run()
    assert not folder.exists()
    assert not list(data_root.rglob(".tmp-*"))


def test_damage_while_copying_is_noticed(archive_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copyfile = shutil.copyfile

    def damaging_copy(source: Path, target: Path) -> None:
        copyfile(source, target)
        if target.name == unit_name(2):
            target.write_bytes(target.read_bytes()[:-1])

    monkeypatch.setattr(archive.shutil, "copyfile", damaging_copy)
    with pytest.raises(ValueError, match=f"{unit_name(2)} has 2047 bytes"):
        run()
    monkeypatch.setattr(archive.shutil, "copyfile", copyfile)
    assert not list(archive_root.rglob("done.json"))
    _, body = run()  # done already, so only the copy is made up for
    assert body.made == []
    assert outputs(archive_root / "tiny" / "01_toy") == expected_outputs()


def test_unfinished_work_stays_when_the_archive_has_other_settings(archive_root: Path) -> None:
    """After --force on this node and a kill, the archive's older result must not come back over the new work."""
    folder, _ = run()

    def power_cut(ctx: object, number: int) -> None:
        if number == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        run_stage(STAGE, toy_config("traces.seed=5"), ToyBody(power_cut), force=True)
    _, body = run("traces.seed=5")
    assert body.made == [2, 3]
    assert outputs(folder) == expected_outputs(seed=5)


def test_unfinished_work_gives_way_to_the_finished_stage(archive_root: Path) -> None:
    """Preempted here, finished on another node, back here: the archive's folder is taken, the partial one put aside."""
    folder, _ = run()
    (folder / manifest.DONE).unlink()
    (folder / unit_name(3)).unlink()
    _, body = run()
    assert body.made == []
    assert outputs(folder) == expected_outputs()
    assert len(list(folder.parent.glob("01_toy.old-*"))) == 1


def test_archive_root_must_exist(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(tmp_path / "none"))
    body = ToyBody()
    with pytest.raises(ValueError, match=r"SPEC_ARCHIVE_ROOT: got .*none, expected a folder that exists"):
        run_stage(STAGE, toy_config(), body)
    assert body.made == []


def test_archive_root_must_be_writable(archive_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the work, not after it, when the result could not be copied. The tests may run as root, who may
    write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != str(archive_root))
    body = ToyBody()
    with pytest.raises(
        ValueError, match=r"SPEC_ARCHIVE_ROOT: got .*archive, expected a folder that this user can write"
    ):
        run_stage(STAGE, toy_config(), body)
    assert body.made == []
