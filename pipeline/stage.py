"""The stage contract: a stage is a pure function of config sections, input manifests and code version to a folder.

The folder is $SPEC_DATA_ROOT/<run>/<stage>/. A body writes each unit (a shard) to `ctx.tmp(name)` and publishes it;
done.json comes last. So whenever the process dies, the folder holds whole units and a record of them, and the next run
makes only what is missing. A minimal stage:

    STAGE = Stage(name="01_gen_traces", version=1, sections=("models", "traces"))

    def body(ctx):
        for name in shard_names:
            if name not in ctx.shards and not ctx.stopping:
                tmp = ctx.tmp(name)
                write_shard(tmp)
                ctx.publish(tmp, name, validate=check_shard, rows=64)
        return {"rows": 512}

    if __name__ == "__main__":
        sys.exit(stage_main(STAGE, body))

Import torch and the like inside `body`, not at the top: a finished stage then answers in well under a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import archive, fingerprint, ledger, manifest
from pipeline import files as files_module
from pipeline.archived import WORK, archived_folder, copy_to_archive, is_archived, put_aside
from pipeline.config import Config, load_config
from pipeline.context import StageContext, StageStopped, StopSignals, say
from pipeline.files import BusyError
from pipeline.partial import Partial

__all__ = [
    "WORK",
    "BusyError",
    "DiskError",
    "Stage",
    "StageContext",
    "StageStopped",
    "StaleError",
    "data_root",
    "run_stage",
    "stage_main",
]
EXIT_DONE, EXIT_USER, EXIT_STALE, EXIT_BUSY, EXIT_DISK, EXIT_STOPPED = 0, 2, 3, 4, 74, 75

Body = Callable[[StageContext], Mapping[str, Any]]


class StaleError(ValueError):
    """The stage's folder was made from another config, input or code version."""


class DiskError(ValueError):
    """The disk is full, or too full to start."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage is: raise `version` whenever its code writes something else than before.

    `sections` are the config sections it reads, or parts of them such as "bench_engine.prompts"; `inputs` the names of
    the stages whose folders it reads (or a function of the config that says so), `free_bytes` what must be free under
    SPEC_DATA_ROOT before it starts.
    """

    name: str
    version: int
    sections: tuple[str, ...]
    inputs: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    free_bytes: int = 100 << 20


def data_root() -> Path:
    """$SPEC_DATA_ROOT. ValueError when it is not set, is not a folder or cannot be written to."""
    text = os.environ.get("SPEC_DATA_ROOT", "")
    if not text:
        raise ValueError("SPEC_DATA_ROOT is not set; copy env.sh.example to env.sh and edit it, or export it")
    if not Path(text).is_dir():
        raise ValueError(f"SPEC_DATA_ROOT: got {text}, expected a folder that exists; create it or correct env.sh")
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError(f"SPEC_DATA_ROOT: got {text}, expected a folder that this user can write to")
    return Path(text)


def run_stage(stage: Stage, config: Config, body: Body, *, force: bool = False, verify: bool = False) -> Path:
    """Bring the stage's folder to "done" and return it; at once when it is done already and nothing changed.

    `body(ctx)` makes the units that `ctx.shards` lacks and returns {"rows": int, ...}; what else it returns goes into
    done.json ("device" as the device). `force` moves an existing folder aside first; `verify` hashes every output of a
    finished stage instead of comparing sizes. Raises StaleError, BusyError, DiskError, StageStopped (after SIGTERM or
    USR1), and ValueError for an environment or input that is not as it must be.
    """
    folder = _prepare_folder(config, stage.name)
    names = stage.inputs(config) if callable(stage.inputs) else stage.inputs
    inputs = {name: finished_input(config, name) for name in names}
    hashes = {name: manifest.content_hash(content) for name, (_, content) in inputs.items()}
    wanted = fingerprint.fingerprint(stage.name, stage.version, stage.sections, config, hashes)
    busy = f"{stage.name} of run {config.run!r} is being run by another process; wait for it or stop it"
    with _disk_errors(folder):
        if not force and _is_done(stage, folder, wanted, verify) and is_archived(config, stage.name, folder):
            return folder
        with files_module.lock(_lock_path(folder), busy):
            partial = Partial(stage.name, folder, archived_folder(config, stage.name), config.slurm.archive_seconds)
            _take_over(config, stage, folder, wanted, force, partial)
            if not _is_done(stage, folder, wanted, verify, announce=False):
                paths = {name: path for name, (path, _) in inputs.items()}
                _run_body(stage, config, folder, wanted, paths, body, partial)
            copy_to_archive(config, stage.name, folder)
            partial.remove()
    return folder


def stage_main(stage: Stage, body: Body, argv: Sequence[str] | None = None) -> int:
    """The command line of a stage; the exit code.

    0 done; 2 something the user must put right; 3 made from other settings (see --force); 4 run by another process;
    74 disk full; 75 stopped by SIGTERM or USR1, start again to continue. An error in the code is 1, with its traceback.
    """
    parser = argparse.ArgumentParser(
        prog=stage.name, description=(sys.modules[body.__module__].__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--config", default="configs/demo.yaml", help="the experiment (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as traces.batch=4"
    )
    parser.add_argument("--force", action="store_true", help="move an existing folder aside and start over")
    parser.add_argument("--verify", action="store_true", help="hash every file of a finished stage again")
    arguments = parser.parse_args(argv)
    codes = {StaleError: EXIT_STALE, BusyError: EXIT_BUSY, DiskError: EXIT_DISK, StageStopped: EXIT_STOPPED}
    try:
        config = load_config(arguments.config, arguments.set)
        run_stage(stage, config, body, force=arguments.force, verify=arguments.verify)
    except (ValueError, StageStopped) as error:
        say(stage.name, str(error))
        return codes.get(type(error), EXIT_USER)
    return EXIT_DONE


def _prepare_folder(config: Config, name: str) -> Path:
    folder = data_root() / config.run / name
    archive.root()
    try:
        folder.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"SPEC_DATA_ROOT: cannot create {folder.parent}: {error.strerror}") from error
    return folder


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def finished_input(config: Config, name: str) -> tuple[Path, dict[str, Any]]:
    """An input stage's folder and manifest, copied back from the archive when this node lacks it."""
    folder, archived = data_root() / config.run / name, archived_folder(config, name)
    if manifest.read(folder) is None and archived is not None and manifest.read(archived) is not None:
        with _disk_errors(folder), files_module.lock(_lock_path(folder), "", wait=True):
            if manifest.read(folder) is None:
                say(name, f"copying it back from {archived}")
                archive.copy_finished(archived, folder)
    content = manifest.read(folder)
    if content is None:
        raise ValueError(f"input {name} is not finished in {folder}; run that stage first")
    problems = manifest.damaged(folder, manifest.file_records(content))
    if problems:
        raise ValueError(f"input {name} in {folder} is damaged: {'; '.join(problems)}; run that stage again")
    changes = fingerprint.changed_settings(content, config)
    if changes:
        raise StaleError(
            f"input {name} in {folder} was made from other settings; run that stage again\n{_listed(changes)}"
        )
    return folder, content


def _is_done(stage: Stage, folder: Path, wanted: dict[str, Any], verify: bool, announce: bool = True) -> bool:
    """Whether the folder is finished and made from what is wanted. StaleError when made from something else."""
    content = manifest.read(folder)
    if content is None:
        return False
    _check_same(stage, folder, content["fingerprint"], wanted, "was made")
    problems = manifest.damaged(folder, manifest.file_records(content), rehash=verify)
    for problem in problems if announce else ():
        say(stage.name, f"finished before, but {problem}; making it again")
    if not problems and announce:
        say(stage.name, f"done already, nothing changed: {content['rows']} rows in {folder}")
    return not problems


def _check_same(stage: Stage, folder: Path, old: dict[str, Any], new: dict[str, Any], was: str) -> None:
    changes = fingerprint.differences(old, new)
    if changes:
        raise StaleError(
            f"{folder} {was} from other settings:\n{_listed(changes)}\n"
            f"Run {stage.name} again with --force to move that folder aside (nothing is deleted) and start over, "
            "or give this experiment another `run` name."
        )


def _listed(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _take_over(
    config: Config, stage: Stage, folder: Path, wanted: dict[str, Any], force: bool, partial: Partial
) -> None:
    """Under the lock: with `force` put old work aside; else fetch from the archive what it has and this node lacks."""
    archived = archived_folder(config, stage.name)
    if force:
        put_aside(config, stage.name, folder)
        return
    finished = manifest.read(archived) if archived is not None else None
    if archived is None or manifest.read(folder) is not None:
        return
    if finished is None:
        partial.take()
    elif ledger.resume(folder) is None or finished["fingerprint"] == wanted:
        archive.copy_finished(archived, folder)
        say(stage.name, f"copied back from {archived}")


def _run_body(
    stage: Stage,
    config: Config,
    folder: Path,
    wanted: dict[str, Any],
    inputs: Mapping[str, Path],
    body: Body,
    partial: Partial,
) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < stage.free_bytes:
        raise DiskError(
            f"{free >> 20} MiB free under {folder.parent}, {stage.name} needs {stage.free_bytes >> 20} MiB to start: "
            "free some, or set SPEC_DATA_ROOT to another disk"
        )
    units = _open_ledger(stage, folder, wanted)
    began = time.monotonic()
    with StopSignals(stage.name) as signals:
        ctx = StageContext(
            stage=stage.name,
            config=config,
            folder=folder,
            shards=units,
            inputs=inputs,
            signals=signals,
            unit_done=partial.unit_done,
        )
        try:
            summary = body(ctx)
            ctx.check_stop()
        except Exception:
            partial.last_copy()
            raise
    outputs = list(units.records.values())
    content = manifest.build(
        stage=stage.name, fingerprint=wanted, outputs=outputs, summary=summary, started=units.header["started"]
    )
    files_module.write_atomic(folder / manifest.DONE, manifest.to_text(content))
    say(stage.name, f"done: {content['rows']} rows in {folder}, {time.monotonic() - began:.1f} s")


def _open_ledger(stage: Stage, folder: Path, wanted: dict[str, Any]) -> ledger.Ledger:
    """The folder ready for the body: without leftovers of a killed process, finished units checked by hash."""
    folder.mkdir(exist_ok=True)
    _clear_leftovers(folder)
    units = ledger.resume(folder)
    if units is None:
        foreign = [path.name for path in folder.iterdir()]
        if foreign:
            raise ValueError(f"{folder} holds {foreign[0]} but no record of a stage; run with --force to move it aside")
        return ledger.start(folder, wanted)
    # Failed before its first unit, over a wrong path perhaps: there is nothing to keep.
    untouched = not units and [path.name for path in folder.iterdir()] == [ledger.NAME]
    if untouched and units.header["fingerprint"] != wanted:
        return ledger.start(folder, wanted)
    _check_same(stage, folder, units.header["fingerprint"], wanted, "holds unfinished work made")
    (folder / manifest.DONE).unlink(missing_ok=True)
    for problem in units.forget_damaged():
        say(stage.name, f"{problem}; making it again")
    say(stage.name, f"continuing in {folder}: {len(units)} finished files kept")
    return units


def _clear_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{files_module.TMP_PREFIX}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not files_module.is_disk_full(error):
            raise
        raise DiskError(
            f"the disk is full while writing for {folder} ({error}); "
            "finished units are kept: free some space and run again"
        ) from error
