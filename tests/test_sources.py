"""Prompt sources: the same prompts for the same seed, rows of every common shape, bad rows named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import rows, sources
from pipeline.scoring import score
from pipeline.sources import Prompt, load_all, load_prompts, state

ROOT = Path(__file__).resolve().parent.parent
SHARED_FILES = ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "math500.jsonl", "spec_bench_480.jsonl")


def write_rows(path: Path, *values: object) -> str:
    path.write_text("".join(value if isinstance(value, str) else json.dumps(value) + "\n" for value in values))
    return f"jsonl:{path}"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "row, messages, reference",
    [
        ({"prompt": "a"}, user("a"), None),
        ({"question": "a", "answer": "b"}, user("a"), "b"),
        ({"problem": "a", "solution": "b"}, user("a"), "b"),
        ({"problem": "a", "solution": "work", "answer": "b"}, user("a"), "b"),
        ({"text": "a", "reference": "b"}, user("a"), "b"),
        ({"turns": ["a", "next"]}, user("a"), None),
        ({"prompt": "x", "messages": [*user("a"), {"role": "assistant", "content": "b"}]}, user("a"), "b"),
        ({"prompt": user("a")}, user("a"), None),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    *user("a"),
                    {"role": "assistant", "content": "b"},
                    *user("c"),
                ]
            },
            [{"role": "system", "content": "s"}, *user("a")],
            "b",
        ),
        ({"prompt": None, "question": "a"}, user("a"), None),
    ],
)
def test_row_shapes(row: dict[str, object], messages: list[dict[str, str]], reference: str | None) -> None:
    assert rows.read(row) == (messages, reference)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"input": "a"}, "got keys input, expected one of messages, turns, prompt"),
        ({"prompt": ""}, "prompt: got '', expected text that is not empty"),
        ({"prompt": 3}, "prompt: got 3, expected text"),
        ({"turns": []}, r"turns: got \[\], expected"),
        ({"messages": [{"role": "user"}]}, "expected role .* and content"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "expected role"),
        ({"messages": [{"role": "system", "content": "a"}]}, "expected a message of the user"),
    ],
)
def test_bad_rows(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows.read(row)


def test_bad_lines_are_reported_and_the_rest_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, "{broken\n", "\n", "[1]\n", {"prompt": "b"}, {"x": 1})
    prompts = load_prompts("set", source, 10, seed=0)
    assert {(prompt.id, prompt.messages[0]["content"]) for prompt in prompts} == {("set/1", "a"), ("set/5", "b")}
    reported = capsys.readouterr().err
    assert "p.jsonl: line 2 skipped: not JSON" in reported
    assert "p.jsonl: line 4 skipped: got a JSON list, expected an object" in reported
    assert "p.jsonl: line 6 skipped: got keys x" in reported


def test_a_flood_of_bad_lines_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, *["{\n"] * 20)
    load_prompts("set", source, 10, seed=0)
    assert len(capsys.readouterr().err.splitlines()) == sources.REPORTED_ROWS + 1


def test_bytes_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    assert len(load_prompts("set", f"jsonl:{tmp_path / 'p.jsonl'}", 10, seed=0)) == 1
    assert "line 2 skipped: not UTF-8" in capsys.readouterr().err


def test_rows_that_no_text_or_parser_can_hold_are_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"prompt": "\\ud83d\\ude00"}', '{"prompt": "\\ud83d"}', "[" * 100_000, '{"turns": "abc"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    prompts = load_prompts("set", f"jsonl:{tmp_path / 'p.jsonl'}", 10, seed=0)
    assert {prompt.messages[0]["content"] for prompt in prompts} == {"\U0001f600", "abc"}
    said = capsys.readouterr().err
    assert "line 2 skipped: an escape of half a character" in said
    assert "line 3 skipped: not a row: its JSON is nested too deeply" in said


def test_separators_inside_a_json_string_do_not_split_a_row(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\r\n', encoding="utf-8")
    (prompt,) = load_prompts("set", f"jsonl:{tmp_path / 'p.jsonl'}", 10, seed=0)
    assert prompt.messages == user("a\u2028b\x85c")


@pytest.mark.parametrize(
    "source, message",
    [
        ("jsonl:none.jsonl", "jsonl:none.jsonl: no such file"),
        ("jsonl:$SPEC_PROMPTS/x.jsonl", "environment variable SPEC_PROMPTS is not set"),
        ("jsonl:", "got 'jsonl:', expected reasoning_gym"),
        ("json:x", "got 'json:x', expected .*; did you mean 'jsonl'"),
        ("reasoning_gym:basic_arithmetics", "no task 'basic_arithmetics'; did you mean 'basic_arithmetic'"),
        ("reasoning_gym:knight_swap", "gives other problems in every run; choose another task"),
    ],
)
def test_bad_sources(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts("set", source, 3, seed=0)


def test_a_file_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable prompt"):
        load_prompts("set", write_rows(tmp_path / "p.jsonl", {"x": 1}), 3, seed=0)


def test_seed_chooses_and_a_smaller_limit_gives_the_first(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "p.jsonl", *({"prompt": str(number)} for number in range(50)))
    ten = load_prompts("set", source, 10, seed=1)
    assert load_prompts("set", source, 10, seed=1) == ten
    assert load_prompts("set", source, 4, seed=1) == ten[:4]
    assert load_prompts("set", source, 10, seed=2) != ten
    assert len({prompt.id for prompt in load_prompts("set", source, 99, seed=1)}) == 50


def test_a_row_keeps_its_id_when_rows_are_added(tmp_path: Path) -> None:
    before = load_prompts("set", write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}), 9, seed=0)
    after = load_prompts(
        "set", write_rows(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}), 9, 0
    )
    assert [prompt for prompt in after if prompt.id != "set/3"] == before


def test_reasoning_gym_takes_tasks_in_turn() -> None:
    prompts = load_prompts("math", "reasoning_gym:basic_arithmetic,gcd", 5, seed=3)
    assert [prompt.id for prompt in prompts] == [
        "math/basic_arithmetic-3-0",
        "math/gcd-3-0",
        "math/basic_arithmetic-3-1",
        "math/gcd-3-1",
        "math/basic_arithmetic-3-2",
    ]
    assert all(prompt.reference and prompt.verifier for prompt in prompts)
    again = load_prompts("math", "reasoning_gym:basic_arithmetic,gcd", 3, seed=3)
    assert [prompt.messages for prompt in again] == [prompt.messages for prompt in prompts[:3]]


def test_reasoning_gym_is_the_same_in_every_process() -> None:
    """A task that iterates over a set would give other problems in each; resuming would then mix two data sets."""
    code = (
        "import json; from pipeline.sources import load_prompts; "
        "print('>' + json.dumps([p.messages for p in load_prompts('m', 'reasoning_gym:basic_arithmetic,gcd', 8, 0)]))"
    )
    texts = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        texts.add(result.stdout[result.stdout.index(">") :])
    assert len(texts) == 1


def answered(text: str) -> float | None:
    (prompt,) = load_prompts("math", "reasoning_gym:gcd", 1, seed=0)
    return score(prompt, text.format(right=prompt.reference, wrong=int(prompt.reference or 0) + 1))


def test_answers_are_scored_by_the_verifier() -> None:
    assert answered("{right}") == 1.0
    assert answered("First 777, then ...\nSo the answer is {right}.") == 1.0
    assert answered("12 and 13: <answer>{right}</answer> as 5 shows") == 1.0
    assert answered("\\boxed{{{right}}} or 55") == 1.0
    assert answered("{wrong}") != 1.0
    assert answered("<answer>{wrong}</answer> not {right}") != 1.0
    assert answered("") == 0.0


def test_a_verifier_survives_json() -> None:
    (prompt,) = load_prompts("math", "reasoning_gym:gcd", 1, seed=0)
    again = Prompt(**{**vars(prompt), "verifier": json.loads(json.dumps(prompt.verifier))})
    assert score(again, prompt.reference or "") == 1.0


def test_human_eval() -> None:
    prompts = load_prompts("code", "human_eval", 200, seed=0)
    assert len(prompts) == 164
    by_id = {prompt.id: prompt for prompt in prompts}
    first = by_id["code/HumanEval/0"]
    assert "def has_close_elements" in first.messages[0]["content"]
    assert first.reference is not None
    assert "return" in first.reference
    assert score(first, "anything") is None


def test_human_eval_by_range() -> None:
    numbers = {int(prompt.id.rpartition("/")[2]) for prompt in load_prompts("code", "human_eval:100-163", 200, seed=0)}
    assert numbers == set(range(100, 164))
    first = load_prompts("code", "human_eval:0-99", 2, seed=0)
    assert [prompt.id for prompt in first] == ["code/HumanEval/87", "code/HumanEval/46"]
    assert len(load_all("code", "human_eval:0-99", 2, seed=0)) == 100
    for wrong in ("9", "5-3", "a-b", "-4"):
        with pytest.raises(ValueError, match=f"human_eval:{wrong}: got '{wrong}', expected FIRST-LAST"):
            load_prompts("code", f"human_eval:{wrong}", 2, seed=0)


def test_what_else_a_row_says_is_known(tmp_path: Path) -> None:
    """Later turns and a worked solution are not asked, but a training row must not hold them."""
    source = write_rows(
        tmp_path / "p.jsonl",
        {"problem": "p", "answer": "42", "solution": "since it is so"},
        {"turns": ["first", "second"]},
        {"messages": [{"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "a"), ("user", "v"))]},
    )
    found = {prompt.id: (prompt.reference, prompt.others) for prompt in load_all("s", source, 1, seed=0)}
    assert found == {"s/1": ("42", ("since it is so",)), "s/2": (None, ("second",)), "s/3": ("a", ("v",))}


def test_hub_dataset_from_a_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    write_rows(folder / "test.jsonl", *({"question": f"q{n}" if n != 2 else "", "answer": f"a{n}"} for n in range(6)))
    prompts = load_prompts("hub", "hf:$MY_DATA/set#/test", 10, seed=0)
    assert {(prompt.id, prompt.messages[0]["content"], prompt.reference) for prompt in prompts} == {
        (f"hub/{n}", f"q{n}", f"a{n}") for n in range(6) if n != 2
    }
    assert "row 2 skipped: question: got ''" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"hf:.*none: cannot be loaded .*expected hf:ID or hf:ID#CONFIG/SPLIT"):
        load_prompts("hub", f"hf:{tmp_path}/none", 10, seed=0)


def test_state_changes_with_the_file_only(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "a"})
    before = state(source)
    assert state(source) == before
    write_rows(tmp_path / "p.jsonl", {"prompt": "b"})
    assert state(source) != before
    assert state("reasoning_gym:gcd").startswith("reasoning-gym 0.")


@pytest.mark.skipif(
    "SPEC_TEST_PROMPTS" not in os.environ, reason="SPEC_TEST_PROMPTS names a folder of benchmark prompts"
)
@pytest.mark.parametrize("name", SHARED_FILES)
def test_real_benchmark_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(os.environ["SPEC_TEST_PROMPTS"]) / name
    lines = sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
    prompts = load_prompts("real", f"jsonl:{path}", 100_000, seed=0)
    assert len(prompts) == lines
    assert capsys.readouterr().err == ""
