"""Kinds of config values that more than one section has, each with the words that an error uses."""

from __future__ import annotations

import re
from typing import Any

from pipeline.schema import setting

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def count(low: int = 1, **field: Any) -> Any:
    return setting(f"a whole number of at least {low}", lambda value: value >= low, **field)


def one_of(choices: tuple[str, ...], **field: Any) -> Any:
    return setting(f"one of {', '.join(choices)}", lambda value: value in choices, **field)


def name(**field: Any) -> Any:
    return setting(
        "a name of letters, digits, '.', '_', '-' (it becomes a folder)",
        lambda value: NAME.fullmatch(value) is not None,
        **field,
    )


def temperature(**field: Any) -> Any:
    return setting("a temperature of at least 0 (0 = greedy)", lambda value: 0 <= value <= 100, **field)


def positive(**field: Any) -> Any:
    return setting("a number above 0", lambda value: 0 < value < float("inf"), **field)


def fraction(**field: Any) -> Any:
    return setting("a number from 0 to 1", lambda value: 0 <= value <= 1, **field)
