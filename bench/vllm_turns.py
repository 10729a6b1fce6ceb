"""Engines that live together and are measured in turns, each in a process of its own.

All are started at once, since a start takes a minute or two; none is measured before every one is up or has failed, so
that nothing compiles or captures beside a clock. Then one cell is asked for at a time: while one process measures, the
others wait.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.serving_server import last_error, last_lines, start_group, stop
from bench.vllm_methods import Cell

PROGRAM = ("-m", "bench.vllm_worker")  # tests put a stand-in here
START_S = 330.0  # after which an engine that is not up is given up
CELL_S = 100.0
LINES = 8
STOP_S = 1.0


class WorkerError(Exception):
    """A process that ended, hung or failed; the message says why, with the last lines of its log."""


class Slow(WorkerError):
    """It did not answer in time."""


class Worker:
    """One engine. log: what its process prints."""

    def __init__(self, job: Mapping[str, Any], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.process = start_group([sys.executable, *PROGRAM], log, env, stdout=subprocess.PIPE)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._tell(job)

    def ready(self, seconds: float) -> dict[str, Any]:
        """What the worker says of its engine when that is up. WorkerError when it is not, within `seconds`."""
        found: dict[str, Any] = self._answer("ready", seconds)["ready"]
        return found

    def measure(self, cell: Cell, passes: int, seconds: float = CELL_S) -> dict[str, Any]:
        """The measured values of a cell. WorkerError, after which the engine is of no use."""
        names = ("controller", "k", "batch", "alphas", "temperature")
        asked = {name: getattr(cell, name) for name in names}
        row: dict[str, Any] = self.ask(asked | {"passes": passes}, "row", seconds)["row"]
        return row

    def ask(self, values: Mapping[str, Any], key: str, seconds: float = CELL_S) -> dict[str, Any]:
        """The answer, which has `key`. WorkerError, after which the engine is of no use."""
        self._tell(values)
        return self._answer(key, seconds)

    def stop(self) -> None:
        """The process is gone, with what it started, and so is its memory."""
        stop(self.process, STOP_S)

    def _tell(self, values: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: the missing answer says so
            self.process.stdin.write(json.dumps(values).encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed by stop
            for line in self.process.stdout:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _answer(self, key: str, seconds: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise Slow(f"no answer within {seconds:.0f} s{self._last()}") from None
        if found is None:
            self.process.wait()
            raise WorkerError(f"it ended with {self.process.returncode}: {last_error(self.log)}{self._last()}")
        if key not in found:
            raise WorkerError(str(found["error"]))
        return found

    def _last(self) -> str:
        lines = " | ".join(last_lines(self.log, LINES))
        return f" (last lines: {lines})" if lines else ""


class Wave:
    """Engines by method, started together."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def add(self, name: str, worker: Worker) -> None:
        self.workers[name] = worker

    def wait(self, seconds: float) -> dict[str, WorkerError]:
        """Until every engine is up or has failed, `seconds` in all; the failures, whose processes are gone."""
        until, failed = time.monotonic() + seconds, {}
        for name, worker in list(self.workers.items()):
            try:
                self.facts[name] = worker.ready(until - time.monotonic())
            except WorkerError as error:
                failed[name] = error
                self.drop(name)
        return failed

    def drop(self, name: str) -> None:
        self.workers.pop(name).stop()

    def stop(self) -> None:
        for name in list(self.workers):
            self.drop(name)
