"""What a report is made from: a run's folder read once, and its rows as methods measured under loads.

A *method* is how tokens are drafted (drafter, draft, controller, k); a *load* is what it has to serve (batch of the
engine, requests at once or their rate of a server); a *cell* is a load with its prompts, temperature and context.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from pipeline.results import read_result, stage_files

STATES = ("fail", "not run", "pass")  # the worst first: what several results say of one gate
ENGINES = {"specdec": "the specdec engine", "vllm": "vLLM"}
ALL_GATES = {
    "G1": "sampled output follows the target's own law",
    "G2": "greedy output is token for token that of plain decoding",
    "G3": "a trained draft is accepted more often than its start",
    "G4": "the adaptive draft length keeps up with the best fixed one",
    "G5": "twice the speed of plain decoding at batch 1 on a GPU",
    "G6": "the same output and no slowdown inside vLLM",
}
DRAFTERS = {"model": "draft model", "ngram": "n-gram", "none": "no speculation"}  # what people call them
CELL = ("target", "dtype", "engine", "prompt_set", "temperature", "prompt_tokens", "acceptance")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run. results by file name; curves: the training metrics of each draft, a record a step; done: the stages'
    done.json, in order; filter_report: stage 02's counts, where that stage ran."""

    name: str
    results: Mapping[str, Mapping[str, Any]]
    curves: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    done: Sequence[Mapping[str, Any]] = ()
    filter_report: Mapping[str, Any] | None = None

    @property
    def rows(self) -> list[Row]:
        """Every row, with its stage."""
        return [row | {"stage": result["stage"]} for result in self.results.values() for row in result["rows"]]

    @property
    def gates(self) -> dict[str, dict[str, Any]]:
        """G1 to G6 and others found, each with the worst state that a result gives it."""
        return merged_gates(self.results.values())


@dataclass(frozen=True, kw_only=True, order=True)
class Method:
    """How tokens are drafted; controller "fixed" with k, or another's name with the most it may choose; title: the name
    that a server's config gives the method."""

    engine: str
    title: str
    drafter: str
    draft: str
    controller: str
    k: int

    @property
    def drafts(self) -> bool:
        return self.drafter != "none"

    @property
    def name(self) -> str:
        """The drafter, with the draft's own name where one was measured."""
        name = DRAFTERS.get(self.drafter, self.drafter)
        return self.title or (f"{name} ({self.draft})" if self.draft else name)

    @property
    def label(self) -> str:
        if not self.drafts:
            return "no speculation"
        if self.controller in self.title:
            return self.title
        length = f"k = {self.k}" if self.controller in ("none", "fixed") else f"{self.controller} k"
        return f"{self.name}, {length}"


@dataclass(frozen=True, kw_only=True, order=True)
class Load:
    """kind: batch (of the engine), at once (requests of a server), or Poisson (a share of a server's saturation)."""

    engine: str
    kind: str
    value: float

    @property
    def label(self) -> str:
        words = {"batch": "batch {:g}", "at once": "{:g} at once", "Poisson": "{:.0%} of saturation"}
        return words[self.kind].format(self.value)

    @property
    def phrase(self) -> str:
        """With its preposition, for a sentence."""
        if self.kind == "at once":
            return f"with {self.value:g} request{'s' * (self.value != 1)} at once"
        return f"at {self.label}"


def read_run(folder: Path) -> RunData:
    """A run's folder. ValueError when it holds no result, or one that is not of the schema."""
    paths = stage_files(folder, "result.json")
    if not paths:
        raise ValueError(f"{folder}: no stage has a result.json there; expected a run's folder under SPEC_DATA_ROOT")
    report = folder / "02_filter" / "report.json"
    metrics = sorted((folder / "03_train_draft").glob("*/metrics.jsonl"))
    return RunData(
        name=folder.resolve().name,
        results={f"{path.parent.name}/{path.name}": clean(read_result(path)) for path in paths},
        curves={path.parent.name: clean(list(_json_lines(path))) for path in metrics},
        done=[clean(json.loads(path.read_text(encoding="utf-8"))) for path in stage_files(folder, "done.json")],
        filter_report=clean(json.loads(report.read_text(encoding="utf-8"))) if report.is_file() else None,
    )


def merged_gates(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each gate's record of the worst state; those of ALL_GATES that no result holds are "not run"."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        for name, record in result["gates"].items():
            if name not in found or STATES.index(record["state"]) < STATES.index(found[name]["state"]):
                found[name] = record | {"stage": result["stage"]}
    absent = {"state": "not run", "value": None, "limit": None, "reason": "no stage of this run judges it", "stage": ""}
    return {name: found.get(name, absent) for name in [*ALL_GATES, *sorted(set(found) - set(ALL_GATES))]}


def method_of(row: Row) -> Method:
    """The method that a measured row is of."""
    k = row.get("k")
    return Method(
        engine=str(row["engine"]),
        title=str(row.get("method") or ""),
        drafter=str(row.get("drafter") or "none"),
        draft="" if row.get("draft") is None else Path(str(row["draft"])).name,
        controller=row.get("controller") or "none",
        k=int(k) if is_number(k) else 0,
    )


def load_of(row: Row) -> Load:
    """The load that a measured row was measured under."""
    engine, batch, share = str(row["engine"]), row.get("batch"), row.get("rate_share")
    if row.get("load") == "open":
        return Load(engine=engine, kind="Poisson", value=share if is_number(share) else 0)
    return Load(engine=engine, kind="at once" if engine == "vllm" else "batch", value=batch if is_number(batch) else 1)


def with_panels(rows: Sequence[Row]) -> list[Row]:
    """The rows with `panel`: their prompts, with what of engine and length tells rows of these prompts apart."""
    engines = {row.get("engine") for row in rows}
    lengths: dict[tuple[Any, Any], set[Any]] = {}
    for row in rows:
        lengths.setdefault((row.get("engine"), row.get("prompt_set")), set()).add(row.get("prompt_tokens"))
    found = []
    for row in rows:
        name = str(row.get("prompt_set") or "served prompts")
        if len(lengths[row.get("engine"), row.get("prompt_set")]) > 1:
            name += f", {row.get('prompt_tokens')} tokens"
        found.append(row | {"panel": f"{name} ({row.get('engine')})" if len(engines) > 1 else name})
    return found


def cell_of(row: Row) -> tuple[Any, ...]:
    """What has to be equal for two rows to be compared."""
    return (load_of(row), *(row.get(name) for name in CELL))


def speeds(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows that measured a speed, with `speedup` over the same cell's plain decoding (None where that is missing).
    Rows of processes that ran side by side are left out: their speeds do not hold."""
    measured = [dict(row) for row in rows if row.get("engine") and "gate" not in row and row.get("jobs", 1) == 1]
    measured = [row for row in measured if is_number(row.get("tokens_per_s"))]
    plain = {cell_of(row): row["tokens_per_s"] for row in measured if not method_of(row).drafts}
    for row in measured:
        base = plain.get(cell_of(row))
        if not is_number(row.get("speedup")):  # arrivals at a given rate leave no method a speed of its own
            row["speedup"] = row["tokens_per_s"] / base if base and row.get("load") != "open" else None
    return measured


def clean(value: Any) -> Any:
    """The same data with a question mark for each half surrogate, which JSON can hold and no file of text can."""
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def is_number(value: Any) -> TypeGuard[float]:
    """A finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values; a ratio's mean over cells."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that a killed process may have left with half a line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
