"""The filter stage: nothing vanishes, its output depends on its input alone, and what it keeps can be read."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from dying import die_at, fork
from test_traces import is_same
from toy_traces import TINY, rows_of, run_filter, trace, write_traces

from bench import filter_rate
from data import filtered
from data.common import TraceRecord
from data.filter import STAGE, body
from data.filtered import SPLITS, iter_rows
from pipeline import manifest
from pipeline.config import load_config
from pipeline.results import read_result
from pipeline.stage import DiskError, run_stage

WORDS = [f"{start}{middle}{end}" for start in "bdfgklm" for middle in ("a", "e", "ir", "o") for end in "nrstpk"]


def story(rng: random.Random, words: int = 40) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def mixed_records(count: int = 60) -> list[TraceRecord]:
    """Some of everything: clean rows, exact and near duplicates, loops, cut-off ones."""
    rng = random.Random(0)
    records = []
    for number in range(count):
        prompt = story(rng)
        records.append(trace(number, prompt, f"well {number} it is {story(rng, 5)}"))
        if number % 5 == 0:
            records.append(trace(1000 + number, prompt + " fine", f"another {number}"))
        if number % 6 == 0:
            records.append(records[-1])
        if number % 7 == 0:
            records.append(trace(2000 + number, story(rng), "so " + "and on " * 9, finish_reason="length"))
    return records


def output_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".parquet", ".json", ".md")
    } | {"done.json": b""}


def test_every_row_is_kept_as_it_was_or_dropped_with_a_reason(data_root: Path) -> None:
    records = mixed_records()
    folder = run_filter(records, per_shard=16)
    kept = [row for split in ("train", "heldout") for row in iter_rows(folder, split)]
    dropped = rows_of(folder, "dropped")
    assert len(kept) + len(dropped) == len(records)
    by_id = {record.prompt_id: record for record in records}
    assert all(is_same(row, by_id[row.prompt_id]) for row in kept)
    assert {row.label for row in kept} == {"unverified"}
    counted = {reason: sum(row["reason"] == reason for row in dropped) for reason in {row["reason"] for row in dropped}}
    assert counted == {"exact_duplicate": 10, "near_duplicate": 12, "loop": 9}
    report = json.loads((folder / "report.json").read_text())
    assert {step: count for step, count in report["dropped"].items() if count} == counted
    assert sum(report["kept"].values()) == len(kept)
    done = manifest.read(folder)
    assert done is not None
    assert done["rows"] == len(kept)
    assert f"{len(records)} rows in" in (folder / "report.md").read_text()


def test_a_near_duplicate_names_the_prompt_that_stays(data_root: Path) -> None:
    rng = random.Random(3)
    prompt = story(rng)
    records = [
        trace(0, prompt, "a"),
        trace(0, prompt, "b"),
        trace(1, prompt.upper() + " too", "c"),
        trace(2, story(rng), "d"),
    ]
    folder = run_filter(records, "filter.heldout=0.0")
    assert [row["prompt_id"] for row in rows_of(folder, "train")] == ["set/0", "set/0", "set/2"]
    (dropped,) = rows_of(folder, "dropped")
    assert (dropped["reason"], dropped["detail"]["of"]) == ("near_duplicate", "set/0")
    assert dropped["detail"]["jaccard"] == round(38 / 39, 4)


def test_splits_hold_whole_prompts(data_root: Path) -> None:
    rng = random.Random(1)
    prompts = [story(rng) for _ in range(40)]
    records = [
        trace(number, prompt, f"answer {part}", completion=part)
        for part in range(3)
        for number, prompt in enumerate(prompts)
    ]
    folder = run_filter(records, "filter.heldout=0.4")
    ids = {split: [row["prompt_id"] for row in rows_of(folder, split)] for split in SPLITS}
    assert not set(ids["train"]) & set(ids["heldout"])
    assert len(ids["train"]) + len(ids["heldout"]) == 120
    assert 8 * 3 <= len(ids["heldout"]) <= 24 * 3


def test_nothing_left_names_the_step(data_root: Path) -> None:
    records = [trace(n, f"prompt number {n}", "cut off", finish_reason="length") for n in range(4)]
    with pytest.raises(
        ValueError, match=r"all 4 rows were dropped, 4 of them by the step truncated .*filter.truncated"
    ):
        run_filter(records, "filter.truncated=drop")
    assert pq.read_metadata(data_root / "tiny" / "02_filter" / "dropped-00000.parquet").num_rows == 4


def test_an_edited_input_shard_is_found(data_root: Path) -> None:
    config = load_config(TINY)
    shard = write_traces(config, mixed_records(8)) / "shard-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[200] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00000.parquet has another sha256 .*01_gen_traces with --verify"):
        run_stage(STAGE, config, body)


def test_a_full_disk_is_said_and_the_next_run_finishes(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(TINY)
    write_traces(config, mixed_records(8))
    whole = filtered.open_writer
    monkeypatch.setattr(filtered, "open_writer", lambda path, *_, **__: whole(Path("/dev/full")))
    with pytest.raises(DiskError, match=r"the disk is full while writing .*02_filter"):
        run_stage(STAGE, config, body)
    monkeypatch.undo()
    monkeypatch.setenv("SPEC_DATA_ROOT", str(data_root))
    assert (run_stage(STAGE, config, body) / "report.md").is_file()


def test_a_bench_setting_that_changes_no_prompt_leaves_the_rows_valid(data_root: Path) -> None:
    records = mixed_records(8)
    folder = run_filter(records)
    before = (folder / "done.json").read_bytes()
    run_stage(STAGE, load_config(TINY, ["bench_engine.ks=[3]"]), body)
    assert (folder / "done.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"bench_engine\.prompts"):
        run_stage(STAGE, load_config(TINY, ["bench_engine.prompts.0.limit=5"]), body)


def run_in_child(event_number: int, root: Path) -> bool:
    """Whether a run of the stage in a forked process was killed, as asked, at its n-th file operation."""

    def child() -> None:
        die_at(event_number, root)
        run_stage(STAGE, load_config(TINY), body)

    code = fork(child)
    assert code in {0, -signal.SIGKILL}
    return code != 0


def killed_and_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: int) -> None:
    config = load_config(TINY)
    roots = [tmp_path / str(number) for number in range(points + 1)]
    for root in roots:
        root.mkdir()
        monkeypatch.setenv("SPEC_DATA_ROOT", str(root))
        write_traces(config, mixed_records(), per_shard=16)
    monkeypatch.setenv("SPEC_DATA_ROOT", str(roots[0]))
    expected = output_files(run_stage(STAGE, config, body))
    rng = random.Random(0)
    for root in roots[1:]:
        monkeypatch.setenv("SPEC_DATA_ROOT", str(root))
        kills = 0
        while run_in_child(rng.randrange(5, 120), root):
            kills += 1
        assert output_files(root / "tiny" / "02_filter") == expected, f"after {kills} kills"
        assert kills


def test_killed_and_run_again_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_and_finished(tmp_path, monkeypatch, points=2)


@pytest.mark.slow
def test_killed_at_twenty_points_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_and_finished(tmp_path, monkeypatch, points=20)


@pytest.mark.slow
def test_the_bench_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "rate.json"
    assert filter_rate.main(["--rows", "1000", "--folder", str(tmp_path), "--out", str(out)]) == 0
    (row,) = read_result(out)["rows"]
    assert (row["rows_in"], row["prompts"], row["rows_kept"]) == (1000, 250, 1000)
    assert 0 < row["index_mb"] < row["peak_memory_mb"]
    assert [path.name for path in tmp_path.iterdir()] == ["rate.json"]
