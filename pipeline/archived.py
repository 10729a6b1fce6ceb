"""A stage's place in the archive: whether it is there, copying it there, and putting it aside."""

from __future__ import annotations

from pathlib import Path

from pipeline import archive, files
from pipeline.config import Config
from pipeline.context import say
from pipeline.partial import partial_folder

WORK = ".work-"  # <stage>.work-<12 digits of a hash>: a body's unfinished work (checkpoints), archived for other nodes


def archived_folder(config: Config, stage: str) -> Path | None:
    """Where the finished stage is, or will be; None without an archive."""
    root = archive.root()
    return root / config.run / stage if root else None


def is_archived(config: Config, stage: str, folder: Path) -> bool:
    """Whether the archive, if there is one, has what is in the finished `folder`."""
    archived = archived_folder(config, stage)
    return archived is None or archive.holds(folder, archived)


def copy_to_archive(config: Config, stage: str, folder: Path) -> None:
    """Copy the finished `folder` there unless it is there already."""
    archived = archived_folder(config, stage)
    if archived is not None and not archive.holds(folder, archived):
        archive.copy_finished(folder, archived)
        say(stage, f"copied to {archived}")


def put_aside(config: Config, stage: str, folder: Path) -> None:
    """Move all of a stage aside, here and in the archive, finished or not: what is started over now may go on on a node
    that would fetch the old work."""
    archived, old = archived_folder(config, stage), [folder]
    if archived is not None:
        old += [archived, partial_folder(archived), *archived.parent.glob(f"{archived.name}{WORK}????????????")]
    for each in old:
        if each.exists():
            say(stage, f"moved the old folder to {files.move_aside(each)}")
