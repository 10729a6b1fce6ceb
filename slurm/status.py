"""What became of a run's jobs; for a failed one why, and the command that goes on.

python -m slurm.status [--config FILE]      # without a config: every run under logs/
python -m slurm.status --cancel --config FILE
python -m slurm.status --log STAGE [--config FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import archive, manifest
from pipeline.config import load_config
from pipeline.stages import stage_name
from slurm import client, record
from slurm.client import Job
from slurm.facts import checkout
from slurm.record import Submitted

LOG_LINES, LAST_LINES = 60, 8
OK_STATES = ("COMPLETED", "DONE")


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a stage has failed; 2 when there is nothing to tell."""
    parser = argparse.ArgumentParser(prog="slurm.status", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", help="only this experiment's run")
    parser.add_argument("--cancel", action="store_true", help="cancel the run's jobs")
    parser.add_argument("--log", metavar="STAGE", help="show the end of a stage's last log")
    arguments = parser.parse_args(argv)
    logs = checkout() / "logs"
    try:
        runs = [load_config(arguments.config).run] if arguments.config else recorded_runs(logs)
        entries = {run: record.read(logs / run) for run in runs}
        if not any(entries.values()):
            raise ValueError(f"no job was submitted {'for run ' + runs[0] if arguments.config else 'from here'}")
        if arguments.log:
            show_log(runs[-1], entries[runs[-1]], arguments.log)
            return 0
        if arguments.cancel:
            cancel_all([entry for run in runs for entry in entries[run]])
            return 0
        return max([print_run(run, entries[run]) for run in runs if entries[run]])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def recorded_runs(logs: Path) -> list[str]:
    """Runs with a record of jobs, the latest last."""
    found = sorted(logs.glob(f"*/{record.NAME}"), key=lambda path: path.stat().st_mtime)
    return [path.parent.name for path in found]


def print_run(run: str, entries: Sequence[Submitted]) -> int:
    """The table of one run, then what failed; 1 if something has."""
    latest = sorted(record.latest(entries).values(), key=lambda entry: entry.stage)
    known = states(latest)
    source = "sacct" if client.has_accounting() else "scontrol; the site has no accounting (sacct)"
    print(f"run {run}   (states from {source})")
    rows: list[tuple[str, ...]] = [("stage", "job", "state", "GPUs", "node", "time", "restarts")]
    rows += [_row(entry, known[entry.job]) for entry in latest]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return print_failures(latest, known)


def states(entries: Sequence[Submitted]) -> dict[int, Job]:
    """Every job; of one that Slurm has forgotten its stage's folder tells whether it is done."""
    known = client.jobs([entry.job for entry in entries])
    forgotten = [entry for entry in entries if entry.job not in known]
    return known | {entry.job: Job(number=entry.job, state=_forgotten_state(entry)) for entry in forgotten}


def _forgotten_state(entry: Submitted) -> str:
    root = archive.root() or Path(os.environ.get("SPEC_DATA_ROOT", "."))
    folder = root / Path(entry.script).parent.name / entry.stage
    return "DONE" if manifest.read(folder) is not None else "UNKNOWN"


def _row(entry: Submitted, job: Job) -> tuple[str, ...]:
    waits = f" ({job.reason})" if job.state == "PENDING" and job.reason not in ("None", "") else ""
    restarts = len(re.findall(r"^\[\w+\] job \d+ on ", _text(entry), re.MULTILINE)) - 1
    cells = (entry.stage, str(entry.job), job.state.lower() + waits, str(entry.gpus), job.nodes, job.elapsed)
    return (*cells, str(max(0, restarts)))


def print_failures(latest: Sequence[Submitted], known: dict[int, Job]) -> int:
    """Each failed stage with the last lines of its log, then the command that goes on."""
    ended = [entry for entry in latest if not known[entry.job].is_live and known[entry.job].state not in OK_STATES]
    if not ended:
        return 0
    for entry in ended:
        print(f"\n{entry.stage} (job {entry.job}): {why(entry, known[entry.job])}")
    print(f"\nTo go on, with only what is left:\n  slurm/submit.sh --config {os.path.relpath(ended[0].config)}")
    return 1


def why(entry: Submitted, job: Job) -> str:
    """Why a job ended, with the last lines of its log."""
    if "DependencyNeverSatisfied" in job.reason:
        return "not run, because a stage before it failed"
    lines = [line for line in _text(entry).splitlines() if line.strip()]
    if not lines and job.code == "0:53":
        return f"Slurm could not open its log on the node: {entry.log}; is that folder visible there?"
    tail = "".join(f"\n    {line}" for line in lines[-LAST_LINES:])
    code = f", exit code {job.code.partition(':')[0]}" if job.code not in ("", "0:0") else ""
    return f"{job.state.lower()}{code}; the end of {os.path.relpath(entry.log)}:{tail or ' nothing'}"


def _text(entry: Submitted) -> str:
    path = Path(entry.log)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def show_log(run: str, entries: Sequence[Submitted], stage: str) -> None:
    """The end of the last log of a stage. ValueError when there is none."""
    entry = record.latest(entries).get(stage_name(stage))
    if entry is None:
        raise ValueError(f"no job was submitted for {stage_name(stage)} of run {run}")
    lines = _text(entry).splitlines()
    print(f"==> {entry.log} ({len(lines)} lines)")
    print("\n".join(lines[-LOG_LINES:]))


def cancel_all(entries: Sequence[Submitted]) -> None:
    """Cancel what is in the queue, the last in the chain first; a stage that runs leaves a resumable state."""
    waiting = {job.number for job in client.queue()}
    chosen = [entry for entry in reversed(entries) if entry.job in waiting]
    client.cancel(entry.job for entry in chosen)
    for entry in chosen:
        print(f"{entry.stage}: job {entry.job} cancelled")
    if not chosen:
        print("nothing in the queue")


if __name__ == "__main__":
    sys.exit(main())
