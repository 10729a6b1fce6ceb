"""A phase's kernels by the time they take, and the time in which none runs.

Kernels may overlap (each of ours can let the next one start early), so that the time in which any of them runs is less
than their sum.
"""

from collections.abc import Sequence
from typing import Any

from bench.kernel_groups import HOST, Work, group_of

MOST = 12  # kernels listed by name; the others are one row
OTHERS, GAPS = "(others)", "(no kernel runs)"
LEAST_GAP_MS = 1e-3


def kernel_rows(phase: str, work: Sequence[Work], timed_s: float, parts: int = 1) -> list[dict[str, Any]]:
    """One row a kernel (on a CPU an operator), the longest first, then the rest, then what no kernel fills of the
    phase's unprofiled time. parts: steps that the phase has; times and counts are of one of them."""
    by_name: dict[str, list[float]] = {}
    for each in work:
        by_name.setdefault(_name(each), []).append(each.ms)
    names = sorted(by_name, key=lambda name: -sum(by_name[name]))
    listed = {name: by_name[name] for name in names[:MOST]}
    if rest := [ms for name in names[MOST:] for ms in by_name[name]]:
        listed[OTHERS] = rest
    on_device = [each for each in work if each.start_ms is not None]
    rows = [_row(phase, name, sum(times) / parts, len(times) / parts) for name, times in listed.items()]
    if on_device:
        gaps = gaps_of(on_device)
        idle_ms = max(0.0, 1e3 * timed_s - busy_ms(on_device))
        row = _row(phase, GAPS, idle_ms / parts, len(gaps) / parts)
        rows.append(row | {"top": [f"{1e3 * ms:.1f} us after {name}" for name, ms in gaps[:3]]})
    whole_ms = 1e3 * timed_s / parts if on_device else sum(row["kernel_ms"] for row in rows)
    return [row | {"share": row["kernel_ms"] / whole_ms if whole_ms else 0.0} for row in rows]


def busy_ms(work: Sequence[Work]) -> float:
    """The time in which at least one of these kernels ran."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(_span(each) for each in work):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def gaps_of(work: Sequence[Work]) -> list[tuple[str, float]]:
    """(the kernel that ended last before it, ms) of each time between two kernels in which none ran; the longest first.
    As profiled, which makes the host slower: how they compare counts, not their sum."""
    ordered = sorted(work, key=_span)
    found, last = [], ordered[0]
    for each in ordered[1:]:
        start, end = _span(each)
        if start - _span(last)[1] > LEAST_GAP_MS:
            found.append((last.name, start - _span(last)[1]))
        if end > _span(last)[1]:
            last = each
    return sorted(found, key=lambda gap: -gap[1])


def _name(work: Work) -> str:
    """On a CPU one for all that the host spends around operators."""
    on_host = work.start_ms is None and group_of(work.name, work.around) == HOST
    return HOST if on_host else work.name


def _span(work: Work) -> tuple[float, float]:
    assert work.start_ms is not None
    return work.start_ms, work.start_ms + work.ms


def _row(phase: str, name: str, ms: float, count: float) -> dict[str, Any]:
    return {"phase": phase, "kernel": name, "kernel_ms": ms, "events": count}
