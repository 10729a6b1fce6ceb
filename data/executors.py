"""Where workers run: processes of this machine, or an array of Slurm jobs, behind submitit's one interface."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit

from pipeline import archive
from pipeline.config import Config

GPU_CAP = 4  # without SPEC_GPU_CAP


def make_executor(config: Config, name: str, folder: Path) -> Any:
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
    executor.update_parameters(job_name=name, **slurm_parameters(config))
    return executor


def slurm_parameters(config: Config) -> dict[str, Any]:
    """One task a job, `tensor_parallel` GPUs a task, never more GPUs at once than SPEC_GPU_CAP."""
    gpus, cap = config.traces.tensor_parallel, int(os.environ.get("SPEC_GPU_CAP", GPU_CAP))
    if gpus > cap:
        raise ValueError(f"traces.tensor_parallel: got {gpus} GPUs a worker, expected at most SPEC_GPU_CAP={cap}")
    optional = {
        "account": os.environ.get("SPEC_SLURM_ACCOUNT"),
        "partition": os.environ.get("SPEC_SLURM_PARTITION"),
    }
    return {
        "time": config.workers.minutes,
        "nodes": 1,
        "ntasks_per_node": 1,
        "gpus_per_node": gpus,
        "array_parallelism": max(1, min(config.workers.count, cap // gpus)),
        **{key: value for key, value in optional.items() if value},
    }


def worker_environment(config: Config, number: int) -> dict[str, str]:
    """What worker `number` of this machine must not share with the others: its GPUs, or its part of the cores.

    ValueError when the machine has GPUs, but not enough. Under Slurm the job sees to it.
    """
    if config.workers.executor != "local":
        return {}
    gpus, each, count = visible_gpus(), config.traces.tensor_parallel, config.workers.count
    if not gpus:
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    if len(gpus) < count * each:
        raise ValueError(
            f"workers.count: got {count} workers of {each} GPUs on a machine with {len(gpus)}, "
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
