"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """A port that nothing listens on now, at `host`; at any of this machine's addresses without one."""
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])
