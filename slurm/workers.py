"""Jobs that a stage starts itself: within its share of the GPU cap while it runs, and never left behind.

The stage's job ends its workers when it ends. Where it could not (it was killed whole, or its node failed), a small job
behind it does (slurm/end_workers.sh). That one has the stage's slots of the cap too, so whatever is to use these GPUs
next, submitted before or afterwards, starts when no worker is left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from pipeline import site
from pipeline.config import Config
from pipeline.context import say
from slurm import cap, client
from slurm.render import Script
from slurm.resources import fans_out, resources

END_SECONDS = 120
ENDER_MINUTES = 60


@contextlib.contextmanager
def workers_of(job: str, config: Config, stage: str) -> Iterator[None]:
    """Around a stage that starts jobs of its own: it learns how many GPUs these may hold, and none is left behind, of
    this start or of one before that was killed."""
    asked = resources(config, stage, site.slurm_site())
    if not fans_out(config, stage):
        yield
        return
    mark = cap.comment_of_workers(job)
    os.environ[site.COMMENT] = mark
    if asked.worker_gpus:
        os.environ[site.RESERVED] = str(asked.worker_gpus)
    end_jobs(stage, mark)
    try:
        yield
    finally:
        end_jobs(stage, mark)


def end_jobs(stage: str, mark: str) -> None:
    """Cancel this user's jobs with this comment, and wait until they are gone."""
    end = time.monotonic() + END_SECONDS
    while left := [each.number for each in client.queue() if each.comment == mark]:
        client.cancel(left)
        if time.monotonic() > end:
            say(stage, f"workers {', '.join(map(str, left))} do not end")
            return
        time.sleep(1)


def submit_ender(script: Script, driver: int, comment: str | None) -> int:
    """The job behind a driver that ends what it has left behind; it asks for what the driver asks for, but for time."""
    asked = script.asked
    options = [
        f"--job-name={script.name}-end",
        f"--output={script.logs / f'{script.stage}-%j.end.log'}",
        "--open-mode=append",
        "--requeue",
        "--ntasks=1",
        f"--time={ENDER_MINUTES}",
        f"--dependency=afterany:{driver}",
        *([f"--comment={comment}"] if comment else []),
        *([f"--mem={asked.memory_gib}G"] if asked.memory_gib else []),
        *script.places(),
        *asked.extra,
    ]
    return client.submit(str(script.checkout / "slurm" / "end_workers.sh"), options, [cap.comment_of_workers(driver)])
