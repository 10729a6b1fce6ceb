"""How long drafting and verifying took, on the device's own clock, without waiting for it.

A round is what the controller thinks in: k drafts a row, made at the end of one step, and the next step's forward that
verifies them. Only rounds whose steps did nothing else are reported: no prompt tokens, the same rows throughout.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One round over `batch` rows with `k` drafts each; seconds. What vLLM's scheduler finds as `specdec_times`.

    draft_s: making the drafts, with the draft's own work on the tokens verified before; includes feeding it the
    `caught_up` tokens (over all rows) that it missed while k was 0. verify_s: the target's step, from its inputs to
    the accepted tokens.
    """

    draft_s: float
    verify_s: float
    batch: int
    k: int
    caught_up: int = 0


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """The end of a step: what was drafted, and the marks around it."""

    rows: frozenset[str]
    k: int
    caught_up: int
    marks: tuple[Any, ...]  # of drafting, in pairs


class StepClock:
    """Marks of one runner's steps. On a GPU a mark is an event; `newest` reads those that the device has passed."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._drafted: Drafted | None = None
        self._open: deque[tuple[Drafted, tuple[Any, Any], int]] = deque()
        self._marks: list[Any] = []
        self._plain_k: int | None = None
        self._rows: frozenset[str] = frozenset()

    def mark(self) -> None:
        """In order: the step begins, the draft has caught up, drafting begins, drafting ends."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def begin(self, scheduler_output: Any) -> None:
        """A step whose requests are these."""
        self._marks = []
        self._plain_k = plain_k(scheduler_output)
        self._rows = frozenset(scheduler_output.num_scheduled_tokens)
        self.mark()

    def end(self, k: int, caught_up: int, *, timed: bool = True) -> None:
        """The step is over; it drafted k tokens a row, in a time that says something or not."""
        drafted, self._drafted = self._drafted, None
        if self._plain_k is None or len(self._marks) != 4:
            return
        _, fed, drafting, _ = self._marks
        # A drafter may have found fewer than it was asked for; the round's length is what was verified.
        if drafted is not None and self._plain_k <= drafted.k and drafted.rows == self._rows:
            self._open.append((replace(drafted, k=self._plain_k), (fed, drafting), len(self._rows)))
        if timed:
            self._drafted = Drafted(rows=self._rows, k=k, caught_up=caught_up, marks=tuple(self._marks))

    def newest(self) -> StepTimes | None:
        """The latest round that the device has finished and that was not given out before."""
        times = None
        while self._open and self._passed(self._open[0][1][1]):
            drafted, verify, batch = self._open.popleft()
            draft_s = self._between(*drafted.marks[:2]) + self._between(*drafted.marks[2:])
            verify_s = self._between(*verify)
            times = StepTimes(draft_s=draft_s, verify_s=verify_s, batch=batch, k=drafted.k, caught_up=drafted.caught_up)
        return times

    def _passed(self, mark: Any) -> bool:
        return not self._on_gpu or mark.query()

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin


def plain_k(scheduler_output: Any) -> int | None:
    """The most drafts that a row has in this step, where all rows verify theirs and one token more and nothing else."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    scheduled = scheduler_output.num_scheduled_tokens
    if not scheduled or scheduler_output.scheduled_new_reqs:
        return None
    lengths = {name: len(drafts.get(name, ())) for name in scheduled}
    alone = all(tokens == lengths[name] + 1 for name, tokens in scheduled.items())
    return max(lengths.values()) if alone else None
