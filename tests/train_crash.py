"""A program for tests/test_train_stage.py: stage 03 killed, stopped and resumed in forked processes; prints JSON.

Forked from a process that has imported everything but computed nothing, so that a run costs no imports. Usage:
train_crash.py FINISHED_ROOT EMPTY_ROOT, the first with stages 01 and 02 of configs/tiny.yaml done.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dying import count_file_events, die_at, fork

import train.start  # what the stage imports late, so that forked processes have it
from pipeline.config import load_config
from pipeline.stage import stage_main
from train.metrics import MetricsLog, read_metrics
from train.ranks import Ranks
from train.train_draft import STAGE, TrainStage

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml")
SETTINGS = ("train.recipe.steps=9", "train.recipe.keep_checkpoints=1", "train.recipe.exact_every=0")
MANY_STEPS, STOP_STEP = 400, 5


def run_stage(settings: tuple[str, ...] = SETTINGS) -> int:
    options = [word for setting in settings for word in ("--set", setting)]
    with Ranks() as ranks:
        return stage_main(STAGE, TrainStage(ranks), ["--config", CONFIG, *options])


def fork_stage(root: Path, before: Callable[[], object] = lambda: None, settings: tuple[str, ...] = SETTINGS) -> int:
    """The exit code of a forked process that does `before`, then stage 03 with its data under `root`."""

    def child() -> int:
        os.environ["SPEC_DATA_ROOT"] = str(root)
        with open(root / "log", "a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 2)
        before()
        return run_stage(settings)

    return fork(child)


def count_events(root: Path, counted: Path) -> int:
    """How many file operations under `root` a whole run makes: each is a moment to be killed at."""

    def child() -> int:
        count = count_file_events(root)
        os.environ["SPEC_DATA_ROOT"] = str(root)
        code = run_stage()
        counted.write_text(str(count()), encoding="utf-8")
        return code

    assert fork(child) == 0
    return int(counted.read_text(encoding="utf-8"))


def killed(root: Path, event_number: int) -> bool:
    return fork_stage(root, lambda: die_at(event_number, root)) == -signal.SIGKILL


def weights(root: Path) -> dict[str, str]:
    folder = root / "tiny" / STAGE.name
    files = sorted(folder.glob("*/*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fresh_roots(finished: Path, empty: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        root = empty / str(number)
        shutil.copytree(finished, root)
        yield root


def stopped_by_signal(root: Path) -> dict[str, object]:
    """SIGTERM as soon as the row of STOP_STEP is written, long before the last: exit code, steps done, checkpoints."""
    write = MetricsLog.write

    def write_and_signal(log: MetricsLog, row: dict[str, Any]) -> None:
        write(log, row)
        if row["step"] == STOP_STEP:
            os.kill(os.getpid(), signal.SIGTERM)

    code = fork_stage(
        root, lambda: setattr(MetricsLog, "write", write_and_signal), (f"train.recipe.steps={MANY_STEPS}",)
    )
    [metrics] = (root / "tiny").glob("*/*.work-*/sft/round-0/metrics.jsonl")
    steps = [row["step"] for row in read_metrics(metrics)]
    checkpoints = [path.name for path in (metrics.parent / "checkpoints").iterdir()]
    return {"code": code, "signalled": STOP_STEP, "steps": steps, "checkpoints": checkpoints}


def main(finished: Path, empty: Path) -> None:
    torch.set_num_threads(1)
    assert train.start
    load_config(CONFIG)
    roots, rng = fresh_roots(finished, empty), random.Random(0)
    whole = next(roots)
    events = count_events(whole, empty / "events")
    expected = weights(whole)
    outcomes, kills = [], []
    root = next(roots)
    while killed(root, number := rng.randrange(events // 20, events // 2)):
        kills.append(number)
        if len(kills) == 12:
            assert fork_stage(root) == 0
            break
    outcomes.append(weights(root))
    for _ in range(3):
        root = next(roots)
        kills.append(number := rng.randrange(1, events))
        assert killed(root, number)
        assert fork_stage(root) == 0
        outcomes.append(weights(root))
    print(
        json.dumps(
            {"expected": expected, "outcomes": outcomes, "kills": kills, "events": events}
            | {"stopped": stopped_by_signal(next(roots))}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
