"""What a check of the environment found: records, their table, their exit code."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("ok", "note", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table. `cost` is what its lack costs, or the way out."""

    item: str
    level: str
    found: str
    cost: str = ""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, self.level


def ok(item: str, found: str) -> Finding:
    return Finding(item=item, level="ok", found=found)


def note(item: str, found: str, cost: str) -> Finding:
    """Something that is not there, and need not be."""
    return Finding(item=item, level="note", found=found, cost=cost)


def warning(item: str, found: str, cost: str) -> Finding:
    """Something that works, but badly."""
    return Finding(item=item, level="warning", found=found, cost=cost)


def error(item: str, found: str, cost: str) -> Finding:
    """Something without which a stage cannot run."""
    return Finding(item=item, level="error", found=found, cost=cost)


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def exit_code(findings: Sequence[Finding], strict: bool) -> int:
    levels = {finding.level for finding in findings}
    if "error" in levels:
        return 2
    return 1 if strict and "warning" in levels else 0


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, the cost of each under it, and the counts."""
    width = max(len(finding.item) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:8} {finding.item:{width}}  {finding.found}")
        if finding.cost:
            lines.append(" " * (9 + width) + f"  -> {finding.cost}")
    counts = [sum(finding.level == level for finding in findings) for level in ("error", "warning", "note")]
    return "\n".join([*lines, "errors: {}, warnings: {}, notes: {}".format(*counts)])
