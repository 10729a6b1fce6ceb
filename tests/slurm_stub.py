"""Stands for a stage in tests of jobs: the stage contract without a model. Units of a few bytes, each after a pause.

    python slurm_stub.py STAGE --config FILE [--force]

What it does is in $SPEC_CHECKOUT/stub/STAGE.json, which is no part of what its result depends on: `units`, `pause`
(seconds before each), `fail` (a sentence), `free_bytes`, `hang` (the number of the unit that is never made), `workers`
(jobs of one GPU that it starts as a driver does, which only sleep).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config_slurm import JOB_STAGES
from pipeline.stage import Stage, StageContext, stage_main

SECTIONS = {"01_gen_traces": "traces", "02_filter": "filter", "03_train_draft": "train"}  # of others the bench's


def settings(stage: str) -> dict[str, Any]:
    """Of this stage, with defaults."""
    path = Path(os.environ["SPEC_CHECKOUT"]) / "stub" / f"{stage}.json"
    given = json.loads(path.read_text()) if path.is_file() else {}
    return {"units": 2, "pause": 0.0, "fail": "", "free_bytes": 1, "hang": None, "workers": 0} | given


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Make the units that are missing."""
    wanted = settings(ctx.stage)
    if wanted["workers"]:
        start_workers(wanted["workers"])
    for number in range(wanted["units"]):
        name = f"unit-{number}"
        if name in ctx.shards:
            continue
        ctx.log(f"at {name}")
        end = time.monotonic() + wanted["pause"]
        while time.monotonic() < end or wanted["hang"] == number:
            ctx.check_stop()
            time.sleep(0.05)
        if wanted["fail"] and number == wanted["units"] - 1:
            raise ValueError(wanted["fail"])
        ctx.tmp(name).write_text(f"{ctx.stage} {number}\n")
        ctx.publish(ctx.tmp(name), name, rows=1)
        ctx.log(f"made {name} on {os.environ.get('SLURMD_NODENAME')}")
    return {"rows": wanted["units"]}


def start_workers(count: int) -> None:
    """An array with the driver's mark."""
    options = [f"--array=1-{count}", "--gpus-per-node=1", "--output=/dev/null", "--job-name=worker"]
    mark = f"--comment={os.environ['SPEC_WORKER_COMMENT']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    subprocess.run(["sbatch", *options, mark, "--wrap", "sleep 600"], env=kept, check=True)


def main() -> int:
    """The stage's exit code."""
    name = sys.argv[1]
    before = JOB_STAGES[JOB_STAGES.index(name) - 1] if name != JOB_STAGES[0] else None
    stage = Stage(
        name=name,
        version=1,
        sections=(SECTIONS.get(name, "bench_engine"),),
        inputs=(before,) if before else (),
        free_bytes=settings(name)["free_bytes"],
    )
    return stage_main(stage, body, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
