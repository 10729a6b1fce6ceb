"""Texts that exist already, to be scored: somebody's logs, a draft's own samples, or another teacher's traces.

    jsonl:PATH      one JSON object a line
    parquet:PATH    one file; trace shards too

A row has a prompt (`prompt_ids`, or messages / prompt / question / .. as in pipeline.rows; of `messages` all turns up
to the last user's) and what was answered: `completion_ids`, or `completion` (text). It may have `finish_reason` ("stop"
or "length"), `temperature`, `top_p`, `max_tokens` and `seed`, which say how it was made, and `id`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline import files, rows
from pipeline.sources import existing_file, report_bad_rows

FINISH_REASONS = ("stop", "length")
_Check = tuple[str, Callable[[Any], bool]]
_SETTINGS: dict[str, _Check] = {  # what is expected of each, and its test
    "temperature": ("a finite number, 0 or more", lambda value: _is_number(value) and 0 <= value < math.inf),
    "top_p": ("a number in (0, 1]", lambda value: _is_number(value) and 0 < value <= 1),
    "max_tokens": ("a whole number from 1 to 2^31 - 1", lambda value: type(value) is int and 0 < value < 1 << 31),
    "seed": ("a whole number from 0 to 2^63 - 1", lambda value: type(value) is int and 0 <= value < 1 << 63),
}


@dataclass(frozen=True, kw_only=True)
class Text:
    """One row. `prompt_ids` None: by the chat template; `completion` is text or token ids.

    `prompt_id` is the id of the first row with this prompt, `index` counts the rows with it from 0: several answers to
    one prompt are its completions, as in traces.
    """

    id: str
    prompt_id: str
    index: int
    source: str
    messages: list[dict[str, str]]
    reference: str | None
    prompt_ids: tuple[int, ...] | None
    completion: str | tuple[int, ...]
    finish_reason: str | None
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int


def load_texts(name: str, source: str, limit: int) -> list[Text]:
    """The first `limit` good rows of a file, as the set `name`.

    Bad rows are reported on stderr with their number and skipped. ValueError when the file does not exist, cannot be
    read or has no good row.
    """
    kind, _, path = source.partition(":")
    readers = {"jsonl": _jsonl_rows, "parquet": _parquet_rows}
    if kind not in readers or not path:
        raise ValueError(f"texts to score: got {source!r}, expected jsonl:PATH or parquet:PATH")
    texts: list[Text] = []
    ids: set[str] = set()
    bad: dict[int, str] = {}
    answers: dict[str, tuple[str, int]] = {}  # by prompt: its id, how many were read
    for number, row in readers[kind](path):
        if len(texts) == limit:
            break
        try:
            text = _text(name, number, row() if callable(row) else row)
            if text.id in ids:
                raise ValueError(f"id: got {text.id!r} a second time, expected another for every row, or none")
        except (ValueError, TypeError) as error:
            bad[number] = str(error)
            continue
        ids.add(text.id)
        prompt = files.sha256_json([text.messages, text.prompt_ids])
        prompt_id, count = answers.get(prompt, (text.id, 0))
        answers[prompt] = prompt_id, count + 1
        texts.append(replace(text, prompt_id=prompt_id, index=count))
    report_bad_rows(path, "line" if kind == "jsonl" else "row", bad)
    if not texts:
        raise ValueError(
            f"{source}: no usable text in it; expected rows with a prompt and completion or completion_ids"
        )
    return texts


def _jsonl_rows(path: str) -> Iterator[tuple[int, Any]]:
    with existing_file("jsonl", path).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, lambda line=line: rows.parse(line)


def _parquet_rows(path: str) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(existing_file("parquet", path)) as file:
            first = 1
            for batch in file.iter_batches(batch_size=256, use_threads=False):
                yield from enumerate(batch.to_pylist(), start=first)
                first += batch.num_rows
    except pa.ArrowException as error:
        raise ValueError(f"parquet:{path}: cannot be read: {error}") from error


def _text(name: str, number: int, row: Any) -> Text:
    if not isinstance(row, Mapping):
        raise ValueError(f"got a JSON {type(row).__name__}, expected an object")
    prompt_ids = None if row.get("prompt_ids") is None else _ids("prompt_ids", row["prompt_ids"])
    messages, reference = _prompt(row, required=prompt_ids is None)
    reason = row.get("finish_reason")
    if reason not in (None, *FINISH_REASONS):
        raise ValueError(f"finish_reason: got {reason!r}, expected stop, length or none")
    key = f"{name}/{row['id'] if row.get('id') is not None else number}"
    return Text(
        id=key,
        prompt_id=key,
        index=0,
        source=name,
        messages=messages,
        reference=reference,
        prompt_ids=prompt_ids,
        completion=_completion(row),
        finish_reason=reason,
        temperature=float(_setting(row, "temperature", 1.0)),
        top_p=float(_setting(row, "top_p", 1.0)),
        max_tokens=_setting(row, "max_tokens", None),
        seed=_setting(row, "seed", 0),
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _setting(row: Mapping[str, Any], key: str, default: Any) -> Any:
    """The row's value under `key`, or `default` where it has none. ValueError for one that no record can hold."""
    value = row.get(key)
    if value is None:
        return default
    expected, is_good = _SETTINGS[key]
    if not is_good(value):
        raise ValueError(f"{key}: got {str(value)[:60]}, expected {expected}")
    return value


def _prompt(row: Mapping[str, Any], required: bool) -> tuple[list[dict[str, str]], str | None]:
    """Messages and reference; a trace's messages are JSON text. Token ids alone are prompt enough."""
    if isinstance(row.get("messages"), str):
        row = {**row, "messages": json.loads(row["messages"])}
    if not required and not any(row.get(key) is not None for key in rows.PROMPT_KEYS):
        return [], None
    return rows.conversation(row)


def _completion(row: Mapping[str, Any]) -> str | tuple[int, ...]:
    if row.get("completion_ids") is not None:
        return _ids("completion_ids", row["completion_ids"])
    text = row.get("completion")
    if not isinstance(text, str) or not text:
        raise ValueError(f"got no completion_ids and completion {text!r}, expected one of them, not empty")
    return text


def _ids(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ValueError(f"{key}: got {str(value)[:60]!r}, expected a list of token ids that is not empty")
    return tuple(value)
