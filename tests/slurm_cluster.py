"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in one folder, with fake GPUs.

with Cluster.started(folder) as cluster: cluster.run("sinfo")

With `accounted` there is a database behind it (tests/slurm_accounting.py), and the controller forgets jobs at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_accounting import accounting

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
GPUS_PER_NODE = 4
START_SECONDS = 600
CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
ReturnToService=2
KillWait=10
JobRequeue=1
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
Licenses=specgpu:4,large:64
NodeName=DEFAULT CPUs=16 RealMemory=8000 Gres=gpu:{gpus}
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{node1}-{node2}]
PartitionName=main Nodes=node[1-2] Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=node[1-2] PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=node[1-2] PriorityTier=20 PreemptMode=OFF
"""
WITHOUT_ACCOUNTING = """
AccountingStorageType=accounting_storage/none
MinJobAge=3600
"""
WITH_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
MinJobAge=2
"""


def missing() -> str | None:
    """Why no cluster can be started here; None when one can."""
    found = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=found)]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)})"
    return None if os.geteuid() == 0 else "a test cluster is started as root only"


class Cluster:
    """`environment` is what a client needs; `run` calls one."""

    def __init__(self, folder: Path, *, accounted: bool = False) -> None:
        self.folder, self.accounted = folder, accounted
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.database = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, *, accounted: bool = False) -> Iterator[Cluster]:
        """Up on entering, every process gone on leaving."""
        cluster = cls(folder, accounted=accounted)
        try:
            cluster._start()
            yield cluster
        finally:
            cluster._stop()

    def run(self, *command: str, check: bool = True) -> str:
        """What a Slurm command prints."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def wait_idle(self, seconds: float = START_SECONDS) -> None:
        """Until the queue is empty and both nodes are idle."""
        end = time.monotonic() + seconds
        while self.run("squeue", "-h") or self.run("sinfo", "-h", "-o", "%T", check=False).split() not in IDLE:
            assert time.monotonic() < end, self.run("squeue") + self.run("sinfo", "-N")
            time.sleep(0.1)

    def clear(self) -> None:
        """Cancel every job and wait until the nodes are idle."""
        self.run("scancel", "--full", "--user=root", check=False)
        self.wait_idle()

    def _start(self) -> None:
        folder = self.folder
        for name in ("munge", "state", "dev", "spool-node1", "spool-node2"):
            (folder / name).mkdir(parents=True)
        ports = free_ports()
        names = {"controller": ports[0], "node1": ports[1], "node2": ports[2], "gpus": GPUS_PER_NODE}
        rest = WITH_ACCOUNTING.format(folder=folder, port=ports[3]) if self.accounted else WITHOUT_ACCOUNTING
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, user="root", **names) + rest)
        for number in range(GPUS_PER_NODE):
            (folder / "dev" / f"gpu{number}").touch()  # slurmd only asks that there is a file
        lines = [f"NodeName=node{n} Name=gpu File={folder}/dev/gpu[0-{GPUS_PER_NODE - 1}]\n" for n in (1, 2)]
        (folder / "gres.conf").write_text("".join(lines))
        self._munge()
        if self.accounted:
            self.database.enter_context(accounting(folder, ports[3]))
        self._daemon("slurmctld", "-f", str(folder / "slurm.conf"))
        for number in (1, 2):
            self._daemon("slurmd", "-f", str(folder / "slurm.conf"), "-N", f"node{number}")
        end = time.monotonic() + START_SECONDS
        while self.run("sinfo", "-h", "-o", "%T", check=False).split() not in IDLE:
            assert time.monotonic() < end, (folder / "slurmctld.log").read_text()
            time.sleep(0.1)

    def _munge(self) -> None:
        home = self.folder / "munge"
        key = home / "munge.key"
        key.write_bytes(os.urandom(1024))
        for path, mode in ((key, 0o600), (home, 0o755)):
            path.chmod(mode)
        files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
        options = [f"--{option}={home / name}" for option, name in files.items()]
        self._daemon("munged", "--force", f"--key-file={key}", *options)

    def _daemon(self, *command: str) -> None:
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        done = subprocess.run(
            [shutil.which(command[0], path=path) or command[0], *command[1:]],
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a daemon that keeps a pipe open would never let it end
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{command[0]} did not start: see the logs in {self.folder}"

    def _stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.clear()
        for name in ("slurmd-node1.pid", "slurmd-node2.pid", "slurmctld.pid"):
            end(self.folder / name)
        self.database.close()
        end(self.folder / "munge" / "munged.pid")


def end(pid_file: Path) -> None:
    """Stop the daemon that wrote this file, if it did, and wait for it."""
    if not pid_file.is_file():
        return
    pid = int(pid_file.read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    latest = time.monotonic() + START_SECONDS
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < latest:
        time.sleep(0.1)


IDLE = (["idle"], ["idle", "idle"])


def free_ports() -> list[int]:
    """For the controller, its two nodes and a database, free now, below the range for outgoing connections."""
    first = 20000 + os.getpid() % 5000
    for base in range(first, first + 5000, 5):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(base, base + 4):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(base, base + 4))
    raise AssertionError("no free ports")
