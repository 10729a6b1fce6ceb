"""The filter's first pass: every step that looks at one row alone, in order, and its result as a small parquet file.

checked-NNNNN.parquet has one line a row of input shard NNNNN: label, reason and detail (null for a row that is still
in), and the hash by which the second pass finds exact duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.checks import Drop, check
from data.decontaminate import Decontaminator
from data.dedup import row_key
from data.filtered import ROWS_AT_A_TIME
from data.rows import Row, read_rows
from data.shards import stream_tables
from data.verify import Verifier
from pipeline.config import Config
from pipeline.models import load_tokenizer

_SCHEMA = pa.schema(
    [("label", pa.string()), ("reason", pa.string()), ("detail", pa.string()), ("key", pa.binary(16))],
    metadata={"checked_schema_version": "1"},
)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the first pass found of a row; `key` is dedup.row_key."""

    label: str
    drop: Drop | None
    key: bytes


class RowChecker:
    """The steps with what they need: tokenizer, benchmarks and verifier."""

    def __init__(self, config: Config, decontaminator: Decontaminator, verifier: Verifier) -> None:
        self.config, self.decontaminator, self.verifier = config.filter, decontaminator, verifier
        self.tokenizer = load_tokenizer(config.models)

    def check_shard(self, path: Path, check_stop: Callable[[], None]) -> Iterator[list[Checked]]:
        """Batches of results in the order of the shard's rows; `check_stop` is called between rows and may raise."""
        for table in stream_tables(path, ROWS_AT_A_TIME):
            checked = []
            for row in read_rows(table, self._decode, len(self.tokenizer)):
                check_stop()
                checked.append(self.check(row))
            yield checked

    def check(self, row: Row) -> Checked:
        """All steps on one row, the dearest last: only what is still in is verified."""
        drop = check(row, self.config) or self.decontaminator.check(row)
        label = "unverified" if drop else self.verifier.label(row)
        if label == "wrong" and self.config.wrong == "drop":
            drop = Drop(reason="wrong")
        return Checked(label=label, drop=drop, key=row_key(row))

    def _decode(self, ids: list[list[int]]) -> list[str]:
        # The tokenizers library itself, where it is there: transformers looks at every id in Python first.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.decode_batch(ids, skip_special_tokens=True)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def checked_name(number: int) -> str:
    """The file for input shard `number`."""
    return f"checked-{number:05d}.parquet"


def write_checked(path: Path, batches: Iterable[list[Checked]]) -> int:
    """Write the results of one shard; how many there were."""
    rows = 0
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd", write_statistics=False) as writer:
        for batch in batches:
            columns = [
                [each.label for each in batch],
                [each.drop.reason if each.drop else None for each in batch],
                [json.dumps(each.drop.detail, ensure_ascii=False) if each.drop else None for each in batch],
                [each.key for each in batch],
            ]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
            rows += len(batch)
    return rows


def read_checked(path: Path) -> Iterator[Checked]:
    """The results of one shard, in order. ValueError when the file is not sound."""
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(use_threads=False):
                for row in batch.to_pylist():
                    detail = json.loads(row["detail"]) if row["reason"] else {}
                    drop = Drop(reason=row["reason"], detail=detail) if row["reason"] else None
                    yield Checked(label=row["label"], drop=drop, key=row["key"])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a sound file of the filter's first pass: {error}") from error
