"""Times of the plugin's rounds, for a row of bench.vllm_speed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def round_times(times: Sequence[Any], batch: int) -> dict[str, Any]:
    """Milliseconds of the worker's own clock, by the plugin: drafting a token, and the target's step; medians over
    rounds of the whole batch. times_by_k: [k, rounds, drafting, the target's step] of each draft length."""
    whole = [each for each in times if each.batch == batch]
    drafting = [each for each in whole if each.k]
    found = {"round_draft_ms": drafting and median(each.draft_s for each in drafting)}
    found["draft_step_ms"] = drafting and median(each.draft_s / each.k for each in drafting)
    found["verify_ms"] = whole and median(each.verify_s for each in whole)
    by_k: dict[int, list[Any]] = {}
    for each in whole:
        by_k.setdefault(each.k, []).append(each)
    table = [
        [k, len(ours), 1e3 * median(each.draft_s for each in ours), 1e3 * median(each.verify_s for each in ours)]
        for k, ours in sorted(by_k.items())
    ]
    shown = {name: 1e3 * value for name, value in found.items() if value}
    return {**shown, "times_by_k": table} if table else shown
