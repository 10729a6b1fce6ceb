"""What stage 01 survives: kill -9 at any moment, a full disk, edited files, bad rows, a draft of another vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from dying import count_calls, killed_at_call

from data import engine_backend, tracer
from data.gen_traces import STAGE, body
from data.shards import read_notes
from pipeline import manifest, tiny
from pipeline.config import load_config
from pipeline.stage import DiskError, StageContext, run_stage

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
SMALL = ("traces.shard_size=1", "traces.max_tokens=20")


def run(*overrides: str) -> Path:
    return run_stage(STAGE, load_config(CONFIG, [*SMALL, *overrides]), body)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.parquet"))}


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_ends_with_the_same_files(data_root: Path) -> None:
    """Our engine, float32. Ten runs, each killed in its own tenth of a run's calls, killed again, then finished."""
    whole = contents(run("run=whole"))
    whole_done = manifest.read(data_root / "whole" / STAGE.name)
    assert whole_done is not None
    calls, rng = count_calls(lambda: run("run=counted")), random.Random(0)
    kills, found = 0, set()
    for number in range(10):
        folder = data_root / f"cut{number}" / STAGE.name
        first = (number + rng.random()) / 10.2  # not in the last 2 %, as a run's calls are not the same to the last one
        for share in (first, 0.7 * rng.random()):
            kills += killed_at_call(int(share * calls), lambda: run(f"run=cut{number}"))  # noqa: B023
            found.add(len(contents(folder)))
        assert contents(run(f"run=cut{number}")) == whole
        done = manifest.read(folder)
        assert done is not None
        assert done["files"] == whole_done["files"]
        assert not list(folder.glob(".tmp-*"))
    assert kills >= 15, "most runs were over before they were to be killed"
    assert len(found) >= 3, "the kills all hit the same moment"


def test_a_full_disk_is_named_and_the_next_run_goes_on(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third shard is written to a device that is always full: the kernel's own error, through parquet's writer."""
    whole = contents(run("run=whole"))
    place = StageContext.tmp

    def full(ctx: StageContext, name: str) -> Path:
        return Path("/dev/full") if name == "shard-00002.parquet" else place(ctx, name)

    monkeypatch.setattr(StageContext, "tmp", full)
    with pytest.raises(DiskError, match=r"the disk is full while writing for .*free some space and run again"):
        run("run=cut")
    folder = data_root / "cut" / STAGE.name
    assert len(contents(folder)) == 2
    monkeypatch.undo()
    monkeypatch.setenv("SPEC_DATA_ROOT", str(data_root))
    assert contents(run("run=cut")) == whole


@pytest.mark.parametrize("change", ["cut off", "edited"])
def test_a_damaged_shard_is_found_by_its_hash_and_made_again(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """In a run that was stopped half way, where no size is enough: every finished shard is hashed again."""
    whole = contents(run("run=whole"))
    publish = StageContext.publish

    def stop_after_three(ctx: StageContext, *args: Any, **options: Any) -> Any:
        record = publish(ctx, *args, **options)
        ctx.signals.seen = len(ctx.shards) == 3
        return record

    monkeypatch.setattr(StageContext, "publish", stop_after_three)
    with pytest.raises(Exception, match="stopped; 3 finished files kept"):
        run("run=cut")
    monkeypatch.undo()
    monkeypatch.setenv("SPEC_DATA_ROOT", str(data_root))
    path = data_root / "cut" / STAGE.name / "shard-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if change == "cut off" else data)
    assert contents(run("run=cut")) == whole
    said = capsys.readouterr().err
    assert "shard-00001.parquet has " in said
    assert "; making it again" in said
    assert "2 finished files kept" in said


def test_bad_rows_of_a_prompt_file_are_named_by_line_and_the_rest_runs(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "one"}\n{"prompt": \n\n{"answer": "2"}\n{"prompt": "two"}\n')
    folder = run(f'traces.prompts=[{{name: own, source: "jsonl:{source}", limit: 9}}]')
    said = capsys.readouterr().err
    assert "line 2 skipped: not JSON" in said
    assert "line 4 skipped: got keys answer, expected one of messages" in said
    assert sum(read_notes(path).records for path in folder.glob("shard-*")) == 2


def test_a_draft_that_numbers_tokens_otherwise_is_refused_before_a_token(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same size of vocabulary, two tokens swapped: nothing but the tokenizers tells."""
    draft = tmp_path / "draft"
    tiny.make("qwen3", draft)
    tokens = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokens))
    monkeypatch.setattr(engine_backend, "load_target", lambda *_: pytest.fail("weights were loaded"))
    for workers in (0, 2):
        with pytest.raises(ValueError, match="different tokenizers: 260 and 260 tokens, 2 differ, such as 'a'"):
            run(f"models.draft={{model: {draft}}}", f"workers.count={workers}")
    assert contents(data_root / "tiny" / STAGE.name) == {}


def test_a_run_does_not_mix_backends(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" on a machine with vLLM, gone on with on one without it, would be two laws in one data set."""
    monkeypatch.setattr(tracer.importlib.util, "find_spec", lambda name: None)
    folder = run("traces.backend=auto")
    (folder / "shard-00001.parquet").unlink()
    monkeypatch.setattr(tracer.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"holds shards made by specdec .*, and traces\.backend=auto means vllm here"):
        run("traces.backend=auto")


def test_thinking_is_the_templates_switch_and_part_of_the_record(data_root: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from data.shards import read_shard

    with pytest.raises(ValueError, match="thinking is set, but the target's chat template has no enable_thinking"):
        run("traces.thinking=true")
    target = tmp_path / "reasoning"
    tiny.make("qwen3", target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = tiny.CHAT_TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
    tokenizer.save_pretrained(target)
    for thinking in ("true", "false", "null"):
        folder = run(f"run=t{thinking}", f"models.target={target}", f"traces.thinking={thinking}")
        (record,) = read_shard(folder / "shard-00000.parquet")
        assert record.thinking is json.loads(thinking)
        assert tokenizer.decode(record.prompt_ids).endswith("<think></think>") is (thinking == "false")
