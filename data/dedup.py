"""Duplicates: the same prompt and completion again, and prompts that nearly repeat an earlier one.

A prompt is judged once, at its first row that every other step keeps; what is kept of it later follows. Near
duplicates are found with MinHash and locality-sensitive hashing (datasketch) and confirmed by the exact Jaccard
similarity of their shingles, so a collision of hashes drops nothing.

Problems of a generator share their wording on purpose and differ in their numbers, so they are never near duplicates
of each other: of them only the same text again is a duplicate.

Memory: about 100 bytes a row for its hash; for every kept prompt its LSH entry (about 12 kB) and its shingles (4 bytes
a word).
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

import numpy as np
from datasketch import MinHash, MinHashLSH

from data.checks import Drop
from data.rows import Row
from data.words import plain, window_hashes, word_hashes, words

NUM_PERM = 128
# A candidate that is none costs one comparison, a pair that is missed stays in the data: more bands than usual.
_WEIGHTS = (0.1, 0.9)


def row_key(row: Row) -> bytes:
    """16 bytes that are equal when prompt and completion are, case, spacing and character forms aside."""
    return _digest(
        *(part for message in row.messages for part in (message["role"], message["content"])), row.completion
    )


def _digest(*texts: str) -> bytes:
    text = "\0".join(" ".join(plain(part).split()) for part in texts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Deduplicator:
    """The rows seen so far. Rows must come in a fixed order: the first of several duplicates stays."""

    def __init__(self, shingle_words: int, threshold: float) -> None:
        self.rows: set[bytes] = set()
        self.verdicts: dict[str, Drop | None] = {}
        self.prompts = NearPrompts(shingle_words, threshold)

    def check(self, row_hash: bytes, prompt_id: str, prompt: str, is_generated: bool) -> Drop | None:
        """Whether this row, which all other steps keep, is a duplicate; if not, later ones are compared with it."""
        if row_hash in self.rows:
            return Drop(reason="exact_duplicate")
        self.rows.add(row_hash)
        if prompt_id not in self.verdicts:
            self.verdicts[prompt_id] = self.prompts.check(prompt_id, prompt, is_generated)
        return self.verdicts[prompt_id]


class NearPrompts:
    """The kept prompts, by number in order of arrival: ids, LSH index and shingles."""

    def __init__(self, shingle_words: int, threshold: float) -> None:
        self.shingle_words, self.threshold = shingle_words, threshold
        self.ids: list[str] = []
        self.texts: dict[bytes, int] = {}
        # Above 0.9 datasketch would choose a single band, which it then refuses; what is found is compared anyway.
        self.index = MinHashLSH(threshold=min(threshold, 0.9), num_perm=NUM_PERM, weights=_WEIGHTS)
        self.empty = MinHash(num_perm=NUM_PERM, hashfunc=int)
        self.shingles = array.array("I")
        self.ends = array.array("Q", [0])

    def check(self, prompt_id: str, prompt: str, is_generated: bool) -> Drop | None:
        """The earlier prompt that this one nearly repeats, if any; else it is kept."""
        digest = _digest(prompt)
        if digest in self.texts:
            return Drop(reason="near_duplicate", detail={"of": self.ids[self.texts[digest]], "jaccard": 1.0})
        shingles = self.shingle_set(words(prompt))
        if len(shingles) and not is_generated:
            sketch = self.empty.copy()
            sketch.update_batch(shingles.tolist())
            found = self._most_similar(shingles, self.index.query(sketch))
            if found is not None:
                return Drop(reason="near_duplicate", detail={"of": self.ids[found[0]], "jaccard": round(found[1], 4)})
            self.index.insert(len(self.ids), sketch, check_duplication=False)
            self.shingles.frombytes(shingles.tobytes())
        self.texts[digest] = len(self.ids)
        self.ids.append(prompt_id)
        self.ends.append(len(self.shingles))
        return None

    def shingle_set(self, prompt_words: list[str]) -> np.ndarray:
        """The distinct shingles, as ascending uint32 hashes; a prompt shorter than a shingle is one."""
        hashes_W = word_hashes(prompt_words)
        (windows,) = window_hashes(hashes_W, min(self.shingle_words, max(len(hashes_W), 1)))
        return np.unique((windows >> np.uint64(32)).astype(np.uint32))

    def _most_similar(self, shingles: np.ndarray, candidates: Sequence[int]) -> tuple[int, float] | None:
        """(number, similarity) of the candidate most like this prompt, the earliest of equals; None below threshold."""
        best: tuple[int, float] | None = None
        for number in sorted(candidates):
            similarity = self._jaccard(shingles, number)
            if similarity >= self.threshold and (best is None or similarity > best[1]):
                best = number, similarity
        return best

    def _jaccard(self, shingles: np.ndarray, number: int) -> float:
        view = np.frombuffer(self.shingles, dtype=np.uint32)[self.ends[number] : self.ends[number + 1]]
        shared = len(np.intersect1d(shingles, view, assume_unique=True))
        return shared / (len(shingles) + len(view) - shared)
