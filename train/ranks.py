"""The processes of a training. The stage's own process is the first and leads; the others follow.

One a GPU, or SPEC_TRAIN_PROCESSES, on each of SPEC_NODES nodes. The leader starts the followers of its node and calls
functions in all of them at once; on other nodes scripts/03_train_draft.sh starts them. A signal is for the leader
alone: followers learn of it through the training. A follower whose leader is gone ends, and the other way round.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from pipeline.ports import free_port

T = TypeVar("T")
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 10.0
LONG = timedelta(days=7)  # followers wait while the leader evaluates or exports


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many processes there are, and where they meet."""

    local: int
    nodes: int
    address: str
    port: int

    @property
    def world(self) -> int:
        return self.local * self.nodes


def layout() -> Layout:
    """From the environment. ValueError for a number that is none, or several nodes without an address."""
    import torch

    local = _number("SPEC_TRAIN_PROCESSES", torch.cuda.device_count() or 1)
    nodes = _number("SPEC_NODES", 1)
    if nodes > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise ValueError(f"SPEC_NODES is {nodes}, but MASTER_ADDR and MASTER_PORT do not say where the first one is")
    port = _number("MASTER_PORT", 0) if nodes > 1 else free_port("127.0.0.1")
    return Layout(local=local, nodes=nodes, address=os.environ.get("MASTER_ADDR", "127.0.0.1"), port=port)


class Ranks:
    """Context manager of the leader: `run(function, ...)` calls it in every process and returns the leader's result.

    The processes start at the first `run`. Leaving ends the followers; `stuck` is then true when they could not be
    told, being in the middle of a collective that this process has left by an error: end it by os._exit.
    """

    def __init__(self) -> None:
        self.followers: list[subprocess.Popen[bytes]] = []
        self.group: Any = None
        self.started = False
        self.stuck = False
        self.closing = threading.Event()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.started and _number("SPEC_NODES", 1) > 1:
            self._start(layout())  # the other nodes wait to hear that there is nothing to do
        self.closing.set()
        if self.group is None:
            return
        farewell = threading.Thread(target=_say_goodbye, args=(self.group,), daemon=True)
        farewell.start()
        farewell.join(PATIENCE_SECONDS)
        for follower in self.followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.wait(timeout=PATIENCE_SECONDS)
            follower.kill()
            follower.wait()
        self.stuck = farewell.is_alive()
        if not self.stuck:
            _leave_group()

    def run(self, function: Callable[..., T], *arguments: Any, **here: Any) -> T:
        """`function(*arguments)` in each process, which must be able to unpickle both; `here` is for the leader's."""
        if not self.started:
            self._start(layout())
        if self.group is not None:
            _broadcast((function, arguments), self.group)
        return function(*arguments, **here)

    def _start(self, where: Layout) -> None:
        self.started = True
        if where.world == 1:
            return
        self.followers = _start_node(where, 0)
        threading.Thread(target=self._watch, daemon=True).start()
        self.group = _join_group()

    def _watch(self) -> None:
        """A collective that waits for a dead follower cannot be interrupted from Python: end the process."""
        while not self.closing.wait(POLL_SECONDS):
            if any(follower.poll() is not None for follower in self.followers):
                sys.stderr.write("a training process ended early; its error is above. Run again to continue\n")
                sys.stderr.flush()
                for follower in self.followers:
                    follower.kill()
                os._exit(1)


def _start_node(where: Layout, node: int) -> list[subprocess.Popen[bytes]]:
    """Make this process the first of its node, and start the others there."""
    command, started = [sys.executable, "-P", "-m", "train.ranks"], []
    for local_rank in range(1, where.local):
        environment = os.environ | _names(where, node, local_rank)
        started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
    os.environ.update(_names(where, node, 0))
    return started


def main() -> None:
    """A follower, or on a node that is not the leader's its first process, which starts the others."""
    if "RANK" not in os.environ:
        _start_node(layout(), _number("SPEC_NODE_RANK", 0))
    follow()


def follow() -> None:
    """Be a follower: do what the leader calls until it says that it is done, or is gone."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    leader = os.getppid()
    threading.Thread(target=_end_with, args=(leader,), daemon=True).start()
    group = _join_group()
    while (call := _broadcast(None, group)) is not None:
        function, arguments = call
        with contextlib.suppress(ValueError):  # the leader meets the same one, and tells
            function(*arguments)
    _leave_group()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _join_group() -> Any:
    """The process group of the collectives, on GPUs over NCCL; and one over gloo for calls, which may wait for long."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available())
    return dist.new_group(backend="gloo", timeout=LONG)


def _leave_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _say_goodbye(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # a follower that is gone already
        _broadcast(None, group)


def _broadcast(call: Any, group: Any) -> Any:
    import torch.distributed as dist

    holder = [call]
    dist.broadcast_object_list(holder, src=0, group=group, device=None)
    return holder[0]


def _names(where: Layout, node: int, local_rank: int) -> dict[str, str]:
    return {
        "RANK": str(node * where.local + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(where.world),
        "LOCAL_WORLD_SIZE": str(where.local),
        "MASTER_ADDR": where.address,
        "MASTER_PORT": str(where.port),
    }


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit() or (int(text) < 1 and default):
        raise ValueError(f"{name}: got {text!r}, expected a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    main()
