"""Checkpoints of a training: sharded files, written whole or not at all, the last few kept.

checkpoints/step-00000200/ holds what torch.distributed.checkpoint wrote (a file a process, readable by any number of
them) and `complete.json`, written last: step, what the training was, and the documents it trains on, as hashes. The
folder gets its name when all of that is on the disk, so whatever has the name is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pipeline import files

COMPLETE = "complete.json"
PREFIX = "step-"


class Checkpoints:
    """Those in one folder. `identity` is plain data that says what is trained; another one is refused."""

    def __init__(self, folder: Path, identity: dict[str, Any], keep: int) -> None:
        self.folder, self.identity, self.keep = folder, identity, keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = [path for path in self.folder.glob(f"{PREFIX}*") if (path / COMPLETE).is_file()]
        return sorted(int(path.name.removeprefix(PREFIX)) for path in found)

    def save(self, step: int, model: Any, optimizer: Any) -> Path:
        """Write the state after `step` steps; every process calls this. Older ones beyond `keep` are removed."""
        final = self._path(step)
        tmp = final.with_name(f"{files.TMP_PREFIX}{final.name}")
        if _is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
        _barrier()
        weights, moments = get_state_dict(model, optimizer)
        with _quiet():
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp)
        _barrier()
        if _is_first():
            files.write_atomic(tmp / COMPLETE, json.dumps({"step": step, "identity": self.identity}) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            files.publish(tmp, final)
            for old in self.steps()[: -self.keep]:
                self._remove(old)
        _barrier()
        return final

    def load_last(self, model: Any, optimizer: Any) -> int:
        """Put the newest complete checkpoint into model and optimizer; the number of steps done, 0 without one.

        ValueError when it is of another training, naming what differs.
        """
        steps = self.steps()
        if not steps:
            return 0
        path = self._path(steps[-1])
        self._check(path)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        with _quiet():
            dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return steps[-1]

    def _check(self, path: Path) -> None:
        saved = json.loads((path / COMPLETE).read_text(encoding="utf-8"))["identity"]
        wanted = json.loads(json.dumps(self.identity))
        different = [
            f"{key}: {saved.get(key)} -> {wanted.get(key)}"
            for key in sorted(saved.keys() | wanted.keys())
            if saved.get(key) != wanted.get(key)
        ]
        if different:
            raise ValueError(
                f"{path} is a checkpoint of another training ({'; '.join(different)}); move {self.folder} aside to "
                "start over, or train with the settings it was made with"
            )

    def _path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def _remove(self, step: int) -> None:
        """By way of another name, so that a process killed meanwhile leaves no half of a checkpoint under its own."""
        path = self._path(step)
        doomed = path.with_name(f"{files.TMP_PREFIX}{path.name}")
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier(device_ids=[torch.cuda.current_device()] if torch.cuda.is_available() else None)
