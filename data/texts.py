"""Texts that exist already, to be scored: somebody's logs, a draft's own samples, or another teacher's traces.

    jsonl:PATH      one JSON object a line
    parquet:PATH    one file; trace shards too

A row has a prompt (`prompt_ids`, or messages / prompt / question / .. as in pipeline.rows) and what was answered:
`completion_ids`, or `completion` (text). It may have `finish_reason` ("stop" or "length"), `temperature`, `top_p`,
`max_tokens` and `seed`, which say how it was made, and `id`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import rows
from pipeline.sources import existing_file, report_bad_rows

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, kw_only=True)
class Text:
    """One row. `prompt_ids` None: by the chat template; `completion` is text or token ids."""

    id: str
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
    bad: dict[int, str] = {}
    for number, row in readers[kind](path):
        if len(texts) == limit:
            break
        try:
            texts.append(_text(name, number, row() if callable(row) else row))
        except (ValueError, TypeError) as error:
            bad[number] = str(error)
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
                yield number, lambda line=line: json.loads(line)


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
    max_tokens = row.get("max_tokens")
    return Text(
        id=f"{name}/{row['id'] if row.get('id') is not None else number}",
        source=name,
        messages=messages,
        reference=reference,
        prompt_ids=prompt_ids,
        completion=_completion(row),
        finish_reason=reason,
        temperature=float(row.get("temperature", 1.0)),
        top_p=float(row.get("top_p", 1.0)),
        max_tokens=None if max_tokens is None else int(max_tokens),
        seed=int(row.get("seed", 0)),
    )


def _prompt(row: Mapping[str, Any], required: bool) -> tuple[list[dict[str, str]], str | None]:
    """Messages and reference; a trace's messages are JSON text. Token ids alone are prompt enough."""
    if isinstance(row.get("messages"), str):
        row = {**row, "messages": json.loads(row["messages"])}
    if not required and not any(row.get(key) is not None for key in rows.PROMPT_KEYS):
        return [], None
    return rows.read(row)


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
