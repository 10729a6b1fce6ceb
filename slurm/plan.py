"""Which stages of a run are finished, judged from their manifests alone: nothing is loaded, nothing copied."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import archive, fingerprint, manifest
from pipeline.config import Config
from pipeline.config_slurm import JOB_STAGES
from pipeline.stage import data_root
from pipeline.stages import REPORT, stage_name

REPORT_MADE_FROM = ".report.json"


def results_root() -> Path:
    """Where finished stages are found from any node: SPEC_ARCHIVE_ROOT, else SPEC_DATA_ROOT, which must then be there.

    ValueError when it is not a folder that can be written to.
    """
    root = archive.root()
    if root is not None:
        return root
    try:
        return data_root()
    except ValueError as error:
        raise ValueError(
            f"{error}. Where SPEC_DATA_ROOT is on each node's own disk, SPEC_ARCHIVE_ROOT must name a folder that all "
            "nodes and this one see"
        ) from error


def wanted(names: Sequence[str], first: str | None) -> list[str]:
    """The stages to bring to their end: those named, else all from `first` on. ValueError for unknown ones."""
    if names and first:
        raise ValueError(f"got both stages ({', '.join(names)}) and --from {first}, expected one of the two")
    chosen = [_job_stage(name) for name in names]
    if chosen:
        return [stage for stage in JOB_STAGES if stage in chosen]
    return list(JOB_STAGES[JOB_STAGES.index(_job_stage(first)) if first else 0 :])


def _job_stage(name: str) -> str:
    stage = stage_name(name)
    if stage not in JOB_STAGES:
        raise ValueError(f"got the stage {stage}, expected one of {', '.join(JOB_STAGES)}: it is part of the first job")
    return stage


def finished(config: Config, root: Path) -> dict[str, str]:
    """The finished stages of a run, with their contents' hashes. ValueError when one was made from other settings.

    One whose input has been made anew since, or is missing, does not count as finished.
    """
    done: dict[str, str] = {}
    for stage in JOB_STAGES:
        content = None if stage == REPORT else manifest.read(root / config.run / stage)
        if content is None:
            continue
        check_settings(config, stage, content, root)
        if all(done.get(name) == digest for name, digest in content["fingerprint"]["inputs"].items()):
            done[stage] = manifest.content_hash(content)
    if done and report_made_from(config, root) == done:
        done[REPORT] = ""
    return done


def check_settings(config: Config, stage: str, content: dict[str, Any], root: Path) -> None:
    """ValueError when the finished stage was made from other settings than the config's."""
    changes = fingerprint.changed_settings(content, config)
    if changes:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ValueError(
            f"{root / config.run / stage} was made from other settings:\n{lines}\n"
            f"Submit with --force --from {stage} to make it and what follows again (old folders are moved aside), or "
            "give this experiment another `run` name"
        )


def report_made_from(config: Config, root: Path) -> dict[str, str] | None:
    """The hashes of the stages that the run's last report was made from; None without one."""
    try:
        found = json.loads((root / config.run / REPORT_MADE_FROM).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
