"""Which rows of a JSONL file hold a piece of a benchmark, with the words they share (rules: data/decontaminate.py).

    python -m data.find_contamination --rows gsm8k_train.jsonl --against gsm8k_test.jsonl math500.jsonl

Rows and benchmarks are read as a config's `jsonl:` sources are; a row's answer counts as its completion.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from data.decontaminate import Decontaminator
from pipeline.sources import Prompt, load_all
from pipeline.tables import to_markdown

COLUMNS = ("row", "part", "benchmark", "item", "of", "span")


def find(rows: Sequence[Prompt], benchmarks: Decontaminator) -> list[dict[str, str]]:
    """One record a row that matches: COLUMNS as text, of its first match."""
    found = []
    for row in rows:
        texts = [("prompt", message["content"]) for message in row.messages]
        texts += [("completion", text) for text in (row.reference, *row.others) if text]
        matches = ((part, match) for part, text in texts if (match := benchmarks.find(text)) is not None)
        for part, (item, span) in itertools.islice(matches, 1):
            values = (row.id, part, item.benchmark, item.prompt_id, item.kind, span)
            found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code. Prints a table of the matches and counts."""
    parser = argparse.ArgumentParser(prog="data.find_contamination", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", required=True, help="a JSONL file of prompts and answers")
    parser.add_argument("--against", nargs="+", required=True, help="JSONL files of benchmarks")
    arguments = parser.parse_args(argv)
    try:
        rows = _load(arguments.rows)
        benchmarks = {Path(path).stem: _load(path) for path in arguments.against}
    except ValueError as error:
        print(f"data.find_contamination: {error}", file=sys.stderr)
        return 2
    found = find(rows, Decontaminator(benchmarks))
    if found:
        print(to_markdown(pd.DataFrame(found)))
    counts = Counter(match["benchmark"] for match in found)
    for name, prompts in benchmarks.items():
        print(f"{name}: {counts[name]} of {len(rows)} rows match one of its {len(prompts)} items")
    return 0


def _load(path: str) -> list[Prompt]:
    # Row n of the file has the id <name of the file>/<n>.
    return load_all(Path(path).stem, f"jsonl:{path}", 1, seed=0)


if __name__ == "__main__":
    sys.exit(main())
