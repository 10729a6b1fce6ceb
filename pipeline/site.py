"""Facts of a site that env.sh puts into the environment, read with an error that names the variable."""

from __future__ import annotations

import os
from dataclasses import dataclass

DEFAULT_GPU_CAP = 4
RESERVED = "SPEC_WORKER_GPUS"  # set in the job of a stage that starts jobs: the GPUs that these may hold at one time
COMMENT = "SPEC_WORKER_COMMENT"  # what marks those jobs as started by it


def gpu_cap() -> int:
    """$SPEC_GPU_CAP, the GPUs that our jobs may hold at one time (4 when it is not set). ValueError for no number."""
    return whole_number("SPEC_GPU_CAP", DEFAULT_GPU_CAP)


def whole_number(name: str, default: int) -> int:
    """The variable as a whole number of at least 1; `default` when it is not set or empty. ValueError otherwise."""
    text = os.environ.get(name, "").strip()
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{name}: got {text!r}, expected a whole number of at least 1; correct it in env.sh")
    return int(text) if text else default


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """What every job of ours gets unless the config says otherwise; None: Slurm's own default.

    cap_by: who keeps us within the GPU cap: "submitter" (slurm/submit.sh itself), "license" or "qos".
    """

    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    cap_by: str
    license: str | None


CAP_BY = ("submitter", "license", "qos")


def slurm_site() -> SlurmSite:
    """From SPEC_SLURM_*. ValueError when SPEC_SLURM_CAP_BY is none of its choices, or lacks what it needs."""
    known = {name: os.environ.get(f"SPEC_SLURM_{name.upper()}") or None for name in FIELDS}
    cap_by = known.pop("cap_by") or "submitter"
    if cap_by not in CAP_BY:
        raise ValueError(
            f"SPEC_SLURM_CAP_BY: got {cap_by!r}, expected one of {', '.join(CAP_BY)}; correct it in env.sh"
        )
    if cap_by != "submitter" and not known[cap_by]:
        raise ValueError(f"SPEC_SLURM_CAP_BY is {cap_by}, but SPEC_SLURM_{cap_by.upper()} is not set; set it in env.sh")
    return SlurmSite(cap_by=cap_by, **known)


FIELDS = ("account", "partition", "qos", "constraint", "cap_by", "license")
