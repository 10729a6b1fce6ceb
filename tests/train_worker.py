"""One of the processes of tests/test_train_processes.py: trains the toy student several ways, over gloo."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from toy_corpus import random_corpus, student

from pipeline.config_train import RecipeConfig
from train.trainer import Trainer

RECIPE = RecipeConfig(length=32, sequences=5, micro_batch=2, steps=8, lr=1e-2, checkpoint_every=3)
STOP = 4


class StopAfter:
    """True from the n-th call on, on the second process only: what one process hears must stop all."""

    def __init__(self, steps: int, rank: int) -> None:
        self.left, self.rank = steps, rank

    def __call__(self) -> bool:
        self.left -= 1
        return self.rank == 1 and self.left <= 0


def main(root: Path) -> None:
    """Whole trainings with fsdp and ddp, one that is stopped, and the rest of one that a single process began."""
    corpus, rank = random_corpus(24), int(os.environ["RANK"])
    for name, sharding, tied in (("fsdp", "fsdp", False), ("ddp", "ddp", False), ("tied", "fsdp", True)):
        recipe = dataclasses.replace(RECIPE, sharding=sharding)
        outcome = Trainer(student(tied=tied), corpus, recipe, root / name).train()
        assert outcome.finished
        assert bool(outcome.weights) == (rank == 0)
        if rank == 0:
            torch.save(dict(outcome.weights), root / name / "weights.pt")
    stopped = Trainer(student(), corpus, RECIPE, root / "stopped").train(StopAfter(STOP, rank))
    assert stopped.steps == STOP
    assert Trainer(student(), corpus, RECIPE, root / "begun_alone").train().finished


if __name__ == "__main__":
    main(Path(sys.argv[1]))
