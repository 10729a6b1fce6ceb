"""Processes side by side, each with a deadline, a log whose progress is printed, and a second start if it fails."""

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRESS = re.compile(r"\d s\b|Error|mass \d")
POLL_SECONDS = 0.2
LAST_LINES = 12


class Job:
    """A process in a group of its own, with its log. Times are time.monotonic()'s; `again` starts it once more."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        deadline: float,
        interrupt: float = math.inf,
        again: "Callable[[], Job | None] | None" = None,
    ) -> None:
        self.name, self.log, self.deadline, self.interrupt, self.again = name, log, deadline, interrupt, again
        with log.open("ab") as stream:
            self._read = stream.tell()
            self._process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, process_group=0)
        say(f"{name}: started, {deadline - time.monotonic():.0f} s left")

    def poll(self) -> int | None:
        """The exit code, None while it runs. Interrupts and kills when it is time; prints what is new in the log."""
        code = self._process.poll()
        if code is None and time.monotonic() > self.deadline:
            say(f"{self.name}: killed at its deadline")
            code = self.kill()
        elif code is None and time.monotonic() > self.interrupt:
            self.interrupt = math.inf
            say(f"{self.name}: interrupt")
            self._process.send_signal(signal.SIGINT)
        self._print_progress()
        return code

    def kill(self) -> int:
        """End it with all that it started; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _print_progress(self) -> None:
        with self.log.open("rb") as stream:
            stream.seek(self._read)
            whole = stream.read().rpartition(b"\n")[0]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if PROGRESS.search(line):
                say(f"{self.name}: {line[:300]}")


def wait_for(jobs: Sequence[Job]) -> set[str]:
    """The names of those that ended well, in the end of all; one that fails gets its second start. None outlives us."""
    running, well = list(jobs), set()
    try:
        while running:
            time.sleep(POLL_SECONDS)
            for job in [*running]:
                code = job.poll()
                if code is None:
                    continue
                running.remove(job)
                if code == 0:
                    well.add(job.name)
                    continue
                last = job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
                say(f"{job.name}: ended with {code}: {' | '.join(last)[-1500:]}")
                if job.again is not None and (second := job.again()) is not None:
                    running.append(second)
    finally:
        for job in running:
            job.kill()
    return well


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
