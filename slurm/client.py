"""Slurm's own commands, and what they say about jobs, in dataclasses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LIVE = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT")
QUEUE_FIELDS = ("%A", "%T", "%j", "%r", "%N", "%M", "%k")


class SlurmError(ValueError):
    """A Slurm command refused or failed; the text is what it said."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job as Slurm knows it. `state` as in squeue's long form, `code` the exit code as "0:0" ("" while it lives),
    `comment` what it was submitted with."""

    number: int
    state: str
    name: str = ""
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    comment: str = ""
    code: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


def is_installed() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


def call(*command: str) -> str:
    """What a Slurm command prints. SlurmError with its message when it fails or the controller does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} was not found: this is no node of a Slurm cluster") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} has not answered in two minutes: is slurmctld running?") from error
    if done.returncode != 0:
        said = [line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines()]
        raise SlurmError(f"{command[0]}: {'; '.join(said) or f'exit code {done.returncode}'}")
    return done.stdout


def queue() -> list[Job]:
    """This user's jobs that have not ended; every task of an array as a job."""
    lines = call("squeue", "--me", "-h", "-r", "-o", "|".join(QUEUE_FIELDS)).splitlines()
    return [_queued(line.split("|", len(QUEUE_FIELDS) - 1)) for line in lines]


def _queued(fields: Sequence[str]) -> Job:
    number, state, name, reason, nodes, elapsed, comment = fields
    shown = "" if comment == "(null)" else comment
    return Job(number=int(number), state=state, name=name, reason=reason, nodes=nodes, elapsed=elapsed, comment=shown)


def jobs(numbers: Sequence[int]) -> dict[int, Job]:
    """What is known about these jobs: from the controller while it remembers them, else from sacct where the site has
    accounting. A job that neither knows is left out."""
    found = {number: job for number in numbers if (job := _shown(number)) is not None}
    rest = [number for number in numbers if number not in found]
    return found | (_accounted(rest) if rest and has_accounting() else {})


def _shown(number: int) -> Job | None:
    try:
        text = call("scontrol", "-o", "show", "job", str(number))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    fields = dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))
    return Job(
        number=number,
        state=fields["JobState"],
        name=fields["JobName"],
        reason=fields["Reason"],
        nodes="" if fields["NodeList"] == "(null)" else fields["NodeList"],
        elapsed=fields["RunTime"],
        code=fields["ExitCode"],
    )


def has_accounting() -> bool:
    """Whether the site keeps a database of jobs that have ended (sacct)."""
    if shutil.which("sacct") is None:
        return False
    found = re.search(r"^AccountingStorageType\s*=\s*(\S+)", call("scontrol", "show", "config"), re.MULTILINE)
    return found is not None and not found.group(1).endswith("/none")


def _accounted(numbers: Sequence[int]) -> dict[int, Job]:
    fields = "JobIDRaw,State,JobName,NodeList,Elapsed,ExitCode"
    text = call("sacct", "-X", "-n", "-P", "-D", "-o", fields, "-j", ",".join(map(str, numbers)))
    found = {}
    for line in text.splitlines():  # -D: every run of a requeued job; the last line is the latest
        number, state, name, nodes, elapsed, code = line.split("|")
        found[int(number)] = Job(
            number=int(number), state=state.split()[0], name=name, nodes=nodes, elapsed=elapsed, code=code
        )
    return found


def partitions() -> list[str]:
    """Names of the partitions."""
    return re.findall(r"^PartitionName=(\S+)", call("scontrol", "-o", "show", "partition"), re.MULTILINE)


def license_total(name: str) -> int | None:
    """How many of a license the site has; None for one that it does not have."""
    found = re.search(
        rf"^LicenseName={re.escape(name)} .*?Total=(\d+)", call("scontrol", "-o", "show", "licenses"), re.MULTILINE
    )
    return int(found.group(1)) if found else None


def qos_gpu_limit(name: str) -> int | None:
    """The GPUs that a user, or all users together, may hold at one time in a QOS; None without such a limit."""
    said = call("sacctmgr", "-n", "-P", "show", "qos", name, "format=MaxTRESPU,GrpTRES")
    return min(map(int, re.findall(r"gres/gpu=(\d+)", said)), default=None)


def submit(script: str, options: Sequence[str], arguments: Sequence[str] = ()) -> int:
    """The id of a new job; `arguments` are the script's. SlurmError in sbatch's words."""
    said = call("sbatch", "--parsable", *options, script, *arguments).strip().partition(";")[0]
    if not said.isdecimal():
        raise SlurmError(f"sbatch: got {said!r} where a job id was expected")
    return int(said)


def cancel(numbers: Iterable[int]) -> None:
    """Cancel jobs; those that have ended already are no error."""
    chosen = [str(number) for number in numbers]
    if chosen:
        subprocess.run(["scancel", *chosen], capture_output=True, check=False, timeout=120)
