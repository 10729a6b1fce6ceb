"""Tables of text as markdown."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub table of a frame of texts; a bar inside a cell is escaped, a line break becomes a space."""
    lines: list[Sequence[str]] = [table.columns.tolist(), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").splitlines())
