"""Rows whose prompt or completion holds a piece of a benchmark: of its prompts, later turns or worked solutions.

    item of 13 words or more    any 13 of its words in a row
    item of 8 to 12 words       any 8 of its words in a row
    shorter prompt              the row's message or completion is that prompt; a shorter solution is never matched
    problem of a generator      its whole prompt in a row, since its wording is that of every problem of its kind

Words are those of data/words.py, so case, punctuation, spacing and character forms do not matter. Two kinds of words
prove nothing: numbers (the same numbers may stand in another story), and eight or more in a row that five items of a
set share (an instruction in front of each). Pieces that are mostly such words are not looked for; a prompt of numbers
matches as a whole, and every prompt when a row's message is that prompt. A bare final answer is no solution.
"""

from __future__ import annotations

import re
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
        self.last: dict[str, tuple[Item, str] | None] = {}
        self.exact: dict[str, int] = {}
        for number, item in enumerate(self.items):
            if item.kind == "prompt" and item.words:
                self.exact.setdefault("".join(item.words), number)
        shared = {name: _shared_wording(item for item in self.items if item.benchmark == name) for name in benchmarks}
        self.grams = {size: _grams(self.items, size, shared) for size in (LONG, SHORT)}

    def check(self, row: Row) -> Drop | None:
        """The first match in the row's messages, then in its completion."""
        texts = [("prompt", message["content"]) for message in row.messages] + [("completion", row.completion)]
        for part, text in texts:
            match = self.find(text) if part == "completion" else self.find_again(text)
            if match is not None:
                item, span = match
                detail = {"benchmark": item.benchmark, "item": item.prompt_id, "of": item.kind, "part": part}
                return Drop(reason="contaminated", detail={**detail, "span": span})
        return None

    def find_again(self, text: str) -> tuple[Item, str] | None:
        """`find`, which is not done again for the prompt of the row before: its completions follow each other."""
        if text not in self.last:
            self.last = {text: self.find(text)}
        return self.last[text]

    def find(self, text: str) -> tuple[Item, str] | None:
        """(item, the words that text and item share) of the first match in a text."""
        text_words = words(text)
        number = self.exact.get("".join(text_words))
        if number is not None:
            return self.items[number], " ".join(text_words)
        windows = window_hashes(word_hashes(text_words), *self.grams)
        for (size, grams), hashes in zip(self.grams.items(), windows, strict=True):
            for place, entry in _hits(hashes, grams):
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


def _grams(items: Sequence[Item], size: int, shared: Mapping[str, np.ndarray]) -> Grams:
    """All n-grams that show their item among those that are looked up by this n, ascending by hash."""
    hashes, numbers, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, item in enumerate(items):
        if item.gram == size:
            telling = _telling_places(item, size, shared[item.benchmark])
            hashes.append(window_hashes(word_hashes(item.words), size)[0][telling])
            numbers.append(np.full(len(telling), number))
            places.append(telling)
    found = Grams(hashes=np.concatenate(hashes), items=np.concatenate(numbers), places=np.concatenate(places))
    order = np.lexsort((found.places, found.items, found.hashes))
    return Grams(hashes=found.hashes[order], items=found.items[order], places=found.places[order])


def _telling_places(item: Item, size: int, shared: np.ndarray) -> np.ndarray:
    """Where n-grams begin that show the item: half of their words or more are neither numbers nor shared wording.

    Of a `whole` item that is its beginning.
    """
    if item.whole:
        return np.zeros(1, dtype=np.int64)
    says_nothing_W = np.array([_is_number(word) for word in item.words]) | _is_shared(item.words, shared)
    counts = np.concatenate([[0], np.cumsum(says_nothing_W)])
    return np.flatnonzero(2 * (counts[size:] - counts[:-size]) <= size)


def _is_number(word: str) -> bool:
    return word in OPERATOR_WORDS or any(map(str.isdigit, word))


def _is_shared(item_words: list[str], shared: np.ndarray) -> np.ndarray:
    """[W] bool: whether a word stands in SHORT words in a row that are shared wording."""
    begins = np.isin(window_hashes(word_hashes(item_words), SHORT)[0], shared)
    is_shared_W = np.zeros(len(item_words), dtype=bool)
    for offset in range(SHORT):
        is_shared_W[offset : offset + len(begins)] |= begins
    return is_shared_W


def _shared_wording(items: Iterable[Item]) -> np.ndarray:
    """The hashes of SHORT words in a row that SHARED_BY different texts hold. Copies of a text count once."""
    texts = {" ".join(item.words): item.words for item in items}.values()
    each = [np.unique(window_hashes(word_hashes(text_words), SHORT)[0]) for text_words in texts]
    hashes, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *each]), return_counts=True)
    return hashes[counts >= SHARED_BY]


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
