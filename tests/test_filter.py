"""The filter stage: nothing vanishes, its output depends on nothing but its input, and what it keeps can be read."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_traces import is_same, make_record

from data import filter as filter_stage
from data.common import TraceRecord
from data.filtered import SPLITS, iter_rows, iter_tables
from data.gen_traces import STAGE as TRACES
from data.shards import write_shard
from pipeline.config import Config, load_config
from pipeline.stage import run_stage
from pipeline.tiny import byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
VOCAB = 260  # the tiny tokenizer's: a token a byte, and four special ones


@functools.lru_cache
def tokenizer() -> Any:
    return byte_tokenizer()


def trace(number: int, prompt: str, text: str, **changes: Any) -> TraceRecord:
    """A sound record whose completion is `text`, in the tiny tokenizer's tokens."""
    ids = tokenizer().encode(text)
    return replace(
        make_record(number, tokens=len(ids), vocab=VOCAB, ids=ids),
        messages=json.dumps([{"role": "user", "content": prompt}]),
        **changes,
    )


def run_filter(root: Path, records: list[TraceRecord], *overrides: str, per_shard: int = 50) -> Path:
    """The folder of a finished filter stage over these records."""
    config = load_config(TINY, overrides)
    write_traces(config, records, per_shard)
    return run_stage(filter_stage.STAGE, config, filter_stage.body)


def write_traces(config: Config, records: list[TraceRecord], per_shard: int) -> Path:
    """A finished stage 01 that holds these records."""

    def body(ctx: Any) -> dict[str, int]:
        for first in range(0, len(records), per_shard):
            name = f"shard-{first // per_shard:05d}.parquet"
            if name not in ctx.shards:
                write_shard(ctx.tmp(name), records[first : first + per_shard])
                ctx.publish(ctx.tmp(name), name, rows=per_shard)
        return {"rows": len(records)}

    return run_stage(TRACES, config, body)


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    names = ["prompt_id", "label"] + (["reason", "detail"] if split == "dropped" else [])
    return [row for table in iter_tables(folder, split) for row in table.select(names).to_pylist()]


def test_every_row_is_kept_as_it_was_or_dropped_with_a_reason(data_root: Path) -> None:
    records = [trace(n, f"say {n} of {n % 7} " * 5, f"well {n} it is") for n in range(60)] * 2
    folder = run_filter(data_root, records)
    kept = [row for split in ("train", "heldout") for row in iter_rows(folder, split)]
    dropped = rows_of(folder, "dropped")
    assert len(kept) + len(dropped) == len(records)
    assert len(dropped) >= 60
    assert {row["reason"] for row in dropped} <= {"exact_duplicate", "near_duplicate"}
    by_id = {record.prompt_id: record for record in records}
    assert all(is_same(row, by_id[row.prompt_id]) for row in kept)
    report = json.loads((folder / "report.json").read_text())
    assert report["rows"] == len(records)
    assert report["dropped"]["exact_duplicate"] == 60
    assert sum(report["kept"].values()) + sum(report["dropped"].values()) == len(records)


def test_splits_hold_whole_prompts(data_root: Path) -> None:
    records = [trace(n, f"{n} " * 9, f"answer {n} {part}", completion=part) for n in range(40) for part in range(3)]
    folder = run_filter(data_root, records, "filter.heldout=0.4")
    ids = {split: {row["prompt_id"] for row in rows_of(folder, split)} for split in SPLITS}
    assert not ids["train"] & ids["heldout"]
    assert 5 <= len(ids["heldout"]) <= 28
    assert len(ids["train"] | ids["heldout"]) == 40


def test_nothing_left_names_the_step(data_root: Path) -> None:
    records = [trace(n, f"prompt number {n}", "cut off", finish_reason="length") for n in range(4)]
    with pytest.raises(
        ValueError, match=r"all 4 rows were dropped, 4 of them by the step truncated .*filter.truncated"
    ):
        run_filter(data_root, records, "filter.truncated=drop")
    assert pq.read_metadata(data_root / "tiny" / "02_filter" / "dropped-00000.parquet").num_rows == 4
