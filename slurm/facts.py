"""Site facts of a job: env.sh is read anew on its node, so that it may use $SLURMD_NODENAME or $TMPDIR."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

GIVEN = "SPEC_GIVEN"
OWN = ("SPEC_CHECKOUT", GIVEN)  # set by the scripts themselves


def checkout() -> Path:
    """The folder that all jobs run in: the one whose script was started, which may be made of links, else this one."""
    return Path(os.environ.get("SPEC_CHECKOUT") or Path(__file__).resolve().parent.parent)


def given_facts(checkout: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The SPEC_ variables that the submitting shell had set to something else than env.sh does; jobs must get them.

    Nothing else of the environment goes into a job script, so no token can.
    """
    ours = {name: value for name, value in environment.items() if name.startswith("SPEC_") and name not in OWN}
    site = _from_env_sh(checkout, {name: value for name, value in environment.items() if name not in ours})
    return {name: value for name, value in sorted(ours.items()) if site.get(name) != value}


def _from_env_sh(checkout: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What env.sh sets in an environment without SPEC_ variables. ValueError when it fails."""
    if not (checkout / "env.sh").is_file():
        return {}
    script = 'set -a; . "$1/env.sh" >/dev/null; env -0'
    done = subprocess.run(
        ["bash", "-c", script, "bash", str(checkout)], env=dict(environment), capture_output=True, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"{checkout / 'env.sh'} cannot be read: {done.stderr.decode(errors='replace').strip()}")
    pairs = (entry.partition("=") for entry in done.stdout.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name.startswith("SPEC_")}
