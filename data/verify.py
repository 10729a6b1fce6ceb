"""Whether an answer is right, where something can tell: a generator's scorer, math-verify, HumanEval's tests.

Scorers and math-verify evaluate what a model wrote with sympy, which can take for ever or fill the memory
("9**9**9"), and math-verify's own timeout is an alarm signal: it works in a main thread only and does not interrupt C
code. So both run in a helper process, with no timeout of theirs, that is killed when an answer takes too long.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import signal
import sys
import textwrap
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from data.decontaminate import is_bare_answer
from data.rows import Row
from data.sandbox import Limits, run_program
from pipeline.scoring import score
from pipeline.sources import Prompt, human_eval_problems

ANSWER_SECONDS = 10.0
CPU_SECONDS = 60
START_SECONDS = 300.0
WORKER_MEMORY_BYTES = 8 << 30
_CODE_BLOCK = re.compile(r"(```|~~~)[^\n`~]*\n(.*?)(?:\1|\Z)", re.S)  # of whatever language it says
_FINAL = re.compile(r"####[ \t]*(.+)\s*\Z")  # in the last line: elsewhere it is a heading
_NUMBER = re.compile(r"[-+\d.,/%$ ]+")
_MATHS = re.compile(r"\d|\\[A-Za-z]")


class Verifier:
    """Labels rows. A context manager: it ends the helper process, which starts with the first answer it is needed for.

    `run_code` false leaves HumanEval's completions unverified.
    """

    def __init__(self, *, run_code: bool) -> None:
        self.run_code = run_code
        self.helper: Helper | None = None

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.helper is not None:
            self.helper.stop()

    def label(self, row: Row) -> str:
        """ "correct", "wrong" or "unverified". An answer that was cut off is never wrong: it was not finished."""
        verdict = self._verdict(row, row.completion.rpartition("</think>")[2])
        if verdict is None or (not verdict and row.finish_reason == "length"):
            return "unverified"
        return "correct" if verdict else "wrong"

    def _verdict(self, row: Row, answer: str) -> bool | None:
        kind = row.verifier.get("kind") if row.verifier else None
        if kind == "human_eval":
            return self._passes_tests(row, answer) if self.run_code else None
        if kind == "reasoning_gym":
            return self._ask(("score", row.messages, row.verifier, answer))
        gold = maths_answer(row.reference)
        return None if gold is None else self._ask(("maths", gold, answer))

    def _passes_tests(self, row: Row, answer: str) -> bool | None:
        assert row.verifier is not None
        problem = next((each for each in human_eval_problems() if each["task_id"] == row.verifier.get("task_id")), None)
        return None if problem is None else run_program(test_program(problem, answer), Limits())

    def _ask(self, question: tuple[Any, ...]) -> bool | None:
        if self.helper is None:
            self.helper = Helper()
        verdict = self.helper.ask(question)
        if self.helper.is_dead:
            self.helper = None
        return verdict


def maths_answer(reference: str | None) -> str | None:
    """The part of a reference that math-verify should compare with; None when it is not a maths answer.

    That is what follows GSM8K's ####, a solution with \\boxed{}, or a short answer with a digit or a LaTeX command.
    """
    if not reference:
        return None
    if found := _FINAL.findall(reference):
        return str(found[-1]).strip()
    if "\\boxed{" in reference:
        return reference
    return f"${reference.strip()}$" if is_bare_answer(reference) and _MATHS.search(reference) else None


def test_program(problem: dict[str, str], answer: str) -> str:
    """The answer's function with the problem's tests behind it.

    The last code block that defines the function counts, after the imports and helpers that the problem begins with;
    an answer without one is taken for the body, and follows the problem's own text.
    """
    name = problem["entry_point"]
    answer = answer.replace("\r\n", "\n")
    blocks = [textwrap.dedent(block) for _, block in _CODE_BLOCK.findall(answer)] or [answer]
    whole = [block for block in blocks if re.search(rf"^def {re.escape(name)}\b", block, re.M)]
    before = problem["prompt"].partition(f"def {name}")[0]
    code = before + "\n" + whole[-1] if whole else problem["prompt"] + blocks[-1]
    return f"{code}\n\n{problem['test']}\n\ncheck({name})\n"


class Helper:
    """A process that answers one question after the other."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self.seconds = seconds
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.is_dead = False
        try:
            self._receive(START_SECONDS)
        except (EOFError, OSError) as error:  # a timeout is an OSError too
            self.stop()
            raise ValueError("the process that verifies answers does not start; see its error above") from error

    def ask(self, question: tuple[Any, ...]) -> bool | None:
        """The verdict; None when there is none within the time or memory allowed, after which the helper is dead."""
        try:
            self.connection.send(question)
            return self._receive(self.seconds)
        except (EOFError, OSError):  # a timeout is an OSError too
            self.stop()
            return None

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.is_dead = True
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _receive(self, seconds: float) -> Any:
        """What it sends next. TimeoutError when that takes longer; EOFError when it ended."""
        if not self.connection.poll(seconds):
            raise TimeoutError
        return self.connection.recv()


def _serve(connection: Connection) -> None:
    """The helper's life: questions until the pipe closes, each answered with True, False or None."""
    import logging

    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # meant for the stage, sent to its whole group
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    import math_verify  # noqa: F401  before "ready": its import takes seconds

    logging.disable(logging.CRITICAL)
    connection.send("ready")
    while True:
        try:
            kind, *arguments = connection.recv()
        except EOFError:
            sys.exit(0)
        # Should the stage be killed meanwhile, nobody else ends what never ends by itself.
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + CPU_SECONDS), resource.RLIM_INFINITY))
        try:
            connection.send(_score(*arguments) if kind == "score" else _is_same_value(*arguments))
        except Exception:  # what a model wrote can raise anything in a parser; it is then no right answer
            connection.send(False)


def _score(messages: list[dict[str, str]], verifier: dict[str, Any], answer: str) -> bool | None:
    found = score(Prompt(id="", source="", messages=messages, verifier=verifier), answer)
    return None if found is None else found >= 1.0


def _is_same_value(gold: str, answer: str) -> bool | None:
    from math_verify import parse, verify

    expected = parse(gold, parsing_timeout=None)
    if not expected:
        return None
    if verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None):
        return True
    # "12:30" or "[1, 2, 3]" is read in a reference, but not in the middle of a sentence.
    text = gold.strip("$").strip()
    return None if text in answer and not _NUMBER.fullmatch(text) else False
