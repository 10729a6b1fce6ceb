"""The job's process on its node: runs one stage, hands signals on to it, and queues the job again when its time is up.

    python -m slurm.run_stage STAGE --config FILE --logs FOLDER [--check] [--force]

Preempted (SIGTERM), the stage leaves a resumable state and Slurm queues the job again. Near the time limit (USR1) the
stage does the same, and this process asks for the job to be queued again. Either way it then goes on where it was, on
whatever node. A job that starts again and again without one unit or checkpoint more gives up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline import files
from pipeline.config import Config, load_config
from pipeline.config_slurm import JOB_STAGES
from pipeline.context import say
from pipeline.stage import EXIT_STOPPED
from pipeline.stages import CHECK, REPORT
from slurm import plan
from slurm.facts import checkout
from slurm.progress import progress
from slurm.resources import TRAINING
from slurm.workers import workers_of

EXIT_STALLED = 76
REQUEUE_SECONDS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """The stage's exit code; 76 when the job gave up."""
    parser = argparse.ArgumentParser(prog="slurm.run_stage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=JOB_STAGES)
    parser.add_argument("--config", required=True)
    parser.add_argument("--logs", required=True, type=Path)
    parser.add_argument("--check", action="store_true", help="check the environment first")
    parser.add_argument("--force", action="store_true", help="start the stage over, when the job starts first")
    arguments = parser.parse_args(argv)
    job, restarts = os.environ.get("SLURM_JOB_ID", "0"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    say(arguments.stage, f"job {job} on {os.environ.get('SLURM_JOB_NODELIST', 'no node')}, restart {restarts}")
    try:
        config = load_config(arguments.config)
        stalls = count_stalls(config, arguments.stage, arguments.logs / f"{arguments.stage}-{job}.starts.json")
    except ValueError as error:
        say(arguments.stage, str(error))
        return 2
    if stalls >= config.slurm.stalls:
        say(arguments.stage, _given_up(stalls))
        return EXIT_STALLED
    run = SignalledRun(arguments.stage)
    code = run.call(_script(CHECK), "--config", arguments.config) if arguments.check and not restarts else 0
    with workers_of(job, config, arguments.stage):
        if code == 0:
            code = run.call(*stage_command(arguments.stage, arguments.config, arguments.force and not restarts))
    if code == EXIT_STOPPED and signal.SIGUSR1 in run.seen:
        requeue(arguments.stage, job)
    return code


def stage_command(stage: str, config: str, force: bool) -> list[str]:
    """On several nodes, one process on each, meeting at a free port of this one, which is the first."""
    if stage == REPORT:
        return [sys.executable, "-P", "-m", "slurm.report_job", "--config", config]
    command = [_script(stage), "--config", config, *["--force"] * force]
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if stage != TRAINING or nodes == 1:
        return command
    from pipeline.ports import free_port
    from slurm.nodes import own_address

    os.environ.update(MASTER_ADDR=own_address(), MASTER_PORT=str(free_port()))
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "1")  # srun does not take it from the job
    return [
        "srun",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        "--kill-on-bad-exit=1",
        *command,
    ]


def _script(stage: str) -> str:
    return str(checkout() / "scripts" / f"{stage}.sh")


class SignalledRun:
    """Runs commands, one at a time; SIGTERM and USR1 go on to the one that runs, and `seen` has what came."""

    def __init__(self, stage: str) -> None:
        self.stage, self.seen = stage, set()  # type: ignore[var-annotated]
        self.child: subprocess.Popen[bytes] | None = None
        for each in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, self._hand_on)

    def _hand_on(self, number: int, _: FrameType | None) -> None:
        self.seen.add(signal.Signals(number))
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def call(self, *command: str) -> int:
        """The command's exit code, as a shell gives it (128 + signal); 75 without starting it after a signal."""
        if self.seen:
            return EXIT_STOPPED
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        for number in self.seen:  # came while it was started
            self.child.send_signal(number)
        code = self.child.wait()
        return code if code >= 0 else 128 - code


def count_stalls(config: Config, stage: str, path: Path) -> int:
    """How many starts of this job in a row, up to this one, found the stage where the start before had found it.

    Kept beside the log, since the next start may be on another node.
    """
    now = progress(plan.results_root() / config.run, stage)
    before: dict[str, Any] = {}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
    stalls = before.get("stalls", 0) + 1 if before.get("progress") == now else 0
    state = {"starts": before.get("starts", 0) + 1, "stalls": stalls, "progress": now}
    files.write_atomic(path, json.dumps(state) + "\n")
    return int(stalls)


def _given_up(stalls: int) -> str:
    return (
        f"gave up: {stalls} starts in a row without one unit or checkpoint more. Give the stage more minutes or "
        "smaller units (shard_size, checkpoint_every), see why in the log above, then submit it again"
    )


def requeue(stage: str, job: str) -> None:
    """Ask Slurm to queue this job again; it then ends this process."""
    say(stage, "the time limit is near: queueing this job again")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        say(stage, f"scontrol requeue: {done.stderr.strip()}; submit this stage again to continue")
        return
    time.sleep(REQUEUE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
