"""A planted set of 2,000 rows, 500 of them bad in known ways: what the filter must find, and what it must leave."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from toy_traces import rows_of, run_filter, trace

SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "ki", "no", "ra")
ORIGINALS, EXACT, NEAR, CONTAMINATED = 1500, 200, 200, 100
WORDS_CHANGED = 0.05


def vocabulary(rng: random.Random, size: int = 3000) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < size:
        made["".join(rng.choices(SYLLABLES, k=rng.randrange(1, 4)))] = None
    return list(made)


def story(rng: random.Random, words: list[str], numbers: list[int], length: int) -> str:
    """Words as frequent as in real text, with these numbers in order among them."""
    weights = [1 / (rank + 5) for rank in range(len(words))]
    text = rng.choices(words, weights, k=length)
    for number, place in zip(numbers, sorted(rng.sample(range(length), len(numbers))), strict=True):
        text[place] = str(number)
    text[0] = text[0].capitalize()
    return " ".join(text) + "?"


def change_words(rng: random.Random, text: str, words: list[str]) -> str:
    """5 % of the words replaced by others, one at least."""
    parts = text.split(" ")
    for place in rng.sample(range(len(parts)), max(1, round(WORDS_CHANGED * len(parts)))):
        parts[place] = rng.choice(words)
    return " ".join(parts)


def other_case_and_punctuation(rng: random.Random, text: str) -> str:
    parts = [part.upper() if rng.random() < 0.5 else part for part in text.rstrip("?").split(" ")]
    return "".join(part + rng.choice([" ", ", ", "; ", " \u2014 ", "\n", "\u00a0", "... "]) for part in parts)


class Planted:
    """`bad` maps each planted row's prompt id to the reason it must be dropped for."""

    def __init__(self, bench_file: Path) -> None:
        rng = random.Random(0)
        words = vocabulary(rng)
        numbers = [[rng.randrange(2, 900) for _ in range(6)] for _ in range(60)]
        long_items = [story(rng, words, each, rng.randrange(30, 70)) for each in numbers]
        middle_items = [story(rng, words, [], rng.randrange(8, 13)) for _ in range(20)]
        short_items = [story(rng, words, [], rng.randrange(3, 8)) for _ in range(20)]
        items = [*long_items, *middle_items, *short_items]
        lines = [{"question": item, "answer": story(rng, words, [], 40) + f" #### {n}"} for n, item in enumerate(items)]
        bench_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        # The same numbers as a benchmark's item, in the same order, in another story: clean.
        prompts = [story(rng, words, numbers[n % 60], rng.randrange(25, 90)) for n in range(ORIGINALS)]
        self.records = [trace(n, prompt, f"the answer to {n} is {n * n}") for n, prompt in enumerate(prompts)]
        self.bad: dict[str, str] = {}
        for n, source in enumerate(rng.sample(range(ORIGINALS), EXACT)):
            again = (f" {prompts[source]}\n", f"The answer to {source}  is {source * source}")
            self.add(10_000 + n, *again, "exact_duplicate")
        for n, source in enumerate(rng.sample(range(ORIGINALS), NEAR)):
            self.add(20_000 + n, change_words(rng, prompts[source], words), f"near {n}", "near_duplicate")
        for n in range(CONTAMINATED):
            self.add(
                30_000 + n,
                *self.disguised(rng, words, n, long_items + middle_items, short_items, lines),
                "contaminated",
            )
        rng.shuffle(self.records)
        # A copy stands after what it is a copy of: the first of several stays.
        self.records.sort(key=lambda record: record.prompt_id in self.bad)

    def add(self, number: int, prompt: str, text: str, reason: str) -> None:
        self.records.append(trace(number, prompt, text))
        self.bad[f"set/{number}"] = reason

    @staticmethod
    def disguised(
        rng: random.Random, words: list[str], n: int, items: list[str], short: list[str], lines: list[dict[str, Any]]
    ) -> tuple[str, str]:
        """(prompt, completion): an item in other case and punctuation; inside a longer text; a short item."""
        fresh = story(rng, words, [], 40)
        if n < 40:
            return other_case_and_punctuation(rng, items[n]), "planted"
        if n < 60:
            return f"{story(rng, words, [], 50)} {items[n]} {story(rng, words, [], 50)}", "planted"
        if n < 80:
            inside = items[n] if n < 70 else lines[n]["answer"]
            return fresh, f"{story(rng, words, [], 30)} {inside} and so on"
        return other_case_and_punctuation(rng, short[n - 80]), "planted"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """(planted reason by prompt id, found reason by prompt id)."""
    root = tmp_path_factory.mktemp("planted")
    planted = Planted(root / "bench.jsonl")
    assert len(planted.records) == 2000
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_DATA_ROOT", str(root))
        prompts = f"bench_engine.prompts=[{{name: planted, source: 'jsonl:{root}/bench.jsonl', limit: 4}}]"
        folder = run_filter(planted.records, prompts, "bench_draft.prompts=[]", per_shard=400)
    benchmark, served = json.loads((folder / "report.json").read_text())["benchmarks"]
    assert (served["benchmark"], served["rows_removed"]) == ("bench_vllm.arithmetic", 0)
    assert (benchmark["benchmark"], benchmark["items"]) == ("bench_engine.planted", 100)
    assert benchmark["rows_removed"] == CONTAMINATED
    assert all(len(span["span"].split()) >= 3 for span in benchmark["spans"])
    return planted.bad, {row["prompt_id"]: row["reason"] for row in rows_of(folder, "dropped")}


def ids(reasons: dict[str, str], reason: str) -> set[str]:
    return {prompt_id for prompt_id, each in reasons.items() if each == reason}


def test_every_exact_duplicate_is_found(found: tuple[dict[str, str], dict[str, str]]) -> None:
    bad, dropped = found
    assert ids(dropped, "exact_duplicate") == ids(bad, "exact_duplicate")


def test_near_duplicates_are_found_and_nothing_else(found: tuple[dict[str, str], dict[str, str]]) -> None:
    bad, dropped = found
    planted, seen = ids(bad, "near_duplicate"), ids(dropped, "near_duplicate")
    assert len(planted & seen) / len(planted) >= 0.95
    assert len(planted & seen) / len(seen) >= 0.99


def test_every_disguise_is_seen_through_and_no_clean_row_is_removed(
    found: tuple[dict[str, str], dict[str, str]],
) -> None:
    bad, dropped = found
    assert ids(dropped, "contaminated") == ids(bad, "contaminated")
    assert dropped.keys() <= bad.keys()
