"""Documents say what the programs do: messages are the code's, links lead somewhere, commands run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.tables import speed_table, to_text
from pipeline.results import read_result
from tests.test_project import ROOT, python_files

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LEAST_LETTERS = 4  # of a piece of a message between two values


@cache
def code_texts() -> list[str]:
    """Every string of the code, an f-string with … for each value, and the scripts."""
    texts = []
    for path in python_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return [*texts, *(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh"))]


def is_printed(message: str) -> bool:
    """Whether some text of the code has all pieces of the message, in order."""
    pieces = [re.escape(piece.strip()) for piece in message.split("…") if len(piece.strip()) >= LEAST_LETTERS]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    return any(pattern.search(text) for text in code_texts())


def quoted_messages() -> Iterator[str]:
    """The code spans of the tables' first column that are sentences."""
    for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines():
        first = re.match(r"\| `([^`]+)`", line)
        if first and " " in first[1]:
            yield first[1]


def test_messages_in_the_troubleshooting_are_the_codes() -> None:
    messages = list(quoted_messages())
    assert len(messages) > 20
    assert [message for message in messages if not is_printed(message)] == []


def test_a_message_that_no_code_prints_is_seen() -> None:
    assert not is_printed("the flux of … is out of … phase")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """To a file of the checkout, and to a heading of it where one is named."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (path.parent / name) if name else path
        assert file.exists(), f"{path.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_the_number_of_planted_faults_is_the_suites() -> None:
    from tests.faults import DRAFT, LAW

    text = " ".join((ROOT / "docs" / "losslessness.md").read_text(encoding="utf-8").split())
    assert f"so {len(LAW)} faults that real decoders had" in text
    assert len(DRAFT) == 9
    assert "Nine more are faults of the draft only" in text
    assert f"{len(LAW)} planted faults" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demos_tables_are_those_of_its_result() -> None:
    """Speeds of README's table, whose last columns are cut off, and the commit that it names."""
    result = read_result(ROOT / "results" / "demo_cpu.json")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"one run of commit {result['git'][:7]}," in text
    table = to_text(speed_table(result)).splitlines()
    assert len(table) > 10
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ") and len(line) > 60]
    missing = [line for line in table if not any(line.startswith(each) for each in shown)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_result_files_that_are_named_are_there(path: Path) -> None:
    names = set(re.findall(r"results/\w+\.json", path.read_text(encoding="utf-8")))
    made_elsewhere = {name for name in names if f"--out {name}" in path.read_text(encoding="utf-8")}
    assert not [name for name in names - made_elsewhere if not (ROOT / name).is_file()]
