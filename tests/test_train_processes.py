"""Two gloo processes train as one does: sharded or not, and a checkpoint of either number resumes on the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_corpus import random_corpus, student
from train_worker import RECIPE, STOP

from train.metrics import read_metrics
from train.trainer import Outcome, Trainer

pytestmark = pytest.mark.slow  # both processes import everything: about 25 s on two quiet cores
TESTS = Path(__file__).resolve().parent
PROCESSES = 2


def alone(folder: Path, should_stop: Callable[[], bool] = lambda: False, tied: bool = False) -> Outcome:
    return Trainer(student(tied=tied), random_corpus(24), RECIPE, folder).train(should_stop)


def stop_at(steps: int) -> Callable[[], bool]:
    calls = iter(range(1, 100))
    return lambda: next(calls) >= steps


def launch(root: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(TESTS / "train_worker.py"), str(root)]
    workers = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    errors = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("processes")
    alone(root / "alone")
    alone(root / "alone_tied", tied=True)
    assert not alone(root / "begun_alone", stop_at(STOP)).finished
    launch(root)
    assert alone(root / "stopped").finished
    return root


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("name, one_process", [("fsdp", "alone"), ("ddp", "alone"), ("tied", "alone_tied")])
def test_two_processes_have_one_processs_losses(runs: Path, name: str, one_process: str) -> None:
    expected, got = rows(runs / one_process), rows(runs / name)
    assert len(got) == RECIPE.steps
    for one, two in zip(expected, got, strict=True):
        assert two["tokens"] == one["tokens"]
        for key in ("loss", "acc_low"):
            assert two[key] == pytest.approx(one[key], abs=1e-5), f"{key} at step {one['step']}"
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_tied_weights_stay_tied(runs: Path) -> None:
    """A head that is the embedding's matrix must not come apart when it is sharded and gathered."""
    weights = torch.load(runs / "tied" / "weights.pt")
    torch.testing.assert_close(weights["lm_head.weight"], weights["model.embed_tokens.weight"], rtol=0, atol=0)


def test_sharded_checkpoints_have_a_part_of_each_process(runs: Path) -> None:
    [*_, last] = sorted((runs / "fsdp" / "checkpoints").iterdir())
    parts = {path.name[:4]: path.stat().st_size for path in last.glob("*.distcp")}
    assert set(parts) == {"__0_", "__1_"}
    assert min(parts.values()) > 0.3 * max(parts.values())


def test_both_shardings_end_with_the_same_weights(runs: Path) -> None:
    sharded, whole = (torch.load(runs / name / "weights.pt") for name in ("fsdp", "ddp"))
    assert sharded.keys() == whole.keys() == student().model.state_dict().keys()
    for name in whole:
        torch.testing.assert_close(sharded[name], whole[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["stopped", "begun_alone"])
def test_another_number_of_processes_resumes_the_same_curve(runs: Path, name: str) -> None:
    """stopped: two processes, then one; begun_alone: one, then two."""
    expected, got = rows(runs / "alone"), rows(runs / name)
    assert [row["step"] for row in got] == list(range(RECIPE.steps))
    for one, other in zip(expected, got, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
