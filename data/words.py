"""Texts as words that do not change with case, punctuation, spacing or the way a character is encoded.

W is the number of words of a text. A word is a run of letters and digits, or one Chinese or Japanese character. An
operator next to a number is a word too: "12 + 7" and "12 * 7" are different problems.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata

import numpy as np

_CJK = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_INSIDE = re.compile(r"['\u2019\u2018`\u00ad]|(?<=\d),(?=\d{3})")  # don't = dont, 1,000 = 1000
_DIGIT = re.compile(r"\d")
_OPERATOR = re.compile(r"(?<=[\d)\s])[+*/=^<>\u00d7\u00f7](?=[\s(-]*\d)|(?<![^\W\d_])[-\u2212](?=[\s(-]*\d)")
_OPERATOR_NAMES = {
    **dict.fromkeys("-\u2212", "minus"),
    **dict.fromkeys("*\u00d7", "times"),
    **dict.fromkeys("/\u00f7", "over"),
    "+": "plus",
    "=": "equals",
    "^": "power",
    "<": "less",
    ">": "greater",
}
OPERATOR_WORDS = frozenset(_OPERATOR_NAMES.values())
# Window hashes are polynomials in this odd number modulo 2^64, where it has an inverse.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def words(text: str) -> list[str]:
    """The text's words in order, normalised: "It\u2019s 1,000!" gives ["its", "1000"]."""
    text = _INSIDE.sub("", plain(text))
    if _DIGIT.search(text):  # most texts have none, and need not be searched for operators
        text = _OPERATOR.sub(_operator_word, text)
    return _WORD.findall(text)


def plain(text: str) -> str:
    """The text in compatibility form without case and invisible characters; punctuation and spacing stay."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
        text = unicodedata.normalize("NFKC", text.casefold())
    return text.lower()


def word_hashes(text_words: list[str]) -> np.ndarray:
    """[W] uint64, the same on every machine."""
    return np.array([_HASHES[word] for word in text_words], dtype=np.uint64)


def window_hashes(hashes_W: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """For each size [max(W - size + 1, 0)] uint64: one hash for every `size` words in a row.

    With prefix sums of h_i b^i, the window at i is (prefix_{i + size} - prefix_i) b^-i: the same wherever it stands.
    """
    powers_W, inverses_W = _powers(len(hashes_W))
    prefix = np.zeros(len(hashes_W) + 1, dtype=np.uint64)
    np.cumsum(hashes_W * powers_W, out=prefix[1:])
    counts = [max(len(hashes_W) - size + 1, 0) for size in sizes]
    return [
        (prefix[size : size + count] - prefix[:count]) * inverses_W[:count]
        for size, count in zip(sizes, counts, strict=True)
    ]


def _operator_word(match: re.Match[str]) -> str:
    return f" {_OPERATOR_NAMES[match[0]]} "


class _WordHashes(dict[str, int]):
    """Hashes of the words met so far, forgotten when they become many."""

    def __missing__(self, word: str) -> int:
        if len(self) >= 1 << 17:
            self.clear()
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self[word] = int.from_bytes(digest, "little")
        return self[word]


_HASHES = _WordHashes()


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` powers of the base and of its inverse, kept up to the next power of two."""
    powers, inverses = _power_tables(max(count - 1, 1).bit_length())
    return powers[:count], inverses[:count]


@functools.lru_cache(maxsize=64)
def _power_tables(bits: int) -> tuple[np.ndarray, np.ndarray]:
    tables = []
    for base in (_BASE, _INVERSE):
        factors = np.full(1 << bits, base, dtype=np.uint64)
        factors[0] = 1
        tables.append(np.cumprod(factors, dtype=np.uint64))
    return tables[0], tables[1]
