"""Traces written by hand for the filter's tests: any text as a completion, and a finished stage 01 that holds them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.common import TraceRecord
from data.filter import STAGE, body
from data.filtered import iter_tables
from data.gen_traces import STAGE as TRACES
from data.shards import write_shard
from pipeline.config import Config, load_config
from pipeline.stage import run_stage
from pipeline.tiny import byte_tokenizer

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"
VOCAB = 260  # the tiny tokenizer's: a token a byte, and four special ones
N = 8


@functools.lru_cache
def tokenizer() -> Any:
    return byte_tokenizer()


def trace(number: int, prompt: str, text: str, **changes: Any) -> TraceRecord:
    """A sound record with this prompt and completion; the teacher's law is uniform over the vocabulary."""
    ids_T = np.asarray(changes.pop("completion_ids", None) or tokenizer().encode(text), dtype=np.int32)
    tokens, logprob = len(ids_T), -np.log(VOCAB)
    values: dict[str, Any] = {
        "prompt_id": f"set/{number}",
        "source": "set",
        "messages": json.dumps([{"role": "user", "content": prompt}]),
        "reference": None,
        "verifier": None,
        "prompt_ids": np.arange(5, dtype=np.int32),
        "completion": 0,
        "completion_ids": ids_T,
        "token_logprob": np.full(tokens, logprob, np.float32),
        "top_ids": np.tile(np.arange(N, dtype=np.int32), (tokens, 1)),
        "top_logprobs": np.full((tokens, N), logprob, np.float32),
        "tail_mass": np.full(tokens, 1 - N / VOCAB, np.float32),
        "finish_reason": "stop",
        "temperature": 0.8,
        "top_p": 1.0,
        "max_tokens": 512,
        "seed": 7,
        "teacher": "tiny",
        "teacher_revision": "1",
    }
    return TraceRecord(**(values | changes))


def write_traces(config: Config, records: Sequence[TraceRecord], per_shard: int = 50) -> Path:
    """A finished stage 01 that holds these records."""

    def traces_body(ctx: Any) -> dict[str, int]:
        for first in range(0, len(records), per_shard):
            name = f"shard-{first // per_shard:05d}.parquet"
            if name not in ctx.shards:
                write_shard(ctx.tmp(name), records[first : first + per_shard])
                ctx.publish(ctx.tmp(name), name, rows=len(records[first : first + per_shard]))
        return {"rows": len(records)}

    return run_stage(TRACES, config, traces_body)


def run_filter(records: Sequence[TraceRecord], *overrides: str, per_shard: int = 50) -> Path:
    """The folder of a finished filter stage over these records."""
    config = load_config(TINY, overrides)
    write_traces(config, records, per_shard)
    return run_stage(STAGE, config, body)


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    """prompt_id and label of a split's rows, of the dropped ones also reason and detail (parsed)."""
    names = ["prompt_id", "label"] + (["reason", "detail"] if split == "dropped" else [])
    rows = [row for table in iter_tables(folder, split) for row in table.select(names).to_pylist()]
    return [row | ({"detail": json.loads(row["detail"])} if split == "dropped" else {}) for row in rows]
