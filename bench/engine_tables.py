"""The speed bench's rows as tables: tokens a second with others beside them, times of steps, what was not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.tables import interval_of, number

Row = Mapping[str, Any]


def engine_speed_tables(result: Mapping[str, Any]) -> Iterator[tuple[str, pd.DataFrame]]:
    """(heading, table); tables without rows are left out."""
    rows = [row for row in result["rows"] if "gate" not in row]
    measured = [row for row in rows if "not_run" not in row]
    yield from _unless_empty(
        "Tokens/s by batch. Acceptance is imposed on random weights where it says synthetic; the engine's speeds are "
        "of rounds in which every row decodes, others' of whole calls:",
        speeds([row for row in measured if "tokens_per_s" in row]),
    )
    yield from _unless_empty(
        "Times of steps in ms (in brackets the time a copy takes for the bytes that must be read); overhead: what a "
        "round with four drafts takes beyond its forwards:",
        steps([row for row in measured if "target_step_ms" in row]),
    )
    yield from _unless_empty("Not run:", not_run([row for row in rows if "not_run" in row]))


def speeds(rows: Sequence[Row]) -> pd.DataFrame:
    """One row a measurement, by batch and acceptance, others first."""
    rows = sorted(rows, key=_order)
    return pd.DataFrame(
        {
            "batch": [number(row["batch"]) for row in rows],
            "engine": [_engine(row) for row in rows],
            "acceptance": [number(row.get("acceptance")) for row in rows],
            "k": [_length(row) for row in rows],
            "tokens/s": [interval_of(row, "tokens_per_s") for row in rows],
            "speed vs k=0": [number(row.get("speedup")) for row in rows],
            "tokens a round": [number(row.get("tokens_per_round")) for row in rows],
            "round ms": [number(row.get("round_ms")) for row in rows],
            "draft step ms": [number(row.get("draft_step_ms")) for row in rows],
            "verify ms": [number(row.get("verify_ms")) for row in rows],
            "host ms": [number(row.get("host_ms")) for row in rows],
            "graphs": [number(row.get("graphs")) for row in rows],
            "capture s": [number(row.get("capture_s")) for row in rows],
            "graphs MiB": [number(row.get("capture_mib")) for row in rows],
        }
    )


def steps(rows: Sequence[Row]) -> pd.DataFrame:
    """One row a context, batch and variant."""
    rows = sorted(rows, key=lambda row: (row["context"], row["batch"], row["variant"]))

    def verify(row: Row, tokens: int) -> str:
        return number(row["verify_ms"][tokens - 2]) if len(row["verify_ms"]) > tokens - 2 else "-"

    return pd.DataFrame(
        {
            "context": [number(row["context"]) for row in rows],
            "batch": [number(row["batch"]) for row in rows],
            "variant": [row["variant"] for row in rows],
            "target, 1 token": [f"{number(r['target_step_ms'])} ({number(r['target_floor_ms'])})" for r in rows],
            **{f"verify {tokens}": [verify(row, tokens) for row in rows] for tokens in (2, 5, 9)},
            "draft step": [f"{number(row['draft_step_ms'])} ({number(row['draft_floor_ms'])})" for row in rows],
            "first draft step": [number(row["draft_first_ms"]) for row in rows],
            "overhead": [number(row["overhead_ms"]) for row in rows],
            "host": [number(row["host_ms"]) for row in rows],
        }
    )


def not_run(rows: Sequence[Row]) -> pd.DataFrame:
    return pd.DataFrame({"cell": [row["cell"] for row in rows], "reason": [row["not_run"] for row in rows]})


def _unless_empty(title: str, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    if len(table):
        yield f"{title}\n\n", table


def _order(row: Row) -> tuple[Any, ...]:
    is_ours = row["engine"] == "specdec"
    return (row["batch"], is_ours, _engine(row), row.get("acceptance") or "", row["controller"], row["k"])


def _engine(row: Row) -> str:
    return f"{row['engine']} {row.get('variant') or row.get('method')}"


def _length(row: Row) -> str:
    if row["controller"] != "adaptive":
        return str(row["k"])
    return f"adaptive: {number(row['mean_k'])} of {row['k']}"
