"""Tables of bench.vllm_speed's rows for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from bench.tables import number
from bench.vllm_speed_gate import AIM_ACCEPTANCE, AIMS, with_speedups

AIM = "aimed at, ours adaptive"
Row = Mapping[str, Any]


def whole_passes(rows: Sequence[Row]) -> pd.DataFrame:
    """As `speeds`, of whole calls, in which prompts are read too."""
    speed = "tokens_per_s_wall"
    whole = [{**row, "tokens_per_s": row[speed], "speedup": None} for row in rows if speed in row]
    return speeds(with_speedups(whole), aims={})


def speeds(rows: Sequence[Row], aims: Mapping[int, float] = AIMS) -> pd.DataFrame:
    """One row a method, length and acceptance, one column a batch: tokens a second, and beside plain decoding. aims:
    tokens a second by batch, in a row of their own."""
    measured = [row for row in rows if "tokens_per_s" in row]
    batches = sorted({row["batch"] for row in measured})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in measured:
        lines.setdefault((row["method"], length_of(row), acceptance_of(row)), {})[row["batch"]] = speed_of(row)
    ordered = sorted(lines, key=lambda key: key[2] not in ("", AIM_ACCEPTANCE) and "tokens a round" not in key[2])
    if aims and any(key[2] == AIM_ACCEPTANCE for key in ordered):
        ordered.insert(0, (AIM, "", AIM_ACCEPTANCE))
        lines[ordered[0]] = {batch: number(aims.get(batch)) for batch in batches}
    table = {"method": [key[0] for key in ordered], "k": [key[1] for key in ordered]}
    table["acceptance"] = [key[2] for key in ordered]
    columns = {f"batch {batch}": [lines[key].get(batch, "-") for key in ordered] for batch in batches}
    return pd.DataFrame(table | columns)


def speed_of(row: Row) -> str:
    """345 (1.78x)."""
    beside = f" ({row['speedup']:.2f}x)" if row.get("speedup") is not None else ""
    return f"{number(row['tokens_per_s'])}{beside}"


def acceptance_of(row: Row) -> str:
    """With the temperature where that is not 0."""
    told = f"T = {row['temperature']:g}" if row.get("temperature") else ""
    return ", ".join(filter(None, (row["acceptance"], told)))


def length_of(row: Row) -> str:
    """A method's draft length in words."""
    if row["controller"] == "none":
        return "0"
    return str(row["k"]) if row["controller"] == "fixed" else f"{row['controller']}, up to {row['k']}"


def rounds(rows: Sequence[Row]) -> pd.DataFrame:
    """What the rounds of drafting methods were like."""
    drafting = [row for row in rows if row.get("mean_k") is not None and row["controller"] != "none"]
    names = {
        "mean k": "mean_k",
        "alpha": "alpha",
        "tokens a round": "tokens_per_round",
        "draft step ms": "draft_step_ms",
        "verify ms": "verify_ms",
    }
    about = {
        "method": [row["method"] for row in drafting],
        "k": [length_of(row) for row in drafting],
        "batch": [str(row["batch"]) for row in drafting],
        "acceptance": [acceptance_of(row) or "-" for row in drafting],
    }
    return pd.DataFrame(about | {label: [number(row.get(name)) for row in drafting] for label, name in names.items()})


def engines(rows: Sequence[Row]) -> pd.DataFrame:
    """What each engine took to start and holds, by its last row."""
    last = {row["method"]: row for row in rows if "start_s" in row}
    names = {
        "start s": "start_s",
        "compiled in s": "compile_s",
        "target graphs": "target_graphs",
        "captured in s": "capture_s",
        "graphs GiB": "capture_gib",
        "whole steps": "whole_graphs",
        "made in s": "whole_graphs_s",
        "draft graphs": "draft_graphs",
        "their capture s": "draft_capture_s",
        "their MiB": "draft_capture_mib",
        "own draft's cache GiB": "draft_cache_gib",
        "KV tokens": "kv_tokens",
        "KV KiB a token": "kv_kib_per_token",
    }
    about = {"method": list(last), "runner": [row["runner"] for row in last.values()]}
    return pd.DataFrame(
        about | {label: [number(row.get(name)) for row in last.values()] for label, name in names.items()}
    )


def not_run(rows: Sequence[Row]) -> list[str]:
    """One line a method and reason: which cells were not measured."""
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        if "not_run" in row:
            key = (row["method"], row["not_run"])
            reasons[key] = reasons.get(key, 0) + 1
    return [f"- {method}, {count} cells: {reason}" for (method, reason), count in reasons.items()]
