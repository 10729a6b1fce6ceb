"""On-policy batches (DistillSpec, arXiv 2310.08461): the student writes, the teacher's law there is what it learns.

A draft starts every round from the target's own text, so the student does too: it continues texts of the target from
somewhere in their middle.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.sweep_batches import Batch, batch_of
from train.texts import Text

ROWS = 512
GRID = 16  # prefixes are cut to a multiple of this, so that rows of equal length are found


def mixed_with_own(
    batches: Iterator[Batch], student: Any, head_ids_H: Tensor, texts: Sequence[Text], length: int
) -> Iterator[Batch]:
    """Batches of the target's texts and of the student's in turn."""
    rng = np.random.default_rng(1)
    by_cut = _cuts(texts)
    own: list[Batch] = []
    while True:
        yield next(batches)
        if not own:
            own = _own_batches(student, head_ids_H, texts, by_cut, length, rng)
        yield own.pop()


def _cuts(texts: Sequence[Text]) -> dict[int, np.ndarray]:
    """Length of a prefix -> numbers of the texts that can be cut there: behind the prompt, before the end."""
    found: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        start, end = len(text.prompt), len(text.prompt) + len(text.completion)
        for cut in range(-(-start // GRID) * GRID, end, GRID):
            found.setdefault(cut, []).append(number)
    return {cut: np.array(numbers) for cut, numbers in found.items() if len(numbers) >= 2}


def _own_batches(
    student: Any,
    head_ids_H: Tensor,
    texts: Sequence[Text],
    by_cut: dict[int, np.ndarray],
    length: int,
    rng: np.random.Generator,
) -> list[Batch]:
    """ROWS texts cut at one place and continued by the student, in four batches; only its own tokens count."""
    weights = np.array([len(numbers) for numbers in by_cut.values()], dtype=float)
    cut = list(by_cut)[rng.choice(len(weights), p=weights / weights.sum())]
    chosen = rng.choice(by_cut[cut], size=ROWS)
    prefixes = np.stack([np.concatenate([texts[n].prompt, texts[n].completion])[:cut] for n in chosen])
    ids_BT = torch.from_numpy(prefixes.astype(np.int64)).to(head_ids_H.device)
    written = sample(student, head_ids_H, ids_BT, length).cpu().numpy()
    own = [Text(source="own", prompt=p, completion=w) for p, w in zip(prefixes, written, strict=True)]
    quarters = np.array_split(np.arange(ROWS), 4)
    return [batch_of(own, quarter.tolist(), str(head_ids_H.device)) for quarter in quarters]


@torch.no_grad()
def sample(student: Any, head_ids_H: Tensor, ids_BT: Tensor, length: int) -> Tensor:
    """`length` tokens a row drawn from the student at temperature 1 [B, length]."""
    written, cache = [], None
    with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=ids_BT.is_cuda):
        for _ in range(length):
            out = student.get_decoder()(input_ids=ids_BT, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            q_BH = student.get_output_embeddings()(out.last_hidden_state[:, -1]).float().softmax(1)
            ids_BT = head_ids_H[torch.multinomial(q_BH, 1)]
            written.append(ids_BT)
    return torch.cat(written, 1)
