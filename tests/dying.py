"""Processes that kill themselves at a moment counted in their own work: a slow or a fast machine changes nothing."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

FILE_EVENTS = {"open", "os.rename", "os.truncate", "os.remove", "os.mkdir", "shutil.copyfile", "shutil.rmtree"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(event_number: int, root: Path) -> None:
    """Kill this process just before its n-th file operation under `root`; of a write it leaves half behind."""
    seen = 0

    def count() -> bool:
        nonlocal seen
        seen += 1
        return seen == event_number

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and str(root) in str(arguments[0]) and count():
            die()

    write, fsync = os.write, os.fsync

    def torn_write(descriptor: int, data: bytes) -> int:
        if count():
            write(descriptor, data[: len(data) // 2])
            die()
        return write(descriptor, data)

    def dying_fsync(descriptor: int) -> None:
        if count():
            die()
        fsync(descriptor)

    os.write, os.fsync = torn_write, dying_fsync  # type: ignore[assignment]
    sys.addaudithook(on_event)


def count_file_events(root: Path) -> Callable[[], int]:
    """From now on; the returned function says how many file operations under `root` there were."""
    seen = 0

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        seen += event in FILE_EVENTS and str(root) in str(arguments[0])

    sys.addaudithook(on_event)
    return lambda: seen


def fork(run: Callable[[], int | None]) -> int:
    """The exit code of a forked process: what `run` returns, 0 for None, 1 when it raised, -9 when it was killed.

    It starts with everything imported that this process has imported, so that a kill can hit any moment of the work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_calls(run: Callable[[], object]) -> int:
    """How many calls and returns, of Python's functions and of C's, a forked `run` makes: each a moment to die at."""
    reader, writer = os.pipe()
    seen = 0

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        seen += 1

    def counted() -> None:
        sys.setprofile(on_call)
        run()
        sys.setprofile(None)
        os.write(writer, str(seen).encode())

    assert fork(counted) == 0
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        return int(stream.read())


def killed_at_call(number: int, run: Callable[[], object]) -> bool:
    """Whether a forked `run` got as far as its n-th call or return, where it is killed."""
    left = number

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    def dying() -> None:
        sys.setprofile(on_call)
        run()

    code = fork(dying)
    assert code in {0, -signal.SIGKILL}
    return code != 0
