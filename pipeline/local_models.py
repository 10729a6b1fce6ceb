"""Where models made on this machine live, and how each is made exactly once, whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline import files


def models_root(create: bool = True) -> Path:
    """$SPEC_DATA_ROOT/models, or a cache of the user's when SPEC_DATA_ROOT is not set."""
    data_root = os.environ.get("SPEC_DATA_ROOT", "")
    if data_root and not Path(data_root).is_dir():
        raise ValueError(f"SPEC_DATA_ROOT: got {data_root}, expected a folder that exists; create it or correct env.sh")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(data_root) / "models" if data_root else cache / "specdec" / "models"
    if create:
        root.mkdir(parents=True, exist_ok=True)
    return root


def make_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` under models_root(), made by `make(temporary folder)` if it is not there.

    Processes that want the same model wait for the one that makes it. ValueError when the disk is full.
    """
    folder = models_root() / name
    if folder.is_dir():
        return folder
    with files.lock(folder.with_name(f".{name}.lock"), "", wait=True):
        if folder.is_dir():
            return folder
        print(f"making model {name} once, in {folder}", file=sys.stderr, flush=True)
        tmp = folder.with_name(files.TMP_PREFIX + name)
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
        try:
            make(tmp)
            files.publish(tmp, folder)
        except Exception as error:
            if files.is_disk_full(error):
                raise ValueError(
                    f"the disk is full while making {folder} ({error}); free some space and run again"
                ) from error
            raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    return folder
