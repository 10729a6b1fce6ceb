"""The job script of a stage: plain bash that a person can read, change and submit with sbatch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.cap import comment_by_hand
from slurm.facts import GIVEN
from slurm.resources import Resources


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the job script at `path` says. `facts` are site facts that env.sh does not give, `check` puts the
    environment check before the stage, `license` is the one that holds the GPU cap, if any."""

    path: Path
    run: str
    stage: str
    asked: Resources
    config: Path
    checkout: Path
    logs: Path
    facts: Mapping[str, str]
    stop_seconds: int
    license: str | None = None
    check: bool = False
    force: bool = False

    @property
    def name(self) -> str:
        return f"{self.run}-{self.stage}"

    def places(self) -> Iterator[str]:
        """Options of sbatch that say where the job may run, and for whom."""
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self.asked, name)
            if value:
                yield f"--{name}={value}"

    @property
    def log(self) -> Path:
        """Where the job writes; %j stands for its id."""
        return self.logs / f"{self.stage}-%j.log"


def render(script: Script) -> str:
    """The file's text."""
    command = ["-P", "-m", "slurm.run_stage", script.stage, "--config", str(script.config), "--logs", str(script.logs)]
    command += ["--check"] * script.check + ["--force"] * script.force
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Stage {script.stage} of run {script.run}, written by slurm/submit.sh.",
            f"# Once its inputs are finished it can be submitted by hand: sbatch {shlex.quote(str(script.path))}",
            *(f"#SBATCH {option}" for option in options(script)),
            "",
            "set -euo pipefail",
            f"cd {shlex.quote(str(script.checkout))}",
            "",
            *_facts(script),
            "# shellcheck source=/dev/null",
            ". slurm/on_node.sh",
            "",
            "# Runs the stage, hands signals on to it, and queues this job again when its time is up.",
            f'exec "$SPEC_PYTHON" {shlex.join(command)}',
            "",
        ]
    )


def options(script: Script) -> Iterator[str]:
    """Of sbatch, one a line."""
    asked = script.asked
    yield f"--job-name={script.name}"
    yield f"--output={_quoted(script.log)}"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{script.stop_seconds}"
    yield f"--time={asked.minutes}"
    yield f"--nodes={asked.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={asked.cpus}"
    if asked.memory_gib:
        yield f"--mem={asked.memory_gib}G"
    if asked.gpus:
        yield f"--gpus-per-node={asked.gpus}"
        if script.license:
            yield f"--licenses={script.license}:{asked.gpus * asked.nodes}"
    yield from map(_quoted_value, script.places())
    yield f'--comment="{comment_by_hand(asked.all_gpus)}"'
    yield from asked.extra


def _facts(script: Script) -> Sequence[str]:
    lines = []
    if script.facts:
        lines += ["# Site facts that the submitting shell had set otherwise than env.sh does."]
        lines += [f"export {name}={_bash_word(value)}" for name, value in script.facts.items()]
        lines += [f"export {GIVEN}={shlex.quote(' '.join(script.facts))}"]
    else:
        lines += [f"export {GIVEN}="]
    return [*lines, "# The rest is read from env.sh here, on the node."]


def _bash_word(text: str) -> str:
    """As shlex.quote, but in double quotes, which say that a $ in them is meant."""
    return text if shlex.quote(text) == text else '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'


def _quoted_value(option: str) -> str:
    name, _, value = option.partition("=")
    return f"{name}={_quoted(value)}"


def _quoted(value: object) -> str:
    """For a #SBATCH line, which knows double quotes but no backslash in them."""
    text = str(value)
    if '"' in text or "\n" in text:
        raise ValueError(f"got {text!r}, expected a value without double quotes and line breaks")
    return f'"{text}"' if any(character.isspace() for character in text) else text
