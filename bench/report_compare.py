"""Two runs beside each other: what differs in settings, gates, speed and acceptance.

    python -m bench.report --compare RUN_A RUN_B [--out FILE.html]

Speeds of two runs were measured at two times, so a difference is called one only where both have intervals and these
do not overlap, or, without intervals, from 10 % on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.recommend import NOISE
from bench.report_blocks import Section, table_of_frame
from bench.report_data import Row, RunData, cell_of, is_number, load_of, method_of, read_run, speeds
from bench.report_html import Head, render_page
from bench.tables import number, to_text
from pipeline import files
from pipeline.fingerprint import flat
from pipeline.stage import data_root

OUT = "comparison.html"
SAME = "They are the same in both runs."


def main(argv: Sequence[str]) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.report", description="Compare two runs.")
    parser.add_argument("--compare", nargs=2, required=True, metavar=("RUN_A", "RUN_B"), help="folders or run names")
    parser.add_argument("--out", default=OUT, help=f"the page (default: {OUT} here)")
    arguments = parser.parse_args(argv)
    try:
        first, second = (read_run(run_folder(name)) for name in arguments.compare)
    except ValueError as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 2
    sections = compare(first, second)
    for section in sections:
        tables = [to_text(block.frame.map(number)) for block in section.blocks]
        print(f"\n== {section.title}", *tables, *([section.missing] if section.missing else []), sep="\n")
    out = Path(arguments.out)
    title = f"{first.name} and {second.name}"
    files.write_atomic(out, render_page(title, [Head.of(first), Head.of(second)], sections))
    print(f"\n{out}")
    return 0


def run_folder(name: str) -> Path:
    """A folder by its path, else a run under SPEC_DATA_ROOT. ValueError when neither is there."""
    if Path(name).is_dir():
        return Path(name)
    folder = data_root() / name
    if not folder.is_dir():
        raise ValueError(f"{name}: neither a folder nor a run under {data_root()}; give one of these")
    return folder


def compare(first: RunData, second: RunData) -> list[Section]:
    """Speed, acceptance, gates and settings of A and B, what differs first."""
    pairs = list(_pairs(first, second))
    return [
        _section("speed", "Speed", [_speed_record(a, b) for a, b in pairs], "No method was measured in both runs."),
        _section("acceptance", "Acceptance", list(_acceptance_records(first, second, pairs)), "None in both runs."),
        _section("gates", "Gates", _gate_records(first, second), SAME),
        _section("settings", "Settings, versions and machines that differ", _setting_records(first, second), SAME),
    ]


def verdict(before: Row, after: Row, name: str) -> str:
    """faster, slower or "no difference": B against A by the column `name`, an interval in `<name>_ci`."""
    old, new = before.get(name), after.get(name)
    if not (is_number(old) and is_number(new) and old > 0):
        return "-"
    old_ci, new_ci = (row.get(f"{name}_ci") or [None] for row in (before, after))
    if None not in (*old_ci, *new_ci):
        is_clear = new_ci[0] > old_ci[1] or new_ci[1] < old_ci[0]
    else:
        is_clear = not 1 / NOISE < new / old < NOISE
    return ("higher" if new > old else "lower") if is_clear else "no clear difference"


def _section(name: str, title: str, records: Sequence[Mapping[str, Any]], missing: str) -> Section:
    blocks = [table_of_frame(name, title, pd.DataFrame(records))] if records else []
    return Section(id=name, title=title, blocks=blocks, missing="" if records else missing)


def _pairs(first: RunData, second: RunData) -> Iterator[tuple[Row, Row]]:
    """Rows of one cell and method; a drafter that has another draft in B goes with the one of A, when each has one."""
    before, after = ({_key(row): row for row in speeds(run.rows)} for run in (first, second))
    for key in before:
        if key in after:
            yield before[key], after[key]
    left = [
        [row for key, row in rows.items() if key not in other] for rows, other in ((before, after), (after, before))
    ]
    by_drafter = [_unique(rows) for rows in left]
    for key in by_drafter[0]:
        if key in by_drafter[1]:
            yield by_drafter[0][key], by_drafter[1][key]


def _key(row: Row) -> tuple[Any, ...]:
    return (method_of(row), cell_of(row))


def _unique(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """By drafter, controller, k and cell, without the draft; only what is there once."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        method = method_of(row)
        found.setdefault((method.drafter, method.controller, method.k, cell_of(row)), []).append(row)
    return {key: same[0] for key, same in found.items() if len(same) == 1}


def _where(before: Row, after: Row) -> dict[str, Any]:
    labels = method_of(before).label, method_of(after).label
    return {
        "load": f"{load_of(before).label} ({before['engine']})",
        "prompts": before.get("prompt_set"),
        "T": before.get("temperature"),
        "method": labels[0] if labels[0] == labels[1] else f"{labels[0]} / {labels[1]}",
    }


def _speed_record(before: Row, after: Row) -> dict[str, Any]:
    old, new = before["tokens_per_s"], after["tokens_per_s"]
    return _where(before, after) | {
        "A tokens/s": old,
        "B tokens/s": new,
        "B / A": new / old if old else None,
        "tokens/s of B": verdict(before, after, "tokens_per_s"),
        "A speed vs k=0": before["speedup"],
        "B speed vs k=0": after["speedup"],
    }


def _acceptance_records(first: RunData, second: RunData, pairs: Sequence[tuple[Row, Row]]) -> Iterator[dict[str, Any]]:
    """Of the bench's methods, then of trained drafts by set and temperature."""
    for before, after in pairs:
        if is_number(before.get("alpha")) and is_number(after.get("alpha")):
            yield _where(before, after) | _rates(before, after, "alpha")
    drafts = [{(row["loss"], row["domain"]): row for row in run.rows if "alpha_t1" in row} for run in (first, second)]
    for key in drafts[0].keys() & drafts[1].keys():
        for temperature in (0, 1):
            where = {"load": "stage 03", "prompts": key[1], "T": temperature, "method": key[0]}
            yield where | _rates(drafts[0][key], drafts[1][key], f"alpha_t{temperature}")


def _rates(before: Row, after: Row, name: str) -> dict[str, Any]:
    return {
        "A alpha": before[name],
        "B alpha": after[name],
        "B - A": after[name] - before[name] if is_number(before[name]) and is_number(after[name]) else None,
        "alpha of B": verdict(before, after, name),
    }


def _gate_records(first: RunData, second: RunData) -> list[dict[str, Any]]:
    before, after = first.gates, second.gates
    none: Mapping[str, Any] = {"state": "not run", "value": None, "reason": ""}
    return [
        {
            "gate": name,
            "A": before.get(name, none)["state"],
            "B": after.get(name, none)["state"],
            "A value": before.get(name, none)["value"],
            "B value": after.get(name, none)["value"],
        }
        for name in sorted(before.keys() | after.keys())
    ]


def _setting_records(first: RunData, second: RunData) -> list[dict[str, str]]:
    before, after = (dict(_settings(run)) for run in (first, second))
    return [
        {"stage": stage, "setting": key, "A": before.get((stage, key), "-"), "B": after.get((stage, key), "-")}
        for stage, key in sorted(before.keys() | after.keys())
        if before.get((stage, key)) != after.get((stage, key))
    ]


def _settings(run: RunData) -> Iterator[tuple[tuple[str, str], str]]:
    """((stage, key), value): the config of each stage that is done, and what each result was measured on."""
    for done in run.done:
        yield from (((done["stage"], key), value) for key, value in flat("", done["fingerprint"]["config"]))
    for result in run.results.values():
        facts = {"commit": result["git"], "device": result["device"], "version": result["versions"]}
        yield from (((result["stage"], key), value) for key, value in flat("", facts))
