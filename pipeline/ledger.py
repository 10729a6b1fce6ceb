"""The record of a stage's finished units while it runs: one JSON line a unit, with its hash.

The first line is the fingerprint of what the units are made from. A crash can only tear the last line, which is cut
off again at the next start; a unit whose bytes no longer have the recorded hash is forgotten, so it is made again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import files, manifest
from pipeline.manifest import FileRecord

NAME = "progress.jsonl"


class Ledger:
    """Finished units by file name. `name in ledger`, `len(ledger)`, iteration over names, `ledger[name]`."""

    def __init__(self, path: Path, header: dict[str, Any], records: dict[str, FileRecord]) -> None:
        self.path, self.header, self.records = path, header, records

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __getitem__(self, name: str) -> FileRecord:
        return self.records[name]

    def add(self, record: FileRecord) -> None:
        """Record a unit whose file is already under its final name."""
        _append(self.path, asdict(record))
        self.records[record.name] = record

    def forget_damaged(self) -> list[str]:
        """Forget every unit whose file is missing or has other bytes than recorded; one line about each."""
        problems = []
        for name, record in list(self.records.items()):
            if name not in self.records:
                continue
            found = manifest.damaged(self.path.parent, [record], rehash=True)
            if found:
                problems += found
                self._forget(name)
        return problems

    def _forget(self, name: str) -> None:
        """A file of a folder takes the whole folder along: it is made again as one."""
        top, slash, _ = name.partition("/")
        if slash:
            shutil.rmtree(self.path.parent / top, ignore_errors=True)
        for each in [each for each in self.records if each == name or (slash and each.startswith(f"{top}/"))]:
            del self.records[each]


def start(folder: Path, fingerprint: dict[str, Any]) -> Ledger:
    """A new ledger in an empty stage folder."""
    header = {"fingerprint": fingerprint, "started": manifest.now()}
    files.write_atomic(folder / NAME, json.dumps(header, sort_keys=True) + "\n")
    return Ledger(folder / NAME, header, {})


def resume(folder: Path) -> Ledger | None:
    """The ledger that an earlier process left, without its torn last line; None when there is none."""
    path = folder / NAME
    if not path.is_file():
        return None
    _cut_torn_line(path)
    header, *lines = [_parse(line) for line in path.read_text(encoding="utf-8").splitlines()] or [None]
    if header is None or "fingerprint" not in header:
        raise ValueError(f"{path}: not a stage's progress file; run the stage with --force to move the folder aside")
    records = [FileRecord(**line) for line in lines if line is not None]
    return Ledger(path, header, {record.name: record for record in records})


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _append(path: Path, value: dict[str, Any]) -> None:
    line = (json.dumps(value, sort_keys=True) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
