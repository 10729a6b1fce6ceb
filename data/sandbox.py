"""Runs a model's code against its tests in a process that can do little harm.

Always: a fresh Python process without our environment variables, in a temporary folder that is removed afterwards,
limited in CPU time, wall time, memory, the size of a file and the number of changes to files; when time is up its whole
process group is killed. A hook in the process refuses sockets, processes, signals, ctypes and writing outside the
folder.

Where the kernel lets an ordinary user make namespaces, it has no network at all, sees no process but its own (it can
kill neither us nor anyone else, and nothing it starts outlives it), and every file system is read-only but the folder.

Not guaranteed: that it cannot read files that the user can read (without a network they go nowhere), and, where
namespaces are refused, that code written to break out of Python's own hook does not. For hostile code use a virtual
machine; this is for mistakes and mischief of a language model.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use. CPU time decides, so that a busy machine changes no result; wall time is for sleepers."""

    cpu_seconds: int = 5
    wall_seconds: float = 60.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


def run_program(program: str, limits: Limits, *, namespaces: bool = True) -> bool:
    """Whether the program ran to its end without an error, within the limits.

    `namespaces` false leaves the kernel's part out (for the tests of what remains).
    """
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="spec-code-") as folder, tempfile.TemporaryFile() as job:
        values = {"program": program, "folder": folder, "token": token, "namespaces": namespaces, **asdict(limits)}
        job.write(json.dumps(values).encode())
        job.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD)],
            stdin=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                process.wait(limits.wall_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
                process.wait()
            return process.stdout.read(len(token)) == token.encode()
