"""Stage 06's result as tables: what steps cost, how near they are to what memory allows, and the time of each phase by
group and by kernel."""

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
    "round launch ms": "round_launch_ms",
}
_STEPS = ("draft step", "target step", "verify", "round")
_LONGEST_NAME, _MIB = 60, 1 << 20


def cost_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """One row a cell. c: time of a draft step over that of a target step."""
    cells = cells_of(result)
    measured = {title: name for title, name in _COSTS.items() if any(name in row for row in cells)}
    times = {title: [number(row.get(name)) for row in cells] for title, name in measured.items()}
    return pd.DataFrame(_where(cells) | {"variant": [row.get("variant", "-") for row in cells]} | times)


def cells_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The summary of each cell."""
    return [row for row in result["rows"] if "phase" not in row]


def roofline_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """One row a cell and step: the bytes it has to read, the time a copy takes for them, its own, and their ratio."""
    steps = [
        (row, name, stem)
        for row in cells_of(result)
        for name in _STEPS
        if f"{(stem := name.replace(' ', '_'))}_floor_ms" in row
    ]
    columns = {
        "step": [name for _, name, _ in steps],
        "reads MiB": [number(row[f"{stem}_bytes"] / _MIB) for row, _, stem in steps],
        "floor ms": [number(row[f"{stem}_floor_ms"]) for row, _, stem in steps],
        "ms": [number(row[f"{stem}_ms"]) for row, _, stem in steps],
        "of the floor's speed": [f"{row[f'{stem}_of_copy']:.1%}" for row, _, stem in steps],
    }
    return pd.DataFrame(_where([row for row, _, _ in steps]) | columns)


def kernel_table(result: Mapping[str, Any], most: int | None = None) -> pd.DataFrame:
    """One row a cell, step and kernel, the longest first and `most` of them; then what none fills, and after which the
    longest gaps are."""
    by_step: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if "kernel" in row:
            by_step.setdefault((row["batch"], row["context"], row["phase"]), []).append(row)
    rows = [row for step in by_step.values() for i, row in enumerate(step) if most is None or i < most or "top" in row]
    columns = {
        "step": [row["phase"] for row in rows],
        "kernel": [_short(row["kernel"]) for row in rows],
        "ms": [number(row["kernel_ms"]) for row in rows],
        "share": [f"{row['share']:.1%}" for row in rows],
        "times": [number(row["events"]) for row in rows],
        "longest gaps": ["; ".join(map(_short, row.get("top", ()))) or "-" for row in rows],
    }
    return pd.DataFrame(_where(rows) | columns)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


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
