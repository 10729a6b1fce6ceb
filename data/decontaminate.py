"""Rows whose prompt or completion holds a piece of a benchmark: of its prompts, later turns or worked solutions.

    item of 13 words or more    any 13 of its words in a row
    item of 8 to 12 words       any 8 of its words in a row
    shorter prompt              the row's message or completion is that prompt; a shorter solution is never matched
    problem of a generator      its whole prompt in a row, since its wording is that of every problem of its kind

Words are those of data/words.py, so case, punctuation, spacing and character forms do not matter. Two kinds of match
prove nothing and are left out: wording that five or more items of a set share (an instruction in front of each), and
pieces that are mostly numbers (the same numbers in another story); a prompt of such pieces only matches as a whole.
A bare final answer is no solution.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data.checks import Drop
from data.rows import Row, is_generated
from data.words import OPERATOR_WORDS, window_hashes, word_hashes, words
from pipeline.config import Config, bench_sections
from pipeline.sources import Prompt, load_all

LONG, SHORT = 13, 8
SHARED_BY = 5
BARE_ANSWER_WORDS = 8
_LATEX = re.compile(r"\\[A-Za-z]+")
_NATURAL = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One text of a benchmark. `whole` items match only with all their words."""

    benchmark: str
    prompt_id: str
    kind: str  # "prompt" | "solution"
    words: list[str]
    whole: bool

    @property
    def gram(self) -> int:
        """How many of its words are looked up at once; 0 when it is too short for that."""
        if len(self.words) < SHORT:
            return 0
        return LONG if len(self.words) >= LONG and not self.whole else SHORT


@dataclass(frozen=True, kw_only=True)
class Grams:
    """The n-grams of one n, ascending by hash: hashes [G] uint64, item and place within it [G] int64."""

    hashes: np.ndarray
    items: np.ndarray
    places: np.ndarray


class Decontaminator:
    """The benchmarks' items, ready to be looked for; `benchmarks` maps a name to its prompts."""

    def __init__(self, benchmarks: Mapping[str, Sequence[Prompt]]) -> None:
        self.items = [item for name, prompts in benchmarks.items() for item in _items(name, prompts)]
        self.exact: dict[str, int] = {}
        for number, item in enumerate(self.items):
            if item.kind == "prompt" and item.words:
                self.exact.setdefault("".join(item.words), number)
        self.grams = {size: _grams(self.items, size) for size in (LONG, SHORT)}

    def check(self, row: Row) -> Drop | None:
        """The first match in the row's messages, then in its completion."""
        texts = [("prompt", message["content"]) for message in row.messages] + [("completion", row.completion)]
        for part, text in texts:
            match = self.find(text)
            if match is not None:
                item, span = match
                detail = {"benchmark": item.benchmark, "item": item.prompt_id, "of": item.kind, "part": part}
                return Drop(reason="contaminated", detail={**detail, "span": span})
        return None

    def find(self, text: str) -> tuple[Item, str] | None:
        """(item, the words that text and item share) of the first match in a text."""
        text_words = words(text)
        number = self.exact.get("".join(text_words))
        if number is not None:
            return self.items[number], " ".join(text_words)
        hashes_W = word_hashes(text_words)
        for size, grams in self.grams.items():
            for place, entry in _hits(window_hashes(hashes_W, size), grams):
                item, start = self.items[grams.items[entry]], int(grams.places[entry])
                needed = len(item.words) if item.whole else size
                # The words are compared: equal hashes alone prove nothing.
                if text_words[place : place + needed] == item.words[start : start + needed]:
                    return item, _whole_span(text_words, item.words, place, start)
        return None


def load_benchmarks(config: Config) -> dict[str, list[Prompt]]:
    """The prompt sets of every bench section, by <section>.<set>; files, data sets and HumanEval without their limit.

    What the bench leaves out today may be measured tomorrow, so it is not trained on either.
    """
    sections = {name: getattr(config, name) for name in bench_sections()}
    return {
        f"{name}.{source.name}": load_all(source.name, source.source, source.limit, getattr(section, "seed", 0))
        for name, section in sections.items()
        if section is not None
        for source in section.prompts
    }


def _items(benchmark: str, prompts: Iterable[Prompt]) -> Iterator[Item]:
    for prompt in prompts:
        texts = [("prompt", message["content"]) for message in prompt.messages]
        solutions = [text for text in (prompt.reference, *prompt.others) if text and not is_bare_answer(text)]
        for kind, text in (*texts, *(("solution", text) for text in solutions)):
            item_words = words(text)
            is_sum = 2 * sum(map(_is_number, item_words)) > len(item_words)
            whole = kind == "prompt" and (is_sum or is_generated(prompt.verifier))
            yield Item(benchmark=benchmark, prompt_id=prompt.id, kind=kind, words=item_words, whole=whole)


def is_bare_answer(text: str) -> bool:
    """Whether a reference is a final answer without the words of a solution, such as "42" or a matrix in LaTeX."""
    return len(_NATURAL.findall(_LATEX.sub(" ", text))) < BARE_ANSWER_WORDS


def _grams(items: Sequence[Item], size: int) -> Grams:
    """All n-grams of the items that are looked up by this n, of `whole` items the first, without the shared ones."""
    hashes, numbers, places = [], [], []
    for number, item in enumerate(items):
        if item.gram == size:
            windows = window_hashes(word_hashes(item.words), size)
            telling = _telling_places(item, size)
            hashes.append(windows[telling])
            numbers.append(np.full(len(telling), number))
            places.append(telling)
    if not hashes:
        return Grams(hashes=np.zeros(0, np.uint64), items=np.zeros(0, np.int64), places=np.zeros(0, np.int64))
    found = Grams(hashes=np.concatenate(hashes), items=np.concatenate(numbers), places=np.concatenate(places))
    keep = np.flatnonzero(~_is_shared(items, found))
    order = keep[np.lexsort((found.places[keep], found.items[keep], found.hashes[keep]))]
    return Grams(hashes=found.hashes[order], items=found.items[order], places=found.places[order])


def _telling_places(item: Item, size: int) -> np.ndarray:
    """Where n-grams begin that show the item: not those that are mostly numbers, and of a `whole` item the first."""
    if item.whole:
        return np.zeros(1, dtype=np.int64)
    counts = np.concatenate([[0], np.cumsum([_is_number(word) for word in item.words])])
    return np.flatnonzero(2 * (counts[size:] - counts[:-size]) <= size)


def _is_number(word: str) -> bool:
    return word in OPERATOR_WORDS or any(map(str.isdigit, word))


def _is_shared(items: Sequence[Item], grams: Grams) -> np.ndarray:
    """[G] bool: whether SHARED_BY different texts of one benchmark hold the n-gram. Copies of an item count once."""
    texts_of: dict[tuple[str, int], set[str]] = defaultdict(set)
    texts = [" ".join(item.words) for item in items]
    keys = [
        (items[number].benchmark, hashed) for number, hashed in zip(grams.items, grams.hashes.tolist(), strict=True)
    ]
    for key, number in zip(keys, grams.items, strict=True):
        if len(texts_of[key]) < SHARED_BY:
            texts_of[key].add(texts[number])
    shared = [len(texts_of[key]) >= SHARED_BY for key in keys]
    return np.array([yes and not items[n].whole for yes, n in zip(shared, grams.items, strict=True)], dtype=bool)


def _hits(windows: np.ndarray, grams: Grams) -> Iterator[tuple[int, int]]:
    """(place in the text, number of the n-gram) wherever the hashes are equal, in the order of the text."""
    if not len(grams.hashes):
        return
    first = np.searchsorted(grams.hashes, windows)
    for place in np.flatnonzero(grams.hashes[np.minimum(first, len(grams.hashes) - 1)] == windows).tolist():
        entry = int(first[place])
        while entry < len(grams.hashes) and grams.hashes[entry] == windows[place]:
            yield place, entry
            entry += 1


def _whole_span(text: list[str], item: list[str], place: int, start: int) -> str:
    """The longest run of equal words around a match, for people to judge it by."""
    while place > 0 and start > 0 and text[place - 1] == item[start - 1]:
        place, start = place - 1, start - 1
    length = 0
    while place + length < len(text) and start + length < len(item) and text[place + length] == item[start + length]:
        length += 1
    return " ".join(text[place : place + length])
