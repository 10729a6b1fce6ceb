"""Progress of counted units: a bar with rate and ETA on a terminal, a line every 30 s in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_WIDTH = 24
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 30.0


class Progress:
    """Call `update(n)` for every n finished units; `total` includes `done` units of an earlier run.

    The rate counts this run's units only. Use as a context manager: leaving it prints the last state.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str = "units",
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.resumed = done, done
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.clock, self.began = clock, clock()
        self.shown, self.shown_done = self.began, -1
        self.width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown_done != self.done:
            self._show()
        if self.terminal:
            self.stream.write("\n")
            self.stream.flush()

    def update(self, units: int = 1) -> None:
        """Count finished units; print when it is time to."""
        self.done += units
        now = self.clock()
        if now - self.shown >= (TERMINAL_SECONDS if self.terminal else LOG_SECONDS):
            self.shown = now
            self._show()

    def text(self) -> str:
        """The state in words, such as "traces 3/8 shards, 0.5 shards/s, 10 s left"."""
        elapsed = self.clock() - self.began
        rate = (self.done - self.resumed) / elapsed if elapsed > 0 else 0.0
        left = f"{duration((self.total - self.done) / rate)} left" if rate > 0 else "time left unknown"
        return f"{self.label} {self.done}/{self.total} {self.unit}, {rate:.3g} {self.unit}/s, {left}"

    def _show(self) -> None:
        self.shown_done = self.done
        if not self.terminal:
            print(self.text(), file=self.stream, flush=True)
            return
        full = min(BAR_WIDTH, BAR_WIDTH * self.done // max(1, self.total))
        line = f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {self.text()}"
        self.stream.write("\r" + line.ljust(self.width))
        self.stream.flush()
        self.width = len(line)


def duration(seconds: float) -> str:
    """Seconds in words: "42 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
