"""Where workers run: processes of this machine, or an array of Slurm jobs, behind submitit's one interface."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import UncompletedJobError

from pipeline import archive, site
from pipeline.config import Config
from pipeline.site import COMMENT, RESERVED

# Site facts anew on the worker's node, whose SPEC_DATA_ROOT is its own.
WORKER_SETUP = ['cd "$SPEC_CHECKOUT"', ". slurm/on_node.sh"]


@dataclass(frozen=True, kw_only=True)
class Seats:
    """How many workers share a stage, and the GPUs that each holds, which the setting `gpus_from` says."""

    count: int
    gpus: int
    gpus_from: str


def make_executor(config: Config, seats: Seats, name: str, folder: Path) -> Any:
    """A submitit executor whose logs go to a new folder under `folder`. ValueError when Slurm is asked for not
    there, or without a folder that all nodes see."""
    workers = config.workers
    executor: Any
    # Workers start as `python -m submitit...` and must find this package, wherever the driver was started.
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    logs = folder / f"jobs-{uuid.uuid4().hex[:8]}"  # submitit would read the results of older jobs of the same number
    if workers.executor == "local":
        executor = submitit.LocalExecutor(folder=logs)
        executor.update_parameters(timeout_min=workers.minutes)
        return executor
    if archive.root() is None:
        raise ValueError(
            "workers.executor: slurm needs SPEC_ARCHIVE_ROOT, a folder that all nodes see; set it in env.sh"
        )
    try:
        executor = submitit.SlurmExecutor(folder=logs)
    except RuntimeError as error:
        raise ValueError(f"workers.executor: got slurm, but {error}; run this on a node of the cluster") from error
    executor.update_parameters(job_name=name, **slurm_parameters(config, seats))
    return executor


def map_array(executor: Any, function: Any, tasks: Sequence[Any]) -> list[Any]:
    """Start `function(task)` for each; under Slurm as one array, free of the settings of this process's own job."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        return list(executor.map_array(function, tasks))


def has_ended(job: Any) -> bool:
    """Whether a worker's job is over. Under Slurm the queue says so: sites without accounting have no sacct to ask."""
    if isinstance(job, submitit.SlurmJob):
        return job.paths.result_pickle.exists() or job.job_id not in _queued_ids()
    return bool(job.done())


def is_in_queue(job: Any) -> bool:
    """Whether a worker may hold its GPUs, or get them without being asked for again: also while it is ending."""
    return job.job_id in _queued_ids() if isinstance(job, submitit.SlurmJob) else not job.done()


def failure(job: Any) -> str:
    """Why a job that has ended did so, in a line: the error it raised, or the last words of one that was killed."""
    killed = isinstance(job, submitit.SlurmJob) and not job.paths.result_pickle.exists()
    error = None if killed else job.exception()
    if error is None and not killed:
        return "it stopped early"
    killed = killed or isinstance(error, UncompletedJobError)
    lines = [line.strip() for line in ((job.stderr() or "") if killed else str(error)).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__ if error else "none"
    return f"killed; its last words: {last}" if killed else last


class _Every:
    """Contains everything: the queue is not known, so every job may be in it."""

    def __contains__(self, _: object) -> bool:
        return True


def _queued_ids() -> Container[str]:
    command = ["squeue", "--me", "-h", "-r", "-o", "%i"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return set(done.stdout.split()) if done.returncode == 0 else _Every()


def slurm_parameters(config: Config, seats: Seats) -> dict[str, Any]:
    """One task a job, the seat's GPUs a task (none when the config's jobs have none), and never more at one time than
    slurm/submit.sh has put aside for this stage, or a license or QOS of the site allows.

    ValueError where nothing holds the GPU cap: outside of a job of slurm/submit.sh.
    """
    where, cap = site.slurm_site(), site.gpu_cap()
    each = _gpus_a_job(config, seats)
    if each > cap:
        raise ValueError(f"{seats.gpus_from}: got {each} GPUs a worker, expected at most SPEC_GPU_CAP={cap}")
    if each and where.cap_by == "submitter" and RESERVED not in os.environ:
        raise ValueError(
            "workers.executor: slurm, but this is no job of slurm/submit.sh, which keeps workers within SPEC_GPU_CAP; "
            "submit the stage: slurm/submit.sh STAGE --config FILE"
        )
    licenses = f"{where.license}:{each}" if where.cap_by == "license" and each else None
    names = {"account": where.account, "partition": where.partition, "qos": where.qos, "constraint": where.constraint}
    additional = {"licenses": licenses, "comment": os.environ.get(COMMENT)}
    return {
        "time": config.workers.minutes,
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": config.slurm.cpus,
        "array_parallelism": most_at_once(config, seats),
        "setup": WORKER_SETUP,
        "additional_parameters": _given(additional),
        **_given({"gpus_per_node": each or None, "mem": _memory(config), **names}),
    }


def most_at_once(config: Config, seats: Seats) -> int:
    """How many workers may run at one time: on one machine all, under Slurm as many as their GPUs are put aside for."""
    each = _gpus_a_job(config, seats)
    if config.workers.executor == "local" or not each:
        return seats.count
    cap = site.gpu_cap()
    return max(1, min(seats.count, min(cap, site.whole_number(RESERVED, cap)) // each))


def _gpus_a_job(config: Config, seats: Seats) -> int:
    return seats.gpus if config.slurm.gpus else 0


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


def _memory(config: Config) -> str | None:
    return f"{config.slurm.memory_gib}G" if config.slurm.memory_gib else None


def worker_environment(config: Config, seats: Seats, number: int) -> dict[str, str]:
    """What worker `number` of this machine must not share with the others: its GPUs, or its part of the cores.

    ValueError when the machine has GPUs, but not enough. Under Slurm the job sees to it.
    """
    if config.workers.executor != "local":
        return {}
    gpus, each, count = visible_gpus(), seats.gpus, seats.count
    if not gpus:
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    if len(gpus) < count * each:
        raise ValueError(
            f"workers: got {count} of {each} GPUs each on a machine with {len(gpus)}, "
            f"expected at most {len(gpus) // each}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number * each : (number + 1) * each])}


def visible_gpus() -> Sequence[str]:
    """The GPUs that this process may use, found without touching them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip()]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(index) for index, line in enumerate(found.splitlines()) if line.startswith("GPU")]
