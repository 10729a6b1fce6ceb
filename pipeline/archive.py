"""Copies of finished stage folders between node-local storage and the shared archive, every file checked by hash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline import files, ledger, manifest


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
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = target.with_name(f"{files.TMP_PREFIX}{target.name}-{os.getpid()}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    try:
        _copy(source, tmp, content)
        if target.exists():
            files.move_aside(target)
        files.publish(tmp, target)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def _copy(source: Path, tmp: Path, content: dict[str, Any]) -> None:
    records = manifest.file_records(content)
    names = [record.name for record in records] + [ledger.NAME, manifest.DONE]
    for name in names:
        (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, tmp / name)
    problems = manifest.damaged(tmp, records, rehash=True)
    if problems:
        raise ValueError(
            f"{source}: {'; '.join(problems)}: the copy is not kept. "
            "Run that stage again: with --verify it makes damaged files anew, with --force all of them"
        )
