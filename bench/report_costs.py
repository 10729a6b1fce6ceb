"""Sections of a report about cost: where a round's time goes, the profile of its kernels, memory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bench.recommend import MEMORY
from bench.report_blocks import WHERE, Section, Table, frame_of, grouped, median_or_none, table_of_frame
from bench.report_data import Row, RunData, is_number, load_of, method_of
from bench.report_plots import Figure, stacked_bars

RUN_BENCH = "Run scripts/04_bench_engine.sh."
MOST_BARS = 24
PROFILE_STAGE = "06_profile"


def time_split(run: RunData) -> Section:
    """Drafting, verification and overhead of a round, at fixed lengths."""
    rows = [row for row in run.rows if "gate" not in row and row.get("engine") and row.get("verify_ms") is not None]
    rows = [row for row in rows if row.get("controller") in ("none", "fixed") and row.get("jobs", 1) == 1]
    if not rows:
        return Section(id="time", title="Where a round's time goes", missing=f"No times of rounds. {RUN_BENCH}")
    records = [
        {
            "method": f"{load_of(ours[0]).label}: {method_of(ours[0]).label}",
            "draft": median_or_none(_draft_ms(row) for row in ours),
            "verify": median_or_none(row["verify_ms"] for row in ours),
            "overhead": median_or_none(row.get("overhead_ms") for row in ours),
        }
        for ours in grouped(rows, "batch", "drafter", "draft", "k").values()
    ]
    table = pd.DataFrame(records).set_index("method")
    figure = stacked_bars(
        "time_of_a_round",
        "A round: drafting, verification, the rest",
        table.head(MOST_BARS).astype(float),
        x_label="ms a round, median over prompts",
        frame=table.reset_index(),
        note=f"{len(table) - MOST_BARS} more are in the CSV." if len(table) > MOST_BARS else "",
    )
    return Section(id="time", title="Where a round's time goes", blocks=[figure])


def memory(run: RunData) -> Section:
    """What methods cost in memory: as measured, and the weights of trained drafts."""
    rows = [row for row in run.rows if any(row.get(name) is not None for name in MEMORY) and row.get("engine")]
    weights = [
        {"draft": Path(file["name"]).parent.name, "weights, MB": file["bytes"] / 1e6}
        for done in run.done
        if done["stage"] == "03_train_draft"
        for file in done["files"]
        if file["name"].endswith(".safetensors")
    ]
    blocks: list[Figure | Table] = []
    if rows:
        frame = frame_of(rows, [*WHERE, *MEMORY]).drop_duplicates()
        blocks.append(table_of_frame("memory", "Memory by method", frame.rename(columns=MEMORY)))
    if weights:
        blocks.append(
            table_of_frame("draft_weights", "Weights of the drafts that stage 03 trained", pd.DataFrame(weights))
        )
    missing = "" if blocks else "No memory was measured: on a GPU stage 04, and the server of stage 05, record it."
    return Section(id="memory", title="Memory cost", blocks=blocks, missing=missing)


def profile(run: RunData) -> Section:
    """Stage 06's tables, one for each kind of row that it wrote."""
    rows = [row for row in run.rows if row["stage"] == PROFILE_STAGE and "gate" not in row]
    kinds = grouped([row | {"kind": row.get("kind") or row.get("table")} for row in rows], "kind")
    blocks = [
        table_of_frame(
            f"profile_{index}", str(kind or "Measured").replace("_", " "), frame_of(ours, list(_columns(ours)))
        )
        for index, ((kind,), ours) in enumerate(kinds.items())
    ]
    missing = "" if blocks else "No profile. Run scripts/06_profile.sh."
    return Section(id="profile", title="Profile of a round", blocks=blocks, missing=missing)


def _columns(rows: list[Row]) -> dict[str, None]:
    """All columns but the one that names the table and the stage."""
    return dict.fromkeys(name for row in rows for name in row if name not in ("kind", "table", "stage"))


def _draft_ms(row: Row) -> float:
    """All draft steps of a round."""
    step = row.get("draft_step_ms")
    return step * row["k"] if is_number(step) else 0.0
