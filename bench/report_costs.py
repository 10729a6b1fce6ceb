"""Sections of a report about cost: where a round's time goes, the profile of its kernels, memory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bench.profile_tables import cost_table, group_table, kernel_table, roofline_table
from bench.recommend import MEMORY
from bench.report_blocks import Section, Table, grouped, median_or_none, table_of_frame
from bench.report_data import Row, RunData, is_number, load_of, method_of
from bench.report_plots import Figure, stacked_bars

RUN_BENCH = "Run scripts/04_bench_engine.sh."
MOST_BARS = 24
PROFILE_STAGE = "06_profile"


def time_split(run: RunData) -> Section:
    """Drafting, verification and overhead of a round, at fixed lengths."""
    rows = [row for row in run.rows if "gate" not in row and row.get("engine") and row.get("verify_ms") is not None]
    rows = [row for row in rows if row.get("controller") in ("none", "fixed") and row.get("jobs", 1) == 1]
    rows = [row for row in rows if row["stage"] != PROFILE_STAGE]
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
    records = [
        {
            "engine": row["engine"],
            "method": method_of(row).label,
            "load": "any" if row["engine"] == "vllm" else load_of(row).label,  # a server's pool is made at its start
            "prompts": row.get("prompt_set"),
            "prompt tokens": row.get("prompt_tokens"),
            **{title: row.get(name) for name, title in MEMORY.items()},
        }
        for row in rows
    ]
    weights = [{"draft": draft, "weights, MB": size / 1e6} for draft, size in draft_bytes(run).items()]
    blocks: list[Figure | Table] = []
    if rows:
        frame = pd.DataFrame(records).dropna(axis="columns", how="all").drop_duplicates()
        blocks.append(table_of_frame("memory", "Memory by method", frame))
    if weights:
        blocks.append(
            table_of_frame("draft_weights", "Weights of the drafts that stage 03 trained", pd.DataFrame(weights))
        )
    missing = "" if blocks else "No memory was measured: on a GPU stage 04, and the server of stage 05, record it."
    return Section(id="memory", title="Memory cost", blocks=blocks, missing=missing)


def draft_bytes(run: RunData) -> dict[str, int]:
    """The size of the weights of each draft that stage 03 trained."""
    return {
        Path(file["name"]).parent.name: file["bytes"]
        for done in run.done
        if done["stage"] == "03_train_draft"
        for file in done["files"]
        if file["name"].endswith(".safetensors")
    }


def profile(run: RunData) -> Section:
    """Stage 06: the time of each phase by group of kernels, and what steps cost."""
    found = next((result for result in run.results.values() if result["stage"] == PROFILE_STAGE), None)
    if found is None or not found["rows"]:
        missing = "No profile. Run scripts/06_profile.sh."
        return Section(id="profile", title="Profile of a round", missing=missing)
    rows = [row for row in found["rows"] if "group" in row]
    blocks: list[Figure | Table] = [table_of_frame("profile_costs", "What steps cost", cost_table(found))]
    if len(roofline := roofline_table(found)):
        blocks.append(table_of_frame("profile_roofline", "How near they are to what memory allows", roofline))
    if rows:
        times = [row | {"phase": f"batch {row['batch']}, context {row['context']}: {row['phase']}"} for row in rows]
        names = list(dict.fromkeys(row["phase"] for row in times))
        groups = list(dict.fromkeys(row["group"] for row in rows))
        table = pd.DataFrame(times).pivot_table(index="phase", columns="group", values="group_ms").loc[names, groups]
        blocks.append(
            stacked_bars(
                "profile_groups",
                "Time of each phase, by group of kernels",
                table.head(MOST_BARS),
                x_label="ms",
                frame=pd.DataFrame(rows),
            )
        )
        blocks.append(table_of_frame("profile_shares", "The same as shares", group_table(found), folded=True))
        blocks.append(table_of_frame("profile_kernels", "The same by kernel", kernel_table(found), folded=True))
    intro = (
        "c: time of a draft step over that of a target step. A Chrome trace of each phase lies in the stage's folder."
    )
    return Section(id="profile", title="Profile of a round", intro=intro, blocks=blocks)


def _draft_ms(row: Row) -> float:
    """All draft steps of a round."""
    step = row.get("draft_step_ms")
    return step * row["k"] if is_number(step) else 0.0
