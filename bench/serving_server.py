"""`vllm serve` on a free port: started in a process group of its own, waited for, and always stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.ports import free_port

HOST = "127.0.0.1"
POLL_S = 0.2
STOP_S = 20.0
LAST_LINES = 12
EPITAPHS = ("See root cause above", "EngineDeadError", "EngineCore encountered an issue")
PORT_TAKEN = "address already in use"
PORT_ATTEMPTS = 3
PROGRAM = ("-m", "bench.vllm_cli", "serve")  # tests put a stand-in here
# "(EngineCore pid=4301) ERROR 11-30 02:37:40 [core.py:133] text": who, level, when and where are not the message
_PREFIX = re.compile(r"^(\(.*? pid=\d+\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_ERROR = re.compile(r"^[\w.]*(Error|Exception)\b")


class ServerError(Exception):
    """A server that did not start, or died. The message is its own last error; `last_lines` what it logged last."""

    def __init__(self, message: str, last_lines: Sequence[str]) -> None:
        super().__init__(message)
        self.last_lines = list(last_lines)


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """`arguments` of `vllm serve` (the port is added) and what the environment gets on top of ours."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str, timeout: float = 60.0) -> str:
        """The body of a GET. ServerError when the server is not there any more."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
                body: bytes = answer.read()
        except OSError as error:
            raise self.error(f"GET {path}: {error}") from error
        return body.decode()

    def error(self, otherwise: str) -> ServerError:
        """What went wrong: `otherwise`, and the last exception in the log, if any; how the process ended, if it did."""
        if self.process.poll() is not None:
            return _death(self.process, self.log)
        cause = last_error(self.log)
        return ServerError(f"{otherwise}: {cause}" if _ERROR.match(cause) else otherwise, last_lines(self.log))


@contextlib.contextmanager
def serving(command: ServerCommand, log: Path, *, minutes: float, check_stop: Callable[[], None]) -> Iterator[Server]:
    """A server that is ready, stopped at the end with everything it started.

    `check_stop` may raise while it is waited for. ServerError when it dies, or is not ready after `minutes`.
    """
    for attempt in range(PORT_ATTEMPTS):
        port = free_port(HOST)
        process = _start(command, port, log)
        server = Server(url=f"http://{HOST}:{port}", log=log, process=process)
        try:
            try:
                _wait_until_ready(server, minutes, check_stop)
            except ServerError:
                if attempt + 1 < PORT_ATTEMPTS and PORT_TAKEN in log.read_text(errors="replace").lower():
                    continue  # another process took the port between our look and vLLM's
                raise
            yield server
            return
        finally:
            stop(process)


def start_group(
    command: Sequence[str], log: Path, env: Mapping[str, str], *, stdout: int | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """A process that leads a group of its own and logs to a file; its standard input is a pipe that only we hold."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=stream if stdout is None else stdout,
            stderr=stream,
            env={**os.environ, **env},
            cwd=cwd,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], patience: float = STOP_S) -> None:
    """Ask the process to end, wait `patience` seconds, and kill what is left of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """The last lines of a log that say something, without who wrote them when."""
    lines = [_PREFIX.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def last_error(log: Path) -> str:
    """The last line that names an exception, and what follows it in brackets or after a colon; else the last line.

    What vLLM's other processes say when one has failed (EPITAPHS) comes after the cause and does not count.
    """
    lines = last_lines(log, count=100_000)
    errors = [line for line in lines if _ERROR.match(line) and not any(words in line for words in EPITAPHS)]
    return (errors or lines or ["no output"])[-1]


def _start(command: ServerCommand, port: int, log: Path) -> subprocess.Popen[bytes]:
    log.unlink(missing_ok=True)
    arguments = [*command.arguments, "--host", HOST, "--port", str(port)]
    # in the folder of its log: what a method writes to a relative path does not land in the user's folder
    return start_group([sys.executable, *PROGRAM, *arguments], log, command.env, cwd=log.parent)


def _wait_until_ready(server: Server, minutes: float, check_stop: Callable[[], None]) -> None:
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        check_stop()
        if server.process.poll() is not None:
            raise _death(server.process, server.log)
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        time.sleep(POLL_S)
    raise ServerError(f"not ready after {minutes:g} minutes", last_lines(server.log))


def _death(process: subprocess.Popen[bytes], log: Path) -> ServerError:
    code = process.poll()
    ended = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return ServerError(f"the server ended ({ended}): {last_error(log)}", last_lines(log))
