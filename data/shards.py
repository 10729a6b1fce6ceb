"""Trace shards: parquet files, readable by `datasets`, whose bytes depend on their records alone.

Columns that grow with T use byte-stream-split and zstd, which keep float32 exact at under 64 bytes a token.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.common import Skipped, TraceRecord, check_record

SCHEMA_VERSION = 2
_VERSION_KEY = "trace_schema_version"
_NOTES_KEY = "trace_notes"

_TOP_IDS = pa.list_(pa.list_(pa.int32()))
_TOP_LOGPROBS = pa.list_(pa.list_(pa.float32()))
_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("messages", pa.string()),
        ("reference", pa.string()),
        ("verifier", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion", pa.int32()),
        ("completion_ids", pa.list_(pa.int32())),
        ("token_logprob", pa.list_(pa.float32())),
        ("top_ids", _TOP_IDS),
        ("top_logprobs", _TOP_LOGPROBS),
        ("tail_mass", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("max_tokens", pa.int32()),
        ("seed", pa.int64()),
        ("teacher", pa.string()),
        ("teacher_revision", pa.string()),
        ("backend", pa.string()),
        ("thinking", pa.bool_()),
    ]
)
_SPLIT = (
    "prompt_ids.list.element",
    "completion_ids.list.element",
    "token_logprob.list.element",
    "top_ids.list.element.list.element",
    "top_logprobs.list.element.list.element",
    "tail_mass.list.element",
)


@dataclass(frozen=True, kw_only=True)
class ShardNotes:
    """What a shard's metadata says of it, read without its rows: `tokens` are completion tokens, `backends` what
    computed them."""

    records: int
    tokens: int
    backends: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def write_shard(path: Path, records: Sequence[TraceRecord], skipped: Sequence[Skipped] = ()) -> None:
    """Write one parquet shard; equal records give equal bytes. ValueError for a record that is not valid."""
    for record in records:
        check_record(record)
    columns = [_column(field, [getattr(record, field.name) for record in records]) for field in _SCHEMA]
    write_table(path, pa.table(columns, schema=_SCHEMA), skipped)


def write_table(path: Path, table: pa.Table, skipped: Sequence[Skipped] = ()) -> None:
    """Write one parquet shard of rows that are known to be valid."""
    notes = {
        "tokens": pc.sum(pc.list_value_length(table.column("completion_ids"))).as_py() or 0,
        "backends": sorted(pc.unique(table.column("backend")).to_pylist()),
        "skipped": [[item.prompt_id, item.reason] for item in skipped],
    }
    with open_writer(path) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_VERSION_KEY: str(SCHEMA_VERSION), _NOTES_KEY: json.dumps(notes)})


def open_writer(path: Path, added: Sequence[pa.Field] = (), compression_level: int = 9) -> pq.ParquetWriter:
    """A parquet file of the trace columns and the `added` ones; the same tables give the same bytes."""
    # Statistics, dictionaries and a second copy of the schema would be half of a small shard.
    return pq.ParquetWriter(
        path,
        pa.schema([*_SCHEMA, *added]),
        compression="zstd",
        compression_level=compression_level,
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        column_encoding=dict.fromkeys(_SPLIT, "BYTE_STREAM_SPLIT"),
    )


def stream_tables(path: Path, rows: int) -> Iterator[pa.Table]:
    """The shard's rows in order, at most `rows` at a time, unchecked. ValueError when it is not a trace shard."""
    try:
        with pq.ParquetFile(path) as file:
            _check_schema(file.metadata.metadata, file.schema_arrow)
            for batch in file.iter_batches(batch_size=rows, use_threads=False):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{path}: not a sound trace shard: {error}") from error


def to_records(table: pa.Table) -> Iterator[TraceRecord]:
    """The rows of a table that has the trace columns; other columns are left out."""
    for row in _rows(table.select(_SCHEMA.names)):
        yield _record(row, _SCHEMA.names)


def read_shard(path: Path) -> list[TraceRecord]:
    """The shard's records, each checked. ValueError naming an unsound file."""
    try:
        records = list(to_records(read_table(path)))
        for record in records:
            check_record(record)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a sound trace shard: {error}") from error
    return records


def read_notes(path: Path) -> ShardNotes:
    """The counts and the skipped prompts of a shard that `read_shard` has accepted."""
    metadata = pq.read_metadata(path)
    notes = json.loads(metadata.metadata[_NOTES_KEY.encode()])
    skipped = tuple(Skipped(prompt_id=prompt_id, reason=reason) for prompt_id, reason in notes["skipped"])
    return ShardNotes(
        records=metadata.num_rows, tokens=notes["tokens"], backends=tuple(notes["backends"]), skipped=skipped
    )


def read_table(path: Path) -> pa.Table:
    """The shard as an arrow table. ValueError when its schema is not this module's."""
    # Not pq.read_table: its threads can outlive the interpreter and abort it at exit (apache/arrow 34314).
    with pq.ParquetFile(path) as file:
        _check_schema(file.metadata.metadata, file.schema_arrow)
        return file.read(use_threads=False)


def _check_schema(metadata: Mapping[bytes, bytes] | None, schema: pa.Schema) -> None:
    version = (metadata or {}).get(_VERSION_KEY.encode(), b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"trace schema version {version}, this code reads {SCHEMA_VERSION}; generate again")
    if not schema.equals(_SCHEMA):
        raise ValueError(f"columns {schema.names}, expected {_SCHEMA.names}")


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    """One column; lists go through flat numpy arrays, as a Python object a probability would be slow."""
    if not pa.types.is_list(field.type):
        return pa.array(values, type=field.type)
    inner = field.type.value_type
    flat = np.concatenate([np.zeros(0)] + [value.reshape(-1) for value in values])
    offsets = pa.array(np.cumsum([0] + [len(value) for value in values]), type=pa.int32())
    if not pa.types.is_list(inner):
        return pa.ListArray.from_arrays(offsets, pa.array(flat.astype(inner.to_pandas_dtype())), type=field.type)
    entries = pa.array(flat.astype(inner.value_type.to_pandas_dtype()))
    num_top = values[0].shape[1] if values else 1
    bounds = pa.array(np.arange(0, len(flat) + 1, num_top), type=pa.int32())
    tokens = pa.ListArray.from_arrays(bounds, entries, type=inner)
    return pa.ListArray.from_arrays(offsets, tokens, type=field.type)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches():
        for index in range(batch.num_rows):
            yield {name: batch.column(name)[index] for name in batch.schema.names}


def _record(row: dict[str, Any], names: Sequence[str]) -> TraceRecord:
    values: dict[str, Any] = {}
    for name in names:
        kind = _SCHEMA.field(name).type
        is_list = pa.types.is_list(kind)
        values[name] = _array(row[name].values, kind.value_type) if is_list else row[name].as_py()
    return TraceRecord(**values)


def _array(values: pa.Array, kind: pa.DataType) -> np.ndarray:
    if not pa.types.is_list(kind):
        return values.to_numpy()
    lengths = set(values.value_lengths().to_pylist())
    if len(lengths) != 1:
        raise ValueError(f"its tokens have {sorted(lengths)} top entries, expected one number for all")
    return values.flatten().to_numpy().reshape(-1, lengths.pop())


assert [field.name for field in fields(TraceRecord)] == _SCHEMA.names
