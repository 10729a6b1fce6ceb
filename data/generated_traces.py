"""A finished stage 01 of any size, made up, to measure the filter on.

    python -m data.generated_traces --rows 1000000 --config configs/tiny.yaml    # under SPEC_DATA_ROOT
    python -m data.generated_traces --rows 1000000 --index-only                  # memory of the filter's index

Prompts are all different, of 30 to 70 words as frequent as in real text, with four completions each. A shard has 1,000
rows. The completions, of 64 tokens, and their probabilities are the same in every shard; within one they are random, so
they compress as badly as real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.common import TraceRecord
from data.dedup import NearPrompts
from data.gen_traces import STAGE
from data.shards import read_table, write_shard, write_table
from pipeline.config import Config, load_config
from pipeline.models import load_tokenizer
from pipeline.stage import StageContext, run_stage

SHARD_ROWS, COMPLETIONS, TOKENS, N = 1000, 4, 64, 8
VOCABULARY = 20_000


class Prompts:
    """Prompt i, of words with frequencies 1 / (rank + 10); the same on every machine."""

    def __init__(self) -> None:
        rng = random.Random(0)
        self.words = ["".join(rng.choices("bcdfglmnprstaeiou", k=rng.randrange(2, 9))) for _ in range(VOCABULARY)]
        self.sums = np.cumsum(1 / (np.arange(VOCABULARY) + 10)).tolist()

    def __getitem__(self, number: int) -> str:
        rng = random.Random(number)
        return " ".join(rng.choices(self.words, cum_weights=self.sums, k=rng.randrange(30, 71)))


def record(rng: np.random.Generator, ids_T: np.ndarray) -> TraceRecord:
    """A sound trace with these completion tokens and a random law; prompt and id are to be filled in."""
    logprobs_TN = np.sort(rng.uniform(-8, -2.5, size=(TOKENS, N)).astype(np.float32))[:, ::-1]
    # Ids far above the completion's, so that no sampled token is among the top ones.
    top_ids_TN = (1 << 20) + rng.integers(0, 1 << 16, size=(TOKENS, 1)) + np.arange(N)
    return TraceRecord(
        prompt_id="",
        source="generated",
        messages="",
        reference=None,
        verifier=None,
        prompt_ids=rng.integers(0, 1 << 15, size=50).astype(np.int32),
        completion=0,
        completion_ids=ids_T,
        token_logprob=logprobs_TN[:, -1] - 1,
        top_ids=top_ids_TN.astype(np.int32),
        top_logprobs=logprobs_TN,
        tail_mass=(1 - np.exp(logprobs_TN.astype(np.float64)).sum(1)).astype(np.float32),
        finish_reason="stop",
        temperature=1.0,
        top_p=1.0,
        max_tokens=TOKENS,
        seed=0,
        teacher="generated",
        teacher_revision="0",
    )


def write_traces(config: Config, rows: int) -> Path:
    """The folder of a finished stage 01 with this many rows, a multiple of SHARD_ROWS."""

    def body(ctx: StageContext) -> Mapping[str, Any]:
        rng, prompts, tokenizer = np.random.default_rng(0), Prompts(), load_tokenizer(config.models)
        texts = (prompts[-1 - number] * 9 for number in range(SHARD_ROWS))
        records = [record(rng, np.array(tokenizer.encode(text)[:TOKENS], np.int32)) for text in texts]
        write_shard(ctx.tmp("numbers"), records)
        numbers = read_table(ctx.tmp("numbers"))
        with ctx.progress(rows // SHARD_ROWS, "shards") as progress:
            for shard in range(rows // SHARD_ROWS):
                name = f"shard-{shard:05d}.parquet"
                write_table(ctx.tmp(name), with_texts(numbers, prompts, shard * SHARD_ROWS))
                ctx.publish(ctx.tmp(name), name, rows=SHARD_ROWS)
                progress.update()
        return {"rows": rows}

    return run_stage(STAGE, config, body)


def with_texts(table: pa.Table, prompts: Prompts, first: int) -> pa.Table:
    """The table's rows as rows `first`, `first` + 1, ... of all: ids, prompts and numbers of completions filled in."""
    numbers, completions = np.divmod(np.arange(first, first + table.num_rows), COMPLETIONS)
    columns = {
        "prompt_id": [f"generated/{number}" for number in numbers],
        "messages": [json.dumps([{"role": "user", "content": prompts[number]}]) for number in numbers.tolist()],
        "completion": completions,
    }
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    return table


def index_bytes(count: int) -> int:
    """By how much this process grows when the filter's index takes up this many prompts, all of which are kept."""
    prompts, near = Prompts(), NearPrompts(3, 0.5)
    before = resident_bytes()
    for number in range(count):
        near.check(f"generated/{number}", prompts[number], is_generated=False)
    return resident_bytes() - before


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code. Prints JSON."""
    parser = argparse.ArgumentParser(prog="data.generated_traces", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="configs/tiny.yaml", help="whose tokenizer is used (default: %(default)s)")
    parser.add_argument("--rows", type=int, required=True, help=f"a multiple of {SHARD_ROWS}")
    parser.add_argument("--index-only", action="store_true", help="no traces: how much memory the index of them takes")
    arguments = parser.parse_args(argv)
    if arguments.rows < 1 or arguments.rows % SHARD_ROWS:
        parser.error(f"--rows: got {arguments.rows}, expected a multiple of {SHARD_ROWS}")
    count = -(-arguments.rows // COMPLETIONS)
    if arguments.index_only:
        print(json.dumps({"prompts": count, "index_bytes": index_bytes(count)}))
    else:
        print(
            json.dumps({"prompts": count, "folder": str(write_traces(load_config(arguments.config), arguments.rows))})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
