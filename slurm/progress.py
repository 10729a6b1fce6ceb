"""How far a stage has come, seen from any node: its finished units and checkpoints."""

from __future__ import annotations

from pathlib import Path

from pipeline import files, ledger
from pipeline.partial import partial_folder
from pipeline.stage import WORK


def progress(run: Path, stage: str) -> str:
    """A hash that changes whenever the stage has a unit, a worker's unit or a checkpoint more; `run` is its folder in
    the archive, or under SPEC_DATA_ROOT where there is none."""
    units = [run / stage / ledger.NAME, partial_folder(run / stage) / ledger.NAME]
    counts = [path.read_bytes().count(b"\n") - 1 for path in units if path.is_file()]  # without the ledger's header
    patterns = (f"{stage}{WORK}*/**/*", f"{stage}/{stage}{WORK}*/**/*", f".{stage}.workers/*/*.note")
    names = sorted(
        str(path.relative_to(run))
        for pattern in patterns
        for path in run.glob(pattern)
        if not any(part.startswith(files.TMP_PREFIX) for part in path.parts)
    )
    return files.sha256_json({"units": sum(counts), "files": names})
