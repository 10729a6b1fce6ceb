"""Stage 01 by several workers: the driver, which loads no model.

Worker w of W makes the missing shards w, w + W, ...; the driver takes finished shards over as they come, checks and
publishes them, starts a worker that died again for the shards it owes, and gives up on one that died several times in a
row without having finished a shard.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.exchange import Exchange
from data.executors import (
    failure,
    has_ended,
    is_in_queue,
    make_executor,
    map_array,
    most_at_once,
    worker_environment,
)
from data.gen_traces import missing_shards, wanted_shards
from data.items import Shard
from data.shards import read_notes, read_shard
from data.worker import ShardWorker, Task
from pipeline.files import sha256_file
from pipeline.models import check_draft, resolve
from pipeline.stage import StageContext

if TYPE_CHECKING:
    from pipeline.progress import Progress

POLL_SECONDS = {"local": 0.1, "slurm": 5.0}


@dataclass(kw_only=True)
class Post:
    """One worker's place: its job, the shards it owes, how often it died in a row without finishing one."""

    number: int
    shards: tuple[str, ...]
    job: Any
    left: int
    failures: int = 0


class FanOut:
    """The driver's work for one run of the stage."""

    def __init__(self, ctx: StageContext, shards: Sequence[Shard], progress: Progress) -> None:
        self.ctx, self.shards, self.progress = ctx, shards, progress
        self.workers = ctx.config.workers
        check_draft(ctx.config.models)
        resolve(ctx.config.models.target)  # fetched once, not by every worker
        self.exchange = Exchange.of_run(ctx.config.run, ctx.stage, ctx.shards.header["fingerprint"])
        self.executor = make_executor(ctx.config, f"{ctx.config.run}-{ctx.stage}", self.exchange.folder)

    def run(self) -> None:
        """Until every wanted shard is published. ValueError when a worker keeps failing; StageStopped."""
        finished = len(self.ctx.shards)
        self.gather()
        if len(self.ctx.shards) > finished:
            self.ctx.log(f"{len(self.ctx.shards) - finished} shards taken over from workers of an earlier driver")
        missing = [shard.name for shard in missing_shards(self.ctx, self.shards)]
        count = min(self.workers.count, len(missing))
        posts = [
            Post(number=number, shards=tuple(missing[number::count]), job=None, left=len(missing[number::count]))
            for number in range(count)
        ]
        self.ctx.log(f"{count} workers ({self.workers.executor}); their logs are in {self.executor.folder}")
        self.start(posts)
        try:
            self.watch(posts)
        finally:
            for post in posts:
                if post.job is not None and not has_ended(post.job):
                    post.job.cancel()
        self.exchange.remove()

    def start(self, posts: Sequence[Post]) -> None:
        """Submit workers, several as one array."""
        if posts:
            jobs = map_array(self.executor, ShardWorker(), [self.task(post) for post in posts])
            for post, job in zip(posts, jobs, strict=True):
                post.job = job

    def task(self, post: Post) -> Task:
        """What the worker is sent."""
        return Task(
            stage=self.ctx.stage,
            number=post.number,
            config=self.ctx.config,
            shards=post.shards,
            finished={name: read_notes(self.ctx.folder / name).tokens for name in self.ctx.shards},
            exchange=self.exchange.folder,
            environment=worker_environment(self.ctx.config, post.number),
            driver=os.getpid() if self.workers.executor == "local" else None,
        )

    def watch(self, posts: Sequence[Post]) -> None:
        """Take shards over and restart workers until nothing is missing."""
        while missing := {shard.name for shard in missing_shards(self.ctx, self.shards)}:
            self.ctx.check_stop()
            ended = [post for post in posts if missing.intersection(post.shards) and has_ended(post.job)]
            self.gather()
            for post in ended:
                if self.has_room(posts):
                    self.restart(post)
            time.sleep(POLL_SECONDS[self.workers.executor])

    def has_room(self, posts: Sequence[Post]) -> bool:
        """Whether one more worker may run: the array's limit does not count a worker that is started again."""
        return sum(is_in_queue(post.job) for post in posts) < most_at_once(self.ctx.config)

    def restart(self, post: Post) -> None:
        """Start a worker that has ended again if it still owes shards; ValueError when it has failed too often."""
        missing = {shard.name for shard in missing_shards(self.ctx, self.shards)}
        owed = tuple(name for name in post.shards if name in missing)
        if not owed:
            return
        reason = failure(post.job)
        post.failures = post.failures + 1 if len(owed) == post.left else 0
        if post.failures > self.workers.retries:
            raise ValueError(
                f"worker {post.number} failed {post.failures} times without finishing a shard; the first it owes is "
                f"{owed[0]}. The last failure: {reason}. Its log: {post.job.paths.stderr}"
            )
        self.ctx.log(f"worker {post.number} ended with {len(owed)} shards to do ({reason}); starting it again")
        post.shards, post.left = owed, len(owed)
        self.start([post])

    def gather(self) -> None:
        """Publish what workers have finished: with a token budget in order only, and none behind its end."""
        for shard in wanted_shards(self.ctx, self.shards):
            if shard.name in self.ctx.shards:
                continue
            if self.exchange.record(shard.name) is not None:
                self.take(shard)
            if self.ctx.config.traces.token_budget is None:
                continue
            if shard.name not in self.ctx.shards or shard == wanted_shards(self.ctx, self.shards)[-1]:
                return

    def take(self, shard: Shard) -> None:
        """Copy one shard into the stage's folder, or forget it if its bytes are not those its worker wrote.

        The worker's copy stays until the stage is done: the stage's folder may be on a disk of this node alone.
        """
        record, tmp = self.exchange.record(shard.name), self.ctx.tmp(shard.name)
        assert record is not None, "only finished shards are taken"
        shutil.copyfile(self.exchange.folder / shard.name, tmp)
        if sha256_file(tmp) != record.sha256:
            self.ctx.log(f"{shard.name} has another sha256 than when its worker wrote it; making it again")
            self.exchange.forget(shard.name)
            return
        self.ctx.publish(tmp, shard.name, validate=read_shard, rows=record.rows)
        self.progress.update()
