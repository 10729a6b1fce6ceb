"""Runs one program under limits and says whether it came to its end. Started by data/sandbox.py, by path; needs Python
alone.

The job is JSON on standard input: program, folder, token, namespaces, and the limits in seconds and bytes. The token
is written to standard output when the program has run to its end, and nothing else ever is.
"""

import ctypes
import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NEW_USER, NEW_NET, NEW_PID, NEW_MOUNTS, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x08000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
CAPABILITY_VERSION = 0x20080522

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS_PROCESSES = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.", "pty.")
FORBIDDEN = ("socket.", "ctypes.", "resource.", "signal.pthread_kill", "os.kill", *STARTS_PROCESSES)
CHANGES_PATHS = ("mkdir", "remove", "rename", "rmdir", "link", "symlink", "truncate", "chmod", "chown", "utime")
MAX_CHANGES = 64  # files opened for writing, renamed and so on: with the limit on a file's size, on the space they take
PATH_EVENTS = {f"os.{name}" for name in CHANGES_PATHS} | {"os.setxattr", "os.removexattr", "sqlite3.connect"}


def main() -> None:
    job = json.load(sys.stdin)
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if job["namespaces"] and libc.unshare(NEW_USER | NEW_NET | NEW_PID | NEW_MOUNTS | NEW_IPC) == 0:
        wait_in_parent(libc)
        make_read_only(libc, job["folder"])
    os.chdir(job["folder"])
    set_limits(job)
    drop_privileges(libc)
    sys.addaudithook(guard(job["folder"]))
    exec(compile(job["program"], "<completion>", "exec"), {"__name__": "__main__"})
    os.write(answer, job["token"].encode())
    os._exit(0)


def wait_in_parent(libc: ctypes.CDLL) -> None:
    """Fork: the child is process 1 of a namespace of its own, so that all it starts ends with it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # os.kill(0, ...) would reach the parent, which is in no namespace, through the group they shared


def make_read_only(libc: ctypes.CDLL, folder: str) -> None:
    """Remount everything read-only but the folder; where the kernel cannot (before 5.12), the guard alone watches."""
    path = folder.encode()
    read_only, writable = ((ctypes.c_uint64 * 4)(ATTR_RDONLY, 0, 0, 0), (ctypes.c_uint64 * 4)(0, ATTR_RDONLY, 0, 0))
    libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    libc.mount(path, path, None, ctypes.c_ulong(MS_BIND), None)
    for target, flags, change in ((b"/", AT_RECURSIVE, read_only), (path, 0, writable)):
        libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target, flags, ctypes.byref(change), ctypes.sizeof(change))


def set_limits(job: dict) -> None:
    """CPU seconds, address space, size of a written file, no processes, few files."""
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def drop_privileges(libc: ctypes.CDLL) -> None:
    """Give up every capability, also those inside the namespace, with which mounts could be undone."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def guard(folder: str):
    """An audit hook, which Python code cannot remove: what it forbids raises PermissionError in the program."""
    inside, changes = os.path.realpath(folder) + os.sep, 0

    def is_outside(path: int | str | bytes) -> bool:
        if isinstance(path, int):  # already open
            return False
        return not (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(inside)

    def count() -> None:
        nonlocal changes
        changes += 1
        if changes > MAX_CHANGES:
            raise PermissionError(f"more than {MAX_CHANGES} changes of files are not allowed here")

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, _, flags = arguments
            if flags & WRITE_FLAGS and path != os.devnull:
                if is_outside(path):
                    raise PermissionError("writing outside the folder is not allowed here")
                count()
        elif event in PATH_EVENTS:
            if any(is_outside(path) for path in arguments[:2] if isinstance(path, str | bytes)):
                raise PermissionError(f"{event} outside the folder is not allowed here")
            count()

    return hook


if __name__ == "__main__":
    main()
