"""A stage by several workers: the driver, which loads no model.

Worker w of W makes the missing groups of units w, w + W, ...; the driver takes finished units over as they come,
checks and publishes them, starts a worker that died again for the units it owes, and gives up on one that died several
times in a row without having finished a unit.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.exchange import Exchange
from pipeline.executors import (
    Seats,
    failure,
    has_ended,
    is_in_queue,
    make_executor,
    map_array,
    most_at_once,
    worker_environment,
)
from pipeline.files import sha256_file
from pipeline.models import check_draft, resolve
from pipeline.stage import StageContext
from pipeline.worker import Driver, Make, Task, UnitWorker

if TYPE_CHECKING:
    from pipeline.progress import Progress

POLL_SECONDS = {"local": 0.1, "slurm": 5.0}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage shares out.

    `wanted()` are all its units, in order, as far as is known; `make` is called in a worker with some of them and with
    what `given()` is when that worker is started. A group of units is made by one worker; `waves` of groups are made
    one after the other, each by as many workers as there are `seats`. Only units that `validate` accepts are taken;
    with `in_order` none before those in front of it.
    """

    wanted: Callable[[], Sequence[str]]
    waves: Sequence[Sequence[Sequence[str]]]
    make: Make
    given: Callable[[], Any]
    validate: Callable[[Path], object]
    seats: Seats
    in_order: bool = False


@dataclass(kw_only=True)
class Post:
    """One worker's place: its job, the units it owes, how often it died in a row without finishing one."""

    number: int
    units: tuple[str, ...]
    job: Any
    left: int
    failures: int = 0


class FanOut:
    """The driver's work for one run of the stage. ValueError where workers cannot be had."""

    def __init__(self, ctx: StageContext, work: Work, progress: Progress) -> None:
        self.ctx, self.work, self.progress = ctx, work, progress
        self.workers = ctx.config.workers
        check_draft(ctx.config.models)
        resolve(ctx.config.models.target)  # fetched once, not by every worker
        self.exchange = Exchange.of_run(ctx.config.run, ctx.stage, ctx.shards.header["fingerprint"])
        self.executor = make_executor(ctx.config, work.seats, f"{ctx.config.run}-{ctx.stage}", self.exchange.folder)

    def run(self) -> None:
        """Until every wanted unit is published. ValueError when a worker keeps failing; StageStopped."""
        finished = len(self.ctx.shards)
        self.gather()
        if len(self.ctx.shards) > finished:
            taken = len(self.ctx.shards) - finished
            self.ctx.log(f"{taken} finished units taken over from workers of an earlier driver")
        for groups in self.work.waves:
            self.run_wave(groups)

    def run_wave(self, groups: Sequence[Sequence[str]]) -> None:
        """Share these groups out and take over what comes, until nothing of them is missing."""
        missing = set(self.missing())
        owed = [units for group in groups if (units := tuple(name for name in group if name in missing))]
        if not owed:
            return
        count = min(self.work.seats.count, len(owed))
        shares = [tuple(name for units in owed[number::count] for name in units) for number in range(count)]
        posts = [Post(number=number, units=units, job=None, left=len(units)) for number, units in enumerate(shares)]
        self.ctx.log(f"{count} workers ({self.workers.executor}); their logs are in {self.executor.folder}")
        self.start(posts)
        try:
            self.watch(posts)
        finally:
            for post in posts:
                if post.job is not None and not has_ended(post.job):
                    post.job.cancel()

    def missing(self) -> list[str]:
        """The wanted units that are not published."""
        return [name for name in self.work.wanted() if name not in self.ctx.shards]

    def start(self, posts: Sequence[Post]) -> None:
        """Submit workers, several as one array."""
        if posts:
            jobs = map_array(self.executor, UnitWorker(), [self.task(post) for post in posts])
            for post, job in zip(posts, jobs, strict=True):
                post.job = job

    def task(self, post: Post) -> Task:
        """What the worker is sent."""
        is_local = self.workers.executor == "local"
        return Task(
            stage=self.ctx.stage,
            number=post.number,
            config=self.ctx.config,
            inputs=tuple(self.ctx.inputs),
            make=self.work.make,
            units=post.units,
            finished=frozenset(self.ctx.shards),
            given=self.work.given(),
            exchange=self.exchange.folder,
            environment=worker_environment(self.ctx.config, self.work.seats, post.number),
            driver=Driver(process=os.getpid()) if is_local else Driver(job=os.environ.get("SLURM_JOB_ID")),
        )

    def watch(self, posts: Sequence[Post]) -> None:
        """Take units over and restart workers until nothing that they owe is missing."""
        owed = {name for post in posts for name in post.units}
        while missing := owed.intersection(self.missing()):
            self.ctx.check_stop()
            ended = [post for post in posts if missing.intersection(post.units) and has_ended(post.job)]
            self.gather()
            for post in ended:
                if self.has_room(posts):
                    self.restart(post)
            time.sleep(POLL_SECONDS[self.workers.executor])

    def has_room(self, posts: Sequence[Post]) -> bool:
        """Whether one more worker may run: the array's limit does not count a worker that is started again."""
        return sum(is_in_queue(post.job) for post in posts) < most_at_once(self.ctx.config, self.work.seats)

    def restart(self, post: Post) -> None:
        """Start a worker that has ended again if it still owes units; ValueError when it has failed too often."""
        missing = set(self.missing())
        owed = tuple(name for name in post.units if name in missing)
        if not owed:
            return
        reason = failure(post.job)
        post.failures = post.failures + 1 if len(owed) == post.left else 0
        if post.failures > self.workers.retries:
            raise ValueError(
                f"worker {post.number} failed {post.failures} times without finishing a unit; the first it owes is "
                f"{owed[0]}. The last failure: {reason}. Its log: {post.job.paths.stderr}"
            )
        self.ctx.log(f"worker {post.number} ended with {len(owed)} units to do ({reason}); starting it again")
        post.units, post.left = owed, len(owed)
        self.start([post])

    def gather(self) -> None:
        """Publish what workers have finished: with `in_order` none behind a gap, and none behind the last wanted."""
        for name in self.work.wanted():
            if name in self.ctx.shards:
                continue
            if self.exchange.record(name) is not None:
                self.take(name)
            if self.work.in_order and (name not in self.ctx.shards or name == self.work.wanted()[-1]):
                return

    def take(self, name: str) -> None:
        """Copy one unit into the stage's folder, or forget it if its bytes are not those its worker wrote.

        The worker's copy stays until the stage is done: the stage's folder may be on a disk of this node alone.
        """
        record, tmp = self.exchange.record(name), self.ctx.tmp(name)
        assert record is not None, "only finished units are taken"
        shutil.copyfile(self.exchange.folder / name, tmp)
        if sha256_file(tmp) != record.sha256:
            self.ctx.log(f"{name} has another sha256 than when its worker wrote it; making it again")
            self.exchange.forget(name)
            return
        self.ctx.publish(tmp, name, validate=self.work.validate, rows=record.rows)
        self.progress.update()
