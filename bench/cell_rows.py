"""Rows of a bench whose cells are measured until time is up, and go on when the same command is called again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pandas as pd

from pipeline.results import read_result, write_result


def write_as_they_come(
    rows: Iterable[Mapping[str, Any]],
    out: Path,
    *,
    stage: str,
    run: str,
    gate: str,
    judge: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
) -> bool:
    """For a bench of one go: the file after every row, its gate by `judge`, both printed at the end; whether the gate
    passes."""
    started, found = datetime.now(UTC).isoformat(timespec="seconds"), list[Mapping[str, Any]]()
    for row in rows:
        found.append(row)
        write_result(out, stage=stage, run=run, rows=found, gates={gate: judge(found)}, started=started)
    judged = judge(found)
    print(pd.DataFrame(found).to_string(index=False))
    print(f"{judged['state']}: {judged['reason']}")
    return bool(judged["state"] == "pass")


class Named(Protocol):
    @property
    def name(self) -> str:
        """Says which cell it is; the same in every run."""
        ...


AnyCell = TypeVar("AnyCell", bound=Named)


@dataclass(kw_only=True)
class CellRows(ABC):
    """What has been measured, by the name of its cell, on disk after every row. obstacle: why the bench's gate cannot
    be judged here, or None. ValueError for a file of another bench or run."""

    stage: ClassVar[str]
    out: Path
    run: str
    obstacle: str | None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        if self.out.exists():
            earlier = read_result(self.out)
            if (earlier["stage"], earlier["run"]) != (self.stage, self.run):
                raise ValueError(
                    f"{self.out} holds {earlier['stage']} of {earlier['run']}, not {self.stage} of {self.run}; "
                    "name another file with --out"
                )
            self.started = earlier["started"]
            self.rows = {row["cell"]: row for row in earlier["rows"] if "cell" in row}

    @abstractmethod
    def judged(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """All rows as they are written, those of the gates among them; and the gates."""

    def failed(self, cell: Named) -> bool:
        return "not_run" in self.rows.get(cell.name, {})

    def missing(self, cells: Sequence[AnyCell]) -> list[AnyCell]:
        """Those without a row, then those whose row says that they were not run."""
        return [cell for cell in cells if cell.name not in self.rows] + [cell for cell in cells if self.failed(cell)]

    def add(self, cell: Named, row: Mapping[str, Any]) -> None:
        self.rows[cell.name] = {"cell": cell.name, **row}
        rows, gates = self.judged()
        write_result(self.out, stage=self.stage, run=self.run, rows=rows, gates=gates, started=self.started)
