"""Stage 01 by several workers: the files of a single process, whatever dies in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from data import fan_out, worker
from data.exchange import Exchange, ShardRecord
from data.executors import make_executor, slurm_parameters, visible_gpus, worker_environment
from data.gen_traces import STAGE, body
from data.shards import read_notes
from data.worker import DriverGoneError, ShardWorker, Task, check_driver
from pipeline import manifest
from pipeline.config import load_config
from pipeline.stage import run_stage

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
SMALL = ("traces.shard_size=1", "traces.max_tokens=6")


class HereJob:
    """A job that runs when somebody first asks whether it is done, in this process."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.error, self.ran = work, None, False
        self.paths = SimpleNamespace(stderr="worker.err")

    def done(self) -> bool:
        if not self.ran:
            self.ran = True
            try:
                self.work()
            except RuntimeError as error:
                self.error = error
        return True

    def exception(self) -> Exception | None:
        return self.error


class HereExecutor:
    """submitit's interface without processes; notes the tasks it was given."""

    def __init__(self) -> None:
        self.folder, self.tasks = "here", []  # type: ignore[var-annotated]

    def map_array(self, function: Callable[[Task], int], tasks: Sequence[Task]) -> list[HereJob]:
        self.tasks += tasks
        return [HereJob(lambda task=task: function(task)) for task in tasks]


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


def fail_when(monkeypatch: pytest.MonkeyPatch, holds: Callable[[Task, Any], bool]) -> None:
    """Workers die before the shards for which `holds`."""
    make = worker.make_shard

    def dying(task: Task, exchange: Exchange, tracer: Any, shard: Any) -> None:
        if holds(task, shard):
            raise RuntimeError("out of luck")
        make(task, exchange, tracer, shard)

    monkeypatch.setattr(worker, "make_shard", dying)


def test_two_workers_make_the_files_of_one_process(data_root: Path, here: HereExecutor) -> None:
    whole = contents(run("run=one"))
    folder = run("run=two", "workers.count=2")
    assert len(whole) == 6
    assert contents(folder) == whole
    assert [task.shards[0] for task in here.tasks] == ["shard-00000.parquet", "shard-00001.parquet"]
    assert not list((data_root / "two").glob(".*/*")), "the workers' folder goes when the stage is done"
    done = [json.loads((data_root / name / STAGE.name / "done.json").read_text()) for name in ("one", "two")]
    assert done[0]["files"] == done[1]["files"]
    assert run("run=two", "workers.count=3") == folder, "the number of workers is no part of the result"


def test_a_worker_that_dies_is_started_again(
    data_root: Path, here: HereExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    died = []

    def once_per_shard(task: Task, shard: Any) -> bool:
        died.append(shard.name)
        return died.count(shard.name) == 1

    whole = contents(run("run=one"))
    fail_when(monkeypatch, once_per_shard)
    assert contents(run("run=two", "workers.count=2", "workers.retries=1")) == whole
    assert "worker 1 ended with 3 shards to do (out of luck); starting it again" in capsys.readouterr().err


def test_a_worker_that_keeps_failing_ends_the_stage(
    data_root: Path, here: HereExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_when(monkeypatch, lambda task, shard: shard.name == "shard-00003.parquet")
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
    fail_when(monkeypatch, lambda task, shard: shard.name > "shard-00003.parquet")
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
    assert "3 shards taken over from workers of an earlier driver" in said
    assert "shard-00002.parquet has another sha256 than when its worker wrote it; making it again" in said
    assert [task.shards for task in here.tasks[before:]] == [
        ("shard-00002.parquet", "shard-00004.parquet", "shard-00005.parquet")
    ]


def test_the_exchange_counts_only_whole_shards(tmp_path: Path) -> None:
    exchange = Exchange(folder=tmp_path)
    (tmp_path / "a").write_bytes(b"half")
    assert exchange.record("a") is None
    record = ShardRecord(name="a", rows=1, tokens=2, sha256="x")
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


def test_workers_of_one_machine_share_its_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(CONFIG, ["workers.count=2", "traces.backend=vllm", "traces.tensor_parallel=2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_gpus() == ["4", "5", "6", "7"]
    assert [worker_environment(config, n) for n in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="got 2 workers of 2 GPUs on a machine with 2, expected at most 1"):
        worker_environment(config, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert worker_environment(config, 1) == {"OMP_NUM_THREADS": "4"}


def test_slurm_workers_stay_within_the_gpu_cap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = ("workers.executor=slurm", "workers.count=16", "workers.minutes=90", "traces.backend=vllm")
    config = load_config(CONFIG, [*slurm, "traces.tensor_parallel=2"])
    monkeypatch.setenv("SPEC_GPU_CAP", "5")
    monkeypatch.setenv("SPEC_SLURM_PARTITION", "big")
    monkeypatch.delenv("SPEC_SLURM_ACCOUNT", raising=False)
    with pytest.raises(ValueError, match=r"no job of slurm/submit.sh, which keeps workers within SPEC_GPU_CAP"):
        slurm_parameters(config)
    monkeypatch.setenv("SPEC_WORKER_GPUS", "4")
    monkeypatch.setenv("SPEC_WORKER_COMMENT", "workers of 7")
    expected = {"time": 90, "nodes": 1, "ntasks_per_node": 1, "gpus_per_node": 2, "array_parallelism": 2}
    found = slurm_parameters(config)
    assert found.items() >= {**expected, "partition": "big"}.items()
    assert found["additional_parameters"] == {"comment": "workers of 7"}
    monkeypatch.setenv("SPEC_GPU_CAP", "abc")
    with pytest.raises(ValueError, match="SPEC_GPU_CAP: got 'abc', expected a whole number of at least 1"):
        slurm_parameters(config)
    monkeypatch.setenv("SPEC_GPU_CAP", "5")
    assert worker_environment(config, 3) == {}
    with pytest.raises(ValueError, match="got 8 GPUs a worker, expected at most SPEC_GPU_CAP=5"):
        slurm_parameters(load_config(CONFIG, [*slurm, "traces.tensor_parallel=8"]))
    with pytest.raises(ValueError, match="slurm needs SPEC_ARCHIVE_ROOT, a folder that all nodes see"):
        make_executor(config, "x", tmp_path)
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch there
    with pytest.raises(ValueError, match=r"workers\.executor: got slurm, but .*run this on a node of the cluster"):
        make_executor(config, "x", tmp_path)


def test_a_worker_ends_with_its_driver() -> None:
    check_driver(None)
    check_driver(os.getpid())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(DriverGoneError, match=f"process {gone.pid}"):
        check_driver(gone.pid)


def test_a_preempted_worker_is_submitted_as_it_was_and_makes_only_the_rest(data_root: Path) -> None:
    config, folder = load_config(CONFIG, SMALL), data_root / "exchange"
    folder.mkdir()
    exchange = Exchange(folder=folder)
    names = ("shard-00001.parquet", "shard-00004.parquet")
    task = Task(
        stage="01", number=0, config=config, shards=names, finished={}, exchange=folder, environment={}, driver=None
    )
    again = ShardWorker().checkpoint(task)
    assert again.args == (task,)
    assert ShardWorker()(task) == 2
    exchange.forget(names[1])
    assert again.function(*again.args) == 1
    assert sorted(contents(folder)) == list(names)


def workers_of(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(driver.pid).children(recursive=True)
    return [child for child in children if "submitit.core._submit" in child.cmdline()]


def start(*overrides: str) -> subprocess.Popen[bytes]:
    options = [option for override in (*overrides, "workers.count=2") for option in ("--set", override)]
    command = [sys.executable, "-m", "data.gen_traces", "--config", str(CONFIG), *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def wait_for_shards(driver: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    while driver.poll() is None and len(contents(folder)) < count:
        time.sleep(0.01)
    assert driver.poll() is None, driver.stderr.read().decode() if driver.stderr else ""


@pytest.mark.slow
def test_real_workers_one_killed_in_the_middle(data_root: Path) -> None:
    """Whether it still owed something when it was killed depends on the machine; the result must not."""
    settings = ("traces.shard_size=1", "traces.max_tokens=60", "traces.temperatures=[1.0, 0.7, 0.5]")
    whole = contents(run_stage(STAGE, load_config(CONFIG, ["run=one", *settings]), body))
    driver = start("run=two", *settings)
    wait_for_shards(driver, data_root / "two" / STAGE.name, 1)
    victim = next(each for each in workers_of(driver))
    victim.send_signal(signal.SIGKILL)
    _, said = driver.communicate(timeout=900)
    assert driver.returncode == 0, said.decode()
    folder = data_root / "two" / STAGE.name
    assert contents(folder) == whole
    done = manifest.read(folder)
    assert done is not None
    assert manifest.damaged(folder, manifest.file_records(done), rehash=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_real_workers_end_with_their_driver_and_the_next_one_goes_on(data_root: Path, number: signal.Signals) -> None:
    settings = ("traces.shard_size=1", "traces.max_tokens=60", "traces.temperatures=[1.0, 0.7, 0.5]")
    whole = contents(run_stage(STAGE, load_config(CONFIG, ["run=one", *settings]), body))
    driver = start("run=two", *settings)
    wait_for_shards(driver, data_root / "two" / STAGE.name, 1)
    workers = workers_of(driver)
    driver.send_signal(number)
    _, said = driver.communicate(timeout=600)
    assert driver.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 75), said.decode()
    _, alive = psutil.wait_procs(workers, timeout=600)
    assert not alive
    driver = start("run=two", *settings)
    _, said = driver.communicate(timeout=900)
    assert driver.returncode == 0, said.decode()
    assert contents(data_root / "two" / STAGE.name) == whole
