"""The last job of a chain: the report and the gates, from the finished stages wherever they were made.

    python -m slurm.report_job --config FILE

Fetches the stages that this node lacks from the archive, and puts the report beside them there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import archive, files, manifest
from pipeline.config import Config, load_config
from pipeline.config_slurm import JOB_STAGES
from pipeline.context import say
from pipeline.stage import data_root
from pipeline.stages import REPORT
from slurm import plan
from slurm.facts import checkout


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the report and the gates."""
    parser = argparse.ArgumentParser(prog="slurm.report_job", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config)
        root, here = plan.results_root() / config.run, data_root() / config.run
        here.mkdir(exist_ok=True)
        made_from = plan.finished(config, root.parent)
        fetch(root, here)
    except (ValueError, OSError) as error:
        say(REPORT, str(error))
        return 2
    script = checkout() / "scripts" / "run_pipeline.sh"
    code = subprocess.run([script, "--config", arguments.config, "--from", REPORT], check=False).returncode
    hand_over(config, root, here, made_from if code == 0 else None)
    return code


def fetch(root: Path, here: Path) -> None:
    """Every finished stage that is in the archive and not, or otherwise, on this node."""
    for stage in JOB_STAGES:
        if root != here and manifest.read(root / stage) is not None and not archive.holds(here / stage, root / stage):
            archive.copy_finished(root / stage, here / stage)


def hand_over(config: Config, root: Path, here: Path, made_from: dict[str, str] | None) -> None:
    """The report's files to the archive, and what they were made from, without which they do not count as made."""
    for path in here.iterdir() if root != here else ():
        if path.is_file() and not path.name.startswith("."):
            shutil.copyfile(path, root / f"{files.TMP_PREFIX}{path.name}")
            files.publish(root / f"{files.TMP_PREFIX}{path.name}", root / path.name)
    if made_from is not None:
        made_from.pop(REPORT, None)
        files.write_atomic(root / plan.REPORT_MADE_FROM, json.dumps(made_from) + "\n")
        say(REPORT, f"in {root}")


if __name__ == "__main__":
    sys.exit(main())
