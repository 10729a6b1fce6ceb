"""Runs that lie under SPEC_DATA_ROOT of this node, with their size; --delete removes those that the archive has.

    python -m slurm.scratch [--days N] [--delete]

A run is removed only when every unit in every one of its stages is in the archive, by hash, and nothing in it was
touched for --days days (default 7; a stage at work holds its lock, and its run is kept in any case).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline import archive, files, ledger, manifest
from pipeline.manifest import FileRecord
from pipeline.partial import partial_folder
from pipeline.stage import data_root

DAY = 86400.0
LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class Run:
    """`kept_because` is None when all of it is archived, so that it may go."""

    folder: Path
    bytes: int
    days: float
    kept_because: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 when a folder is not as it must be."""
    parser = argparse.ArgumentParser(prog="slurm.scratch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=float, default=7, help="remove what nothing has touched for so long (default 7)")
    parser.add_argument("--delete", action="store_true", help="remove them (default: only list)")
    arguments = parser.parse_args(argv)
    try:
        root, archived = data_root(), archive.root()
        if archived is None:
            raise ValueError("SPEC_ARCHIVE_ROOT is not set: nothing here has a copy, so nothing may be removed")
        if archived.resolve() == root.resolve():
            raise ValueError(f"SPEC_DATA_ROOT and SPEC_ARCHIVE_ROOT are one folder, {root}: there is no second copy")
        runs = list(look(root, archived, arguments.days))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for run in runs:
        verdict = f"kept: {run.kept_because}" if run.kept_because else "removed" if arguments.delete else "can go"
        if arguments.delete and not run.kept_because:
            shutil.rmtree(run.folder)
        print(f"{run.bytes / 2**20:9.1f} MiB  {run.days:5.1f} days  {run.folder.name}: {verdict}")
    if not arguments.delete and any(run.kept_because is None for run in runs):
        print("to remove what can go: make clean-scratch DELETE=1")
    return 0


def look(root: Path, archived: Path, days: float) -> Iterator[Run]:
    """Every run under `root`: a folder with a stage in it."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if not any((stage / ledger.NAME).is_file() for stage in folder.iterdir()):
            continue
        paths = [path for path in folder.rglob("*") if path.is_file()]
        written = [path.stat().st_mtime for path in paths if path.suffix != LOCK]  # looking takes the locks
        age = (time.time() - max(written)) / DAY
        reason = _at_work(folder) or _not_archived(folder, archived / folder.name)
        if reason is None and age < days:
            reason = f"touched in the last {days:g} days"
        yield Run(folder=folder, bytes=sum(path.stat().st_size for path in paths), days=age, kept_because=reason)


def _at_work(folder: Path) -> str | None:
    with ExitStack() as stack:
        for lock in sorted(folder.glob(f".*{LOCK}")):
            try:
                stack.enter_context(files.lock(lock, "a stage is at work in it"))
            except files.BusyError as error:
                return str(error)
    return None


def _not_archived(folder: Path, archived: Path) -> str | None:
    """What of the run is not in the archive, by name and hash; None when everything is."""
    for stage in sorted(path for path in folder.iterdir() if path.is_dir()):
        units = ledger.resume(stage)
        if units is None:
            return f"{stage.name} is no stage's folder"
        there = _archived_records(archived / stage.name)
        missing = [name for name, record in units.records.items() if there.get(name) != record]
        if missing:
            return f"{len(missing)} of {len(units)} files of {stage.name} are not in {archived}"
    return None


def _archived_records(archived: Path) -> dict[str, FileRecord]:
    """The files that the archive has of a stage, finished or not."""
    content, partial = manifest.read(archived), partial_folder(archived)
    if content is not None:
        return {record.name: record for record in manifest.file_records(content)}
    units = ledger.resume(partial) if partial.is_dir() else None
    return {} if units is None else units.records


if __name__ == "__main__":
    sys.exit(main())
