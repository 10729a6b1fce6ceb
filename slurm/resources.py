"""What a stage's job asks for: the config's slurm section over env.sh's site defaults."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config
from pipeline.config_slurm import StageJob
from pipeline.site import SlurmSite, gpu_cap
from pipeline.stages import REPORT

TRACES, TRAINING, SERVING = "01_gen_traces", "03_train_draft", "05_bench_vllm"
WITHOUT_GPU = ("02_filter", REPORT)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """`gpus` and `cpus` a node; `worker_gpus` are held by jobs that the stage starts itself, while it runs."""

    gpus: int
    worker_gpus: int
    nodes: int
    cpus: int
    memory_gib: int | None
    minutes: int
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    extra: tuple[str, ...]

    @property
    def all_gpus(self) -> int:
        """GPUs at one time, those of its workers with it."""
        return self.gpus * self.nodes + self.worker_gpus


def resources(config: Config, stage: str, site: SlurmSite) -> Resources:
    """ValueError when the stage alone would hold more GPUs than the cap, naming the setting to change."""
    slurm = config.slurm
    own = next((job for job in slurm.stages if job.stage == stage), None) or StageJob(stage=stage)
    gpus, worker_gpus = (_default_gpus(config, stage) if own.gpus is None else own.gpus), _worker_gpus(config, stage)
    asked = Resources(
        gpus=gpus,
        worker_gpus=worker_gpus,
        nodes=own.nodes,
        cpus=own.cpus or slurm.cpus,
        memory_gib=own.memory_gib or slurm.memory_gib,
        minutes=own.minutes or slurm.minutes,
        partition=own.partition or site.partition,
        account=own.account or site.account,
        qos=own.qos or site.qos,
        constraint=own.constraint or site.constraint,
        extra=own.extra,
    )
    cap = gpu_cap()
    if asked.all_gpus > cap:
        raise ValueError(
            f"{stage} asks for {asked.all_gpus} GPUs at one time ({_in_words(asked)}), and SPEC_GPU_CAP is {cap}: "
            f"lower {'tensor_parallel or ' if worker_gpus else ''}the stage's gpus or nodes under slurm.stages, "
            "or raise the cap in env.sh"
        )
    return asked


def fans_out(config: Config, stage: str) -> bool:
    """Whether the stage's job only drives jobs of its own."""
    return config.workers.executor == "slurm" and _workers(config, stage)[0] > 0


def _workers(config: Config, stage: str) -> tuple[int, int]:
    """How many workers share a stage, 0 where none do, and the GPUs of each (of the stage's one process then)."""
    if stage == TRACES:
        return config.workers.count, config.traces.tensor_parallel
    if stage == SERVING and config.bench_vllm is not None:
        methods = len(config.bench_vllm.methods)
        return min(config.workers.servers, methods), config.bench_vllm.tensor_parallel
    return 0, 1


def _default_gpus(config: Config, stage: str) -> int:
    if stage in WITHOUT_GPU or fans_out(config, stage) or not config.slurm.gpus:
        return 0
    count, each = _workers(config, stage)
    return max(config.slurm.gpus, max(1, count) * each)


def _worker_gpus(config: Config, stage: str) -> int:
    """As many workers as fit under the cap run at one time; one that does not fit alone is refused."""
    if not fans_out(config, stage) or not config.slurm.gpus:
        return 0
    count, each = _workers(config, stage)
    return max(each, min(count * each, gpu_cap() // each * each))


def _in_words(asked: Resources) -> str:
    nodes = f"{asked.nodes} nodes of {asked.gpus}" if asked.nodes > 1 else f"{asked.gpus} in its job"
    return f"{nodes}, {asked.worker_gpus} in its workers' jobs" if asked.worker_gpus else nodes
