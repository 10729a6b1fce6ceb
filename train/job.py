"""One training of the stage, as every process of it runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Config
from pipeline.config_train import TrainedDraft
from train.corpus import Corpus
from train.student import Student, freeze_embedding, load_exported
from train.trainer import Outcome, Trainer


@dataclass(frozen=True, kw_only=True)
class Job:
    """`start` is an exported draft in float32, `corpora` are trained on together, `heldout` may not exist, `folder`
    gets checkpoints and metrics, `origin` says what all of these were made from."""

    config: Config
    draft: TrainedDraft
    start: Path
    corpora: tuple[Path, ...]
    heldout: Path
    folder: Path
    origin: str


def run_job(
    job: Job, should_stop: Callable[[], bool] = lambda: False, on_step: Callable[[int, int], None] = lambda *_: None
) -> Outcome:
    """Train, from the newest checkpoint if there is one. `on_step(steps done, of how many)`. Errors of `Trainer`."""
    train = job.config.train
    model, head_ids = load_exported(job.start)
    if train.freeze_embedding:
        freeze_embedding(model)
    exact = train.recipe.exact_every > 0 and job.heldout.is_dir()
    trainer = Trainer(
        Student(model, job.draft.loss, head_ids),
        Corpus.join([Corpus.load(folder) for folder in job.corpora]),
        train.recipe,
        job.folder,
        heldout=Corpus.load(job.heldout) if exact else None,
        teacher=_teacher(job.config) if exact else None,
        origin=job.origin,
    )
    steps = len(trainer.order)
    outcome = trainer.train(should_stop, lambda done: on_step(done, steps))
    del trainer, model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return outcome


def _teacher(config: Config) -> Any:
    from accelerate import PartialState

    from pipeline.models import load_target

    return load_target(config.models, str(PartialState().device))
