"""The stage contract: done, resumed, stale, forced, stopped; the environment's faults; what done.json says."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_stage import (
    DOWNSTREAM,
    STAGE,
    TINY,
    UNITS,
    ToyBody,
    expected_outputs,
    outputs,
    toy_config,
    unit_name,
    write_to_full_disk,
)

from pipeline import manifest, stage
from pipeline.progress import Progress, duration
from pipeline.stage import BusyError, DiskError, StageStopped, StaleError, run_stage, stage_main

ROOT = TINY.parent.parent


def run(body: ToyBody | None = None, *overrides: str, **options: bool) -> tuple[Path, ToyBody]:
    body = body or ToyBody()
    return run_stage(STAGE, toy_config(*overrides), body, **options), body


def test_a_run_writes_its_files_then_done_json(data_root: Path) -> None:
    folder, _ = run()
    assert folder == data_root / "tiny" / "01_toy"
    assert outputs(folder) == expected_outputs()
    done = json.loads((folder / "done.json").read_text())
    assert done["rows"] == 10 * UNITS
    assert done["summary"] == {"note": "toy"}
    assert [record["rows"] for record in done["files"]] == [10] * UNITS
    assert all(re.fullmatch("[0-9a-f]{64}", record["sha256"]) for record in done["files"])
    assert {"git", "versions", "host", "device", "started", "ended", "config_hash", "command"} <= done.keys()
    assert done["device"]["kind"] == "cpu"
    assert not list(folder.glob(".tmp-*"))


def test_a_finished_stage_is_not_run_again(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run()
    before = (folder / "done.json").read_bytes()
    assert run()[1].made == []
    assert "done already" in capsys.readouterr().err
    assert (folder / "done.json").read_bytes() == before


def test_a_finished_stage_answers_without_heavy_imports(data_root: Path) -> None:
    """A second on a busy machine is not to be tested; what makes it a second is."""
    run()
    code = (
        "import sys; sys.path.insert(0, 'tests'); import toy_stage; "
        f"assert toy_stage.main(['--config', {str(TINY)!r}]) == 0; "
        "assert not {'torch', 'transformers', 'numpy', 'datasets', 'reasoning_gym'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "done already" in result.stderr


def interrupt_at(number: int) -> ToyBody:
    def before_unit(ctx: stage.StageContext, unit: int) -> None:
        if unit == number:
            raise RuntimeError("power cut")

    return ToyBody(before_unit)


def test_a_half_done_stage_continues_where_it_was(data_root: Path) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        run(interrupt_at(2))
    folder, body = run()
    assert body.made == [2, 3]
    assert outputs(folder) == expected_outputs()


@pytest.mark.parametrize("damage", ["truncated", "edited", "missing"])
def test_a_damaged_unit_is_noticed_at_resume_and_made_again(
    data_root: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    with pytest.raises(RuntimeError):
        run(interrupt_at(3))
    victim = data_root / "tiny" / "01_toy" / unit_name(1)
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(content[:-1] if damage == "truncated" else b"x" + content[1:])
    folder, body = run()
    assert body.made == [1, 3]
    assert outputs(folder) == expected_outputs()
    assert f"{unit_name(1)} " in capsys.readouterr().err


@pytest.mark.parametrize("tail", [b'{"name": "unit-9.b', b"\x00\x00\x00"])
def test_a_torn_progress_line_is_cut_off(data_root: Path, tail: bytes) -> None:
    with pytest.raises(RuntimeError):
        run(interrupt_at(2))
    progress = data_root / "tiny" / "01_toy" / "progress.jsonl"
    progress.write_bytes(progress.read_bytes() + tail)
    folder, body = run()
    assert body.made == [2, 3]
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    assert [line["name"] for line in lines[1:]] == [unit_name(number) for number in range(UNITS)]
    assert outputs(folder) == expected_outputs()


def test_leftovers_of_a_killed_process_are_cleared(data_root: Path) -> None:
    with pytest.raises(RuntimeError):
        run(interrupt_at(1))
    leftover = data_root / "tiny" / "01_toy" / ".tmp-unit-1.bin"
    leftover.write_bytes(b"half")
    folder, _ = run()
    assert not leftover.exists()
    assert outputs(folder) == expected_outputs()


def test_an_invalid_unit_is_not_published(data_root: Path) -> None:
    def body(ctx: stage.StageContext) -> dict[str, int]:
        ctx.tmp("unit-0.bin").write_bytes(b"short")
        ctx.publish(ctx.tmp("unit-0.bin"), "unit-0.bin", validate=ToyBody.validate)
        return {"rows": 1}

    with pytest.raises(ValueError, match="got 5 bytes, expected 2048"):
        run_stage(STAGE, toy_config(), body)
    assert outputs(data_root / "tiny" / "01_toy") == {}


@pytest.mark.parametrize("finished", [True, False])
def test_changed_config_is_stale_and_shown(data_root: Path, finished: bool) -> None:
    with pytest.raises(RuntimeError):
        run(interrupt_at(2))
    if finished:
        run()
    with pytest.raises(StaleError) as error:
        run(None, "traces.seed=5", "traces.temperatures=[0.5]")
    assert "config.traces.seed: 0 -> 5" in str(error.value)
    assert "config.traces.temperatures: [1.0] -> [0.5]" in str(error.value)
    assert "--force" in str(error.value)


def test_changed_sections_that_the_stage_does_not_read_do_not_matter(data_root: Path) -> None:
    run()
    assert run(None, "bench_engine.seed=5", "models.dtype=float64")[1].made == []


def test_changed_code_version_is_stale(data_root: Path) -> None:
    run()
    with pytest.raises(StaleError, match="version: 1 -> 2"):
        run_stage(dataclasses.replace(STAGE, version=2), toy_config(), ToyBody())


def test_a_changed_prompt_file_is_stale(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_PROMPTS", str(tmp_path))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    source = "traces.prompts.0.source=jsonl:$SPEC_PROMPTS/p.jsonl"
    run(None, source)
    (tmp_path / "p.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(StaleError, match=r"prompts.traces.arithmetic: "):
        run(None, source)


def test_force_moves_the_old_folder_aside(data_root: Path) -> None:
    run()
    folder, body = run(None, "traces.seed=5", force=True)
    assert body.made == list(range(UNITS))
    assert outputs(folder) == expected_outputs(seed=5)
    (old,) = folder.parent.glob("01_toy.old-*")
    assert outputs(old) == expected_outputs(seed=0)
    assert (old / "done.json").is_file()


def test_force_twice_in_a_second_keeps_both(data_root: Path) -> None:
    for _ in range(3):
        folder, _ = run(force=True)
    assert len(list(folder.parent.glob("01_toy.old-*"))) == 2


def test_a_finished_folder_that_lost_a_file_is_repaired(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run()
    (folder / unit_name(2)).unlink()
    _, body = run()
    assert body.made == [2]
    assert outputs(folder) == expected_outputs()
    assert f"{unit_name(2)} is missing" in capsys.readouterr().err


def test_verify_finds_changed_bytes_of_the_same_size(data_root: Path) -> None:
    folder, _ = run()
    (folder / unit_name(1)).write_bytes(b"x" * 2048)
    assert run()[1].made == []
    assert run(verify=True)[1].made == [1]
    assert outputs(folder) == expected_outputs()


def test_a_folder_of_somebody_else_is_not_written_into(data_root: Path) -> None:
    folder = data_root / "tiny" / "01_toy"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt but no record of a stage"):
        run()


def test_a_manifest_that_is_not_one_is_named(data_root: Path) -> None:
    folder, _ = run()
    (folder / "done.json").write_text("{")
    with pytest.raises(ValueError, match=r"done.json: not a manifest"):
        run()


# Inputs


def run_downstream(*overrides: str) -> tuple[Path, ToyBody]:
    body = ToyBody(lambda ctx, number: ctx.input("01_toy") / unit_name(number))
    return run_stage(DOWNSTREAM, toy_config(*overrides), body), body


def test_a_stage_needs_its_inputs_finished(data_root: Path) -> None:
    with pytest.raises(ValueError, match=r"input 01_toy is not finished in .*; run that stage first"):
        run_downstream()
    run()
    assert run_downstream()[1].made == list(range(UNITS))


def test_a_changed_input_is_stale_and_an_identical_one_is_not(data_root: Path) -> None:
    run()
    run_downstream()
    run(force=True)
    assert run_downstream()[1].made == []
    run(None, "traces.seed=5", force=True)
    with pytest.raises(StaleError, match=r"inputs\.01_toy: "):
        run_downstream("traces.seed=5")


def test_an_input_made_from_other_settings_than_this_config_is_refused(data_root: Path) -> None:
    run()
    with pytest.raises(StaleError, match=r"input 01_toy in .* was made from other settings(.|\n)*seed: 0 -> 5"):
        run_downstream("traces.seed=5")


def test_a_damaged_input_is_refused(data_root: Path) -> None:
    folder, _ = run()
    (folder / unit_name(0)).write_bytes(b"")
    with pytest.raises(ValueError, match=r"unit-0.bin has 0 bytes, expected 2048"):
        run_downstream()


# Stopping, locks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_stage_after_the_unit_at_hand(data_root: Path, number: signal.Signals) -> None:
    def before_unit(ctx: stage.StageContext, unit: int) -> None:
        if unit == 2:
            os.kill(os.getpid(), number)
            assert ctx.stopping

    with pytest.raises(StageStopped, match="2 finished files kept"):
        run(ToyBody(before_unit))
    assert run()[1].made == [2, 3]


def test_a_body_that_only_returns_early_is_not_taken_for_done(data_root: Path) -> None:
    def body(ctx: stage.StageContext) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"rows": 0}

    with pytest.raises(StageStopped):
        run_stage(STAGE, toy_config(), body)
    assert manifest.read(data_root / "tiny" / "01_toy") is None


def test_signal_handlers_are_put_back(data_root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def running(data_root: Path) -> Iterator[subprocess.Popen[str]]:
    """The toy stage in another process, in its first unit."""
    command = [sys.executable, str(ROOT / "tests" / "toy_stage.py"), "--config", str(TINY)]
    environment = {**os.environ, "TOY_SLEEP": "600", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while not (data_root / "tiny" / "01_toy" / "progress.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def test_two_processes_do_not_run_a_stage_at_once(data_root: Path, running: subprocess.Popen[str]) -> None:
    with pytest.raises(BusyError, match=rf"run by another process.*\(held by process {running.pid} on"):
        run()
    running.kill()
    running.wait()
    assert outputs(run()[0]) == expected_outputs()


# The environment's faults


def test_data_root_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_DATA_ROOT", raising=False)
    with pytest.raises(ValueError, match=r"SPEC_DATA_ROOT is not set; .*env\.sh"):
        run()


def test_data_root_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"SPEC_DATA_ROOT: got .*none, expected a folder that exists"):
        run()


def test_data_root_must_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", "/proc/self")  # read-only for root too
    with pytest.raises(ValueError, match=r"SPEC_DATA_ROOT: .*(can write to|cannot create)"):
        run()


def test_too_little_free_space_is_said_before_the_work(data_root: Path) -> None:
    body = ToyBody()
    with pytest.raises(DiskError, match=r"MiB free under .*, 01_toy needs \d+ MiB to start"):
        run_stage(dataclasses.replace(STAGE, free_bytes=1 << 60), toy_config(), body)
    assert body.made == []


def full_disk(ctx: stage.StageContext, number: int) -> None:
    if number == 2:
        write_to_full_disk()


def test_a_full_disk_is_said_and_costs_one_unit(data_root: Path) -> None:
    with pytest.raises(DiskError, match=r"the disk is full .*finished units are kept"):
        run(ToyBody(full_disk))
    folder, body = run()
    assert body.made == [2, 3]
    assert outputs(folder) == expected_outputs()


def test_a_full_disk_while_recording_progress_leaves_no_torn_line(
    data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    progress = data_root / "tiny" / "01_toy" / "progress.jsonl"

    def short_write(descriptor: int, data: bytes) -> int:
        is_ledger = os.path.samestat(os.fstat(descriptor), progress.stat())
        return write(descriptor, data[:20] if is_ledger and b"unit-2" in data else data)

    monkeypatch.setattr(os, "write", short_write)
    with pytest.raises(DiskError, match="the disk is full"):
        run()
    assert progress.read_bytes().endswith(b"}\n")
    monkeypatch.undo()
    monkeypatch.setenv("SPEC_DATA_ROOT", str(data_root))
    assert run()[1].made == [2, 3]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk takes root")
def test_a_small_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All errors at once: writing, renaming, recording on a disk of 16 KiB; larger ones let the run go on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        monkeypatch.setenv("SPEC_DATA_ROOT", str(disk))
        with pytest.raises(DiskError, match="the disk is full"):
            run()
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        folder, body = run()
        assert 0 < len(body.made) <= UNITS
        assert outputs(folder) == expected_outputs()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_other_errors_of_a_body_pass_through(data_root: Path) -> None:
    def before_unit(ctx: stage.StageContext, unit: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with pytest.raises(OSError, match="input/output error"):
        run(ToyBody(before_unit))


# Command line


def test_exit_codes(data_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(TINY)]
    stop = ToyBody(lambda ctx, unit: os.kill(os.getpid(), signal.SIGTERM))
    assert stage_main(STAGE, stop, config) == stage.EXIT_STOPPED == 75
    assert stage_main(STAGE, ToyBody(full_disk), config) == stage.EXIT_DISK == 74
    assert stage_main(STAGE, ToyBody(), config) == stage.EXIT_DONE == 0
    assert stage_main(STAGE, ToyBody(), [*config, "--set", "traces.seed=5"]) == stage.EXIT_STALE == 3
    assert stage_main(STAGE, ToyBody(), [*config, "--set", "traces.seed=5", "--force"]) == 0
    assert stage_main(STAGE, ToyBody(), [*config, "--set", "traces.sed=5"]) == stage.EXIT_USER == 2
    assert "did you mean 'seed'?" in capsys.readouterr().err
    monkeypatch.delenv("SPEC_DATA_ROOT")
    assert stage_main(STAGE, ToyBody(), config) == 2


def test_exit_code_when_another_process_runs_it(data_root: Path, running: subprocess.Popen[str]) -> None:
    assert stage_main(STAGE, ToyBody(), ["--config", str(TINY)]) == stage.EXIT_BUSY == 4


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_output(stream: io.StringIO, seconds: list[float]) -> str:
    now = [0.0]
    with Progress("toy", 10, "shards", done=2, stream=stream, clock=lambda: now[0]) as progress:
        for now[0] in seconds:
            progress.update()
    return stream.getvalue()


def test_progress_in_a_log_is_a_line_every_30_seconds() -> None:
    lines = progress_output(io.StringIO(), [10, 20, 31, 40, 62]).splitlines()
    assert lines == [
        "toy 5/10 shards, 0.0968 shards/s, 52 s left",
        "toy 7/10 shards, 0.0806 shards/s, 37 s left",
    ]


def test_progress_on_a_terminal_is_a_bar() -> None:
    text = progress_output(Terminal(), [1, 2, 3])
    assert text.count("\r") == 3
    assert text.endswith("\n")
    assert "[############............] toy 5/10 shards, 1 shards/s, 5 s left" in text


def test_durations_in_words() -> None:
    assert [duration(s) for s in (5, 185, 7800)] == ["5 s", "3 min 05 s", "2 h 10 min"]


def test_a_stage_that_failed_before_its_first_unit_takes_other_settings(data_root: Path) -> None:
    """A wrong path is corrected and the stage started again: nothing is there that --force would have to move."""

    def fail(ctx: Any, number: int) -> None:
        if number == at:
            raise ValueError("no such folder")

    at = 0
    with pytest.raises(ValueError, match="no such folder"):
        run_stage(STAGE, toy_config("traces.seed=1"), ToyBody(fail))
    run_stage(STAGE, toy_config("traces.seed=2"), ToyBody())
    at = 1
    with pytest.raises(ValueError, match="no such folder"):
        run_stage(STAGE, toy_config("run=second", "traces.seed=1"), ToyBody(fail))
    with pytest.raises(StaleError, match="holds unfinished work made from other settings"):
        run_stage(STAGE, toy_config("run=second", "traces.seed=2"), ToyBody())
