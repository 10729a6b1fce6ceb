"""What the filter did, counted: report.json for programs, report.md for people.

Equal inputs give equal files: no times in them. Kept and dropped rows together are all rows; this is asserted.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from data.checks import Drop
from data.filtered import LABELS
from pipeline.config import FilterConfig
from pipeline.tables import to_markdown

STEPS = {
    "malformed": "not a sound trace",
    "truncated": "cut off at max_tokens",
    "loop": "ends in a repetition loop",
    "length": "too short or too long",
    "contaminated": "part of a benchmark",
    "wrong": "the verifier refuses the answer",
    "exact_duplicate": "same prompt and completion again",
    "near_duplicate": "prompt nearly repeats an earlier one",
}
# What to change in the config when a step leaves nothing.
ADVICE = {
    "malformed": "see `detail` in dropped-*.parquet",
    "truncated": "raise traces.max_tokens, or set filter.truncated to keep",
    "loop": "raise filter.loop_repeats or filter.loop_tokens",
    "length": "widen filter.min_tokens and filter.max_tokens",
    "contaminated": "take the traces' prompts from elsewhere than the bench's, or with another seed",
    "wrong": "set filter.wrong to keep",
    "exact_duplicate": "give more or other prompts",
    "near_duplicate": "raise filter.near_threshold, or give more varied prompts",
}
SPANS_SHOWN = 50


@dataclass(kw_only=True)
class Counts:
    """Rows by what became of them. `spans` holds the first matches of each benchmark."""

    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    kept: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # split, source, label, finish reason
    contaminated: Counter[str] = field(default_factory=Counter)
    spans: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, *, split: str, row_id: str, source: str, label: str, finish_reason: str, drop: Drop | None) -> None:
        """Count one row. `row_id` names it among the spans."""
        self.rows += 1
        if drop is None:
            self.kept[split, source, label, finish_reason] += 1
            return
        self.dropped[drop.reason] += 1
        if drop.reason == "contaminated":
            benchmark = drop.detail["benchmark"]
            self.contaminated[benchmark] += 1
            if len(self.spans[benchmark]) < SPANS_SHOWN:
                self.spans[benchmark].append({"row": row_id, **drop.detail})

    def kept_rows(self, split: str | None = None) -> int:
        """Kept rows of one split, or of both."""
        return sum(count for key, count in self.kept.items() if split in (None, key[0]))

    def check(self, config: FilterConfig) -> list[str]:
        """Warnings about the split. ValueError when nothing is left, naming the step that dropped the most."""
        assert self.kept_rows() + self.dropped.total() == self.rows, "every row is kept or dropped"
        if self.rows == 0:
            raise ValueError("the input has no rows; expected traces of stage 01")
        if self.kept_rows() == 0:
            reason, count = self.dropped.most_common(1)[0]
            raise ValueError(
                f"all {self.rows} rows were dropped, {count} of them by the step {reason} ({STEPS[reason]}); "
                f"{ADVICE[reason]}"
            )
        sizes = {"train": 1 - config.heldout, "heldout": config.heldout}
        empty = [split for split, share in sizes.items() if share and not self.kept_rows(split)]
        return [
            f"no row fell to {split}: give more prompts, or change filter.heldout or filter.seed" for split in empty
        ]

    def summary(self) -> dict[str, Any]:
        """For done.json: `rows` are the kept ones."""
        splits = {split: self.kept_rows(split) for split in ("train", "heldout")}
        return {"rows": self.kept_rows(), **splits, "dropped": dict(sorted(self.dropped.items()))}


def report(counts: Counts, benchmarks: Mapping[str, int]) -> dict[str, Any]:
    """The report as plain data; `benchmarks` maps each to its number of items."""
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for (_, source, label, _), count in counts.kept.items():
        labels[source][label] += count
    truncated = sum(count for key, count in counts.kept.items() if key[3] == "length")
    return {
        "schema": 1,
        "rows": counts.rows,
        "kept": {split: counts.kept_rows(split) for split in ("train", "heldout")},
        "kept_truncated": truncated,
        "dropped": {step: counts.dropped[step] for step in STEPS},
        "labels": {source: {label: labels[source][label] for label in LABELS} for source in sorted(labels)},
        "benchmarks": [
            {"benchmark": name, "items": items, "rows_removed": counts.contaminated[name], "spans": counts.spans[name]}
            for name, items in benchmarks.items()
        ],
    }


def to_text(content: Mapping[str, Any]) -> str:
    """The report as a page of markdown."""
    kept, rows = content["kept"], content["rows"]
    parts = [
        "# What the filter did\n",
        f"{rows} rows in: {kept['train']} to train, {kept['heldout']} held out, {sum(content['dropped'].values())} "
        f"dropped. Of the kept ones {content['kept_truncated']} were cut off at max_tokens.\n",
        _section("Steps, in order", steps_table(content)),
        _section("Answers of the kept rows", labels_table(content)),
        _section("Benchmarks", benchmarks_table(content)),
        _section(
            f"Matching spans (at most {SPANS_SHOWN} a benchmark; all are in dropped-*.parquet)", spans_table(content)
        ),
    ]
    return "\n".join(parts)


def steps_table(content: Mapping[str, Any]) -> pd.DataFrame:
    """step, what it drops, rows dropped, rows left."""
    dropped = pd.Series({step: content["dropped"][step] for step in STEPS})
    return pd.DataFrame(
        {
            "step": list(STEPS),
            "drops a row that": list(STEPS.values()),
            "dropped": dropped.astype(str).tolist(),
            "left": (content["rows"] - dropped.cumsum()).astype(str).tolist(),
        }
    )


def labels_table(content: Mapping[str, Any]) -> pd.DataFrame:
    """source by label, rows."""
    sources = content["labels"]
    columns = {label: [str(sources[source][label]) for source in sources] for label in LABELS}
    return pd.DataFrame({"source": list(sources), **columns})


def benchmarks_table(content: Mapping[str, Any]) -> pd.DataFrame:
    """benchmark, items, rows removed."""
    found = content["benchmarks"]
    return pd.DataFrame({name: [str(each[name]) for each in found] for name in ("benchmark", "items", "rows_removed")})


def spans_table(content: Mapping[str, Any]) -> pd.DataFrame:
    """One line a removed row: where it matched what."""
    spans = [span for each in content["benchmarks"] for span in each["spans"]]
    names = ("benchmark", "item", "of", "row", "part", "span")
    return pd.DataFrame({name: [str(span[name]) for span in spans] for name in names})


def _section(title: str, table: pd.DataFrame) -> str:
    return f"## {title}\n\n{to_markdown(table) if len(table) else 'None.'}\n"


def to_json(content: Mapping[str, Any]) -> str:
    """The report as report.json holds it."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
