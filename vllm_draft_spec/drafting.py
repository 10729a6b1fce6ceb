"""How a draft token is sampled, and with which probabilities; pure tensor code. And how numbers get to the device.

Shapes: B rows, k drafts a row, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GREEDY = 1e-5  # a temperature below it means greedy, as in vLLM's sampler


def sample_draft(
    logits_BD: torch.Tensor, temperature_B: torch.Tensor, noise_BD: torch.Tensor, certain_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft ids [B] and the law they were drawn from, float32 [B, D].

    noise_BD: standard exponential. Greedy rows take the most likely token; their law is not read by the rejection
    sampler. certain_B: rows that must draft the most likely token although they sample; their law is one-hot. Where the
    logits are not finite the law is all zeros: such a draft is rejected, and the token in its place is the target's.
    """
    bad_B = ~torch.isfinite(logits_BD.amax(-1))
    logits_BD = torch.where(bad_B[:, None], 0.0, logits_BD)
    greedy_B = temperature_B < GREEDY
    probs_BD = (logits_BD / torch.where(greedy_B, 1.0, temperature_B)[:, None]).softmax(-1, dtype=torch.float32)
    best_B = probs_BD.argmax(-1)
    ids_B = (probs_BD / noise_BD).argmax(-1)
    fixed_B = greedy_B if certain_B is None else greedy_B | certain_B
    ids_B = torch.where(fixed_B, best_B, ids_B)
    if certain_B is not None:
        one_hot_BD = torch.zeros_like(probs_BD).scatter_(1, best_B[:, None], 1.0)
        probs_BD = torch.where(certain_B[:, None], one_hot_BD, probs_BD)
    return ids_B, probs_BD.masked_fill(bad_B[:, None], 0.0)


def in_target_vocabulary(probs_BD: torch.Tensor, draft_to_target_D: torch.Tensor, vocab: int) -> torch.Tensor:
    """The same law over the target's ids [B, vocab]. draft_to_target_D: -1 where the target lacks the token; there the
    law must be zero."""
    kept_D = draft_to_target_D >= 0
    probs_BV = probs_BD.new_zeros(probs_BD.shape[0], vocab)
    # index_add and not a write: ids without a partner all point at 0 and add nothing there
    return probs_BV.index_add_(1, draft_to_target_D.clamp(min=0), probs_BD * kept_D)


def drop_beyond(
    ids_Bk: torch.Tensor, probs_BkV: torch.Tensor | None, room_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Drafts that the draft model could not make, all but a row's first room_B, become -1, with a law of all zeros:
    always rejected, and the token in their place comes from the target's own law.

    The j-th draft (from 0) is made by feeding the token at the next position + j, for which the model must have been
    built. Whether a draft is dropped depends on what came before it, never on the token, so the output's law stays
    exact.
    """
    steps_k = torch.arange(ids_Bk.shape[1], device=ids_Bk.device)
    beyond_Bk = steps_k >= room_B[:, None]
    ids_Bk = ids_Bk.masked_fill(beyond_Bk, -1)
    return ids_Bk, None if probs_BkV is None else probs_BkV.masked_fill(beyond_Bk[:, :, None], 0.0)


def without_dropped(rows: list[list[int]]) -> list[list[int]]:
    """Draft ids by row, each cut at its first -1."""
    return [row[: row.index(-1)] if -1 in row else row for row in rows]


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on the device. From ordinary memory a GPU's driver copies only once the device has done all it was
    given, and the host waits."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64."""
    return sent(torch.tensor(values, dtype=torch.int64), device)
