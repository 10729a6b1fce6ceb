"""Where the processes of a job on several nodes meet."""

from __future__ import annotations

import os
import re

from slurm import client


def own_address() -> str:
    """The address of this node as Slurm has it, which the job's other nodes can reach; its name is not always one."""
    name = os.environ["SLURMD_NODENAME"]
    found = re.search(r"\bNodeAddr=(\S+)", client.call("scontrol", "-o", "show", "node", name))
    return found.group(1) if found else name
