"""Stage 02: traces without broken, looping, contaminated and repeated rows; labelled, and split by prompt.

    python -m data.filter --config configs/demo.yaml

Two passes over the shards of stage 01. The first looks at each row alone (is it whole, is its answer right, is it part
of a benchmark) and leaves one line a row in checked-NNNNN.parquet: the unit of resume. The second, in the order of the
shards, drops duplicates and writes what became of each shard (data/filtered.py). It holds the index of kept prompts in
memory, and a resumed run fills that again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import manifest
from pipeline.config import bench_prompt_parts
from pipeline.stage import Stage, StageContext, stage_main

if TYPE_CHECKING:
    from data.decontaminate import Decontaminator
    from data.filter_report import Counts
    from data.sorter import Sorter

# Of the bench sections only what decides their prompts: their other settings may change and the rows stay clean.
STAGE = Stage(
    name="02_filter",
    version=2,
    sections=("filter", "models.target", *bench_prompt_parts()),
    inputs=("01_gen_traces",),
)


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Both passes and the report; counts for done.json."""
    from data.decontaminate import Decontaminator, load_benchmarks
    from data.sorter import Sorter

    shards = input_shards(ctx.input("01_gen_traces"))
    benchmarks = load_benchmarks(ctx.config)
    check_rows(ctx, shards, Decontaminator(benchmarks))
    sorter = Sorter(ctx.config.filter)
    with ctx.progress(len(shards), "shards sorted") as progress:
        for number, path in enumerate(shards):
            sort_shard(ctx, number, path, sorter)
            progress.update()
    for warning in sorter.counts.check(ctx.config.filter):
        ctx.log(warning)
    publish_report(ctx, sorter.counts, {name: len(prompts) for name, prompts in benchmarks.items()})
    return sorter.counts.summary()


def input_shards(folder: Path) -> list[Path]:
    """The trace shards of a finished stage 01, in order. ValueError for one that is not as it was written."""
    content = manifest.read(folder)
    assert content is not None, f"{folder} is an input, so it is finished"
    records = [record for record in manifest.file_records(content) if record.name.startswith("shard-")]
    problems = manifest.damaged(folder, records, rehash=True)
    if problems:
        raise ValueError(
            f"input {folder}: {'; '.join(problems)}; run 01_gen_traces with --verify, which makes it again"
        )
    return [folder / record.name for record in records]


def check_rows(ctx: StageContext, shards: Sequence[Path], decontaminator: Decontaminator) -> None:
    """The first pass: checked-NNNNN.parquet for every shard that lacks it."""
    from data.row_checks import RowChecker, checked_name, read_checked, write_checked
    from data.verify import Verifier

    todo = [number for number in range(len(shards)) if checked_name(number) not in ctx.shards]
    if not todo:
        return
    with (
        Verifier(run_code=ctx.config.filter.run_code) as verifier,
        ctx.progress(len(shards), "shards checked", done=len(shards) - len(todo)) as progress,
    ):
        checker = RowChecker(ctx.config, decontaminator, verifier)
        for number in todo:
            name = checked_name(number)
            write_checked(ctx.tmp(name), checker.check_shard(shards[number], ctx.check_stop))
            ctx.publish(ctx.tmp(name), name, validate=lambda path: list(read_checked(path)))
            progress.update()


def sort_shard(ctx: StageContext, number: int, path: Path, sorter: Sorter) -> None:
    """The second pass for one shard: its duplicates are found, its rows written to the files that are not there."""
    from data.filtered import ROWS_AT_A_TIME, SPLITS, Writer, check_file, shard_name
    from data.row_checks import checked_name, read_checked
    from data.shards import stream_tables

    names = {split: shard_name(split, number) for split in SPLITS}
    writers = {split: Writer(ctx.tmp(name), split) for split, name in names.items() if name not in ctx.shards}
    checked = read_checked(ctx.folder / checked_name(number))
    with ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        for table in stream_tables(path, ROWS_AT_A_TIME):
            ctx.check_stop()
            fates = sorter.sort(table, list(islice(checked, table.num_rows)))
            for writer in writers.values():
                writer.write(table, fates)
    for split, writer in writers.items():
        ctx.publish(ctx.tmp(names[split]), names[split], validate=check_file, rows=writer.rows)


def publish_report(ctx: StageContext, counts: Counts, items: Mapping[str, int]) -> None:
    """report.json and report.md; the steps are also told to the person or the log."""
    from data import filter_report

    content = filter_report.report(counts, items)
    for name, text in (
        ("report.json", filter_report.to_json(content)),
        ("report.md", filter_report.to_text(content)),
    ):
        ctx.tmp(name).write_text(text, encoding="utf-8")
        ctx.publish(ctx.tmp(name), name)
    dropped = ", ".join(f"{step} {count}" for step, count in content["dropped"].items() if count)
    kept = content["kept"]
    ctx.log(f"{counts.rows} rows: {kept['train']} to train, {kept['heldout']} held out; dropped: {dropped or 'none'}")


if __name__ == "__main__":
    sys.exit(stage_main(STAGE, body))
