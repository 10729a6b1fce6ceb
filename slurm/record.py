"""logs/<run>/jobs.json: every job that was submitted for a run, oldest first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import files

NAME = "jobs.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """One job. `after` must succeed before it starts, `behind` only end (they hold its GPUs); `gpus` are its own and
    its workers', `slots` those of the cap, where the submitter holds it; `ender` is the job that ends its workers."""

    stage: str
    job: int
    script: str
    log: str
    config: str
    after: tuple[int, ...]
    behind: tuple[int, ...]
    gpus: int
    slots: tuple[int, ...]
    submitted: str
    ender: int | None = None


def read(logs: Path) -> list[Submitted]:
    """The jobs of a run; none when there is no record. ValueError for one that cannot be read."""
    path = logs / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["schema"] == SCHEMA
        return [Submitted(**_tuples(entry)) for entry in content["jobs"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path}: not a record of jobs ({error}); move it aside") from error


def add(logs: Path, entries: Sequence[Submitted]) -> None:
    """Append to the record. The caller holds the lock on submissions."""
    jobs = [asdict(entry) for entry in [*read(logs), *entries]]
    files.write_atomic(logs / NAME, json.dumps({"schema": SCHEMA, "jobs": jobs}, indent=2) + "\n")


def latest(entries: Sequence[Submitted]) -> dict[str, Submitted]:
    """The last job of each stage."""
    return {entry.stage: entry for entry in entries}


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
