"""Cost tables for the simulator from result files: step times that an engine measured, by rows and draft length.

Read are the prices of bench.vllm_lengths (`step_rows`, `step_k`, `draft_ms`, `verify_ms`, `between_ms`) and the rows of
bench.vllm_speed (`batch`, `ks`, `draft_ms_by_k`, `verify_ms_by_k`, a table for each `method`; what a step takes beyond
both is not in them).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.simulate_costs import CostModel

FEED_AFTER = 64  # missed tokens that vllm_draft_spec feeds at k = 0 too
Times = dict[int, dict[int, tuple[float, float]]]  # by rows and k: seconds of drafting, and of the rest


def read_times(path: Path) -> dict[str, CostModel]:
    """Tables by name: the file's, with its method where it has several. ValueError when the file has no such times."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a result file ({error!r})") from None
    found: dict[str, Times] = {}
    for method, batch, k, seconds in (each for row in rows for each in _records(row)):
        name = f"{path.stem} {method}".strip()
        found.setdefault(name, {}).setdefault(batch, {}).setdefault(k, seconds)
    comparable = {name: times for name, each in found.items() if (times := _comparable(each))}
    if not comparable:
        raise ValueError(
            f"{path}: no step times by draft length, with and without drafts; expected a result of bench.vllm_lengths "
            "or bench.vllm_speed"
        )
    return {name: cost_model(name, times) for name, times in comparable.items()}


def cost_model(name: str, times: Times) -> CostModel:
    """Between measured lengths and beyond them linear in k; a number of rows never measured costs what the nearest one
    does. The tokens that catching up feeds cost nothing beside its forward."""
    steps = {rows: max(seconds[0] / k for k, seconds in lengths.items() if k) for rows, lengths in times.items()}

    def nearest(rows: int) -> int:
        return min(steps, key=lambda other: abs(np.log(other / rows)))

    def verify(rows: int, tokens: int) -> float:
        lengths = times[nearest(rows)]
        ks = sorted(lengths)
        totals = [sum(lengths[k]) for k in ks]
        k = tokens / rows - 1
        low = min(max(int(np.searchsorted(ks, k, side="right")) - 1, 0), len(ks) - 2)
        share = (k - ks[low]) / (ks[low + 1] - ks[low])
        return float(totals[low] + share * (totals[low + 1] - totals[low]) - k * steps[nearest(rows)])

    return CostModel(
        name=name,
        step=lambda rows: steps[nearest(rows)],
        verify=verify,
        feed_token_s=0.0,
        feed_after=FEED_AFTER,
    )


def _records(row: Mapping[str, Any]) -> Iterator[tuple[str, int, int, tuple[float, float]]]:
    """(method, rows, k, seconds) of a result row."""
    if "step_k" in row:
        rest = row["verify_ms"] + row["between_ms"]
        yield "", row["step_rows"], row["step_k"], (row["draft_ms"] / 1e3, rest / 1e3)
    for k, draft, verify in zip(
        row.get("ks", ()), row.get("draft_ms_by_k", ()), row.get("verify_ms_by_k", ()), strict=True
    ):
        yield row["method"], row["batch"], k, (draft / 1e3, verify / 1e3)


def _comparable(times: Times) -> Times:
    """The numbers of rows that were timed with and without drafts."""
    return {rows: lengths for rows, lengths in times.items() if 0 in lengths and len(lengths) > 1}
