"""Finished units of an unfinished stage in the archive, so that another node can go on after a preemption.

They lie in `.<stage>.partial` beside the stage's archived folder: the files, and the ledger that lists them, written
last. So the copy is good at any moment, and copying goes on where it was interrupted.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from pipeline import archive, files, ledger
from pipeline.context import say


def partial_folder(archived: Path) -> Path:
    """Where the units of the stage that will be archived as `archived` are."""
    return archived.with_name(f".{archived.name}.partial")


class Partial:
    """Copies the units of `folder` to the archive at least every `seconds`, as they are finished. `archived` is where
    the finished stage will be; None: there is no archive, and nothing is done."""

    def __init__(self, stage: str, folder: Path, archived: Path | None, seconds: float) -> None:
        self.stage, self.folder, self.seconds = stage, folder, seconds
        self.target = None if archived is None else partial_folder(archived)
        self.copied = time.monotonic()

    def unit_done(self) -> None:
        """After each unit: copy when the period is over."""
        if time.monotonic() - self.copied >= self.seconds:
            self.copy()

    def copy(self) -> None:
        """Copy what the archive lacks; an older copy of other settings is moved aside."""
        if self.target is None:
            return
        own, there = ledger.resume(self.folder), _ledger(self.target)
        if own is None:
            return
        if there is not None and there.header["fingerprint"] != own.header["fingerprint"]:
            files.move_aside(self.target)
            there = None
        self.target.mkdir(parents=True, exist_ok=True)
        new = [record for name, record in own.records.items() if there is None or there.records.get(name) != record]
        for record in new:
            final = self.target / record.name
            final.parent.mkdir(parents=True, exist_ok=True)
            tmp = final.with_name(f"{files.TMP_PREFIX}{final.name}")
            shutil.copyfile(self.folder / record.name, tmp)
            files.publish(tmp, final)
        if new or there is None:
            files.write_atomic(self.target / ledger.NAME, own.path.read_text(encoding="utf-8"))
        self.copied = time.monotonic()

    def last_copy(self) -> None:
        """Copy when the stage ends unfinished; an archive that cannot take it must not hide why the stage ended."""
        try:
            self.copy()
        except OSError as error:
            say(self.stage, f"the units made last could not be copied to {self.target}: {error}")

    def take(self) -> None:
        """Bring the archive's units here when this node has none, or fewer of the same (which are moved aside)."""
        there = _ledger(self.target) if self.target is not None else None
        if there is None or self.target is None:
            return
        own = ledger.resume(self.folder)
        if own is not None and (own.header["fingerprint"] != there.header["fingerprint"] or len(own) >= len(there)):
            return
        for problem in there.forget_damaged():
            say(self.stage, f"in {self.target}: {problem}")
        archive.copy_files(self.target, self.folder, list(there.records.values()), [ledger.NAME])
        say(self.stage, f"{len(there)} finished files taken over from {self.target}")

    def remove(self) -> None:
        """The stage is finished."""
        if self.target is not None:
            shutil.rmtree(self.target, ignore_errors=True)


def _ledger(folder: Path) -> ledger.Ledger | None:
    return ledger.resume(folder) if folder.is_dir() else None
