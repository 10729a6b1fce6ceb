"""One row of somebody's data set read as a prompt: the shapes that are common, and what is wrong with a bad one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PROMPT_KEYS = ("messages", "turns", "prompt", "question", "problem", "text")  # the first that a row has is read
REFERENCE_KEYS = ("answer", "solution", "reference")
ROLES = ("system", "user", "assistant", "tool")

Messages = list[dict[str, str]]


def parse(line: bytes) -> Any:
    """The JSON of one line. ValueError saying why there is none, or that its texts cannot be written as UTF-8."""
    try:
        value = json.loads(line)
        if b"\\u" in line:  # only an escape can give half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("an escape of half a character (a lone surrogate), which no text can hold") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not a row: its JSON is nested too deeply") from error
    return value


def read(row: Mapping[str, Any]) -> tuple[Messages, str | None]:
    """(messages up to the first user's, reference answer or None). ValueError saying what is wrong with the row.

    Of a conversation only its opening is kept; the assistant's first reply, if there is one, serves as the reference.
    """
    key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if key is None:
        raise ValueError(f"got keys {', '.join(row) or '(none)'}, expected one of {', '.join(PROMPT_KEYS)}")
    value = row[key]
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else value
    messages, reply = _opening(key, value) if isinstance(value, list) else (_single(key, value), None)
    return messages, _reference(row) or reply


def conversation(row: Mapping[str, Any]) -> tuple[Messages, str | None]:
    """`read`, but all of `messages` up to the last user's: what an answer beside it (a log's) was an answer to."""
    opening, reference = read(row)
    turns = row.get("messages")
    if not isinstance(turns, list):
        return opening, reference
    last = max(place for place, turn in enumerate(turns) if isinstance(turn, Mapping) and turn.get("role") == "user")
    messages = [_message("messages", turn) for turn in turns[: last + 1]]
    return (messages, _reference(row)) if len(messages) > len(opening) else (opening, reference)


def texts(row: Mapping[str, Any]) -> list[str]:
    """Every text of a good row: all turns of its conversation, and what stands under the keys of an answer."""
    key = next(key for key in PROMPT_KEYS if row.get(key) is not None)
    turns = row[key] if isinstance(row[key], list) else [row[key]]
    contents = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in turns]
    return [text for text in (*contents, *map(row.get, REFERENCE_KEYS)) if isinstance(text, str) and text]


def problem_with(line: bytes) -> str | None:
    """Why a JSONL line cannot be used; None when it can."""
    try:
        row = parse(line)
        if not isinstance(row, dict):
            return f"got a JSON {type(row).__name__}, expected an object"
        read(row)
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
        checked = _message(key, message)
        if messages and messages[-1]["role"] == "user":
            return messages, checked["content"] if checked["role"] == "assistant" else None
        messages.append(checked)
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(f"{key}: got {_short(value)}, expected a message of the user that is not empty")
    return messages, None


def _message(key: str, message: Any) -> dict[str, str]:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"{key}: got {_short(message)}, expected role ({', '.join(ROLES)}) and content (text)")
    return {"role": role, "content": content}


def _reference(row: Mapping[str, Any]) -> str | None:
    for key in REFERENCE_KEYS:
        if isinstance(row.get(key), str) and row[key]:
            return str(row[key])
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
