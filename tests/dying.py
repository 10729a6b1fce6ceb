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

from pipeline.context import StageContext

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


def fork(run: Callable[[], object]) -> int:
    """The exit code of a forked process: the number that `run` returns, or 0; 1 when it raised, -9 when it was killed.

    It starts with everything imported that this process has imported, so that a kill can hit any moment of the work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            returned = run()
            code = returned if isinstance(returned, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def calls_from_now() -> Callable[[], int]:
    """The returned function says how many calls and returns, of Python's functions and of C's, there were since."""
    seen = 0

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        seen += 1

    sys.setprofile(on_call)
    return lambda: seen


def die_at_call(number: int) -> None:
    """Kill this process at the n-th call or return from now on: between two file operations too."""
    left = number

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    sys.setprofile(on_call)


def count_calls(run: Callable[[], object]) -> int:
    """How many calls and returns a forked `run` makes: each is a moment to die at."""
    reader, writer = os.pipe()

    def counted() -> None:
        count = calls_from_now()
        run()
        os.write(writer, str(count()).encode())

    assert fork(counted) == 0
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        return int(stream.read())


def killed_at_call(number: int, run: Callable[[], object]) -> bool:
    """Whether a forked `run` got as far as its n-th call or return, where it is killed."""

    def dying() -> None:
        die_at_call(number)
        run()

    code = fork(dying)
    assert code in {0, -signal.SIGKILL}
    return code != 0


def signal_amid_unit(files: int, number: signal.Signals, context: type[StageContext] = StageContext) -> None:
    """From now on: this process sends itself a signal amid the unit that a stage makes after its n-th file.

    A stage asks inside its units whether to stop: the second time that it does so after that file is the moment.
    """
    published, asked = 0, 0
    publish, check_stop = context.publish, context.check_stop

    def counted_publish(ctx: StageContext, *arguments: Any, **options: Any) -> Any:
        nonlocal published
        record = publish(ctx, *arguments, **options)
        published += 1
        return record

    def counted_check(ctx: StageContext) -> None:
        nonlocal asked
        asked += published >= files
        if asked == 2:
            os.kill(os.getpid(), number)
        check_stop(ctx)

    context.publish, context.check_stop = counted_publish, counted_check  # type: ignore[method-assign]
