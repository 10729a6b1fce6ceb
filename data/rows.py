"""Trace rows as text, and what is wrong with those that cannot be read as such."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from data.common import check_record
from data.shards import to_records

_LISTS = ("prompt_ids", "completion_ids", "token_logprob", "top_ids", "top_logprobs", "tail_mass")
_TOKEN_LISTS = _LISTS[1:]  # one element a completion token
_TEXTS = ("prompt_id", "source", "messages", "reference", "verifier", "finish_reason")
_NEEDED = ("prompt_id", "source", "messages", "finish_reason")

Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trace as text. `prompt` is what was said before the completion, system messages aside.

    `problem` says why the row is malformed; the other fields are then not to be relied on.
    """

    prompt_id: str
    source: str
    messages: list[dict[str, str]]
    prompt: str
    completion: str
    reference: str | None
    verifier: dict[str, Any] | None
    completion_ids: np.ndarray
    finish_reason: str
    problem: str | None


def read_rows(table: pa.Table, decode: Decode, vocab_size: int) -> list[Row]:
    """The rows of a table of traces; `decode` turns lists of ids below `vocab_size` into texts."""
    texts = table.select(_TEXTS).to_pylist()
    lists = [array.to_numpy(zero_copy_only=False) for array in _chunks(table, "completion_ids")]
    ids = [np.zeros(0, np.int32) if row is None else np.asarray(row) for chunk in lists for row in chunk]
    numbers = [None] * table.num_rows if _all_sound(table) else list(_number_problems(table))
    problems = [
        number or _text_problem(row) or _id_problem(row_ids, vocab_size)
        for number, row, row_ids in zip(numbers, texts, ids, strict=True)
    ]
    readable = [[] if problem else row_ids.tolist() for row_ids, problem in zip(ids, problems, strict=True)]
    completions = decode(readable)
    return list(map(_row, texts, completions, ids, problems))


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """What was said before the completion; system messages, which many prompts share, aside."""
    return "\n".join(message["content"] for message in messages if message["role"] != "system")


def is_generated(verifier: Mapping[str, Any] | None) -> bool:
    """Whether the prompt is a generator's: such problems share their wording on purpose and differ in numbers."""
    return verifier is not None and verifier.get("kind") == "reasoning_gym"


def _row(texts: dict[str, Any], completion: str, ids: np.ndarray, problem: str | None) -> Row:
    messages = [] if problem else json.loads(texts["messages"])
    return Row(
        prompt_id=texts["prompt_id"] or "",
        source=texts["source"] or "",
        messages=messages,
        prompt=prompt_text(messages),
        completion=completion,
        reference=texts["reference"],
        verifier=json.loads(texts["verifier"]) if texts["verifier"] and not problem else None,
        completion_ids=ids,
        finish_reason=texts["finish_reason"] or "",
        problem=problem,
    )


def _text_problem(row: dict[str, Any]) -> str | None:
    missing = [name for name in _NEEDED if not row[name]]
    if missing:
        return f"{missing[0]} is empty"
    if not _is_conversation(_json(row["messages"])):
        return "messages are not a JSON list of role and content that holds a user's text"
    if row["verifier"] is not None and not isinstance(_json(row["verifier"]), dict):
        return "verifier is not a JSON object"
    return None


def _is_conversation(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    keys = ("role", "content")
    if not all(isinstance(each, dict) and all(isinstance(each.get(key), str) for key in keys) for each in messages):
        return False
    return any(each["role"] == "user" and each["content"].strip() for each in messages)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _id_problem(ids: np.ndarray, vocab_size: int) -> str | None:
    if len(ids) == 0:
        return "no completion tokens"
    if ids.min() < 0 or ids.max() >= vocab_size:
        return f"completion ids from {ids.min()} to {ids.max()}, expected ids from 0 to {vocab_size - 1}"
    return None


def _all_sound(table: pa.Table) -> bool:
    """Whether every row passes check_record, by checking the tokens of all rows as those of one long completion.

    What check_record asks of a token never depends on its neighbours, so the long record is sound when all rows are.
    """
    if any(chunk.null_count for name in _LISTS for chunk in _chunks(table, name)):
        return False
    lengths = [_lengths(table, name) for name in _TOKEN_LISTS]
    if any((each != lengths[0]).any() for each in lengths) or not (lengths[0] > 0).all():
        return False
    if not (_lengths(table, "prompt_ids") > 0).all():
        return False
    if not set(table.column("finish_reason").to_pylist()) <= {"stop", "length"}:
        return False
    flat = {name: _joined(table, name) for name in _LISTS}
    if any(array is None for array in flat.values()):
        return False
    record = SimpleNamespace(prompt_id="", completion=0, temperature=0, finish_reason="stop", **flat)
    try:
        check_record(record)  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def _joined(table: pa.Table, name: str) -> np.ndarray | None:
    """The column's elements of all rows in one array, [tokens] or [tokens, N]; None when N differs or one is null."""
    parts = []
    for chunk in _chunks(table, name):
        values = chunk.flatten()
        if pa.types.is_list(values.type):
            widths = set(np.asarray(values.value_lengths()).tolist())
            if len(widths) != 1 or values.null_count:
                return None
            values = values.flatten()
            parts.append(np.asarray(values).reshape(-1, widths.pop()))
        else:
            parts.append(np.asarray(values))
        if values.null_count:
            return None
    return np.concatenate(parts)


def _number_problems(table: pa.Table) -> Iterator[str | None]:
    for index in range(table.num_rows):
        row = table.slice(index, 1)
        if any(row.column(name).null_count for name in _LISTS):
            yield "a list of tokens or probabilities is missing"
            continue
        try:
            check_record(next(to_records(row)))
        except ValueError as error:
            yield str(error).partition(": ")[2] or str(error)
        else:
            yield None


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return np.concatenate([np.asarray(chunk.value_lengths()) for chunk in _chunks(table, name)])


def _chunks(table: pa.Table, name: str) -> Sequence[pa.Array]:
    return table.column(name).chunks
