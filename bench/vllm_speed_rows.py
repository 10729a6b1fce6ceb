"""Rows of bench.vllm_speed: kept on disk, and what an engine's log says for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import vllm_speed_gate
from bench.cell_rows import CellRows
from bench.report_data import is_number
from bench.serving_metrics import memory
from bench.serving_rows import FOLDERS
from bench.vllm_methods import Cell

REASON_LENGTH = 900
_CAPTURE = re.compile(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB")
_WHOLE = re.compile(r"(\d+) CUDA graphs of the target's step, .* made in ([\d.]+) s, (-?[\d.]+) GiB")
_TIMES = {
    "load_s": re.compile(r"Model loading took .* ([\d.]+) seconds"),
    "compile_s": re.compile(r"torch\.compile took ([\d.]+) s in total"),
    "init_s": re.compile(r"init engine .* took ([\d.]+) s"),
}
_OWN = re.compile(r"own draft .*: weights ([\d.]+) GiB, cache ([\d.]+) GiB")


class Rows(CellRows):
    stage = "vllm_speed"

    def judged(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        found = vllm_speed_gate.with_speedups(self.rows.values())
        judged = vllm_speed_gate.g6(found, self.obstacle)
        return found + judged["rows"], {"G6": judged["gate"]}


def told(log: Path) -> dict[str, Any]:
    """Row fields from an engine's log: its pool, and what its start, capturing graphs and the own draft took."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = {"kv_tokens": memory(text)["kv_tokens"]}
    found |= {name: float(seen.group(1)) for name, one in _TIMES.items() if (seen := one.search(text))}
    if capture := _CAPTURE.search(text):
        found |= {"capture_s": float(capture.group(1)), "capture_gib": float(capture.group(2))}
    if whole := _WHOLE.search(text):
        found |= {"whole_graphs": int(whole.group(1)), "whole_graphs_s": float(whole.group(2))}
        found |= {"whole_graphs_gib": float(whole.group(3))}
    if own := _OWN.search(text):
        found |= {"draft_weights_gib": float(own.group(1)), "draft_cache_gib": float(own.group(2))}
    return found


def short(text: str) -> str:
    """An engine's words for a page, without the folders of this machine."""
    text = FOLDERS.sub(".../", text)
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


def line_of(cell: Cell, row: Mapping[str, Any]) -> str:
    """What a terminal shows of a row."""
    if "not_run" in row:
        return f"{cell.name}: not run: {row['not_run']}"
    names = ("tokens_per_s", "tokens_per_s_wall", "mean_k", "alpha", "tokens_per_round", "draft_step_ms", "verify_ms")
    values = [f"{name} {row[name]:.4g}" for name in names if is_number(row.get(name))]
    return f"{cell.name}: {', '.join(values)}"
