"""Made-up rows and runs for tests of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.results import gate, write_result

PASSED = gate("pass", value=1.5, limit=4.0, reason="3 comparisons")
PROVEN = {"G1": PASSED, "G2": PASSED}
WHERE = {"target": "tiny", "dtype": "float32", "engine": "specdec", "prompt_set": "code", "temperature": 0.0}


def plain(batch: int = 1, rate: float = 100.0, **other: Any) -> dict[str, Any]:
    """The row of k = 0."""
    names = {"drafter": "none", "draft": None, "controller": "none", "k": 0, "batch": batch}
    times = {"verify_ms": 10.0, "overhead_ms": 0.1, "repeats": 1, "ci_level": None}
    return {**WHERE, **names, **times, "tokens_per_s": rate, "speedup": 1.0, "alpha": None} | other


def drafted(drafter: str = "ngram", speedup: float = 2.0, batch: int = 1, **other: Any) -> dict[str, Any]:
    """A row with drafts of a fixed length, measured against `plain`'s 100 tokens/s."""
    names = {"drafter": drafter, "draft": None, "controller": "fixed", "k": 2, "batch": batch, "mean_k": 2}
    rates = {"tokens_per_s": 100 * speedup, "speedup": speedup, "alpha": 0.5, "alpha_by_position": [0.6, 0.4]}
    times = {"verify_ms": 12.0, "draft_step_ms": 1.0, "overhead_ms": 0.2, "repeats": 1, "ci_level": None}
    return {**WHERE, **names, **rates, **times} | other


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    gates: Mapping[str, Any] = PROVEN,
    stage: str = "04_bench_engine",
) -> Path:
    """A run's folder with one stage's result in it; the folder."""
    (folder / stage).mkdir(parents=True, exist_ok=True)
    started = "2026-01-01T00:00:00+00:00"
    path = folder / stage / "result.json"
    write_result(path, stage=stage, run=folder.name, rows=rows, gates=gates, started=started, command="python -m x")
    return folder


def write_draft(folder: Path, metrics: str, *, domain: str = "held out") -> None:
    """Stage 03's result of one draft, and its metrics.jsonl as given."""
    rates = {
        f"{name}_t{t}": value for t in (0, 1) for name, value in (("alpha", 0.4), ("alpha_by_position", [0.5, None]))
    }
    write_run(folder, [{"loss": "kd", "domain": domain, "prompts": 4, **rates}], gates={}, stage="03_train_draft")
    (folder / "03_train_draft" / "kd").mkdir(exist_ok=True)
    (folder / "03_train_draft" / "kd" / "metrics.jsonl").write_text(metrics, encoding="utf-8")


def write_filter(folder: Path, source: str = "arithmetic") -> None:
    """Stage 02's report, and its done.json."""
    report = {
        "rows": 10,
        "kept": {"train": 6, "heldout": 2},
        "kept_truncated": 1,
        "dropped": {"loop": 2},
        "labels": {source: {"correct": 1, "wrong": 2, "unverified": 5}},
        "benchmarks": [{"benchmark": source, "items": 3, "rows_removed": 0, "spans": []}],
    }
    done = {
        "stage": "02_filter",
        "fingerprint": {"config": {"filter": {"heldout": 0.2}}},
        "files": [],
        "git": {"revision": "abc", "dirty": False},
        "versions": {"python": "3.11"},
        "device": {"name": "cpu", "kind": "cpu", "count": 1},
        "command": ["/x/data/filter.py", "--config", "c.yaml"],
        "started": "2026-01-01T00:00:00+00:00",
    }
    (folder / "02_filter").mkdir(parents=True)
    for name, content in (("report.json", report), ("done.json", done)):
        (folder / "02_filter" / name).write_text(json.dumps(content), encoding="utf-8")
