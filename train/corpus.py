"""Training documents in flat arrays, in memory or mapped from files: any document is one slice away.

A document is a prompt and a completion of the teacher. R counts the completion tokens of all documents, K the kept
teacher entries. A row of the [R] arrays is one completion token with what the teacher said before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from train.losses import Targets


class Record(Protocol):
    """What is read of a trace (`data.common.TraceRecord` is one)."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def completion(self) -> int: ...
    @property
    def prompt_ids(self) -> np.ndarray: ...
    @property
    def completion_ids(self) -> np.ndarray: ...
    @property
    def top_ids(self) -> np.ndarray: ...
    @property
    def top_logprobs(self) -> np.ndarray: ...
    @property
    def tail_mass(self) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """`names` [documents] are for messages; `token_begins` and `row_begins` [documents + 1] say where a document's
    tokens and rows start; `tokens` holds prompts and completions in turn."""

    names: np.ndarray
    tokens: np.ndarray
    token_begins: np.ndarray
    row_begins: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    tail_mass: np.ndarray

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> Corpus:
        """ValueError when there is no record, or records keep different numbers of teacher entries."""
        records = list(records)
        if not records:
            raise ValueError("got no completion to train on; look at the filter's report, or generate more traces")
        kept = sorted({record.top_ids.shape[1] for record in records})
        if len(kept) > 1:
            raise ValueError(f"got completions with {kept} teacher entries a token, expected one number for all")
        sizes = [(len(record.prompt_ids), len(record.completion_ids)) for record in records]
        return cls(
            names=np.array([f"{record.prompt_id}/{record.completion}" for record in records]),
            tokens=np.concatenate(
                [part for record in records for part in (record.prompt_ids, record.completion_ids)]
            ).astype(np.int32),
            token_begins=np.cumsum([0] + [prompt + completion for prompt, completion in sizes]),
            row_begins=np.cumsum([0] + [completion for _, completion in sizes]),
            top_ids=np.concatenate([record.top_ids for record in records]).astype(np.int32),
            top_logprobs=np.concatenate([record.top_logprobs for record in records]).astype(np.float32),
            tail_mass=np.concatenate([record.tail_mass for record in records]).astype(np.float32),
        )

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """A saved corpus, its arrays mapped: processes of one machine share the memory."""
        return cls(**{field.name: np.load(folder / f"{field.name}.npy", mmap_mode="r") for field in fields(cls)})

    def save(self, folder: Path) -> None:
        """One .npy file an array, in an existing folder."""
        for field in fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name))

    def __len__(self) -> int:
        return len(self.token_begins) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[documents]: tokens that training reads of each: all but the last."""
        return np.diff(self.token_begins) - 1

    @property
    def completion_lengths(self) -> np.ndarray:
        """[documents]: tokens that training predicts of each."""
        return np.diff(self.row_begins)

    def document(self, number: int) -> tuple[np.ndarray, int, np.ndarray]:
        """Its token ids, the index of its first completion token, and its rows."""
        ids = self.tokens[self.token_begins[number] : self.token_begins[number + 1]]
        rows = np.arange(self.row_begins[number], self.row_begins[number + 1])
        return ids, len(ids) - len(rows), rows

    def targets(self, rows: np.ndarray) -> Targets:
        """What the teacher said at these rows."""
        documents = np.searchsorted(self.row_begins, rows, side="right") - 1
        from_end = self.row_begins[documents + 1] - rows
        token = self.tokens[self.token_begins[documents + 1] - from_end]
        return Targets(
            token_n=torch.from_numpy(token.astype(np.int64)),
            top_ids_nK=torch.from_numpy(self.top_ids[rows].astype(np.int64)),
            top_logprobs_nK=torch.from_numpy(np.array(self.top_logprobs[rows])),
            tail_n=torch.from_numpy(np.array(self.tail_mass[rows])),
        )

    def select(self, documents: Sequence[int]) -> Corpus:
        """A corpus of some of the documents, in the order given."""
        tokens = [self.document(number)[0] for number in documents]
        rows = [self.document(number)[2] for number in documents]
        every_row = np.concatenate(rows)
        return Corpus(
            names=self.names[list(documents)],
            tokens=np.concatenate(tokens),
            token_begins=np.cumsum([0] + [len(ids) for ids in tokens]),
            row_begins=np.cumsum([0] + [len(each) for each in rows]),
            top_ids=self.top_ids[every_row],
            top_logprobs=self.top_logprobs[every_row],
            tail_mass=self.tail_mass[every_row],
        )

    def token_mass(self, vocab_size: int) -> np.ndarray:
        """[V] float64: the teacher's probability of each id summed over all rows, of the kept entries: the expected
        number of times it says it."""
        weights = np.exp(self.top_logprobs.astype(np.float64)).reshape(-1)
        return np.bincount(self.top_ids.reshape(-1), weights=weights, minlength=vocab_size)

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """One corpus of the documents of several, in order; a single one stays mapped."""
        if len(corpora) == 1:
            return corpora[0]

        def values(name: str) -> np.ndarray:
            arrays = [getattr(corpus, name) for corpus in corpora]
            if name.endswith("_begins"):
                return np.cumsum(np.concatenate([[0], *(np.diff(array) for array in arrays)]))
            return np.concatenate(arrays)

        return cls(**{field.name: values(field.name) for field in fields(cls)})
