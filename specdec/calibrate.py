"""Timing rounds of every batch size and draft length before the first request.

A controller that starts with costs compares lengths from its first round on, where it would else spend that round's
time on finding out; and the first request does not pay for memory and code that are loaded then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specdec.controller import FixedK
from specdec.lengths import Lengths
from specdec.listeners import Listeners
from specdec.lookup import LookupDrafter
from specdec.request import Request, SamplingParams
from specdec.stats import RoundStats

if TYPE_CHECKING:
    from specdec.engine import Engine

_CONTEXT = 64  # prompt tokens of the requests that are timed


class _LastToken(LookupDrafter):
    """Stands in for a lookup drafter, whose memory must not hold the timed texts: proposes the last token again."""

    def start(self, row: int, tokens: Sequence[int]) -> None:
        return

    def extend(self, row: int, tokens: Sequence[int], length: int) -> None:
        return

    def finish(self, row: int) -> None:
        return

    def guess(self, row: int, tokens: Sequence[int], k: int) -> list[int]:
        return [tokens[-1]] * k


def calibrate(engine: "Engine", repeats: int, batches: Sequence[int] | None) -> list[RoundStats]:
    """See Engine.calibrate."""
    controller = engine._lengths.controller
    if engine.has_work:
        raise ValueError("calibrate was called with requests waiting or running; call it before the first one")
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"repeats is {repeats!r}; expected a whole number from 1 on")
    batches = _doubling(len(engine._slots)) if batches is None else list(batches)
    if not batches or not all(type(rows) is int and 1 <= rows <= len(engine._slots) for rows in batches):
        raise ValueError(f"batches is {batches}; expected whole numbers from 1 to num_slots = {len(engine._slots)}")
    if controller is None or isinstance(controller, FixedK) or engine._drafter is None:
        return []
    with _rehearsal(engine) as rounds:
        for rows in batches:
            for k in [0, *_doubling(engine.k_max)]:
                _time(engine, rounds, rows, k, repeats)
    for r in rounds:
        controller.observe_cost(r.rows, r.k, r.draft_s, r.verify_s, r.total_s)
    return rounds


def _doubling(last: int) -> list[int]:
    """1, 2, 4, ... and `last`."""
    return [*(1 << i for i in range((last - 1).bit_length())), last]


@contextmanager
def _rehearsal(engine: "Engine") -> Iterator[list[RoundStats]]:
    """Rounds that nobody outside hears of, and of which nothing stays; yields the list that the timed ones go to."""
    names = ("_lengths", "_drafter", "_listeners", "_last_round", "_chunk", "stats")
    before = {name: getattr(engine, name) for name in names}
    engine._listeners = Listeners()
    engine._chunk = max(engine._chunk, _CONTEXT)  # a prompt in one step: each step is then a round
    if isinstance(engine._drafter, LookupDrafter):
        stand_in = _LastToken()
        stand_in.attach(engine._target, len(engine._slots), engine.capacity)
        engine._drafter = stand_in
    try:
        yield []
    finally:
        _cancel_all(engine)
        for name, value in before.items():
            setattr(engine, name, value)


def _time(engine: "Engine", rounds: list[RoundStats], rows: int, k: int, repeats: int) -> None:
    """`repeats` rounds of this shape after one to warm up. Rounds in which the draft had to catch up or a graph
    was made do not count, nor those of a model whose rows end with an error at once."""
    engine._lengths = Lengths(k, engine.k_max)
    steady = 0
    for _ in range(3 * (repeats + 1)):
        _top_up(engine, rows)
        engine.step()
        last = engine._last_round
        if last is None or (last.rows, last.k) != (rows, k) or last.caught_up or not last.timed:
            continue
        steady += 1
        if steady > 1:
            rounds.append(last)
        if steady > repeats:
            return


def _top_up(engine: "Engine", rows: int) -> None:
    """Requests for the rows that are missing; rows that are too many end."""
    running = [slot for slot in engine._slots if slot is not None]
    for slot in running[rows:]:
        engine.cancel(slot.ticket)
    length = max(1, min(_CONTEXT, engine.room // 2))
    prompt = [(7 * i + 3) % engine.vocab_size for i in range(length)]
    for row in range(len(running), rows):
        params = SamplingParams(max_tokens=max(1, engine.room - length), seed=row)
        engine.submit(Request(prompt_ids=prompt, params=params))


def _cancel_all(engine: "Engine") -> None:
    engine._queue.clear()
    for slot in list(engine._slots):
        if slot is not None:
            engine.cancel(slot.ticket)
    engine._done.clear()
