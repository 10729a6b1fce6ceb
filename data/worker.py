"""A worker of stage 01: makes the shards it was given, one after the other, in an engine of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.helpers import Checkpointable

from data.exchange import Exchange, ShardRecord
from pipeline.config import Config
from pipeline.context import say
from pipeline.files import TMP_PREFIX, sha256_file


@dataclass(frozen=True, kw_only=True)
class Task:
    """`shards` are names, `finished` the tokens of shards that the driver has already, `environment` what is set before
    torch is imported. On one machine `driver` is the driver's process id: a worker ends with it."""

    stage: str
    number: int
    config: Config
    shards: tuple[str, ...]
    finished: Mapping[str, int]
    exchange: Path
    environment: Mapping[str, str]
    driver: int | None


class DriverGoneError(RuntimeError):
    """The driver that this worker works for was killed."""


class ShardWorker(Checkpointable):
    """What submitit runs. Preempted or out of time, it is submitted again as it was: finished shards stay."""

    def __call__(self, task: Task) -> int:
        """Make the task's shards that nobody has made; how many that were."""
        os.environ.update(task.environment)
        from data.items import all_items, cut
        from data.tracer import make_tracer

        exchange = Exchange(folder=task.exchange)
        say(task.stage, f"worker {task.number}: process {os.getpid()} on {socket.gethostname()}")
        items = all_items(task.config.traces)
        shards = cut(items, task.config.traces.shard_size)
        names = [shard.name for shard in shards]
        tracer, made = None, 0
        for shard in shards:
            if shard.name not in task.shards or exchange.record(shard.name) is not None:
                continue
            if is_budget_reached(task, exchange, names):
                break
            tracer = tracer or make_tracer(task.config, items)
            make_shard(task, exchange, tracer, shard)
            made += 1
            say(task.stage, f"worker {task.number}: {shard.name} done")
        return made


def make_shard(task: Task, exchange: Exchange, tracer: Any, shard: Any) -> None:
    """Generate, write, read back and hand over one shard."""
    from data.shards import read_shard, write_shard

    records, skipped = tracer.trace(shard.items, lambda: check_driver(task.driver))
    tmp = exchange.folder / f"{TMP_PREFIX}{socket.gethostname()}-{os.getpid()}-{shard.name}"
    write_shard(tmp, records, skipped)
    read_shard(tmp)
    tokens = sum(len(record.completion_ids) for record in records)
    exchange.put(tmp, ShardRecord(name=shard.name, rows=len(records), tokens=tokens, sha256=sha256_file(tmp)))


def is_budget_reached(task: Task, exchange: Exchange, names: Sequence[str]) -> bool:
    """Whether the shards that are finished without a gap, from the first on, hold the token budget."""
    budget, tokens = task.config.traces.token_budget, 0
    if budget is None:
        return False
    for name in names:
        record = exchange.record(name)
        if record is None and name not in task.finished:
            return False
        tokens += task.finished[name] if record is None else record.tokens
        if tokens >= budget:
            return True
    return False


def check_driver(driver: int | None) -> None:
    """DriverGoneError when the driver's process on this machine is gone: its successor has workers of its own."""
    if driver is None:
        return
    try:
        os.kill(driver, 0)
    except ProcessLookupError as error:
        raise DriverGoneError(f"the driver (process {driver}) is gone") from error
