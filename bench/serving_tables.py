"""Tables of stage 05 for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from bench.tables import number


def serving_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a method and load: speed, times, goodput, price; or why it was not run."""
    return pd.DataFrame(
        {
            "method": [row["method"] for row in rows],
            "load": [load_name(row) for row in rows],
            "tokens/s": [number(row.get("tokens_per_s")) for row in rows],
            "speed vs none": [number(row.get("speedup")) for row in rows],
            "TTFT ms": [_spread(row, "ttft") for row in rows],
            "TPOT ms": [_spread(row, "tpot") for row in rows],
            "E2EL ms": [_spread(row, "e2el") for row in rows],
            "good requests/s": [number(row.get("goodput_requests_per_s")) for row in rows],
            "$ a million tokens": [number(row.get("usd_per_million_tokens")) for row in rows],
            "tokens a round": [number(row.get("tokens_per_round")) for row in rows],
            "note": [f"not run: {row['not_run']}" if row["not_run"] else "" for row in rows],
        }
    )


def method_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a method: what it is, whether its greedy texts are those of "none", acceptance, memory."""
    firsts = list({row["method"]: row for row in reversed(rows)}.values())[::-1]
    plain = next((row["kv_tokens"] for row in firsts if row["drafter"] == "none"), None)
    return pd.DataFrame(
        {
            "method": [row["method"] for row in firsts],
            "drafter": [row["drafter"] + (" (plugin)" if row["plugin"] else "") for row in firsts],
            "draft": [row["draft"] or "-" for row in firsts],
            "k": [_length(row) for row in firsts],
            "texts as none's": [_texts(row) for row in firsts],
            "alpha by position": [number(row.get("alpha_by_position")) for row in firsts],
            "accepted of drafted": [number(row.get("accepted_share")) for row in firsts],
            "KV tokens": [number(row["kv_tokens"]) for row in firsts],
            "less than none's": [_less(row["kv_tokens"], plain) for row in firsts],
            "full contexts at once": [number(row["max_concurrency"]) for row in firsts],
        }
    )


def load_name(row: Mapping[str, Any]) -> str:
    """A load in words."""
    if row["load"] == "closed":
        return f"{row['batch']} at once"
    rate = "" if row["rate"] is None else f", {number(row['rate'])} requests/s"
    return f"Poisson, {number(row['rate_share'])} of saturation{rate}"


def _spread(row: Mapping[str, Any], name: str) -> str:
    """Median, and the 90th and 99th percentile."""
    if row.get(f"{name}_ms") is None:
        return number(None)
    return f"{number(row[f'{name}_ms'])} ({number(row[f'{name}_p90_ms'])}, {number(row[f'{name}_p99_ms'])})"


def _length(row: Mapping[str, Any]) -> str:
    if row["controller"] in ("none", "fixed"):
        return str(row["k"])
    return f"{row['controller']}, up to {row['k']}"


def _texts(row: Mapping[str, Any]) -> str:
    if row["texts"] is None:
        return number(None)
    ties = f", {row['texts_tied']} part at a tie" if row["texts_tied"] else ""
    return f"{row['texts_same']} of {row['texts']}{ties}"


def _less(mine: int | None, plain: int | None) -> str:
    return number(None) if mine is None or not plain else f"{1 - mine / plain:.0%}"
