"""Accounting for the test cluster: a MariaDB on a socket and slurmdbd, in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr", "sacct")
PLUGINS = Path("/usr/lib")
START_SECONDS = 120
CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def missing() -> str | None:
    """Why there can be no accounting here; None when there can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if not any(PLUGINS.glob("*/slurm*/accounting_storage_mysql.so")):
        absent.append("slurm-wlm-mysql-plugin")
    return f"Slurm's accounting is not installed ({', '.join(absent)})" if absent else None


@contextlib.contextmanager
def accounting(folder: Path, port: int) -> Iterator[None]:
    """slurmdbd at `port`, with munge's socket in `folder`/munge; everything ends with it."""
    data, socket = folder / "database", folder / "database.socket"
    log = (folder / "database.log").open("ab")
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db"]
    subprocess.run([*install, "--auth-root-authentication-method=normal"], stdout=log, stderr=log, check=True)
    options = [f"--datadir={data}", f"--socket={socket}", "--skip-networking", "--user=root"]
    server = subprocess.Popen(
        [_program("mariadbd"), "--no-defaults", *options, f"--pid-file={folder}/database.pid"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        _wait(socket.exists, folder / "database.log")
        (folder / "slurmdbd.conf").write_text(CONF.format(folder=folder, port=port))
        (folder / "slurmdbd.conf").chmod(0o600)
        with _dbd(folder, socket):
            yield
    finally:
        server.terminate()
        server.wait(START_SECONDS)
        log.close()


@contextlib.contextmanager
def _dbd(folder: Path, socket: Path) -> Iterator[None]:
    environment = os.environ | {"MYSQL_UNIX_PORT": str(socket), "SLURM_CONF": str(folder / "slurm.conf")}
    process = subprocess.Popen(
        [_program("slurmdbd"), "-D"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ask = ["sacctmgr", "-i", "add", "cluster", "test"]
    try:
        _wait(lambda: not subprocess.run(ask, env=environment, capture_output=True, check=False).returncode,
              folder / "slurmdbd.log")  # fmt: skip
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_SECONDS)


def _program(name: str) -> str:
    return shutil.which(name, path=PATH) or name


def _wait(holds: object, log: Path) -> None:
    assert callable(holds)
    end = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < end, log.read_text(errors="replace")[-3000:] if log.exists() else "no log"
        time.sleep(0.2)
