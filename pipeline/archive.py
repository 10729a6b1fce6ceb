"""Copies of finished stage folders between node-local storage and the shared archive, every file checked by hash."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

from pipeline import files, ledger, manifest
from pipeline.manifest import FileRecord


def root() -> Path | None:
    """$SPEC_ARCHIVE_ROOT, or None when it is not set. ValueError when it is not a folder that can be written to: better
    before a stage's work than after it, when its result is copied there."""
    text = os.environ.get("SPEC_ARCHIVE_ROOT", "")
    if not text:
        return None
    if not Path(text).is_dir():
        raise ValueError(
            f"SPEC_ARCHIVE_ROOT: got {text}, expected a folder that exists; create it or unset the variable"
        )
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError(
            f"SPEC_ARCHIVE_ROOT: got {text}, expected a folder that this user can write to; correct it or unset the "
            "variable"
        )
    return Path(text)


def holds(folder: Path, archived: Path) -> bool:
    """Whether `archived` already is a copy of the finished stage in `folder` (manifests compared)."""
    copy = manifest.read(archived)
    return copy is not None and copy == manifest.read(folder)


def copy_finished(source: Path, target: Path) -> None:
    """Copy a finished stage folder so that `target` is whole or absent; an older `target` is moved aside.

    Only what the manifest lists is copied, then done.json. ValueError when a file's hash is not the manifest's.
    """
    content = manifest.read(source)
    assert content is not None, f"{source} is not finished"
    copy_files(source, target, manifest.file_records(content), [ledger.NAME, manifest.DONE])


def copy_files(source: Path, target: Path, records: list[FileRecord], notes: list[str]) -> None:
    """`target` made anew from the recorded files of `source` and its `notes`, whole or not at all.

    A copy that was killed is gone on with: files that are there with the right hash are not copied again. OSError
    (ENOSPC) before the first byte when the disk has not the room; ValueError when a copy's hash is not the recorded.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = target.with_name(f"{files.TMP_PREFIX}{target.name}-{_node()}")
    missing = [record for record in records if manifest.damaged(tmp, [record], rehash=True)]
    _check_room(target.parent, sum(record.bytes for record in missing))
    tmp.mkdir(exist_ok=True)
    try:
        for name in [record.name for record in missing] + notes:
            (tmp / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, tmp / name)
        _check_copy(source, tmp, missing)
        if target.exists():
            files.move_aside(target)
        files.publish(tmp, target)
    except Exception:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def _node() -> str:
    """Names this node's copies; two nodes of one host, as in tests, differ in Slurm's name only."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        text = f"the copy needs {size / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free"
        raise OSError(errno.ENOSPC, text, str(folder))


def _check_copy(source: Path, tmp: Path, records: list[FileRecord]) -> None:
    problems = manifest.damaged(tmp, records, rehash=True)
    if problems:
        raise ValueError(
            f"{source}: {'; '.join(problems)}: the copy is not kept. "
            "Run that stage again: with --verify it makes damaged files anew, with --force all of them"
        )
