"""Tables for people, made from result records alone: the same cells as text for a terminal and as
markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

TIMES = ["draft step ms", "verify ms", "overhead ms"]  # columns that a narrow terminal can do without
_NOTHING = "-"


def speed_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """drafter x k or controller x batch, one row a measurement; intervals in brackets where they were measured."""
    rows = sorted((row for row in result["rows"] if "gate" not in row), key=_order)
    contexts = {"prompt tokens": [number(row.get("prompt_tokens")) for row in rows]} if _has_contexts(rows) else {}
    return pd.DataFrame(
        {
            "prompts": [row["prompt_set"] for row in rows],
            "T": [number(row["temperature"]) for row in rows],
            "batch": [str(row["batch"]) for row in rows],
            **contexts,
            "drafter": [_drafter(row) for row in rows],
            "k": [_length(row) for row in rows],
            "tokens/s": [interval_of(row, "tokens_per_s") for row in rows],
            "speed vs k=0": [interval_of(row, "speedup") for row in rows],
            "alpha": [interval_of(row, "alpha") for row in rows],
            "tokens a round": [number(row.get("tokens_per_round")) for row in rows],
            "draft step ms": [number(row.get("draft_step_ms")) for row in rows],
            "verify ms": [number(row.get("verify_ms")) for row in rows],
            "overhead ms": [number(row.get("overhead_ms")) for row in rows],
            "tokens/s, whole pass": [interval_of(row, "tokens_per_s_wall") for row in rows],
        }
    )


def category_table(result: Mapping[str, Any], value: str) -> pd.DataFrame:
    """One row a variant, one column a prompt set, `value` in the cells, in the order of the file."""
    rows = result["rows"]
    categories = dict.fromkeys(row["prompt_set"] for row in rows)
    variants = dict.fromkeys((_drafter(row), _limit(row)) for row in rows)
    cells = {(_drafter(row), _limit(row), row["prompt_set"]): number(row.get(value)) for row in rows}
    columns = {"drafter": [name for name, _ in variants], "k": [limit for _, limit in variants]}
    return pd.DataFrame(columns | {c: [cells.get((*variant, c), _NOTHING) for variant in variants] for c in categories})


def plain_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """The rows that belong to no gate, with all their columns."""
    return _all_columns([row for row in result["rows"] if "gate" not in row])


def gate_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """One row a gate: name, state, value, limit, reason."""
    gates = sorted(result["gates"].items())
    return pd.DataFrame(
        {
            "gate": [name for name, _ in gates],
            "state": [record["state"] for _, record in gates],
            "value": [number(record["value"]) for _, record in gates],
            "limit": [number(record["limit"]) for _, record in gates],
            "reason": [record["reason"] or _NOTHING for _, record in gates],
        }
    )


def evidence_table(result: Mapping[str, Any], gate: str) -> pd.DataFrame:
    """The rows that a gate was judged by, with all their columns."""
    return _all_columns([row for row in result["rows"] if row.get("gate") == gate])


def _all_columns(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "gate"]
    return pd.DataFrame({name: [number(row.get(name)) for row in rows] for name in columns})


def to_text(table: pd.DataFrame) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(name), *(len(cell) for cell in table[name]), 0) for name in table.columns]
    lines = [table.columns.tolist(), *table.to_numpy().tolist()]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _has_contexts(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one set of prompts was measured at several lengths."""
    lengths = {(row["prompt_set"], row.get("prompt_tokens")) for row in rows}
    return len(lengths) > len({name for name, _ in lengths})


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    is_ours = row["engine"] == "specdec"
    load = (row["prompt_set"], row["temperature"], row["batch"], row.get("prompt_tokens", 0))
    drafter = (row["drafter"] != "none", row["drafter"], row.get("draft") or "")
    return (*load, is_ours, *drafter, row["controller"] != "fixed", row["controller"], row["k"])


def _drafter(row: Mapping[str, Any]) -> str:
    if row["engine"] != "specdec":
        return f"{row['engine']} generate"
    return row["drafter"] if row.get("draft") is None else f"{row['drafter']} ({row['draft']})"


def _length(row: Mapping[str, Any]) -> str:
    """The fixed draft length; a controller by name, with the mean it chose and the most it may."""
    if row["controller"] in ("none", "fixed"):
        return str(row["k"])
    return f"{row['controller']}: {number(row['mean_k'])} of {row['k']}"


def _limit(row: Mapping[str, Any]) -> str:
    """The fixed draft length, or the controller with the most it may choose."""
    return str(row["k"]) if row["controller"] in ("none", "fixed") else f"{row['controller']}, up to {row['k']}"


def interval_of(row: Mapping[str, Any], name: str) -> str:
    """A row's value, with its interval in brackets where it has one."""
    interval = row.get(f"{name}_ci")
    if row.get(name) is None or interval is None:
        return number(row.get(name))
    return f"{number(row[name])} [{number(interval[0])}, {number(interval[1])}]"


def number(value: Any) -> str:
    """Three significant digits, all digits of a whole part; texts as they are."""
    if value is None or value != value:
        return _NOTHING
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(number(item) for item in value) + "]"
    if isinstance(value, int) or abs(value) >= 1000:
        return str(round(value))
    return f"{value:.3g}"
