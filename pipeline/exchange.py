"""The folder through which workers hand units to the driver: on the shared file system where there is one.

A worker writes a unit, then a record of it (bytes, sha256, rows); without the record the unit does not count. The
records also tell other workers what is done.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import archive, files
from pipeline.manifest import FileRecord
from pipeline.stage import data_root


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Units and records in `folder`; both are published whole, so several processes may look and write."""

    folder: Path

    @classmethod
    def of_run(cls, run: str, stage: str, fingerprint: Any) -> Exchange:
        """The folder of one run of a stage; another fingerprint (config, prompts) has another folder."""
        root = archive.root() or data_root()
        folder = root / run / f".{stage}.workers" / files.sha256_json(fingerprint)[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder=folder)

    def put(self, tmp: Path, record: FileRecord) -> None:
        """Publish a unit written to `tmp` (in this folder)."""
        files.publish(tmp, self.folder / record.name)
        note = self._note(record.name)
        unique = note.with_name(f"{tmp.name}.note")  # two workers may make the same unit
        unique.write_text(json.dumps(asdict(record)), encoding="utf-8")
        files.publish(unique, note)

    def record(self, name: str) -> FileRecord | None:
        """The record of a finished unit; None when it is not finished."""
        if not (self.folder / name).is_file():
            return None
        try:
            return FileRecord(**json.loads(self._note(name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def forget(self, name: str) -> None:
        """Make a unit unfinished again."""
        self._note(name).unlink(missing_ok=True)
        (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder: the stage has every unit."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _note(self, name: str) -> Path:
        return self.folder / f"{name}.note"
