"""Times of the plugin's rounds, for a row of bench.vllm_speed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def round_times(times: Sequence[Any], batch: int) -> dict[str, Any]:
    """Milliseconds of the worker's own clock, by the plugin: drafting a token, and the target's step; medians over
    rounds of the whole batch. ks, and beside each its number of rounds, its drafting, its target's step."""
    whole = [each for each in times if each.batch == batch]
    drafting = [each for each in whole if each.k]
    found = {"round_draft_ms": drafting and median(each.draft_s for each in drafting)}
    found["draft_step_ms"] = drafting and median(each.draft_s / each.k for each in drafting)
    found["verify_ms"] = whole and median(each.verify_s for each in whole)
    by_k: dict[int, list[Any]] = {}
    for each in whole:
        by_k.setdefault(each.k, []).append(each)
    shown = {name: 1e3 * value for name, value in found.items() if value}
    if not by_k:
        return shown
    ks = sorted(by_k)
    return {
        **shown,
        "ks": ks,
        "rounds_by_k": [len(by_k[k]) for k in ks],
        "draft_ms_by_k": [1e3 * median(each.draft_s for each in by_k[k]) for k in ks],
        "verify_ms_by_k": [1e3 * median(each.verify_s for each in by_k[k]) for k in ks],
    }
