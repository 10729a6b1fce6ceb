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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from test_stage_crash import die_at

import train.start  # what the stage imports late, so that forked processes have it
from pipeline.config import load_config
from pipeline.stage import stage_main
from train.metrics import read_metrics
from train.ranks import Ranks
from train.train_draft import STAGE, TrainStage

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml")
SETTINGS = ("train.recipe.steps=9", "train.recipe.keep_checkpoints=1", "train.recipe.exact_every=0")
STOP_STEPS = 400


def run_stage(settings: tuple[str, ...] = SETTINGS) -> int:
    options = [word for setting in settings for word in ("--set", setting)]
    with Ranks() as ranks:
        return stage_main(STAGE, TrainStage(ranks), ["--config", CONFIG, *options])


def fork(root: Path, child: Callable[[], int], interfere: Callable[[int], None] = lambda _: None) -> int:
    """The wait status of a forked process that runs `child` with its data under `root`."""
    pid = os.fork()
    if pid == 0:
        os.environ["SPEC_DATA_ROOT"] = str(root)
        with open(root / "log", "a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 2)
        code = 1
        try:
            code = child()
        finally:
            os._exit(code)
    interfere(pid)
    return os.waitpid(pid, 0)[1]


def count_events(root: Path, counted: Path) -> int:
    """How many file operations under `root` a whole run makes: each is a moment to be killed at."""

    def child() -> int:
        from test_stage_crash import FILE_EVENTS

        seen = 0

        def on_event(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            seen += event in FILE_EVENTS and str(root) in str(arguments[0])

        sys.addaudithook(on_event)
        code = run_stage()
        counted.write_text(str(seen), encoding="utf-8")
        return code

    assert os.waitstatus_to_exitcode(fork(root, child)) == 0
    return int(counted.read_text(encoding="utf-8"))


def killed(root: Path, event_number: int) -> bool:
    def child() -> int:
        die_at(event_number, root)
        return run_stage()

    return os.waitstatus_to_exitcode(fork(root, child)) == -signal.SIGKILL


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
    """SIGTERM in the middle of a training: exit code, how long it took to end, and the steps before and after."""
    settings = (f"train.recipe.steps={STOP_STEPS}",)
    sent = 0.0

    def interfere(pid: int) -> None:
        nonlocal sent
        while not (paths := list((root / "tiny").glob("*/*.work-*/sft/round-0/metrics.jsonl"))) or not paths[
            0
        ].read_text(encoding="utf-8"):
            time.sleep(0.05)
        time.sleep(0.3)
        sent = time.monotonic()
        os.kill(pid, signal.SIGTERM)

    code = os.waitstatus_to_exitcode(fork(root, lambda: run_stage(settings), interfere))
    seconds = time.monotonic() - sent
    [metrics] = (root / "tiny").glob("*/*.work-*/sft/round-0/metrics.jsonl")
    steps = [row["step"] for row in read_metrics(metrics)]
    checkpoints = [path.name for path in (metrics.parent / "checkpoints").iterdir()]
    return {"code": code, "seconds": seconds, "steps": steps, "checkpoints": checkpoints}


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
            assert os.waitstatus_to_exitcode(fork(root, run_stage)) == 0
            break
    outcomes.append(weights(root))
    for _ in range(3):
        root = next(roots)
        kills.append(number := rng.randrange(1, events))
        assert killed(root, number)
        assert os.waitstatus_to_exitcode(fork(root, run_stage)) == 0
        outcomes.append(weights(root))
    print(
        json.dumps(
            {"expected": expected, "outcomes": outcomes, "kills": kills, "events": events}
            | {"stopped": stopped_by_signal(next(roots))}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
