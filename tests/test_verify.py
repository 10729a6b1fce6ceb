"""Verified answers: maths by value, generators by their scorer, code by its tests, in a process that can do no harm."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import sandbox
from data.rows import Row
from data.sandbox import Limits, run_program
from data.verify import Helper, Verifier, maths_answer
from pipeline.sources import human_eval_problems, load_prompts

# Wall time is long, so that on a busy machine too a program fails for what it does; only the sleeper waits for it.
LIMITS = Limits(cpu_seconds=2, memory_bytes=512 << 20)
SLEEPER_LIMITS = replace(LIMITS, wall_seconds=2.0)


def row(completion: str, reference: str | None = None, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "prompt_id": "a",
        "source": "s",
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "completion": completion,
        "reference": reference,
        "verifier": None,
        "completion_ids": np.zeros(1),
        "finish_reason": "stop",
        "problem": None,
    }
    return Row(**(values | changes))


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(run_code=True) as it:
        yield it


@pytest.mark.parametrize(
    "completion, reference, label",
    [
        ("So she has 72.", "48 + 24 = <<48+24=72>>72\n#### 72", "correct"),
        ("So she has 71.", "48 + 24 = <<48+24=72>>72\n#### 72", "wrong"),
        ("It costs \\boxed{\\frac{1}{2}}.", "so \\boxed{0.5}", "correct"),
        ("The point is $(3, \\pi/2)$.", "\\left( 3, \\frac{\\pi}{2} \\right)", "correct"),
        ("1000", "1,000", "correct"),
        ("<think>it is 5</think> I say 6", "5", "wrong"),
        ("anything", "a reply in a chat, without a number", "unverified"),
        ("no number", "5", "wrong"),
        ("anything", None, "unverified"),
        (
            "A text about 7 apples.",
            "#### 1. Introduction\nA heading is no final answer, however many signs",
            "unverified",
        ),
        ("It opens at 12:30.", "12:30", "unverified"),
        ("It opens at 11.", "12:30", "wrong"),
        ("5 + 2 = 8", "5", "wrong"),
    ],
)
def test_maths(verifier: Verifier, completion: str, reference: str | None, label: str) -> None:
    assert verifier.label(row(completion, reference)) == label


def test_an_answer_that_was_cut_off_is_never_wrong(verifier: Verifier) -> None:
    assert verifier.label(row("so far 7", "#### 72", finish_reason="length")) == "unverified"
    assert verifier.label(row("so far 72", "#### 72", finish_reason="length")) == "correct"


def test_a_generators_own_scorer(verifier: Verifier) -> None:
    (prompt,) = load_prompts("m", "reasoning_gym:gcd", 1, seed=0)
    for text, label in ((str(prompt.reference), "correct"), ("12345", "wrong")):
        assert verifier.label(row(text, prompt.reference, verifier=prompt.verifier)) == label


def test_verifying_works_in_a_thread(verifier: Verifier) -> None:
    """math-verify's own timeout is a signal, which only the main thread can set."""
    labels: list[str] = []
    thread = threading.Thread(target=lambda: labels.append(verifier.label(row("72", "#### 72"))))
    thread.start()
    thread.join()
    assert labels == ["correct"]


@pytest.mark.slow
def test_an_endless_answer_ends_the_helper_and_nothing_else() -> None:
    helper = Helper(seconds=2.0)
    assert helper.ask(("maths", "5", "\\boxed{9^{9^{9^{9}}}}")) is None
    assert helper.is_dead
    with Verifier(run_code=False) as verifier:
        verifier.helper = Helper(seconds=2.0)
        assert verifier.label(row("\\boxed{9^{9^{9^{9}}}}", "5")) == "unverified"
        assert verifier.label(row("5", "5")) == "correct"


def test_which_references_are_maths() -> None:
    assert maths_answer("x\n#### 1,234") == "1,234"
    assert maths_answer("42") == "$42$"
    for reference in (None, "", "Yes.", "We met in 1999, and it was the best summer that I have ever had in my life."):
        assert maths_answer(reference) is None


FORMS = {
    "whole function in a block": "Sure!\n```python\n{prompt}{solution}```\nIt works.",
    "without the imports": "```python\ndef {bare}{solution}\n```",
    "the body alone": "{solution}",
    "after a block of another language": "```bash\npip install x\n```\n\n```python3\n{prompt}{solution}```",
    "a block between tildes": "~~~python\n{prompt}{solution}~~~",
    "a second block that says how to call it": "```python\n{prompt}{solution}```\nCall it:\n```python\nprint(1)\n```",
}


@pytest.mark.parametrize("form", FORMS)
def test_code_that_passes_its_tests(verifier: Verifier, form: str) -> None:
    problem = human_eval_problems()[0]
    bare = problem["prompt"].partition("def ")[2]
    parts = {"prompt": problem["prompt"], "solution": problem["canonical_solution"], "bare": bare}
    task = {"kind": "human_eval", "task_id": "HumanEval/0"}
    assert verifier.label(row(FORMS[form].format(**parts), verifier=task)) == "correct"
    wrong = FORMS[form].format(**parts | {"solution": "    return None\n"})
    assert verifier.label(row(wrong, verifier=task)) == "wrong"
    with Verifier(run_code=False) as careful:
        assert careful.label(row(wrong, verifier=task)) == "unverified"


def test_code_in_an_indented_block_or_with_other_line_ends(verifier: Verifier) -> None:
    problem = human_eval_problems()[0]
    block = f"```python\n{problem['prompt']}{problem['canonical_solution']}```"
    task = {"kind": "human_eval", "task_id": "HumanEval/0"}
    for answer in ("1. So:\n\n" + textwrap.indent(block, "   "), block.replace("\n", "\r\n")):
        assert verifier.label(row(answer, verifier=task)) == "correct"


@pytest.mark.slow
def test_every_solution_of_human_eval_passes(verifier: Verifier) -> None:
    for problem in human_eval_problems():
        answer = f"```python\n{problem['prompt']}{problem['canonical_solution']}```"
        task = {"kind": "human_eval", "task_id": problem["task_id"]}
        assert verifier.label(row(answer, verifier=task)) == "correct", task


HARMFUL = {
    "loops for ever": "while True: pass",
    "sleeps for ever": "import time; time.sleep(1000)",
    "allocates 10 GB": "x = bytearray(10 << 30)",
    "allocates a little too much": "x = bytearray(600 << 20)",
    "writes a file": "open({victim!r}, 'w').write('x')",
    "removes a file": "import os; os.remove({victim!r})",
    "writes a large file": "open('a', 'wb').write(b'x' * (2 << 20))",
    "fills the disk": "for n in range(100): open(str(n), 'wb').write(b'x' * (1 << 20))",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', {port}))",
    "forks": "import os\nwhile True: os.fork()",
    "starts a program": "import subprocess; subprocess.run(['touch', {victim!r} + '2'])",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "leaves early": "import os; os._exit(0)",
    "raises": "raise SystemExit(0)",
}
HARMLESS = """
import math, os, typing
open("a", "w").write("x")
os.mkdir("d")
os.rename("a", "d/b")
print(open("d/b").read())
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on this machine that no program may reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("harm", HARMFUL)
@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "hook alone"])
def test_harmful_code_fails_and_does_no_harm(tmp_path: Path, port: int, harm: str, namespaces: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    program = HARMFUL[harm].format(victim=str(victim), port=port)
    limits = SLEEPER_LIMITS if harm == "sleeps for ever" else LIMITS
    assert not run_program(program, limits, namespaces=namespaces)
    assert victim.read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


@pytest.mark.parametrize("namespaces", [True, False])
def test_harmless_code_runs(namespaces: bool) -> None:
    assert run_program(HARMLESS, LIMITS, namespaces=namespaces)


def namespaces_are_allowed() -> bool:
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000 | 0x20000000))"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.skipif(not namespaces_are_allowed(), reason="this kernel refuses namespaces to an ordinary user")
def test_the_kernel_holds_without_the_hook(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same harm in a child whose hook is taken out: network, files and other processes are still out of reach."""
    text = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    assert text.count('    sys.addaudithook(guard(job["folder"]))\n') == 1
    unguarded = tmp_path / "child.py"
    unguarded.write_text(text.replace('    sys.addaudithook(guard(job["folder"]))\n', ""))
    monkeypatch.setattr(sandbox, "_CHILD", unguarded)
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for harm in ("writes a file", "removes a file", "opens a socket", "allocates a little too much"):
        assert not run_program(HARMFUL[harm].format(victim=str(victim), port=port), LIMITS), harm
    assert not run_program(f"import os; os.kill({os.getpid()}, 0)", LIMITS)
    # There its parent is number 0, and process 1 ignores what it sends itself: no harm, and always the same verdict.
    assert run_program(HARMFUL["kills its parent"], LIMITS)
    assert not run_program(f"import os; os.mkfifo({str(tmp_path / 'fifo')!r})", LIMITS)
    assert victim.read_text() == "whole"
    assert run_program(HARMLESS, LIMITS)
