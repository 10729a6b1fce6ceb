"""What a stage's body is given: where to write, what is finished, whether to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pipeline import files
from pipeline.config import Config
from pipeline.ledger import Ledger
from pipeline.manifest import FileRecord
from pipeline.progress import Progress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StageStopped(Exception):
    """SIGTERM or USR1 came; the finished units are kept and the next run continues."""


def say(stage: str, text: str) -> None:
    """One message of a stage to the person or the log."""
    print(f"[{stage}] {text}", file=sys.stderr, flush=True)


class StopSignals:
    """While entered, SIGTERM and USR1 only set `seen`. Outside the main thread signals stay as they are."""

    def __init__(self, stage: str) -> None:
        self.stage, self.seen = stage, False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {each: signal.signal(each, self._note) for each in STOP_SIGNALS}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if not self.seen:  # os.write, because print may be interrupted inside itself
            os.write(2, f"[{self.stage}] got {signal.Signals(number).name}: stopping after this unit\n".encode())
        self.seen = True


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """`folder` is the stage's folder, `shards` the finished files by name (of earlier runs too); `unit_done` is called
    after each unit."""

    stage: str
    config: Config
    folder: Path
    shards: Ledger
    inputs: Mapping[str, Path]
    signals: StopSignals
    unit_done: Callable[[], None] = lambda: None

    @property
    def stopping(self) -> bool:
        """SIGTERM or USR1 was seen: finish or drop the unit at hand and return."""
        return self.signals.seen

    def check_stop(self) -> None:
        """Raise StageStopped, which drops the unit at hand, when SIGTERM or USR1 was seen."""
        if self.stopping:
            raise StageStopped(
                f"stopped; {len(self.shards)} finished files kept in {self.folder}: run again to continue"
            )

    def input(self, stage: str) -> Path:
        """The finished folder of a stage named in Stage.inputs."""
        assert stage in self.inputs, f"{stage} is not among the inputs of {self.stage}"
        return self.inputs[stage]

    def tmp(self, name: str) -> Path:
        """Where to write the file that will be published as `name`; leftovers are cleared at the next start."""
        return self.folder / f"{files.TMP_PREFIX}{name}"

    def publish(
        self, tmp: Path, final: str | Path, validate: Callable[[Path], object] | None = None, rows: int = 0
    ) -> FileRecord:
        """Make a written temporary file the finished unit `final` (a name in the folder, or the path of one).

        `validate(tmp)` raises when the file is not good; it is read back, hashed, fsynced, renamed and recorded.
        """
        target = self.folder / final
        assert target.parent == self.folder, f"{final} is not directly in {self.folder}"
        if validate is not None:
            validate(tmp)
        record = FileRecord(name=target.name, bytes=tmp.stat().st_size, sha256=files.sha256_file(tmp), rows=rows)
        files.publish(tmp, target)
        self.shards.add(record)
        self.unit_done()
        return record

    def publish_folder(self, name: str, make: Callable[[Path], object]) -> None:
        """Make the folder `name` by `make(temporary folder)`, which creates it, and record each of its files.

        It appears whole or not at all; one that is there already, of a run that was killed before it had recorded
        every file, is only recorded.
        """
        final = self.folder / name
        if not final.is_dir():
            make(self.tmp(name))
            files.publish(self.tmp(name), final)
        for path in sorted(each for each in final.rglob("*") if each.is_file()):
            relative = str(path.relative_to(self.folder))
            if relative not in self.shards:
                size, sha256 = path.stat().st_size, files.sha256_file(path)
                self.shards.add(FileRecord(name=relative, bytes=size, sha256=sha256))
        self.unit_done()

    def progress(self, total: int, unit: str = "units", done: int = 0) -> Progress:
        """A bar on a terminal, a line every 30 s in a log; `total` includes the `done` units of earlier runs."""
        return Progress(self.stage, total, unit, done)

    def log(self, text: str) -> None:
        """Tell the person or the log something."""
        say(self.stage, text)
