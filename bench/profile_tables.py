"""Stage 06's result as tables: what steps cost and the bandwidth they reach; the time of each phase by group."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from bench.kernel_groups import GROUPS
from bench.tables import number

_COSTS = {
    "draft step ms": "draft_step_ms",
    "target step ms": "target_step_ms",
    "verify ms": "verify_ms",
    "round ms": "round_ms",
    "overhead ms": "overhead_ms",
    "c": "cost_ratio",
    "verify / step": "verify_ratio",
    "draft GB/s": "draft_step_gb_per_s",
    "target GB/s": "target_step_gb_per_s",
    "target of copy": "target_step_of_copy",
    "round launch ms": "round_launch_ms",
    "c, graphs": "cost_ratio_graph",
}


def cost_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """One row a cell. c: time of a draft step over that of a target step."""
    cells = [row for row in result["rows"] if "group" not in row]
    measured = {title: name for title, name in _COSTS.items() if any(name in row for row in cells)}
    return pd.DataFrame(_where(cells) | {t: [number(row.get(n)) for row in cells] for t, n in measured.items()})


def group_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """One row a cell and phase: its time, and each group's share of it."""
    by_phase: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if "group" in row:
            by_phase.setdefault((row["batch"], row["context"], row["phase"]), {})[row["group"]] = row
    phases = list(by_phase.values())
    first = [next(iter(groups.values())) for groups in phases]
    columns = {
        **_where(first),
        "phase": [row["phase"] for row in first],
        "ms": [number(sum(row["group_ms"] for row in groups.values())) for groups in phases],
    }
    shares = {group: [f"{groups[group]['share']:.1%}" for groups in phases] for group in GROUPS}
    return pd.DataFrame(columns | shares)


def _where(rows: list[Mapping[str, Any]]) -> dict[str, list[str]]:
    return {name: [str(row[name]) for row in rows] for name in ("batch", "context", "k")}
