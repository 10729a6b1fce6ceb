"""The config section of the Slurm jobs: what each stage asks for, and how it is stopped, moved and given up."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.fields import count, one_of
from pipeline.schema import setting
from pipeline.stages import CHECK, STAGES

JOB_STAGES = tuple(stage for stage in STAGES if stage != CHECK)


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """What one stage asks Slurm for; what is left out is the section's, or for the last five env.sh's, then the site's.

    `gpus` and `cpus` are a node's, `minutes` the time limit, `extra` further options of sbatch as "--exclusive".
    """

    stage: str = one_of(JOB_STAGES)
    gpus: int | None = count(0, default=None)
    nodes: int = count(default=1)
    cpus: int | None = count(default=None)
    memory_gib: int | None = count(default=None)
    minutes: int | None = count(default=None)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    extra: tuple[str, ...] = setting(
        "an option of sbatch as --exclusive", lambda text: text.startswith("--") and "\n" not in text, default=()
    )

    def __post_init__(self) -> None:
        if self.nodes > 1 and self.stage != "03_train_draft":
            raise ValueError(f"nodes: got {self.nodes} for {self.stage}, expected 1: only 03_train_draft spans nodes")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Jobs of all stages, and per stage what differs. No part of what a result depends on.

    `gpus` is what a stage that computes with a model asks for (02_filter and the report never do). A stage is told
    `stop_seconds` before its time limit to leave a resumable state, and its job is queued again; after `stalls` starts
    in a row without a unit or checkpoint more, it fails. Its finished units are copied to SPEC_ARCHIVE_ROOT at least
    every `archive_seconds`.
    """

    gpus: int = count(0, default=1)
    cpus: int = count(default=4)
    memory_gib: int | None = count(default=None)
    minutes: int = count(default=240)
    stop_seconds: int = count(default=300)
    stalls: int = count(default=3)
    archive_seconds: int = count(0, default=600)
    stages: tuple[StageJob, ...] = ()

    def __post_init__(self) -> None:
        names = [job.stage for job in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: got {', '.join(names)}, expected each stage once")


DEFAULT_SLURM = SlurmConfig()
