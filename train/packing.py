"""Completions packed into sequences of one length, each document with its own positions and attention.

    documents a (5 tokens), b (3)     sequence of 10
    input_ids     a0 a1 a2 a3 | b0 b1 | 0 0 0 0     the last token of a document is only predicted, never read
    position_ids   0  1  2  3 |  0  1 | 0 1 2 3     a position that does not follow its neighbour starts a document:
                                                    transformers then lets a token attend to its own document alone
Padding is one more document, on which nothing is trained. Which document goes where: train/order.py.
Shapes: S sequences of L tokens, n loss positions, E documents, padding among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train.corpus import Corpus
from train.losses import Targets


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`positions_n` index the flattened [S * L] positions whose next token is trained on; `ends_E` [E + 1] are the
    places in them where a document ends, 0 first; `documents` are the corpus's numbers, for messages."""

    input_ids_SL: Tensor
    position_ids_SL: Tensor
    positions_n: Tensor
    ends_E: Tensor
    targets: Targets
    documents: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        return Batch(
            input_ids_SL=self.input_ids_SL.to(device, non_blocking=True),
            position_ids_SL=self.position_ids_SL.to(device, non_blocking=True),
            positions_n=self.positions_n.to(device, non_blocking=True),
            ends_E=self.ends_E.to(device, non_blocking=True),
            targets=self.targets.to(device),
            documents=self.documents,
        )


def pack(corpus: Corpus, sequences: Sequence[Sequence[int]], length: int) -> Batch:
    """The batch of these sequences; an empty one is padding alone."""
    input_ids_SL = np.zeros((len(sequences), length), dtype=np.int64)
    position_ids_SL = np.zeros((len(sequences), length), dtype=np.int64)
    positions, rows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for number, documents in enumerate(sequences):
        for document, begin in zip(documents, _begins(corpus, documents), strict=True):
            ids, first_loss, completion_rows = corpus.document(document)
            end = begin + len(ids) - 1
            input_ids_SL[number, begin:end] = ids[:-1]
            position_ids_SL[number, begin:end] = np.arange(len(ids) - 1)
            positions.append(number * length + np.arange(begin + first_loss - 1, end))
            rows.append(completion_rows)
        used = int(sum(corpus.lengths[list(documents)]))
        position_ids_SL[number, used:] = np.arange(length - used)
    starts = np.flatnonzero(position_ids_SL == 0)
    return Batch(
        input_ids_SL=torch.from_numpy(input_ids_SL),
        position_ids_SL=torch.from_numpy(position_ids_SL),
        positions_n=torch.from_numpy(np.concatenate(positions)),
        ends_E=torch.from_numpy(np.append(starts, position_ids_SL.size).astype(np.int32)),
        targets=corpus.targets(np.concatenate(rows)),
        documents=tuple(document for documents in sequences for document in documents),
    )


def _begins(corpus: Corpus, documents: Sequence[int]) -> Iterator[int]:
    begin = 0
    for document in documents:
        yield begin
        begin += int(corpus.lengths[document])
