"""The filter's output: trace rows with a label, split into train and heldout, and the dropped rows with a reason.

    train-00000.parquet, heldout-00000.parquet    trace columns, label
    dropped-00000.parquet                         trace columns, label, reason, detail (a JSON object)

Number n holds what became of input shard n, so all three exist for every shard, some of them empty. Written and read
a few rows at a time: memory does not grow with the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from data.common import TraceRecord
from data.shards import open_writer, to_records

SCHEMA_VERSION = 1
SPLITS = ("train", "heldout", "dropped")
LABELS = ("correct", "wrong", "unverified")
ROWS_AT_A_TIME = 256
_VERSION_KEY = "filtered_schema_version"


@dataclass(frozen=True, kw_only=True)
class FilteredRow(TraceRecord):
    """A kept trace. `label` is "correct" or "wrong" where a verifier could tell, else "unverified"."""

    label: str


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of a row: the split it goes to, and for a dropped one the step and what that saw (JSON)."""

    split: str
    label: str
    reason: str | None = None
    detail: str | None = None


class Writer:
    """One file of one split, written table by table; a context manager. `rows` counts what is in it."""

    def __init__(self, path: Path, split: str) -> None:
        self.split, self.rows = split, 0
        self.added = ("label", "reason", "detail") if split == "dropped" else ("label",)
        fields = [pa.field(name, pa.string()) for name in self.added]
        # Level 9 takes twice the time for 1 % less: worth it after a GPU's work, not here.
        self.writer = open_writer(path, fields, compression_level=3)
        self.writer.add_key_value_metadata({_VERSION_KEY: str(SCHEMA_VERSION)})

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.writer.close()

    def write(self, traces: pa.Table, fates: Sequence[Fate]) -> None:
        """Append the rows of `traces` that fall to this split; `fates` has one element a row."""
        assert len(fates) == traces.num_rows
        places = [place for place, fate in enumerate(fates) if fate.split == self.split]
        if places:
            mine = [pa.array([getattr(fates[place], name) for place in places], pa.string()) for name in self.added]
            columns = [*traces.take(places).columns, *mine]
            self.writer.write_table(pa.Table.from_arrays(columns, schema=self.writer.schema))
            self.rows += len(places)


def shard_name(split: str, number: int) -> str:
    """The file that holds this split's rows of input shard `number`."""
    return f"{split}-{number:05d}.parquet"


def iter_tables(folder: Path, split: str, rows: int = ROWS_AT_A_TIME) -> Iterator[pa.Table]:
    """A split's rows in order, at most `rows` at a time, with every column the file has.

    ValueError when the folder has no such file, or one is not the filter's.
    """
    paths = sorted(folder.glob(f"{split}-*.parquet"))
    if split not in SPLITS or not paths:
        raise ValueError(f"{folder}: no {split}-*.parquet; expected a finished 02_filter folder and one of {SPLITS}")
    for path in paths:
        yield from _tables(path, rows)


def iter_rows(folder: Path, split: str) -> Iterator[FilteredRow]:
    """The rows of "train" or "heldout" (or "dropped", without the reasons), in order. ValueError as `iter_tables`."""
    names = [field.name for field in fields(TraceRecord)]
    for table in iter_tables(folder, split):
        labels = table.column("label").to_pylist()
        for record, label in zip(to_records(table), labels, strict=True):
            yield FilteredRow(**{name: getattr(record, name) for name in names}, label=label)


def check_file(path: Path) -> None:
    """ValueError when the file is not the filter's or cannot be read to its end."""
    for _ in _tables(path, ROWS_AT_A_TIME):
        pass


def _tables(path: Path, rows: int) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(path) as file:
            version = (file.metadata.metadata or {}).get(_VERSION_KEY.encode(), b"none").decode()
            if version != str(SCHEMA_VERSION):
                raise ValueError(f"filter schema version {version}, this code reads {SCHEMA_VERSION}; filter again")
            for batch in file.iter_batches(batch_size=rows, use_threads=False):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a sound file of the filter: {error}") from error
