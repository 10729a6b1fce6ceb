"""Which sequences each step trains on: a function of the corpus, the recipe and the step, not of the processes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.config_train import RecipeConfig

LOOKAHEAD = 64  # sequences that are being filled at a time: more pack tighter and mix less


def plan_epoch(lengths: np.ndarray, length: int, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """Sequences as tuples of document numbers, in training order: every document once, shuffled, each into the
    fullest of the open sequences that still has room for it.

    `lengths` count the tokens read (`Corpus.lengths`), each at most `length`.
    """
    assert len(lengths) == 0 or lengths.max() <= length, "documents longer than the sequence are dealt with earlier"
    rng = np.random.default_rng((seed, epoch))
    open_: list[tuple[int, int]] = []  # (room left, sequence), sorted
    sequences: list[list[int]] = []
    for document in rng.permutation(len(lengths)).tolist():
        size = int(lengths[document])
        index = bisect.bisect_left(open_, (size, -1))
        if index < len(open_):
            room, sequence = open_.pop(index)
        else:
            room, sequence = length, len(sequences)
            sequences.append([])
        sequences[sequence].append(document)
        bisect.insort(open_, (room - size, sequence))
        if len(open_) > LOOKAHEAD:
            open_.pop(0)
    return [tuple(sequences[index]) for index in rng.permutation(len(sequences))]


class Order:
    """The steps of one training: `order[step]` is the tuple of sequences of that step; `len(order)` how many."""

    def __init__(self, lengths: np.ndarray, recipe: RecipeConfig) -> None:
        self.lengths, self.recipe = lengths, recipe
        self.epochs: list[list[tuple[int, ...]]] = []
        if recipe.steps is not None:
            self.steps = recipe.steps
        else:
            assert recipe.epochs is not None
            while len(self.epochs) < recipe.epochs:
                self._plan_one_more()
            self.steps = math.ceil(sum(map(len, self.epochs)) / recipe.sequences)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Sequence[tuple[int, ...]]:
        if not 0 <= step < self.steps:
            raise IndexError(step)
        return list(self._sequences(step * self.recipe.sequences, (step + 1) * self.recipe.sequences))

    def _sequences(self, first: int, end: int) -> Iterator[tuple[int, ...]]:
        """Numbers first to end of all epochs in a row; epochs are planned as they are reached."""
        begin, epoch = 0, 0
        while begin < end:
            if epoch == len(self.epochs):
                if epoch == self.recipe.epochs:
                    return
                self._plan_one_more()
            plan = self.epochs[epoch]
            yield from plan[max(0, first - begin) : max(0, end - begin)]
            begin, epoch = begin + len(plan), epoch + 1

    def _plan_one_more(self) -> None:
        recipe = self.recipe
        self.epochs.append(plan_epoch(self.lengths, recipe.length, recipe.seed, len(self.epochs)))


def share(sequences: Sequence[tuple[int, ...]], rank: int, processes: int, micro_batch: int) -> list[Sequence[tuple]]:
    """A process's micro-batches of a step: every `processes`-th sequence, in groups of at most `micro_batch`.

    Each process gets the same number, as collectives in them must match; an empty sequence is padding.
    """
    each = math.ceil(len(sequences) / processes)
    mine: list[tuple[int, ...]] = list(sequences[rank::processes])
    mine += [()] * (each - len(mine))
    return [mine[first : first + micro_batch] for first in range(0, each, micro_batch)]
