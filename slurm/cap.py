"""Never more GPUs of ours at one time than the cap, over every chain of this user.

By default the submitter sees to it. The cap is so many slots; a job that holds g GPUs takes g of them, written into its
comment, and starts only after (afterany) every job in the queue that has one of them. So no slot ever has two running
jobs, Slurm's own dependencies hold it, and nothing has to keep running for it. Looking at the queue and submitting
happen under one lock of the user, so chains that are submitted at the same moment see each other.

A site may hold the cap itself: by a license that only we use, or a QOS with a limit a user (SPEC_SLURM_CAP_BY).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.site import SlurmSite, gpu_cap
from slurm import client
from slurm.client import Job

MARK = "specdec"


@dataclass(frozen=True, kw_only=True)
class Place:
    """`slots` of the cap, and the jobs in the queue that must end first."""

    slots: tuple[int, ...]
    after: tuple[int, ...]


@contextlib.contextmanager
def submitting() -> Iterator[None]:
    """Hold this user's lock on submissions, over all checkouts; the home folder is on every node that submits."""
    folder = Path.home() / ".cache" / MARK
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder / "slurm.lock", "", wait=True):
        yield


def place(gpus: int, jobs: Sequence[Job], chain: Collection[int]) -> Place:
    """Slots for a job of `gpus` GPUs that is behind the jobs of `chain` in any case: first those that are free but for
    these, then those with the fewest jobs."""
    held = {slot: [job.number for job in jobs if slot in slots_of(job)] for slot in range(gpu_cap())}

    def others(slot: int) -> int:
        return len(set(held[slot]) - set(chain))

    slots = sorted(held, key=lambda slot: (others(slot), slot))[:gpus]
    after = {number for slot in slots for number in held[slot]}
    return Place(slots=tuple(sorted(slots)), after=tuple(sorted(after)))


def comment(slots: Sequence[int]) -> str:
    """What a submitted job carries."""
    return f"{MARK} slots={','.join(map(str, slots))}"


def comment_by_hand(gpus: int) -> str:
    """What a job script carries that is submitted without a place."""
    return f"{MARK} gpus={gpus}"


def comment_of_workers(driver: int | str) -> str:
    """What the jobs carry that the job `driver` starts: they are within its share, and so have no slots."""
    return f"{MARK} workers of {driver}"


def slots_of(job: Job) -> set[int]:
    """The slots that a job of ours has; one submitted by hand is taken to have the last ones."""
    listed = re.fullmatch(rf"{MARK} slots=([\d,]+)", job.comment)
    if listed:
        return {int(slot) for slot in listed.group(1).split(",")}
    counted = re.fullmatch(rf"{MARK} gpus=(\d+)", job.comment)
    gpus = int(counted.group(1)) if counted else 0
    return set(range(max(0, gpu_cap() - gpus), gpu_cap()))


def check_site_cap(site: SlurmSite) -> None:
    """ValueError when the license or QOS that is to hold the cap does not hold it at SPEC_GPU_CAP."""
    cap = gpu_cap()
    if site.cap_by == "license":
        assert site.license is not None
        limit, what = client.license_total(site.license), f"the license {site.license}"
    elif site.cap_by == "qos":
        assert site.qos is not None
        limit, what = client.qos_gpu_limit(site.qos), f"the QOS {site.qos}"
    else:
        return
    if limit is None:
        raise ValueError(f"SPEC_SLURM_CAP_BY is {site.cap_by}, but {what} is not there or has no limit; ask the site")
    if limit > cap:
        raise ValueError(
            f"SPEC_GPU_CAP is {cap}, but {what} lets {limit} GPUs run: it does not hold the cap. Set "
            f"SPEC_GPU_CAP={limit}, or SPEC_SLURM_CAP_BY=submitter"
        )
