"""Sections of a report that back it: gates and their cases, training, data, everything measured, commands and
versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from bench.report_blocks import Cell, Section, Table, frame_of, numbers, table_of_frame
from bench.report_data import ALL_GATES, Row, RunData
from bench.report_plots import Figure, Line, line_panels
from bench.tables import evidence_table, gate_table, number

CURVES = {"loss": "loss", "acc_low": "sum min(p, q) of the top 8", "top1": "same best token"}
LEFT_OF_CURVE = 400  # points of a curve that are drawn
TRAINING = {
    "loss": "draft",
    "domain": "set",
    "prompts": "prompts",
    "alpha_t0": "alpha, T = 0",
    "alpha_t0_ci": "95 %, T = 0",
    "alpha_t1": "alpha, T = 1",
    "alpha_t1_ci": "95 %, T = 1",
    "break_even_c_t1": "pays up to c",
    "tokens_trained": "tokens trained",
}


def gates(run: RunData) -> Section:
    """G1 to G6 with state and reason, and below it every case that was judged."""
    found = run.gates
    frame = gate_table({"gates": found})
    frame.insert(1, "holds when", [ALL_GATES.get(name, "") for name in frame["gate"]])
    rows = [
        [Cell(text=name), Cell(text=means), Cell(text=state, state=state), *(Cell(text=text) for text in rest)]
        for name, means, state, *rest in frame.to_numpy().tolist()
    ]
    table = Table(name="gates", title="Gates", columns=list(frame.columns), rows=rows, frame=frame)
    cases = [
        table_of_frame(f"cases_{name}_{index}", f"{name}: every case ({result['stage']})", cases, folded=True)
        for index, result in enumerate(run.results.values())
        for name in sorted(result["gates"])
        if len(cases := evidence_table(result, name))
    ]
    intro = "A gate that was not run proves nothing, and its reason says why it was not."
    return Section(
        id="gates", title="Gates: is the output unchanged, and is it fast?", intro=intro, blocks=[table, *cases]
    )


def training(run: RunData) -> Section:
    """Curves of stage 03's drafts, and what they are worth."""
    blocks: list[Figure | Table] = []
    if any(run.curves.values()):
        blocks.append(_curves(run.curves))
    rows = [row for row in run.rows if "alpha_t1" in row and "domain" in row]
    if rows:
        frame = frame_of(rows, list(TRAINING)).rename(columns=TRAINING)
        blocks.append(table_of_frame("drafts", "What the drafts are worth", frame, note="In brackets: over prompts."))
    missing = "" if blocks else "No draft was trained in this run. Run scripts/03_train_draft.sh."
    return Section(id="training", title="Training", blocks=blocks, missing=missing)


def _curves(curves: Mapping[str, Sequence[Row]]) -> Figure:
    panels: dict[str, list[Line]] = {title: [] for title in CURVES.values()}
    for draft, records in curves.items():
        thinned = records[:: max(1, len(records) // LEFT_OF_CURVE)]
        for key, title in CURVES.items():
            points = [
                (row["step"], row[key]) for row in thinned if None not in numbers([row.get("step"), row.get(key)])
            ]
            if points:
                x, y = zip(*points, strict=True)
                panels[title].append(Line(label=draft, x=x, y=y))
    frame = pd.DataFrame([{"draft": draft, **record} for draft, records in curves.items() for record in records])
    return line_panels(
        "training_curves",
        "Training by step",
        {title: lines for title, lines in panels.items() if lines} or {"loss": []},
        x_label="step",
        y_label="",
        frame=frame,
        columns=3,
        share_y=False,
    )


def data(run: RunData) -> Section:
    """What stage 02 kept and dropped."""
    report = run.filter_report
    if report is None:
        missing = "No traces were filtered in this run. Run scripts/01_gen_traces.sh and scripts/02_filter.sh."
        return Section(id="data", title="Data", missing=missing)
    kept = report["kept"]
    intro = (
        f"{report['rows']} rows in: {kept.get('train', 0)} to train, {kept.get('heldout', 0)} held out, "
        f"{sum(report['dropped'].values())} dropped; {report['kept_truncated']} kept ones were cut off at max_tokens."
    )
    left = report["rows"] - pd.Series(report["dropped"]).cumsum()
    dropped = pd.DataFrame({"step": list(report["dropped"]), "dropped": list(report["dropped"].values()), "left": left})
    labels = pd.DataFrame([{"source": source, **counts} for source, counts in report["labels"].items()])
    found = pd.DataFrame(
        [{key: each[key] for key in ("benchmark", "items", "rows_removed")} for each in report["benchmarks"]]
    )
    tables = {
        "Steps of the filter, in order": dropped,
        "Answers of the kept rows": labels,
        "Benchmarks kept out": found,
    }
    blocks = [
        table_of_frame(f"data_{index}", title, frame)
        for index, (title, frame) in enumerate(tables.items())
        if len(frame)
    ]
    return Section(id="data", title="Data", intro=intro, blocks=blocks)


def everything(run: RunData) -> Section:
    """Every measured row with all its columns, a table for each stage."""
    blocks = []
    for index, (name, result) in enumerate(run.results.items()):
        rows = [row for row in result["rows"] if "gate" not in row]
        if not rows:
            continue
        shown = frame_of(rows, list(dict.fromkeys(key for row in rows for key in row)))
        blocks.append(
            table_of_frame(f"rows_{index}", f"{result['stage']}: {len(rows)} rows ({name})", shown, folded=True)
        )
    return Section(id="rows", title="Everything measured", blocks=blocks, missing="" if blocks else "No rows.")


def provenance(run: RunData) -> Section:
    """The command, commit, device and time of each stage, and the packages' versions."""
    stages = pd.DataFrame([_stage(result) for result in run.results.values()])
    others = [done for done in run.done if done["stage"] not in {r["stage"] for r in run.results.values()}]
    if others:
        stages = pd.concat([pd.DataFrame([_stage(_as_result(done)) for done in others]), stages])
    found: dict[str, dict[str, list[str]]] = {}
    for result in [*map(_as_result, others), *run.results.values()]:
        for package, version in result["versions"].items():
            found.setdefault(package, {}).setdefault(str(version), []).append(result["stage"])
    versions = pd.DataFrame(
        [
            {"package": package, "version": version, "stages": "all" if len(by) == 1 else ", ".join(names)}
            for package, by in sorted(found.items())
            for version, names in by.items()
        ]
    )
    blocks = [
        table_of_frame("commands", "What was run, and where", stages.sort_values("stage", kind="stable")),
        table_of_frame("versions", "Versions", versions, folded=True),
    ]
    return Section(id="provenance", title="Commands and versions", blocks=blocks)


def _stage(result: Mapping[str, Any]) -> dict[str, str]:
    device = result["device"]
    return {
        "stage": result["stage"],
        "command": result["command"],
        "commit": result["git"][:12] + ("-dirty" if result["git"].endswith("-dirty") else ""),
        "device": f"{device['name']} ({device['kind']}, {number(device['count'])})",
        "started": result["started"],
    }


def _as_result(done: Mapping[str, Any]) -> dict[str, Any]:
    """A stage without a result of its own (01, 02) told as one."""
    git = done.get("git", {})
    revision = f"{git.get('revision') or 'unknown'}{'-dirty' if git.get('dirty') else ''}"
    script, *rest = done.get("command") or [""]
    command = f"python -m {script.removesuffix('.py').split('/')[-2]}.{script.removesuffix('.py').split('/')[-1]}"
    return {**done, "git": revision, "command": " ".join([command if "/" in script else script, *rest])}
