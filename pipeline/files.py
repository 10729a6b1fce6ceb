"""Files that are either whole or absent: hashes, fsync, atomic rename, locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TMP_PREFIX = ".tmp-"
ASIDE = ".old-"  # in the name of a folder that was moved aside
BLOCK_BYTES = 4 << 20


class BusyError(ValueError):
    """Another process holds the lock."""


def sha256_file(path: Path) -> str:
    """The file's sha256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """The sha256 of plain data, independent of key order and spacing."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fsync_path(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(tmp: Path, final: Path) -> None:
    """Give a finished temporary file (or folder) its final name; a crash leaves all of it or nothing."""
    if tmp.is_dir():
        for path in sorted(tmp.rglob("*")):
            fsync_path(path)
    fsync_path(tmp)
    os.replace(tmp, final)
    fsync_path(final.parent)


def write_atomic(path: Path, text: str) -> None:
    """Write `text` under a temporary name beside `path`, then publish it."""
    tmp = path.with_name(TMP_PREFIX + path.name)
    tmp.write_text(text, encoding="utf-8")
    publish(tmp, path)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that a disk or a quota is full, in Python's own way or in a library's words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def move_aside(folder: Path) -> Path:
    """Rename a folder to `<name>.old-<time>` beside itself, and return that. Nothing is deleted."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        aside = folder.with_name(f"{folder.name}{ASIDE}{stamp}{suffix}")
        if not aside.exists():
            os.replace(folder, aside)
            fsync_path(folder.parent)
            return aside
    raise AssertionError(f"a thousand copies of {folder} moved aside in one second")


@contextlib.contextmanager
def lock(path: Path, busy: str, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `path` (the kernel releases it when the process ends, however it ends).

    BusyError with `busy` and the holder's name when another process has it; with `wait`, wait for it instead.
    """
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise BusyError(f"{busy} (held by {holder}; lock file {path})") from error
        stream.truncate(0)
        with contextlib.suppress(OSError):  # the holder's name is a courtesy: a full disk must not fail the lock
            stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            stream.flush()
        yield
