"""One row of somebody's data set read as a prompt: the shapes that are common, and what is wrong with a bad one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PROMPT_KEYS = ("messages", "turns", "prompt", "question", "problem", "text")  # the first that a row has is read
REFERENCE_KEYS = ("answer", "solution", "reference")
ROLES = ("system", "user", "assistant", "tool")

Messages = list[dict[str, str]]


def read(row: Mapping[str, Any]) -> tuple[Messages, str | None]:
    """(messages up to the first user's, reference answer or None). ValueError saying what is wrong with the row.

    Of a conversation only its opening is kept; the assistant's first reply, if there is one, serves as the reference.
    """
    key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if key is None:
        raise ValueError(f"got keys {', '.join(row) or '(none)'}, expected one of {', '.join(PROMPT_KEYS)}")
    value = row[key]
    if key == "turns":
        value = value[0] if isinstance(value, Sequence) and value else value
    messages, reply = _opening(key, value) if isinstance(value, list) else (_single(key, value), None)
    return messages, _reference(row) or reply


def texts(row: Mapping[str, Any]) -> list[str]:
    """Every text of a good row: all turns of its conversation, and what stands under the keys of an answer."""
    key = next(key for key in PROMPT_KEYS if row.get(key) is not None)
    turns = row[key] if isinstance(row[key], list) else [row[key]]
    contents = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in turns]
    return [text for text in (*contents, *map(row.get, REFERENCE_KEYS)) if isinstance(text, str) and text]


def problem_with(line: bytes) -> str | None:
    """Why a JSONL line cannot be used; None when it can."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            return f"got a JSON {type(row).__name__}, expected an object"
        read(row)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno})"
    except ValueError as error:
        return str(error)
    return None


def _single(key: str, value: Any) -> Messages:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key}: got {_short(value)}, expected text that is not empty")
    return [{"role": "user", "content": value}]


def _opening(key: str, value: list[Any]) -> tuple[Messages, str | None]:
    messages: Messages = []
    for message in value:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"{key}: got {_short(message)}, expected role ({', '.join(ROLES)}) and content (text)")
        if messages and messages[-1]["role"] == "user":
            return messages, content if role == "assistant" else None
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(f"{key}: got {_short(value)}, expected a message of the user that is not empty")
    return messages, None


def _reference(row: Mapping[str, Any]) -> str | None:
    for key in REFERENCE_KEYS:
        if isinstance(row.get(key), str) and row[key]:
            return str(row[key])
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
