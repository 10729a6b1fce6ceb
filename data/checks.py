"""What a row alone can show: it is malformed, was cut off, ends in a loop, is too short or too long.

T is the number of completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.rows import Row
from pipeline.config import FilterConfig


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Why a row goes: the step that says so, and what it saw, as plain data."""

    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


def check(row: Row, config: FilterConfig) -> Drop | None:
    """The first of the steps malformed, truncated, loop and length that drops the row."""
    if row.problem:
        return Drop(reason="malformed", detail={"problem": row.problem})
    if config.truncated == "drop" and row.finish_reason == "length":
        return Drop(reason="truncated", detail={"tokens": len(row.completion_ids)})
    found = loop(row.completion_ids, config.loop_repeats, config.loop_tokens)
    if found is not None:
        return Drop(reason="loop", detail={"period": found[0], "tokens": found[1]})
    return _length(len(row.completion_ids), config)


def loop(ids_T: np.ndarray, repeats: int, tokens: int) -> tuple[int, int] | None:
    """(period, length) of the loop that the completion ends in; None when it ends in none.

    A loop is a tail of at least `tokens` tokens in which every token equals the one `period` before it, `repeats`
    periods long or more: "a b c a b c a b" has period 3 and 2 2/3 repeats. One token after it (the stop token, or the
    first of something else) does not end the loop. Of several periods the shortest is given.
    """
    for end in (len(ids_T), len(ids_T) - 1):
        tail_T = ids_T[:end]
        if end < max(tokens, repeats):
            return None
        # Only a token equal to the last one can be a whole number of periods away from it.
        candidates = end - 1 - np.flatnonzero(tail_T[:-1] == tail_T[-1])[::-1]
        candidates = candidates[candidates <= end // repeats]
        for back in range(1, min(3, tokens - tokens // repeats)):  # so many tokens before it must agree in any loop
            candidates = candidates[tail_T[end - 1 - back - candidates] == tail_T[end - 1 - back]]
        for period in candidates.tolist():
            needed = max(repeats * period, tokens) - period
            if np.array_equal(tail_T[-needed:], tail_T[-needed - period : -period]):
                is_other = tail_T[period:] != tail_T[:-period]
                return period, int(np.argmax(is_other[::-1])) + period if is_other.any() else end
    return None


def _length(tokens: int, config: FilterConfig) -> Drop | None:
    if tokens < config.min_tokens:
        return Drop(reason="length", detail={"tokens": tokens, "expected": f"at least {config.min_tokens}"})
    if config.max_tokens is not None and tokens > config.max_tokens:
        return Drop(reason="length", detail={"tokens": tokens, "expected": f"at most {config.max_tokens}"})
    return None
