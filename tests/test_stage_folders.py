"""Folders as units of a stage: whole or absent, recorded file by file, made again as one, archived with their files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from toy_stage import STAGE, toy_config

from pipeline import ledger, manifest
from pipeline.stage import StageContext, run_stage

FILES = {"model.bin": b"weights", "sub/notes.txt": b"notes"}


class FolderBody:
    """Publishes the folder `draft`; `made` counts how often it was made."""

    def __init__(self, dies: bool = False) -> None:
        self.made, self.dies = 0, dies

    def __call__(self, ctx: StageContext) -> Mapping[str, Any]:
        ctx.publish_folder("draft", self.make)
        return {"rows": 1}

    def make(self, folder: Path) -> None:
        self.made += 1
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            if self.dies:
                raise KeyboardInterrupt


def run(body: FolderBody) -> Path:
    return run_stage(STAGE, toy_config(), body)


def contents(folder: Path) -> dict[str, bytes]:
    draft = folder / "draft"
    return {str(path.relative_to(draft)): path.read_bytes() for path in draft.rglob("*") if path.is_file()}


def test_folder_is_recorded_file_by_file(data_root: Path) -> None:
    body = FolderBody()
    folder = run(body)
    done = manifest.read(folder)
    assert done is not None
    assert {record.name for record in manifest.file_records(done)} == {f"draft/{name}" for name in FILES}
    run(body)
    assert body.made == 1


def test_folder_that_was_being_made_is_absent(data_root: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(FolderBody(dies=True))
    assert not (data_root / "tiny" / STAGE.name / "draft").exists()
    assert contents(run(FolderBody())) == FILES


def test_folder_that_was_not_recorded_to_its_end_is_kept(data_root: Path) -> None:
    """Killed between the rename and the last line of the record."""
    folder = run(FolderBody())
    (folder / manifest.DONE).unlink()
    record = folder / ledger.NAME
    record.write_text("".join(record.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    body = FolderBody()
    done = manifest.read(run(body))
    assert done is not None
    assert len(manifest.file_records(done)) == len(FILES)
    assert body.made == 0


@pytest.mark.parametrize("damaged", FILES)
def test_one_damaged_file_has_the_whole_folder_made_again(data_root: Path, damaged: str) -> None:
    folder = run(FolderBody())
    (folder / "draft" / damaged).write_bytes(b"?")
    body = FolderBody()
    run(body)
    assert body.made == 1
    assert contents(folder) == FILES


def test_folder_comes_back_from_the_archive(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive").mkdir()
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(tmp_path / "archive"))
    folder = run(FolderBody())
    shutil.rmtree(folder)
    body = FolderBody()
    assert contents(run(body)) == FILES
    assert body.made == 0
