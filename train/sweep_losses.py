"""Losses of a sweep by name, on the teacher's whole law over the draft's head ("dense") or on its top 8 ("top8").

The functions are train.losses' own; here they get their buckets. N positions, H ids of the draft's head, K = 8.
A name is a loss, "A+B" (the mean of two) or "A>B" (A in the first half of the training, then B).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.losses import LOSSES, Buckets, Targets, cross_entropy, make_buckets

TOP = 8


@dataclass(frozen=True, kw_only=True)
class TeacherLaw:
    """logp_NH: its log-probabilities of the head's ids; targets: its sampled tokens and top 8 of all ids;
    columns_V: the head's column of each id (H: none)."""

    logp_NH: Tensor
    targets: Targets
    columns_V: Tensor

    def narrowed(self, size: int) -> "TeacherLaw":
        """The same for a smaller head: its first `size` ids."""
        return TeacherLaw(
            logp_NH=self.logp_NH[:, :size], targets=self.targets, columns_V=self.columns_V.clamp(max=size)
        )


def loss_of(name: str, logits_NH: Tensor, law: TeacherLaw, progress: float) -> Tensor:
    """The mean over positions of the loss `name` when `progress` (0 to 1) of the training is done."""
    if ">" in name:
        first, second = name.split(">")
        name = first if progress < 0.5 else second
    parts = [_one(part, logits_NH, law) for part in name.split("+")]
    return torch.stack(parts).mean()


def _one(name: str, logits_NH: Tensor, law: TeacherLaw) -> Tensor:
    if name == "ce":
        return cross_entropy(logits_NH, law.targets.token_n, law.columns_V).mean()
    kind, _, loss = name.partition(":")
    makers = {"dense": dense_buckets, "top8": top_buckets}
    if kind not in makers or loss not in LOSSES:
        raise ValueError(f"loss is {name!r}; expected ce, or dense: or top8: and one of {', '.join(LOSSES)}")
    return LOSSES[loss](makers[kind](logits_NH, law)).mean()


def dense_buckets(logits_NH: Tensor, law: TeacherLaw) -> Buckets:
    """A bucket for each id of the head and none for the rest, which the draft cannot reach."""
    p_NH = law.logp_NH.exp()
    return Buckets(
        p_nb=p_NH,
        log_p_nb=law.logp_NH,
        log_q_nb=logits_NH.log_softmax(1),
        reachable_nb=torch.ones_like(p_NH, dtype=torch.bool),
    )


def top_buckets(logits_NH: Tensor, law: TeacherLaw) -> Buckets:
    """What a trace holds: the eight likeliest tokens and the rest."""
    return make_buckets(logits_NH, law.targets, law.columns_V)


def acceptance(logits_NH: Tensor, law: TeacherLaw) -> Tensor:
    """[N]: sum of min(p, q), the probability that a draft token is accepted at temperature 1."""
    return torch.minimum(law.logp_NH.exp(), logits_NH.softmax(1)).sum(1)
