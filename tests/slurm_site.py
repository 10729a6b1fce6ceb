"""A user's checkout on the test cluster: env.sh with a folder of its own for every node, a shared archive, a config."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from slurm_cluster import Cluster

from pipeline.config_slurm import JOB_STAGES

ROOT = Path(__file__).resolve().parent.parent
WAIT_SECONDS = 900
ENV_SH = """\
export SPEC_DATA_ROOT="${{SPEC_DATA_ROOT:-{root}/nodes/${{SLURMD_NODENAME:-login}}}}"
export SPEC_ARCHIVE_ROOT="${{SPEC_ARCHIVE_ROOT:-{root}/archive}}"
export SPEC_GPU_CAP="${{SPEC_GPU_CAP:-4}}"
export SPEC_PYTHON="${{SPEC_PYTHON:-{python}}}"
"""
STUB = """\
#!/usr/bin/env bash
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P "$SPEC_CHECKOUT/tests/slurm_stub.py" STAGE "$@"
"""
STUB_PIPELINE = """\
#!/usr/bin/env bash
echo "report of $*"
cat "$SPEC_DATA_ROOT"/*/*/unit-* > "$SPEC_DATA_ROOT/tiny/report.md"
"""


class Site:
    """`checkout` is made of links to the real one; with `stubs` its stages only pretend (tests/slurm_stub.py)."""

    def __init__(self, root: Path, cluster: Cluster | None, *, stubs: bool = True) -> None:
        self.root, self.cluster = root, cluster
        self.checkout, self.archive = root / "checkout", root / "archive"
        for folder in (self.checkout, self.archive, root / "home", self.checkout / "stub"):
            folder.mkdir(parents=True)
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and path.name not in ("logs", "env.sh", *(["scripts"] if stubs else [])):
                (self.checkout / path.name).symlink_to(path)
        if stubs:
            self._write_stubs()
        (self.checkout / "env.sh").write_text(ENV_SH.format(root=root, python=sys.executable))
        self.config = root / "tiny.yaml"
        self.set_config()

    def _write_stubs(self) -> None:
        scripts = self.checkout / "scripts"
        scripts.mkdir()
        for name in ("_env.sh", "_site.sh"):
            shutil.copy(ROOT / "scripts" / name, scripts)
        texts = {stage: STUB.replace("STAGE", stage) for stage in JOB_STAGES[:-1]}
        texts |= {"00_check_env": "#!/bin/sh\necho environment checked\n", "run_pipeline": STUB_PIPELINE}
        for name, text in texts.items():
            (scripts / f"{name}.sh").write_text(text)
            (scripts / f"{name}.sh").chmod(0o755)

    def set_config(self, path: Path | None = None, **sections: Any) -> Path:
        """Write tiny.yaml with these sections' keys put over its own; `run` is a section of its own kind."""
        content = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
        for name, value in sections.items():
            content[name] = content.get(name, {}) | value if isinstance(value, dict) else value
        (path or self.config).write_text(yaml.safe_dump(content))
        return path or self.config

    def stub(self, stage: str, **settings: Any) -> None:
        """What the stand-in of a stage does."""
        (self.checkout / "stub" / f"{stage}.json").write_text(json.dumps(settings))

    def environment(self, **extra: str) -> dict[str, str]:
        """A user's shell."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPEC_", "SLURM", "MAKE"))}
        ours = self.cluster.environment if self.cluster else {}
        return kept | ours | {"HOME": str(self.root / "home"), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"} | extra

    def call(self, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """A command in the checkout, with `extra` environment variables."""
        return subprocess.run(
            command, cwd=self.checkout, env=self.environment(**extra), capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip

    def submit(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """slurm/submit.sh on the site's config."""
        return self.call("slurm/submit.sh", "--config", str(self.config), *arguments, **extra)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """make with the site's config; its .venv is taken as made."""
        return self.call("make", *arguments, "STAMP=env.sh", "BIN=/nowhere", f"CONFIG={self.config}")

    def jobs(self) -> list[dict[str, Any]]:
        """jobs.json of the run."""
        path = self.checkout / "logs" / "tiny" / "jobs.json"
        return json.loads(path.read_text())["jobs"] if path.is_file() else []

    def job(self, stage: str) -> int:
        """The last job of a stage."""
        return int([job["job"] for job in self.jobs() if job["stage"] == stage][-1])

    def log(self, stage: str) -> str:
        """What the last job of a stage has written."""
        path = Path([job["log"] for job in self.jobs() if job["stage"] == stage][-1])
        return path.read_text() if path.is_file() else ""

    def field(self, stage: str, name: str) -> str:
        """Of the last job of a stage, as scontrol shows it."""
        assert self.cluster is not None
        text = self.cluster.run("scontrol", "-o", "show", "job", str(self.job(stage)))
        found = re.search(rf"\b{name}=(\S*)", text)
        assert found is not None
        return found.group(1)

    def wait(self, seconds: float = WAIT_SECONDS) -> dict[str, str]:
        """The state of each stage's last job, when none of the user's jobs is left."""
        assert self.cluster is not None
        wait_for(lambda: not self.cluster.run("squeue", "-h"), seconds, self.trace)  # type: ignore[union-attr]
        return {stage: self.field(stage, "JobState") for stage in {job["stage"] for job in self.jobs()}}

    def trace(self) -> str:
        """For the message of a test that failed."""
        assert self.cluster is not None
        logs = sorted((self.checkout / "logs").rglob("*.log"))
        return self.cluster.run("squeue") + "".join(f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in logs)

    def units(self, stage: str) -> Iterator[tuple[str, str]]:
        """Every unit that the stand-in of a stage has made in its last job, with the node it was made on."""
        yield from re.findall(r"made (unit-\d+) on (\w+)", self.log(stage))


def wait_for(holds: Callable[[], Any], seconds: float = WAIT_SECONDS, trace: Callable[[], str] = str) -> None:
    """Until `holds()`; AssertionError with `trace()` after so long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, trace()
        time.sleep(0.1)


def gpus_in_use(cluster: Cluster, ending: bool = True) -> int:
    """Of running jobs; with `ending` of those too that Slurm is clearing away, for which an array's next job does not
    wait: what its limit holds is the jobs that run."""
    states = "RUNNING,CONFIGURING" + ",COMPLETING" * ending
    lines = cluster.run("squeue", "-h", "-t", states, "-O", "NumNodes:8,tres-per-node:40")
    pairs = [line.split() for line in lines.splitlines()]
    return sum(int(nodes) * int(gres.rpartition(":")[2]) for nodes, gres in pairs if gres != "N/A")


def most_gpus_at_once(cluster: Cluster, jobs: Sequence[Mapping[str, Any]]) -> int:
    """Of jobs of jobs.json that have ended: by the starts and ends that Slurm noted, to the second, so that nothing
    hangs on when a test looked."""
    spans = [(*_start_and_end(cluster, job["job"]), job["gpus"]) for job in jobs]
    return max(sum(gpus for start, end, gpus in spans if start <= moment < end) for moment, _, _ in spans)


def _start_and_end(cluster: Cluster, job: int) -> tuple[str, str]:
    if not cluster.accounted:
        text = cluster.run("scontrol", "-o", "show", "job", str(job))
        return re.findall(r"\bStartTime=(\S+)", text)[0], re.findall(r"\bEndTime=(\S+)", text)[0]
    # whose controller forgets jobs after two seconds, and whose database learns of an end a little later
    asked = ("sacct", "-X", "-n", "-P", "-o", "Start,End", "-j", str(job))
    wait_for(lambda: "Unknown" not in (cluster.run(*asked) or "Unknown"))
    start, end = cluster.run(*asked).strip().split("|")
    return start, end
