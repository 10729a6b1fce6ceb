"""Stage 01 by several workers: the files of a single process, whatever dies in between."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from here_executor import HereExecutor

from data import shared_traces
from data.gen_traces import STAGE, body
from data.shards import read_notes
from pipeline import fan_out, manifest, worker
from pipeline.config import load_config
from pipeline.exchange import Exchange
from pipeline.executors import Seats, make_executor, slurm_parameters, visible_gpus, worker_environment
from pipeline.manifest import FileRecord
from pipeline.stage import run_stage
from pipeline.worker import Driver, DriverGoneError, Task, UnitWorker, WorkerContext

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
SMALL = ("traces.shard_size=1", "traces.max_tokens=6")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> HereExecutor:
    executor = HereExecutor()
    monkeypatch.setattr(fan_out, "make_executor", lambda *_: executor)
    monkeypatch.setitem(fan_out.POLL_SECONDS, "local", 0.0)
    return executor


def run(*overrides: str) -> Path:
    return run_stage(STAGE, load_config(CONFIG, [*SMALL, *overrides]), body)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.parquet"))}


def fail_when(monkeypatch: pytest.MonkeyPatch, holds: Callable[[WorkerContext, Any], bool]) -> None:
    """Workers die before the shards for which `holds`."""
    make = shared_traces.make_shard

    def dying(ctx: WorkerContext, tracer: Any, shard: Any) -> None:
        if holds(ctx, shard):
            raise RuntimeError("out of luck")
        make(ctx, tracer, shard)

    monkeypatch.setattr(shared_traces, "make_shard", dying)


def test_two_workers_make_the_files_of_one_process(data_root: Path, here: HereExecutor) -> None:
    whole = contents(run("run=one"))
    folder = run("run=two", "workers.count=2")
    assert len(whole) == 6
    assert contents(folder) == whole
    assert [task.units[0] for task in here.tasks] == ["shard-00000.parquet", "shard-00001.parquet"]
    assert not list((data_root / "two").glob(".*/*")), "the workers' folder goes when the stage is done"
    done = [json.loads((data_root / name / STAGE.name / "done.json").read_text()) for name in ("one", "two")]
    assert done[0]["files"] == done[1]["files"]
    assert run("run=two", "workers.count=3") == folder, "the number of workers is no part of the result"


def test_a_worker_that_dies_is_started_again(
    data_root: Path, here: HereExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    died = []

    def once_per_shard(ctx: WorkerContext, shard: Any) -> bool:
        died.append(shard.name)
        return died.count(shard.name) == 1

    whole = contents(run("run=one"))
    fail_when(monkeypatch, once_per_shard)
    assert contents(run("run=two", "workers.count=2", "workers.retries=1")) == whole
    assert "worker 1 ended with 3 units to do (out of luck); starting it again" in capsys.readouterr().err


def test_a_worker_that_keeps_failing_ends_the_stage(
    data_root: Path, here: HereExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_when(monkeypatch, lambda ctx, shard: shard.name == "shard-00003.parquet")
    with pytest.raises(ValueError, match=r"worker 1 failed 3 times .* shard-00003\.parquet.*out of luck.*worker\.err"):
        run("workers.count=2")
    assert len(here.tasks) == 2 + 1 + 2  # it made shard 1, and was started again once for that, then twice more


def test_a_budget_cuts_at_the_same_shard_whoever_makes_them(
    data_root: Path, here: HereExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six shards of 6 tokens: a budget of 13 needs the first three, though workers make others first."""
    whole = contents(run("run=all"))
    alone = contents(run("run=one", "traces.token_budget=13"))
    assert list(alone) == list(whole)[:3]
    shared = run("run=two", "traces.token_budget=13", "workers.count=2")
    assert contents(shared) == alone
    done = json.loads((shared / "done.json").read_text())
    assert (done["rows"], done["summary"]["tokens"], len(done["files"])) == (3, 18, 3)
    assert contents(run("run=much", "traces.token_budget=1000", "workers.count=2")) == whole


def test_a_shard_is_read_once_for_the_budget(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all finished shards' metadata after each further one grows with the square of their number."""
    reads: list[str] = []

    def counted(path: Path) -> Any:
        reads.append(path.name)
        return read_notes(path)

    monkeypatch.setattr("data.shards.read_notes", counted)
    run("run=count", "traces.token_budget=1000")
    assert len(set(reads)) == 6
    assert max(map(reads.count, reads)) == 2  # for the budget, and for the summary


def test_a_budget_is_the_same_after_an_interruption(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after one shard, and the first shard damaged after the end: still the first three."""
    alone = contents(run("run=one", "traces.token_budget=13"))
    folder = run("run=cut", "traces.token_budget=13")
    (folder / "shard-00000.parquet").unlink()
    assert contents(run("run=cut", "traces.token_budget=13")) == alone


def test_what_workers_left_is_taken_over_and_a_damaged_shard_is_not(
    data_root: Path, here: HereExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver dies before it takes anything; the next one finds four shards, of which one was edited."""
    whole = contents(run("run=one"))
    take = fan_out.FanOut.gather
    monkeypatch.setattr(fan_out.FanOut, "gather", lambda self: None)
    fail_when(monkeypatch, lambda ctx, shard: shard.name > "shard-00003.parquet")
    with pytest.raises(ValueError, match="failed 1 times"):
        run("run=two", "workers.count=2", "workers.retries=0")
    monkeypatch.undo()
    monkeypatch.setenv("SPEC_DATA_ROOT", str(data_root))
    monkeypatch.setattr(fan_out, "make_executor", lambda *_: here)
    assert fan_out.FanOut.gather is take
    left = sorted((data_root / "two").glob(".*/*/shard-*.parquet"))
    assert len(left) == 4
    left[2].write_bytes(left[2].read_bytes()[:-1])
    before = len(here.tasks)
    assert contents(run("run=two", "workers.count=1")) == whole
    said = capsys.readouterr().err
    assert "3 finished units taken over from workers of an earlier driver" in said
    assert "shard-00002.parquet has another sha256 than when its worker wrote it; making it again" in said
    assert [task.units for task in here.tasks[before:]] == [
        ("shard-00002.parquet", "shard-00004.parquet", "shard-00005.parquet")
    ]


def test_the_exchange_counts_only_whole_shards(tmp_path: Path) -> None:
    exchange = Exchange(folder=tmp_path)
    (tmp_path / "a").write_bytes(b"half")
    assert exchange.record("a") is None
    record = FileRecord(name="a", bytes=5, sha256="x", rows=1)
    (tmp_path / ".tmp-1-a").write_bytes(b"whole")
    exchange.put(tmp_path / ".tmp-1-a", record)
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert exchange.record("a") == record
    (tmp_path / "a").rename(tmp_path / "gone")
    assert exchange.record("a") is None, "somebody deleted the file"
    (tmp_path / "gone").rename(tmp_path / "a")
    exchange.forget("a")
    assert exchange.record("a") is None
    assert list(tmp_path.iterdir()) == []


def seats(count: int, gpus: int) -> Seats:
    return Seats(count=count, gpus=gpus, gpus_from="traces.tensor_parallel")


def test_workers_of_one_machine_share_its_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(CONFIG)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_gpus() == ["4", "5", "6", "7"]
    assert [worker_environment(config, seats(2, 2), n) for n in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="got 2 of 2 GPUs each on a machine with 2, expected at most 1"):
        worker_environment(config, seats(2, 2), 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert worker_environment(config, seats(2, 2), 1) == {"OMP_NUM_THREADS": "4"}


def test_slurm_workers_stay_within_the_gpu_cap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(CONFIG, ["workers.executor=slurm", "workers.minutes=90"])
    monkeypatch.setenv("SPEC_GPU_CAP", "5")
    monkeypatch.setenv("SPEC_SLURM_PARTITION", "big")
    monkeypatch.delenv("SPEC_SLURM_ACCOUNT", raising=False)
    with pytest.raises(ValueError, match=r"no job of slurm/submit.sh, which keeps workers within SPEC_GPU_CAP"):
        slurm_parameters(config, seats(16, 2))
    monkeypatch.setenv("SPEC_WORKER_GPUS", "4")
    monkeypatch.setenv("SPEC_WORKER_COMMENT", "workers of 7")
    expected = {"time": 90, "nodes": 1, "ntasks_per_node": 1, "gpus_per_node": 2, "array_parallelism": 2}
    found = slurm_parameters(config, seats(16, 2))
    assert found.items() >= {**expected, "partition": "big"}.items()
    assert found["additional_parameters"] == {"comment": "workers of 7"}
    monkeypatch.setenv("SPEC_GPU_CAP", "abc")
    with pytest.raises(ValueError, match="SPEC_GPU_CAP: got 'abc', expected a whole number of at least 1"):
        slurm_parameters(config, seats(16, 2))
    monkeypatch.setenv("SPEC_GPU_CAP", "5")
    assert worker_environment(config, seats(16, 2), 3) == {}
    with pytest.raises(ValueError, match="got 8 GPUs a worker, expected at most SPEC_GPU_CAP=5"):
        slurm_parameters(config, seats(16, 8))
    with pytest.raises(ValueError, match="slurm needs SPEC_ARCHIVE_ROOT, a folder that all nodes see"):
        make_executor(config, seats(16, 2), "x", tmp_path)
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch there
    with pytest.raises(ValueError, match=r"workers\.executor: got slurm, but .*run this on a node of the cluster"):
        make_executor(config, seats(16, 2), "x", tmp_path)


def test_a_worker_ends_with_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Driver().check()
    Driver(process=os.getpid()).check()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(DriverGoneError, match=f"process {gone.pid}"):
        Driver(process=gone.pid).check()


@pytest.mark.parametrize(
    "code, out, said, gone",
    [
        (0, "RUNNING", "", False),
        (0, "PENDING", "", True),
        (0, "", "", True),
        (1, "", "slurm_load_jobs error: Invalid job id specified", True),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller", False),
    ],
)
def test_a_worker_of_a_job_ends_with_it_but_not_because_slurm_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str, said: str, gone: bool
) -> None:
    asked: list[list[str]] = []

    def squeue(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, code, out, said)

    monkeypatch.setattr(worker.subprocess, "run", squeue)
    driver = Driver(job="7")
    if gone:
        with pytest.raises(DriverGoneError, match="job 7"):
            driver.check()
    else:
        driver.check()
        driver.check()
    assert len(asked) == 1, "once a minute"


def test_a_preempted_worker_is_submitted_as_it_was_and_makes_only_the_rest(data_root: Path) -> None:
    config, folder = load_config(CONFIG, SMALL), data_root / "exchange"
    folder.mkdir()
    exchange = Exchange(folder=folder)
    names = ("shard-00001.parquet", "shard-00004.parquet")
    task = Task(
        stage="01",
        number=0,
        config=config,
        inputs=(),
        make=shared_traces.make_shards,
        units=names,
        finished=frozenset(),
        given={},
        exchange=folder,
        environment={},
        driver=Driver(),
    )
    again = UnitWorker().checkpoint(task)
    assert again.args == (task,)
    assert UnitWorker()(task) == 2
    exchange.forget(names[1])
    assert again.function(*again.args) == 1
    assert sorted(contents(folder)) == list(names)


REAL = ("run=two", "workers.count=2", "traces.shard_size=1", "traces.max_tokens=20")


def failing_workers(log: Path, *mode: str) -> tuple[int, str]:
    """The driver's exit code and what it said: into a file, as its workers would keep a pipe open."""
    options = [option for override in REAL for option in ("--set", override)]
    command = [sys.executable, "-m", "tests.failing_workers", *mode, "--config", str(CONFIG), *options]
    with log.open("w") as stream:
        code = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=stream, check=False).returncode
    return code, log.read_text()


def workers_of(folder: Path) -> list[psutil.Process]:
    """The workers, also those without a driver, whose jobs lie under this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "submitit.core._submit" in words and any(str(folder) in word for word in words):
                found.append(process)
    return found


@pytest.mark.slow
def test_real_workers_one_killed_in_the_middle(data_root: Path, tmp_path: Path) -> None:
    """Amid the second of its three shards."""
    whole = contents(run_stage(STAGE, load_config(CONFIG, [*REAL, "run=one", "workers.count=0"]), body))
    code, said = failing_workers(tmp_path / "log", "killed")
    assert code == 0, said
    assert re.search(r"worker 0 ended with 2 units to do \(.*\); starting it again", said)
    folder = data_root / "two" / STAGE.name
    assert contents(folder) == whole
    done = manifest.read(folder)
    assert done is not None
    assert manifest.damaged(folder, manifest.file_records(done), rehash=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_real_workers_end_with_their_driver_and_the_next_one_goes_on(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Its workers would wait for ever."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    whole = contents(run_stage(STAGE, load_config(CONFIG, [*REAL, "run=one", "workers.count=0"]), body))
    code, said = failing_workers(tmp_path / "log", "waiting", str(int(number)))
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 75), said
    folder = data_root / "two" / STAGE.name
    assert len(contents(folder)) in {1, 2}, "each worker makes one"
    _, alive = psutil.wait_procs(workers_of(data_root), timeout=600)
    assert not alive
    assert contents(run_stage(STAGE, load_config(CONFIG, REAL), body)) == whole
