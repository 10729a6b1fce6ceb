"""report.html: one file with everything in it, and report_data/ beside it with each figure's and table's CSV.

Whatever a run lacks, its section says so, and which script measures it. Every text of a result is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

from bench import report_costs, report_evidence, report_sections
from bench.recommend import MEMORY, Recommendation, recommend
from bench.report_blocks import Section
from bench.report_data import RunData
from bench.report_plots import Figure
from pipeline import files

TEMPLATE = "report.html.j2"
OUT, DATA = "report.html", "report_data"
MOST_CSV_BYTES = 200_000  # in the page; a longer one is in report_data/ alone


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands on top for a run. facts: targets, drafts, devices and date."""

    name: str
    advice: Recommendation
    gates: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, run: RunData) -> Head:
        return cls(name=run.name, advice=recommend(run.rows, run.gates), gates=run.gates, facts=_facts(run))


def write_report(run: RunData, out: Path) -> list[Path]:
    """Write the page to `out` and the CSV files into report_data/ beside it; the paths, the page's first."""
    head = Head.of(run)
    sections = list(all_sections(run, head.advice))
    folder = out.parent / DATA
    folder.mkdir(exist_ok=True)
    written = [out]
    for block in (block for section in sections for block in section.blocks):
        files.write_atomic(folder / f"{block.name}.csv", csv_text(block.frame))
        written.append(folder / f"{block.name}.csv")
    files.write_atomic(out, render_page(run.name, [head], sections))
    return written


def all_sections(run: RunData, advice: Recommendation) -> Iterator[Section]:
    """In the order of the page."""
    yield report_evidence.gates(run)
    yield report_sections.which_method_when(run, advice)
    yield report_sections.speed_by_batch(run)
    yield report_sections.latency_throughput(run)
    yield report_sections.acceptance(run)
    yield report_sections.draft_length_over_time()
    yield report_costs.time_split(run)
    yield report_costs.profile(run)
    yield report_costs.memory(run)
    yield report_evidence.training(run)
    yield report_evidence.data(run)
    yield report_evidence.everything(run)
    yield report_evidence.provenance(run)


def render_page(title: str, heads: Sequence[Head], sections: Sequence[Section]) -> str:
    """The page's text, with a recommendation for each run in `heads`. It asks for nothing from elsewhere."""
    return _environment().get_template(TEMPLATE).render(title=title, heads=heads, sections=sections)


def csv_text(frame: pd.DataFrame) -> str:
    """The frame as CSV, without its index."""
    return frame.to_csv(index=False)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["csv_link"] = _csv_link
    environment.filters["markup"] = Markup  # for the figures, which matplotlib escaped
    environment.tests["figure"] = lambda block: isinstance(block, Figure)
    return environment


def _csv_link(frame: pd.DataFrame) -> str:
    """A link that holds the CSV; empty when that would make the page too large."""
    text = csv_text(frame)
    return "data:text/csv;charset=utf-8," + quote(text) if len(text) <= MOST_CSV_BYTES else ""


def _facts(run: RunData) -> dict[str, list[str]]:
    """The targets, drafts and devices of the run's results, and when the last one was started."""
    found: dict[str, dict[str, None]] = {"Target": {}, "Draft": {}, "Device": {}, "Measured": {}}
    found["Measured"][max(result["started"] for result in run.results.values())] = None
    for result in run.results.values():
        device = result["device"]
        found["Device"][f"{device['name']} ({device['count']} {device['kind']})"] = None
        for row in result["rows"]:
            if row.get("target"):
                found["Target"][f"{row['target']}{' in ' + row['dtype'] if row.get('dtype') else ''}"] = None
            if row.get("draft"):
                found["Draft"][str(row["draft"])] = None
    weights = [f"{draft} {size / 1e6:.0f} MB" for draft, size in report_costs.draft_bytes(run).items()]
    found["Weights of trained drafts"] = dict.fromkeys(weights)
    if not weights and not any(row.get(name) for row in run.rows for name in MEMORY):
        found["Memory"] = {"not measured in this run": None}
    return {name: list(values) for name, values in found.items() if values}
