"""Traces: sound records, deterministic shards, and a stage whose result does not depend on when it was
stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dying import fork, signal_amid_unit

from data.common import Skipped, TraceRecord, check_record, encode_prompt, stable_seed
from data.gen_traces import STAGE, body
from data.items import interleave
from data.shards import read_notes, read_shard, write_shard
from pipeline.config import load_config
from pipeline.models import load_target, load_tokenizer
from pipeline.stage import run_stage, stage_main

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
N = 8


def make_record(
    number: int = 0, *, tokens: int = 20, vocab: int = 300, ids: list[int] | None = None, **changes: Any
) -> TraceRecord:
    """A record of a random law: what a model that has learnt nothing would give (or has said, with `ids`)."""
    rng = np.random.default_rng(number)
    logits_TV = rng.normal(scale=2.0, size=(tokens, vocab))
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(1, keepdims=True))
    ids_T = np.asarray(rng.integers(0, vocab, size=tokens) if ids is None else ids, dtype=np.int32)
    top_ids_TN = np.argsort(-logprobs_TV, axis=1)[:, :N].astype(np.int32)
    top_TN = np.take_along_axis(logprobs_TV, top_ids_TN, 1)
    values: dict[str, Any] = {
        "prompt_id": f"set/{number}",
        "source": "set",
        "messages": json.dumps([{"role": "user", "content": f"say {number} é"}], ensure_ascii=False),
        "reference": None,
        "verifier": None,
        "prompt_ids": np.arange(5 + number, dtype=np.int32),
        "completion": 0,
        "completion_ids": ids_T,
        "token_logprob": logprobs_TV[np.arange(tokens), ids_T].astype(np.float32),
        "top_ids": top_ids_TN,
        "top_logprobs": top_TN.astype(np.float32),
        "tail_mass": (1 - np.exp(top_TN).sum(1)).astype(np.float32),
        "finish_reason": "length",
        "temperature": 0.8,
        "top_p": 1.0,
        "max_tokens": tokens,
        "seed": 7,
        "teacher": "tiny",
        "teacher_revision": "1",
    }
    return TraceRecord(**(values | changes))


def is_same(left: TraceRecord, right: TraceRecord) -> bool:
    return all(np.array_equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(TraceRecord))


def changed(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


def test_a_shard_reads_back_exactly_and_its_bytes_repeat(tmp_path: Path) -> None:
    records = [make_record(number, tokens=10 + number) for number in range(5)]
    skipped = [Skipped(prompt_id="set/9", reason="too long")]
    for name in ("a.parquet", "b.parquet"):
        write_shard(tmp_path / name, records, skipped)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    again = read_shard(tmp_path / "a.parquet")
    assert len(again) == len(records)
    assert all(map(is_same, records, again))
    notes = read_notes(tmp_path / "a.parquet")
    assert (notes.records, notes.tokens, list(notes.skipped)) == (5, 60, skipped)


def test_an_empty_shard_is_sound(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", [], [Skipped(prompt_id="x", reason="r")])
    assert read_shard(tmp_path / "a.parquet") == []


def test_datasets_reads_a_shard(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    record = make_record()
    write_shard(tmp_path / "a.parquet", [record])
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))
    assert np.array_equal(np.asarray(loaded[0]["top_logprobs"], dtype=np.float32), record.top_logprobs)


def test_a_token_takes_at_most_64_bytes_on_disk(tmp_path: Path) -> None:
    """Random laws over a real vocabulary's size: nothing in them compresses but the order of the top 8."""
    write_shard(tmp_path / "a.parquet", [make_record(number, tokens=200, vocab=50_000) for number in range(3)])
    assert (tmp_path / "a.parquet").stat().st_size / 600 <= 64


BROKEN = {
    "shape": lambda r: {"tail_mass": r.tail_mass[:-1]},
    "tail_mass is outside": lambda r: {"tail_mass": changed(r.tail_mass, 3, -0.01)},
    "tail_mass is outside ": lambda r: {"tail_mass": changed(r.tail_mass, 3, np.nan)},
    "do not sum to one": lambda r: {"tail_mass": changed(r.tail_mass, 3, 0.0)},
    "not sorted": lambda r: {"top_logprobs": r.top_logprobs[:, ::-1], "top_ids": r.top_ids[:, ::-1]},
    "repeat a token": lambda r: {"top_ids": changed(r.top_ids, (3, 1), r.top_ids[3, 0])},
    "differs from the token's top entry": lambda r: {"completion_ids": changed(r.completion_ids, 3, r.top_ids[3, 0])},
    "above the top entries": lambda r: {"token_logprob": changed(r.token_logprob, 3, r.top_logprobs[3, 0])},
    "not a log-probability": lambda r: {"token_logprob": changed(r.token_logprob, 3, np.nan)},
    "finish reason": lambda r: {"finish_reason": "error"},
    "0 completion tokens": lambda r: {
        name: getattr(r, name)[:0]
        for name in ("completion_ids", "token_logprob", "top_ids", "top_logprobs", "tail_mass")
    },
}


@pytest.mark.parametrize("problem", BROKEN)
def test_an_unsound_record_is_refused(tmp_path: Path, problem: str) -> None:
    record = make_record(completion_ids=np.full(20, 299, dtype=np.int32))
    outside = np.setdiff1d(np.arange(300), record.top_ids)[0]
    record = replace(
        record, completion_ids=np.full(20, outside, np.int32), token_logprob=record.top_logprobs[:, -1] - 1
    )
    check_record(record)
    broken = replace(record, **BROKEN[problem](record))
    with pytest.raises(ValueError, match=f"prompt 'set/0'.*{problem.strip()}"):
        write_shard(tmp_path / "a.parquet", [broken])
    assert not (tmp_path / "a.parquet").exists()


def test_a_truncated_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_shard(path, [make_record()])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a\.parquet: not a sound trace shard"):
        read_shard(path)


def test_seeds_depend_on_their_parts_alone() -> None:
    assert stable_seed(0, "set/1", 0, 0.8) == 8314725487473657769
    seeds = {stable_seed(0, f"set/{i}", c, t) for i in range(20) for c in range(4) for t in (0.6, 1.0)}
    assert len(seeds) == 160
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_beginning_of_the_prompts_has_the_mix_of_all() -> None:
    """In the order of the sources a token budget would leave the last ones out."""
    assert interleave([["a0", "a1", "a2", "a3"], ["b0", "b1"]]) == ["a0", "b0", "a1", "a2", "b1", "a3"]
    mixed = interleave([list("a" * 30), list("b" * 10)])
    assert all(mixed[:end].count("b") in (end // 4, end // 4 + 1) for end in range(0, 41, 4))


def run(*overrides: str, force: bool = False) -> Path:
    return run_stage(STAGE, load_config(CONFIG, overrides), body, force=force)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.parquet"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shards(folder)}


def test_records_are_the_targets_own_law(data_root: Path) -> None:
    """Against a forward of the target over prompt and completion, without cache: ids, logprobs and tail."""
    folder = run("traces.temperatures=[0.7, 0.0]", "traces.completions_per_prompt=2", "traces.top_p=0.9")
    config = load_config(CONFIG)
    target = load_target(config.models, "cpu")
    tokenizer = load_tokenizer(config.models)
    records = [record for path in shards(folder) for record in read_shard(path)]
    assert len(records) == 6 * 3  # two sampled completions a prompt, one greedy
    assert len({(r.prompt_id, r.temperature, r.completion, r.seed) for r in records}) == 18
    for record in records:
        assert record.prompt_ids.tolist() == encode_prompt(tokenizer, json.loads(record.messages))
        ids = torch.tensor([record.prompt_ids.tolist() + record.completion_ids.tolist()])
        with torch.inference_mode():
            logprobs_TV = target(ids).logits[0, len(record.prompt_ids) - 1 : -1].double().log_softmax(-1).numpy()
        own_T = logprobs_TV[np.arange(len(logprobs_TV)), record.completion_ids]
        assert np.allclose(record.token_logprob, own_T, atol=1e-4)
        assert np.allclose(record.top_logprobs, -np.sort(-logprobs_TV, axis=1)[:, :N], atol=1e-4)
        if record.temperature == 0:
            assert record.completion_ids.tolist() == logprobs_TV.argmax(1).tolist()


def test_batch_and_shard_size_do_not_change_a_completion(data_root: Path) -> None:
    """A seed per completion: what a prompt says depends neither on its neighbours nor on its shard."""
    first = [r for path in shards(run("run=a")) for r in read_shard(path)]
    second = [r for path in shards(run("run=b", "traces.batch=1", "traces.shard_size=6")) for r in read_shard(path)]
    assert [r.completion_ids.tolist() for r in first] == [r.completion_ids.tolist() for r in second]


def test_prompts_that_do_not_fit_are_skipped_by_id_and_the_rest_runs(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "short"}, {"prompt": "x" * 5000}, {"prompt": "also short"}]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    prompts = f'traces.prompts=[{{name: own, source: "jsonl:{source}", limit: 9}}]'
    folder = run(prompts, "traces.shard_size=1")
    notes = [read_notes(path) for path in shards(folder)]
    assert sorted(note.records for note in notes) == [0, 1, 1]
    (skipped,) = [item for note in notes for item in note.skipped]
    assert skipped.prompt_id == "own/2"
    assert "prompt tokens, expected at most 4084" in skipped.reason
    assert f"skipped own/2: {skipped.reason}" in capsys.readouterr().err
    done = json.loads((folder / "done.json").read_text())
    assert (done["rows"], done["summary"]["skipped"]) == (2, 1)


def test_a_run_that_can_make_nothing_is_an_error(data_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"traces\.max_tokens: got 4096, expected less than the 4096 tokens"):
        run("traces.max_tokens=4096")
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"prompt": "x" * 5000}))
    with pytest.raises(ValueError, match="no completion was made: all 1 prompts were skipped"):
        run("run=long", f'traces.prompts=[{{name: own, source: "jsonl:{source}", limit: 9}}]')


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_ends_with_the_bytes_of_a_whole_one(data_root: Path, number: signal.Signals) -> None:
    """Killed inside a shard and started again; the capacity of the cache, the seeds and the slots must not
    know."""
    settings = ("traces.shard_size=1", "traces.max_tokens=40")
    whole = contents(run("run=whole", *settings))
    options = [option for override in ("run=cut", *settings) for option in ("--set", override)]

    def interrupted() -> int:
        signal_amid_unit(2, number)
        return stage_main(STAGE, body, ["--config", str(CONFIG), *options])

    assert fork(interrupted) == (-signal.SIGKILL if number == signal.SIGKILL else 75)
    folder = data_root / "cut" / STAGE.name
    kept = {path: path.stat().st_mtime_ns for path in shards(folder)}
    assert len(kept) == 2
    assert not (folder / "done.json").exists()
    assert contents(run("run=cut", *settings)) == whole
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


def test_another_setting_is_refused_and_an_edited_shard_made_again(data_root: Path) -> None:
    folder = run()
    before = contents(folder)
    with pytest.raises(ValueError, match=r"traces\.seed: 0 -> 1"):
        run("traces.seed=1")
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert contents(run()) == before
    assert contents(run("traces.seed=1", force=True)) != before


def test_a_finished_stage_answers_without_torch(data_root: Path) -> None:
    run()
    code = "import sys; sys.argv[0] = 'x'; from data import gen_traces as g; from pipeline.stage import stage_main; "
    code += f"assert stage_main(g.STAGE, g.body, ['--config', {str(CONFIG)!r}]) == 0; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "False", done.stderr


def test_another_draft_leaves_the_traces_as_they_are(data_root: Path) -> None:
    """They are the target's; a change of dtype is one of the traces."""
    small = ["traces.prompts.0.limit=2"]
    folder = run_stage(STAGE, load_config(CONFIG, small), body)
    before = (folder / "done.json").stat().st_mtime_ns
    run_stage(STAGE, load_config(CONFIG, [*small, "models.draft.keep_layers=1"]), body)
    assert (folder / "done.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"models\.dtype"):
        run_stage(STAGE, load_config(CONFIG, [*small, "models.dtype=float64"]), body)
