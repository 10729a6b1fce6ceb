"""Batches of whole texts of like length: padded on the right, so that plain causal attention needs no mask.

B texts a batch, T tokens the longest, N completion tokens in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train.texts import Text


@dataclass(frozen=True, kw_only=True)
class Batch:
    """ids_BT; at_N: flat places (b * T + t) whose next token is a completion's; next_N: those tokens; text_N: which
    text each belongs to. number: of a batch that comes again, to know it by."""

    ids_BT: Tensor
    at_N: Tensor
    next_N: Tensor
    text_N: Tensor
    number: int | None = None


def batch_of(texts: Sequence[Text], numbers: Sequence[int], device: str, number: int | None = None) -> Batch:
    """The texts with these numbers as one batch."""
    chosen = [texts[number] for number in numbers]
    width = max(len(text.prompt) + len(text.completion) for text in chosen)
    ids_BT = np.zeros((len(chosen), width), dtype=np.int64)
    wanted_BT = np.zeros((len(chosen), width), dtype=bool)
    for row, text in enumerate(chosen):
        start, end = len(text.prompt), len(text.prompt) + len(text.completion)
        ids_BT[row, :start], ids_BT[row, start:end] = text.prompt, text.completion
        wanted_BT[row, start - 1 : end - 1] = True
    at_N = np.flatnonzero(wanted_BT)
    arrays = (ids_BT, at_N, ids_BT.reshape(-1)[at_N + 1], np.asarray(numbers)[at_N // width])
    tensors = [torch.from_numpy(array) for array in arrays]
    if device != "cpu":  # from pinned memory, or a copy waits for all that the device has still to do
        tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return Batch(**dict(zip(("ids_BT", "at_N", "next_N", "text_N"), tensors, strict=True)), number=number)


def grouped(texts: Sequence[Text], tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Numbers of all texts in groups of about `tokens` padded tokens, texts of like length together, shuffled."""
    lengths = np.array([len(text.prompt) + len(text.completion) for text in texts])
    order = np.argsort(lengths + rng.random(len(texts)))
    groups: list[list[int]] = [[]]
    for number in order:
        if groups[-1] and lengths[number] * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(int(number))
    return [groups[i] for i in rng.permutation(len(groups))]


def endless_batches(texts: Sequence[Text], tokens: int, seed: int, device: str) -> Iterator[Batch]:
    """Epoch after epoch, the same batches, each in an order of its own."""
    rng = np.random.default_rng(seed)
    groups = grouped(texts, tokens, rng)
    while True:
        for number in rng.permutation(len(groups)):
            yield batch_of(texts, groups[number], device, int(number))
