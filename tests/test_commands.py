"""Every command line of README and docs, run as a stranger would: in a fresh checkout, with an empty home.

Where a command names configs/demo.yaml, the tiny experiment is run by the same line: `make demo` runs the demo's own
stages in another test. The sizes of a bench are made small. What does not run here is in NOT_RUN, with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import DOCS
from tests.test_project import tracked_files

ROOT = Path(__file__).resolve().parent.parent
STARTS = r"(?:[A-Z_]+=\S+ +)*(?:make |scripts/|slurm/|python3? |pip |vllm |sbatch |srun |curl |cp |git )"
NOT_RUN = {
    r"^make (demo|chat|test|test-all|local)\b": "make test-all runs these itself; chat needs a download",
    r"Qwen/|\bTARGET\b": "downloads gigabytes, or stands for names of yours",
    r"train\.sweep_": "needs a GPU for minutes, and files of prompts",
    r"configs/qwen3_8b|cuda|gpu_check|train_speed|engine_speed": "needs a GPU",
    r"slurm/|sbatch|srun|scancel|^make (all|status|logs|cancel|clean-scratch)\b": "needs a cluster",
    r"05_bench_vllm|vllm |SPECDEC_PLUGIN|localhost|bench_vllm|vllm_(identity|law|speed)": "runs vLLM: other tests do",
    r"^(\S+=\S+ )*pip install": "changes the environment that runs this test; tests/test_project.py does it dry",
}
SMALLER = {
    "configs/demo.yaml": "configs/tiny.yaml",
    "RUN_A RUN_B": "tiny tiny",
    "--rows 100000 1000000": "--rows 1000 2000",
    "--tokens 1200": "--tokens 40",
    "--batches 1 64": "--batches 1",
    "--repeats 1 --prompts 4": "--repeats 1 --prompts 2 --max-tokens 8",
}
CONTAMINATION = ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "math500.jsonl", "spec_bench_480.jsonl")
LOGS = '{"prompt": "1 + 1?", "completion": "2"}\n{"prompt": "2 + 2?", "completion": "4"}\n'


def commands(text: str) -> Iterator[str]:
    """The command lines of a document's blocks, a continued one in one piece, without their comments."""
    joined, is_fenced = re.sub(r"\\\n\s*", "", text), False
    for line in joined.splitlines():
        is_fenced ^= line.startswith("```")
        found = re.match(rf"(?: {{4}})?(?:\$ )?({STARTS}.*)$", line)
        if found and (is_fenced or line.startswith("    ")):
            yield re.sub(r"\s+#.*$", "", found[1]).strip()


def documented() -> list[str]:
    """All of them, each once; stages come first and in order, since others read what those write."""
    found = [command for path in DOCS for command in commands(path.read_text(encoding="utf-8"))]
    return sorted(
        dict.fromkeys(found), key=lambda command: (not re.match(r"scripts/\d\d_", command), stage_of(command))
    )


def stage_of(command: str) -> str:
    return found[0] if (found := re.match(r"scripts/\d\d_\w+", command)) else ""


def reason_not_to_run(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), None)


def test_commands_are_found_in_blocks_only() -> None:
    text = "See `make x`.\n\n    make all CONFIG=a   # all\n    scripts/a.sh --b \\\n        --c\n    output of make\n"
    assert list(commands(text)) == ["make all CONFIG=a", "scripts/a.sh --b --c"]
    assert len(documented()) > 10


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tracked files and what a stranger's machine has: a home, a place for data, python in the path."""
    root, home, data, programs = (tmp_path / name for name in ("checkout", "home", "data", "bin"))
    for folder in (home, data, programs):
        folder.mkdir()
    for path in tracked_files():
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(path.stat().st_mode)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("SPEC_", "HF_HOME", "XDG_"))]:
        monkeypatch.delenv(name)
    values = {"HOME": home, "SPEC_DATA_ROOT": data, "SPEC_PYTHON": sys.executable, "SPEC_GIT_REVISION": "none"}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (root / "logs.jsonl").write_text(LOGS)
    for name in CONTAMINATION:
        (root / name).write_text(
            '{"prompt": "How many apples are left when two of nine were eaten by the red horse?"}\n'
        )
    from tests.toy_text import byte_tokenizer, save_toy

    save_toy(root / "SmolLM2-135M-Instruct", byte_tokenizer(), max_positions=8192)
    return root


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_documented_commands_run(checkout: Path) -> None:
    failed = []
    for command in documented():
        if reason_not_to_run(command) is not None:
            continue
        smaller = command
        for long, short in SMALLER.items():
            smaller = smaller.replace(long, short)
        done = subprocess.run(
            ["bash", "-c", smaller], cwd=checkout, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        print(f"{done.returncode} {smaller}")
        if done.returncode:
            failed.append(
                f"{command}\n  as {shlex.quote(smaller)}: {done.returncode}\n{done.stdout[-800:]}{done.stderr[-1500:]}"
            )
    assert not failed, "\n".join(failed)
