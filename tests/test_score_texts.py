"""Backend "score": texts that exist already become records, as if the teacher had made them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.common import TraceRecord, encode_prompt
from data.gen_traces import STAGE, body
from data.shards import read_notes, read_shard
from data.texts import load_texts
from pipeline.config import load_config
from pipeline.models import load_tokenizer
from pipeline.stage import run_stage

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
LAW = ("token_logprob", "top_logprobs", "tail_mass")


def run(*overrides: str) -> Path:
    return run_stage(STAGE, load_config(CONFIG, overrides), body)


def score(source: str, *overrides: str) -> list[TraceRecord]:
    prompts = f'traces.prompts=[{{name: log, source: "{source}", limit: 50}}]'
    return records_of(run("run=score", "traces.backend=score", prompts, *overrides))


def records_of(folder: Path) -> list[TraceRecord]:
    return [record for path in sorted(folder.glob("shard-*.parquet")) for record in read_shard(path)]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_the_score_of_a_trace_is_the_trace(data_root: Path, tmp_path: Path, form: str) -> None:
    """What our engine recorded while sampling, a forward over the finished text finds again."""
    folder = run("traces.temperatures=[0.7]", "traces.shard_size=6", "traces.max_tokens=30")
    made = records_of(folder)
    source = f"parquet:{folder / 'shard-00000.parquet'}"
    if form == "jsonl":
        names = ("finish_reason", "temperature", "max_tokens", "seed")
        rows = [
            {
                "messages": json.loads(record.messages),
                "completion_ids": record.completion_ids.tolist(),
                **{name: getattr(record, name) for name in names},
            }
            for record in made
        ]
        source = write(tmp_path / "texts.jsonl", rows)
    scored = score(source)
    assert len(scored) == len(made) == 6
    for number, (left, right) in enumerate(zip(scored, made, strict=True), start=1):
        assert left.prompt_id == f"log/{number}"
        assert left.backend.startswith("score transformers")
        assert all(np.abs(getattr(left, name) - getattr(right, name)).max() < 1e-4 for name in LAW)
        assert np.array_equal(left.top_ids, right.top_ids)
        others = {"prompt_id", "source", "backend", "reference", "verifier", "top_ids", *LAW}
        changed = replace(left, **{name: getattr(right, name) for name in others})
        for name in {field.name for field in fields(TraceRecord)}:
            assert np.array_equal(getattr(changed, name), getattr(right, name)), name


def test_words_become_tokens_and_an_end_is_known_or_read_off(data_root: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(load_config(CONFIG).models)
    end = tokenizer.eos_token_id
    rows = [
        {"prompt": "hi", "completion": "yes", "finish_reason": "stop", "id": "a"},
        {"prompt": "hi", "completion": "yes"},
        {"prompt_ids": [5, 6], "completion_ids": [7, end]},
    ]
    first, second, third = score(write(tmp_path / "t.jsonl", rows))
    words = tokenizer("yes").input_ids
    assert first.prompt_ids.tolist() == encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])
    assert (first.completion_ids.tolist(), first.finish_reason) == ([*words, end], "stop")
    assert (second.completion_ids.tolist(), second.finish_reason) == (words, "length")
    assert (third.prompt_ids.tolist(), third.finish_reason) == ([5, 6], "stop")
    assert json.loads(third.messages) == [{"role": "user", "content": tokenizer.decode([5, 6])}]
    # Two answers to one prompt are its completions: no near duplicates, and on one side of the filter's split.
    assert [record.prompt_id for record in (first, second, third)] == ["log/a", "log/a", "log/3"]
    assert [record.completion for record in (first, second, third)] == [0, 1, 0]
    assert (second.temperature, second.top_p, second.max_tokens, second.seed) == (1.0, 1.0, 3, 0)


def test_bad_rows_and_texts_that_do_not_fit_are_named_and_the_rest_scored(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a"},
        {"completion": "b"},
        {"prompt": "a", "completion_ids": [1, "2"]},
        {"prompt": "a", "completion": "b", "finish_reason": "eos"},
        [1],
        {"prompt": "a", "completion_ids": [300]},
        {"prompt": "a", "completion": "x" * 5000},
        {"prompt": "c", "completion": "d"},
    ]
    records = score(write(tmp_path / "t.jsonl", rows))
    assert [record.prompt_id for record in records] == ["log/1", "log/9"]
    said = capsys.readouterr().err
    for line, problem in {
        2: "got no completion_ids and completion None",
        3: "got keys completion, expected one of messages",
        4: "completion_ids: got \"[1, '2']\", expected a list of token ids",
        5: "finish_reason: got 'eos', expected stop, length or none",
        6: "got a JSON list, expected an object",
    }.items():
        assert f"line {line} skipped: {problem}" in said
    assert "skipped log/7: token id 300, expected ids below 260: of another tokenizer?" in said
    assert "skipped log/8: " in said
    notes = [read_notes(path) for path in sorted((tmp_path / "spec_data" / "score" / STAGE.name).glob("shard-*"))]
    assert sum(len(note.skipped) for note in notes) == 2


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"seed": 2**70}, "seed: got 1180591620717411303424, expected a whole number from 0 to 2^63 - 1"),
        ({"max_tokens": float("inf")}, "max_tokens: got inf, expected a whole number from 1 to 2^31 - 1"),
        ({"max_tokens": 2**40}, "max_tokens: got 1099511627776, expected"),
        ({"temperature": -1}, "temperature: got -1, expected a finite number, 0 or more"),
        ({"temperature": float("nan")}, "temperature: got nan, expected"),
        ({"top_p": 0}, "top_p: got 0, expected a number in (0, 1]"),
        ({"completion": "\ud800"}, "an escape of half a character"),
    ],
)
def test_settings_that_no_record_can_hold_are_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], problem: str
) -> None:
    good = {"prompt": "a", "completion": "b", "temperature": None, "seed": None}
    (text,) = load_texts("log", write(tmp_path / "t.jsonl", [good | changes, good]), 5)
    assert (text.id, text.temperature, text.seed) == ("log/2", 1.0, 0)
    assert f"line 1 skipped: {problem}" in capsys.readouterr().err


def test_an_id_that_comes_again_is_a_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": prompt, "completion": "b", "id": prompt} for prompt in "aab"]
    texts = load_texts("log", write(tmp_path / "t.jsonl", rows), 5)
    assert [text.id for text in texts] == ["log/a", "log/b"]
    assert "line 2 skipped: id: got 'log/a' a second time, expected another for every row" in capsys.readouterr().err


def test_the_prompt_of_a_log_is_the_whole_conversation(tmp_path: Path) -> None:
    said = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    rows = [{"messages": said[:length], "completion": "d"} for length in (1, 2, 3, 4)]
    texts = load_texts("log", write(tmp_path / "t.jsonl", rows), 9)
    assert [text.messages for text in texts] == [said[:1], said[:1], said[:3], said[:3]]
    assert [(text.prompt_id, text.index) for text in texts] == [("log/1", 0), ("log/1", 1), ("log/3", 0), ("log/3", 1)]


def test_sources_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    for source, message in {
        "human_eval": "texts to score: got 'human_eval', expected jsonl:PATH or parquet:PATH",
        "jsonl:none.jsonl": "jsonl:none.jsonl: no such file",
        write(tmp_path / "t.jsonl", [{"prompt": "a"}]): "no usable text in it; expected rows with a prompt and",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_texts("log", source, 5)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"x\.parquet: cannot be read"):
        load_texts("log", f"parquet:{tmp_path / 'x.parquet'}", 5)


def test_a_limit_takes_the_first_texts_and_an_edited_file_is_noticed(data_root: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "t.jsonl", [{"prompt": "a", "completion": str(number)} for number in range(9)])
    assert [text.completion for text in load_texts("log", source, 3)] == ["0", "1", "2"]
    score(source)
    write(tmp_path / "t.jsonl", [{"prompt": "a", "completion": "other"}])
    with pytest.raises(ValueError, match=r"prompts\.traces\.log"):
        score(source)
