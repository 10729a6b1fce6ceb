"""What a section of a report is made of, and how numbers are written in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.report_data import Row, is_number
from bench.report_plots import Figure
from bench.tables import number

MOST_ROWS = 200  # of a table on the page; its CSV has all
WHERE = (
    *("engine", "drafter", "method", "draft", "controller", "k"),
    *("prompt_set", "prompt_tokens", "temperature", "load", "batch", "rate_share", "rate"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell. shade: from -1 (worst, orange) to 1 (best, blue) behind the text; state: a gate's state, as a badge;
    is_best: in bold."""

    text: str
    shade: float | None = None
    state: str | None = None
    is_best: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """name: of its CSV; folded: shown when its title is clicked; left_out: rows that only the CSV has."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    frame: pd.DataFrame
    note: str = ""
    folded: bool = False
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Section:
    """missing: why there is nothing to show, and what to run; empty otherwise."""

    id: str
    title: str
    intro: str = ""
    blocks: Sequence[Figure | Table] = ()
    missing: str = ""


def table_of_frame(name: str, title: str, frame: pd.DataFrame, *, note: str = "", folded: bool = False) -> Table:
    """A table whose cells are the frame's values as text."""
    rows = [[Cell(text=number(value)) for value in values] for values in frame.head(MOST_ROWS).to_numpy().tolist()]
    left_out = max(0, len(frame) - MOST_ROWS)
    columns = [str(column) for column in frame.columns]
    return Table(
        name=name, title=title, columns=columns, rows=rows, frame=frame, note=note, folded=folded, left_out=left_out
    )


def frame_of(rows: Iterable[Row], columns: Sequence[str]) -> pd.DataFrame:
    """Those columns of the rows that any row has, as they were measured."""
    rows = list(rows)
    found = [name for name in columns if any(row.get(name) is not None for row in rows)]
    return pd.DataFrame([{name: row.get(name) for name in found} for row in rows], columns=found)


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Finite numbers; None for anything else."""
    return [float(value) if is_number(value) else None for value in values]


def median_or_none(values: Iterable[Any]) -> float | None:
    """The median of what is a number."""
    found = sorted(value for value in values if is_number(value))
    if not found:
        return None
    middle = len(found) // 2
    return found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2


def grouped(rows: Iterable[Row], *names: str) -> Mapping[tuple[Any, ...], list[Row]]:
    """Rows by the values of `names`, in the order in which those first come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return groups
