"""A worker of a stage that is shared out: makes the units it was given, in a process of its own, for its driver.

To the code of the stage it looks like the stage: a context in which finished units are known, files are written and
published. What it publishes goes to the exchange folder, from which the driver takes it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.helpers import Checkpointable

from pipeline import ledger
from pipeline.config import Config
from pipeline.context import StageContext, StageStopped, StopSignals, say
from pipeline.exchange import Exchange
from pipeline.files import TMP_PREFIX, sha256_file
from pipeline.manifest import FileRecord
from pipeline.stage import finished_input

ASK_SECONDS = 60.0
ALIVE = ("RUNNING", "SUSPENDED")


class DriverGoneError(StageStopped):
    """The driver that this worker works for was killed: its successor has workers of its own."""


@dataclass(kw_only=True)
class Driver:
    """Whom a worker works for: a process of this machine, or a Slurm job, or one that cannot be watched."""

    process: int | None = None
    job: str | None = None
    asked: float = field(default=float("-inf"))

    def check(self) -> None:
        """DriverGoneError when it is gone. Slurm is asked once a minute; while it does not answer, work goes on."""
        if self.process is not None and not _is_process(self.process):
            raise DriverGoneError(f"the driver (process {self.process}) is gone")
        if self.job is None or time.monotonic() - self.asked < ASK_SECONDS:
            return
        self.asked = time.monotonic()
        if (state := _job_state(self.job)) not in (None, *ALIVE):
            raise DriverGoneError(f"the driver (job {self.job}) is gone: {state}")


def _is_process(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def _job_state(job: str) -> str | None:
    """As squeue has it; None when that is not to be learned now."""
    try:
        done = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return "unknown to Slurm" if "Invalid job id" in done.stderr else None
    return done.stdout.strip() or "ended"


class HandedOver(ledger.Ledger):
    """What is finished, as a worker sees it: the units that the driver had when it started the worker, and those that
    any worker has handed over since. The ledger's own records are this worker's units."""

    def __init__(self, exchange: Exchange, finished: Collection[str]) -> None:
        super().__init__(exchange.folder / ledger.NAME, {}, {})
        self.exchange, self.finished = exchange, finished

    def __contains__(self, name: object) -> bool:
        return name in self.finished or self.exchange.record(str(name)) is not None


@dataclass(frozen=True, kw_only=True)
class WorkerContext(StageContext):
    """The stage's context in a worker: its folder is the exchange, and it stops when the driver is gone."""

    number: int
    exchange: Exchange
    driver: Driver

    def check_stop(self) -> None:
        self.driver.check()

    def tmp(self, name: str) -> Path:
        return self.exchange.folder / f"{TMP_PREFIX}{socket.gethostname()}-{os.getpid()}-{name}"

    def publish(
        self, tmp: Path, final: str | Path, validate: Callable[[Path], object] | None = None, rows: int = 0
    ) -> FileRecord:
        """Read back, hash and hand over one unit."""
        if validate is not None:
            validate(tmp)
        record = FileRecord(name=str(final), bytes=tmp.stat().st_size, sha256=sha256_file(tmp), rows=rows)
        self.exchange.put(tmp, record)
        self.shards.records[record.name] = record
        self.log(f"worker {self.number}: {record.name} done")
        return record


Make = Callable[[WorkerContext, Sequence[str], Any], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """`make(context, units, given)` makes these units; `given` is what the stage tells its workers, `finished` are the
    units that the driver has already, `inputs` the stages that are read; `environment` is set before torch is imported.
    """

    stage: str
    number: int
    config: Config
    inputs: tuple[str, ...]
    make: Make
    units: tuple[str, ...]
    finished: frozenset[str]
    given: Any
    exchange: Path
    environment: Mapping[str, str]
    driver: Driver


class UnitWorker(Checkpointable):
    """What submitit runs. Preempted or out of time, it is submitted again as it was: finished units stay."""

    def __call__(self, task: Task) -> int:
        """Make the task's units that nobody has made; how many that were."""
        os.environ.update(task.environment)
        say(task.stage, f"worker {task.number}: process {os.getpid()} on {socket.gethostname()}")
        task.driver.check()
        exchange = Exchange(folder=task.exchange)
        ctx = WorkerContext(
            stage=task.stage,
            config=task.config,
            folder=exchange.folder,
            shards=HandedOver(exchange, task.finished),
            inputs={name: finished_input(task.config, name)[0] for name in task.inputs},
            signals=StopSignals(task.stage),
            number=task.number,
            exchange=exchange,
            driver=task.driver,
        )
        task.make(ctx, task.units, task.given)
        return len(ctx.shards)
