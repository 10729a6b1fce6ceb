"""Sections of a report about speed: which method when, speed by batch, latency against throughput, acceptance, draft
length over time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.adaptive import RATES, TABLES, shifting_run
from bench.recommend import Choice, Recommendation, Score
from bench.report_blocks import (
    WHERE,
    Cell,
    Section,
    Table,
    frame_of,
    grouped,
    median_or_none,
    numbers,
    table_of_frame,
)
from bench.report_data import ENGINES, Load, Row, RunData, load_of, method_of, speeds, with_panels
from bench.report_plots import Figure, Line, line_panels
from bench.serving_tables import method_table, serving_table
from specdec.simulate_costs import cost_models

RUN_BENCH = "Run scripts/04_bench_engine.sh."
MOST_PANELS, MOST_LINES = 6, 8
SERVING_STAGE = "05_bench_vllm"


def which_method_when(run: RunData, advice: Recommendation) -> Section:
    """A table of method x load for each engine, and the methods that could not be run."""
    choices = {load.engine: [c for c in advice.choices if c.load.engine == load.engine] for load in _loads(advice)}
    blocks = [_method_table(engine, ours) for engine, ours in choices.items()]
    absent = {str(row.get("method")): row["not_run"] for row in run.rows if row.get("not_run")}
    if absent:
        found = pd.DataFrame({"method": list(absent), "why": list(absent.values())})
        blocks.append(table_of_frame("methods_not_run", "Methods that were not run", found))
    missing = "" if choices else f"No speeds. {RUN_BENCH}"
    return Section(id="methods", title="Which method when", blocks=blocks, missing=missing)


def _loads(advice: Recommendation) -> list[Load]:
    return [choice.load for choice in advice.choices]


def _method_table(engine: str, choices: Sequence[Choice]) -> Table:
    """Geometric means of the speedups; the method that is taken in bold, and plain decoding's tokens/s below."""
    scores = {(score.method, choice.load): score for choice in choices for score in choice.scores}
    taken = {choice.load: choice.best if choice.verdict == "pays" else None for choice in choices}
    methods = sorted({method for method, _ in scores}, key=lambda each: (each.name, each.controller, each.k))
    rows = []
    for method in methods:
        cells = [_speed_cell(scores.get((method, load)), taken[load]) for load in taken]
        rows.append([Cell(text=method.label), *cells])
    rows.append([Cell(text="no speculation, tokens/s"), *(Cell(text=_rates(choice.plain)) for choice in choices)])
    records = [
        {"method": method.label, "load": load.label, "speedup": score.speedup, "low": score.low}
        for (method, load), score in scores.items()
    ]
    return Table(
        name=f"method_by_load_{engine}",
        title=f"Speed over plain decoding in {ENGINES.get(engine, engine)}, mean over prompts and temperatures",
        columns=["method", *(load.label for load in taken)],
        rows=rows,
        frame=pd.DataFrame(records),
        note="Blue is faster than plain decoding, orange slower; bold is what the recommendation takes. "
        "A dash: not measured there on all prompts.",
    )


def speed_by_batch(run: RunData) -> Section:
    """Speed over k = 0 of each method, by batch or requests at once; a panel for each engine and set of prompts."""
    rows = [row for row in speeds(run.rows) if method_of(row).drafts and row["speedup"] is not None]
    groups = grouped(with_panels(rows), "panel")
    several = len({row["engine"] for row in rows}) > 1
    panels = {str(panel): list(_speed_lines(ours)) for (panel,), ours in _first(groups)}
    if not panels:
        return Section(id="speed", title="Speed by method and batch", missing=f"No speeds. {RUN_BENCH}")
    figure = line_panels(
        "speed_by_batch",
        "Speed over plain decoding",
        panels,
        x_label="batch" if not several else "batch, or requests at once",
        y_label="speed / plain decoding",
        frame=frame_of(rows, [*WHERE, "tokens_per_s", "tokens_per_s_ci", "speedup", "speedup_ci"]),
        note=f"At each batch the best fixed k of a drafter, and its adaptive k; shaded: intervals. {_left_out(groups)}",
        level=1.0,
        log_x=True,
    )
    return Section(id="speed", title="Speed by method and batch", blocks=[figure])


def latency_throughput(run: RunData) -> Section:
    """Time a token against tokens a second of the whole machine; a line a method through its loads."""
    rows = speeds(run.rows)
    served = [row for row in rows if numbers([row.get("tpot_ms")])[0]]
    rows = served or [row for row in rows if row["engine"] == "specdec"]
    if not rows:
        return Section(id="pareto", title="Latency and throughput", missing=f"No speeds. {RUN_BENCH}")
    points = pd.DataFrame(
        [
            {
                "panel": row["panel"],
                "method": method_of(row).label,
                "load": load_of(row).label,
                "x": row["tpot_ms"] if served else 1e3 * load_of(row).value / row["tokens_per_s"],
                "tokens_per_s": row["tokens_per_s"],
                "ttft_ms": row.get("ttft_ms"),
            }
            for row in with_panels(rows)
        ]
    ).rename(columns={"x": "ms_per_token"})
    panels = {
        str(panel): [_curve(str(method), part) for method, part in _fastest(ours)]
        for panel, ours in list(points.groupby("panel", sort=False))[:MOST_PANELS]
    }
    source = (
        "Served by vLLM: mean time per output token." if served else "The engine's decode alone: batch / (tokens/s)."
    )
    figure = line_panels(
        "latency_throughput",
        "Time a token against throughput",
        panels,
        x_label="ms a token of one request",
        y_label="tokens/s of all requests",
        frame=points,
        note=f"{source} Up and to the left is better; a line joins the loads of a method.",
        share_y=False,
    )
    return Section(id="pareto", title="Latency and throughput", blocks=[figure, *_serving_tables(run)])


def _serving_tables(run: RunData) -> Iterator[Table]:
    """Stage 05's own tables: every method under every load, and what each method is."""
    for result in run.results.values():
        rows = [row for row in result["rows"] if "slo" in row]  # of a load: measured, or why it was not run
        if result["stage"] == SERVING_STAGE and rows:
            note = f"Good requests: {rows[0]['slo']}. The price is an assumption: ${rows[0]['usd_per_hour']:g} an hour."
            yield table_of_frame("serving", "vLLM under load", serving_table(rows), note=note)
            yield table_of_frame("serving_methods", "vLLM's methods", method_table(rows))


def acceptance(run: RunData) -> Section:
    """Acceptance by position, a panel for each set of prompts: of the bench's drafters, and of trained drafts."""
    blocks: list[Figure | Table] = []
    rows = [row for row in run.rows if "gate" not in row and row.get("alpha_by_position") and row.get("engine")]
    if rows:
        groups = grouped(with_panels(rows), "panel")
        panels = {str(panel): list(_acceptance_lines(ours)) for (panel,), ours in _first(groups)}
        note = _left_out(groups)
        blocks.append(_acceptance_figure("acceptance_by_position", "Drafters of the bench", panels, rows, note))
    trained = [row for row in run.rows if row.get("alpha_by_position_t1")]
    if trained:
        groups = grouped([row | {"T": t} for row in trained for t in (0, 1)], "domain", "T")
        panels = {
            f"{domain}, T = {t}": [
                _position_line(str(row.get("loss")), [row[f"alpha_by_position_t{t}"]]) for row in ours
            ]
            for (domain, t), ours in _first(groups)
        }
        note = _left_out(groups)
        blocks.append(
            _acceptance_figure("acceptance_of_drafts", "Trained drafts and their start", panels, trained, note)
        )
    missing = "" if blocks else f"No acceptance was measured. {RUN_BENCH}"
    intro = "How often draft token i is accepted once those before it in its round were."
    return Section(
        id="acceptance", title="Acceptance by position and domain", intro=intro, blocks=blocks, missing=missing
    )


@functools.cache
def draft_length_over_time() -> Section:
    """Gate G4's shifting load: the draft length that the adaptive controller chooses, beside the oracle's."""
    panels, records = {}, []
    for table in TABLES:
        lines = []
        for who in ("adaptive", "oracle"):
            run = shifting_run(cost_models()[table], who)
            step = max(1, len(run.k) // 600)
            x, k = run.progress[::step], run.k[::step]
            lines.append(Line(label=who, x=x, y=k, is_step=True))
            records += [{"costs": table, "policy": who, "tokens": a, "k": b} for a, b in zip(x, k, strict=True)]
        panels[f"costs: {table}"] = lines
    figure = line_panels(
        "draft_length_over_time",
        f"Acceptance {RATES[0]} and {RATES[1]} in turn",
        panels,
        x_label="tokens decoded",
        y_label="draft length k",
        frame=pd.DataFrame(records),
        note="Simulated with gate G4's fixed seeds, so the same in every report: the controller sees only times and "
        "acceptances; the oracle knows all rates and costs.",
    )
    return Section(id="adaptive", title="Draft length on a shifting load", blocks=[figure])


def _speed_cell(score: Score | None, best: Score | None) -> Cell:
    if score is None:
        return Cell(text="-")
    shade = max(-1.0, min(1.0, math.log2(score.speedup)))
    return Cell(text=f"{score.speedup:.2f}x", shade=shade, is_best=score is best)


def _rates(score: Score | None) -> str:
    if score is None:
        return "-"
    low, high = (f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}" for rate in score.tokens_per_s)
    return low if low == high else f"{low} to {high}"


def _speed_lines(rows: Sequence[Row]) -> Iterator[Line]:
    """A line for each drafter and controller: at each load the k of the highest median speedup."""
    lines = []
    for (method, controller), ours in _by_method(rows).items():
        points = []
        for (value,), at in grouped([row | {"x": load_of(row).value} for row in ours], "x").items():
            best = max(grouped(at, "k").values(), key=lambda same: median_or_none(r["speedup"] for r in same) or 0.0)
            bounds = [[(row.get("speedup_ci") or [None, None])[end] for row in best] for end in (0, 1)]
            points.append((value, median_or_none(r["speedup"] for r in best), *map(median_or_none, bounds)))
        x, y, low, high = zip(*sorted(points), strict=True)
        label = f"{method}, best fixed k" if controller == "fixed" else f"{method}, {controller} k"
        lines.append(Line(label=label, x=x, y=y, low=low, high=high))
    yield from sorted(lines, key=lambda line: -max(value or 0.0 for value in line.y))[:MOST_LINES]


def _by_method(rows: Sequence[Row]) -> Mapping[tuple[str, str], list[Row]]:
    """Rows by drafter and by controller, where every fixed length is one."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        method = method_of(row)
        controller = "fixed" if method.controller in ("none", "fixed") else method.controller
        groups.setdefault((method.name, controller), []).append(row)
    return groups


def _fastest(points: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    """The methods of the highest throughput, and no speculation, which all are held against."""
    groups = list(points.groupby("method", sort=False))
    groups.sort(key=lambda group: (group[0] != "no speculation", -group[1]["tokens_per_s"].max()))
    return groups[:MOST_LINES]


def _curve(method: str, points: pd.DataFrame) -> Line:
    points = points.groupby("load", sort=False)[["ms_per_token", "tokens_per_s"]].median().sort_values("tokens_per_s")
    return Line(label=method, x=points["ms_per_token"].tolist(), y=points["tokens_per_s"].tolist())


def _acceptance_lines(rows: Sequence[Row]) -> Iterator[Line]:
    """A line a drafter, of the longest fixed length that was measured: it shows the most positions."""
    for ours in grouped(rows, "drafter", "method", "draft").values():
        fixed = [row for row in ours if row.get("controller") in ("none", "fixed")] or ours
        longest = max(len(row["alpha_by_position"]) for row in fixed)
        lists = [row["alpha_by_position"] for row in fixed if len(row["alpha_by_position"]) == longest]
        yield _position_line(method_of(ours[0]).name, lists)


def _position_line(label: str, lists: Sequence[Sequence[float | None]]) -> Line:
    """The median at each position; None where no draft came that far."""
    values = [median_or_none(column) for column in zip(*lists, strict=True)]
    return Line(label=label, x=range(1, len(values) + 1), y=values)


def _first(groups: Mapping[tuple[Any, ...], list[Row]]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """As many groups as a figure has panels."""
    return list(groups.items())[:MOST_PANELS]


def _left_out(groups: Mapping[tuple[Any, ...], list[Row]]) -> str:
    return f"{len(groups) - MOST_PANELS} more panels are in the CSV." if len(groups) > MOST_PANELS else ""


def _acceptance_figure(
    name: str, title: str, panels: Mapping[str, Sequence[Line]], rows: Sequence[Row], note: str
) -> Figure:
    """Both kinds of rows have their acceptances in columns that start with alpha."""
    columns = dict.fromkeys(key for row in rows for key in row if key.startswith("alpha"))
    return line_panels(
        name,
        title,
        {key: lines[:MOST_LINES] for key, lines in panels.items()},
        x_label="position in the draft",
        y_label="acceptance",
        frame=frame_of(rows, [*WHERE, "loss", "domain", *columns]),
        note=note,
        y_limits=(-0.03, 1.03),
    )
