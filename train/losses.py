"""Distillation losses on the teacher's K largest probabilities, token by token, never with all logits in float32.

Shapes: n tokens, D width of the hidden state, N columns of the draft's head, K kept teacher entries, b = K + 1 buckets:
the K entries and "rest", everything else. p is the teacher's law, q the draft's, both at temperature 1 (a tail that was
summed at temperature 1 cannot be tempered afterwards).

A head pruned to the ids H gives q = 0 outside H. Teacher entries outside H then form a part of p, of mass 1 - m, that
no training can reach; the tail's mass counts as reachable (which part of it lies outside H was not recorded). So:
  forward KL   sum p log(p/q) is infinite by a constant. Its finite part, sum over H, is m KL(p_H || q) + m log m with
               p_H = p / m: its gradient in the logits is m (q - p_H), that of the whole sum. The loss is
               m KL(p_H || q): finite, zero at the best reachable q; where the head can do little it weighs little.
  CE           the same with p one sampled token: outside H it contributes nothing.
  reverse KL   q log(q/p) is zero outside H: nothing changes. Its least value is -log m.
  JSD          the mixture is beta p outside H: a constant, -beta (1 - m) log beta, which is kept.
  TV           half of the mass outside H, a constant, which is kept: 1 - TV stays a bound on acceptance.
Merging tokens into buckets only lowers an f-divergence, so each loss is at most its dense value, and equal to it
when K covers the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.config_train import LossTerm

_LOG_FLOOR = -30.0  # log-probabilities below this are rounding
_MASKED = -1e30  # finite, so that a row of it alone has no NaN gradient
CHUNK_ELEMENTS = 1 << 25  # logits of a chunk: 128 MiB in float32
GPU_SHARE = 64  # of a GPU's memory they take one part in so many: every chunk casts the head and adds to its gradient


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the teacher says at n positions: its sampled token, top K ids and logprobs, mass of all other tokens."""

    token_n: Tensor
    top_ids_nK: Tensor
    top_logprobs_nK: Tensor
    tail_n: Tensor

    def __getitem__(self, rows: slice) -> Targets:
        return Targets(
            token_n=self.token_n[rows],
            top_ids_nK=self.top_ids_nK[rows],
            top_logprobs_nK=self.top_logprobs_nK[rows],
            tail_n=self.tail_n[rows],
        )

    def to(self, device: torch.device) -> Targets:
        return Targets(
            token_n=self.token_n.to(device, non_blocking=True),
            top_ids_nK=self.top_ids_nK.to(device, non_blocking=True),
            top_logprobs_nK=self.top_logprobs_nK.to(device, non_blocking=True),
            tail_n=self.tail_n.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Both laws over K + 1 buckets, the last one "rest". `reachable_nb` is False where the head lacks the token;
    there `log_q_nb` is meaningless. `log_p_nb` is floored, `p_nb` is not. `log_total_n`, where it is known, is the
    logsumexp of the draft's logits."""

    p_nb: Tensor
    log_p_nb: Tensor
    log_q_nb: Tensor
    reachable_nb: Tensor
    log_total_n: Tensor | None = None

    @property
    def reachable_p_nb(self) -> Tensor:
        return self.p_nb * self.reachable_nb

    @property
    def q_nb(self) -> Tensor:
        return self.log_q_nb.exp() * self.reachable_nb

    @property
    def unreachable_n(self) -> Tensor:
        return (self.p_nb * ~self.reachable_nb).sum(-1)


def head_columns(head_ids: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """[V]: the head's column of each target id, or N (no column) where it has none."""
    ids_N = torch.as_tensor(head_ids, dtype=torch.int64)
    columns_V = torch.full((vocab_size,), len(ids_N), dtype=torch.int64)
    columns_V[ids_N] = torch.arange(len(ids_N))
    return columns_V


def make_buckets(logits_nN: Tensor, targets: Targets, columns_V: Tensor | None = None) -> Buckets:
    """Both laws in buckets. `columns_V` as from `head_columns`; None for a head over all ids. logits in float32."""
    num_columns = logits_nN.shape[-1]
    columns_nK = targets.top_ids_nK if columns_V is None else columns_V[targets.top_ids_nK]
    # One masked column more stands for tokens that the head lacks; a whole head needs no copy for it
    logits_nM = logits_nN if columns_V is None else functional.pad(logits_nN, (0, 1), value=_MASKED)
    top_nK = logits_nM.gather(1, columns_nK)
    rest_n1 = logits_nM.scatter(1, columns_nK, _MASKED).logsumexp(-1, keepdim=True)
    # Not by another pass over the logits, and not rest = total - top, which cancels when the top is nearly all
    total_n1 = torch.logaddexp(rest_n1, top_nK.logsumexp(-1, keepdim=True))
    log_q_nb = torch.cat([top_nK, rest_n1], -1) - total_n1
    tail_n1 = targets.tail_n[:, None]
    log_p_nb = torch.cat([targets.top_logprobs_nK, tail_n1.log()], -1)
    return Buckets(
        p_nb=torch.cat([targets.top_logprobs_nK.exp(), tail_n1], -1),
        log_p_nb=log_p_nb.clamp_min(_LOG_FLOOR),
        log_q_nb=log_q_nb.clamp_min(_LOG_FLOOR),
        reachable_nb=functional.pad(columns_nK < num_columns, (0, 1), value=True),
        log_total_n=total_n1.squeeze(-1),
    )


def cross_entropy(
    logits_nN: Tensor, token_n: Tensor, columns_V: Tensor | None = None, log_total_n: Tensor | None = None
) -> Tensor:
    """[n]: -log q(token); 0 for a token that the head lacks. `log_total_n`, where it is known, is the logits'
    logsumexp."""
    if log_total_n is None:
        log_total_n = logits_nN.logsumexp(-1)
    column_n = token_n if columns_V is None else columns_V[token_n]
    is_there_n = column_n < logits_nN.shape[-1]
    logit_n = logits_nN.gather(1, (column_n * is_there_n)[:, None]).squeeze(1)
    return (log_total_n - logit_n) * is_there_n


def forward_kl(buckets: Buckets) -> Tensor:
    """[n]: m KL(p_H || q) over the K entries and the rest: top-k knowledge distillation with a tail bucket.

    KL(p || q) = sum p log(p/q) (Hinton et al., arXiv 1503.02531, at temperature 1); the bucket for the tail makes its
    gradient unbiased in the K tokens' probabilities, where renormalising is not.
    """
    p_nb = buckets.reachable_p_nb
    mass_n = p_nb.sum(-1)
    kl_n = (p_nb * (buckets.log_p_nb - buckets.log_q_nb)).sum(-1)
    return kl_n - mass_n * mass_n.clamp_min(math.exp(_LOG_FLOOR)).log()


def renormalised_kl(buckets: Buckets) -> Tensor:
    """[n]: KL(p~ || q), p~ the reachable top K renormalised to one; the tail is forgotten.

    Biased: its minimum is q = p~, which has no tail (Anshumann et al., Sparse Logit Sampling, arXiv 2503.16870,
    section 3). Kept as the ablation. 0 for a token without a reachable entry.
    """
    p_nK = buckets.reachable_p_nb[:, :-1]
    mass_n1 = p_nK.sum(-1, keepdim=True).clamp_min(math.exp(_LOG_FLOOR))
    log_ratio_nK = buckets.log_p_nb[:, :-1] - mass_n1.log() - buckets.log_q_nb[:, :-1]
    return (p_nK / mass_n1 * log_ratio_nK).sum(-1)


def reverse_kl(buckets: Buckets) -> Tensor:
    """[n]: KL(q || p) = sum q log(q/p), in buckets (Gu et al., MiniLLM, arXiv 2306.08543, equation 1)."""
    return (buckets.q_nb * (buckets.log_q_nb - buckets.log_p_nb)).sum(-1)


def jensen_shannon(buckets: Buckets, beta: float = 0.5) -> Tensor:
    """[n]: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, 0 < beta < 1.

    Generalised JSD (Agarwal et al., GKD, arXiv 2306.13649, equation 1).
    """
    log_p_nb, log_q_nb = buckets.log_p_nb, buckets.log_q_nb
    log_m_nb = torch.logaddexp(log_p_nb + math.log(beta), log_q_nb + math.log1p(-beta))
    from_p_n = (buckets.reachable_p_nb * (log_p_nb - log_m_nb)).sum(-1)
    from_q_n = (buckets.q_nb * (log_q_nb - log_m_nb)).sum(-1)
    return beta * (from_p_n - buckets.unreachable_n * math.log(beta)) + (1 - beta) * from_q_n


def total_variation(buckets: Buckets) -> Tensor:
    """[n]: 1/2 sum |p - q| in buckets (Zhou et al., DistillSpec, arXiv 2310.08461, section 4).

    1 - TV is the acceptance of speculative sampling when the buckets are tokens, and above it otherwise.
    """
    return 0.5 * ((buckets.reachable_p_nb - buckets.q_nb).abs().sum(-1) + buckets.unreachable_n)


LOSSES: Mapping[str, Callable[[Buckets], Tensor]] = {
    "kl": forward_kl,
    "kl_renormalised": renormalised_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
}
LOSS_NAMES = ("ce", *LOSSES)
METRICS = ("acc_low", "acc_high", "top1")


def exact_acceptance(draft_logits_nN: Tensor, teacher_logits_nV: Tensor, columns_V: Tensor | None = None) -> Tensor:
    """[n]: sum over all tokens of min(p, q), the probability that speculative sampling at temperature 1 accepts."""
    p_nV, q_nN = teacher_logits_nV.float().softmax(-1), draft_logits_nN.float().softmax(-1)
    if columns_V is not None:
        q_nN = functional.pad(q_nN, (0, 1))[:, columns_V]
    return torch.minimum(p_nV, q_nN).sum(-1)


def acceptance_bounds(buckets: Buckets) -> tuple[Tensor, Tensor]:
    """[n], [n]: sum over the top K of min(p, q), and that plus min of the two rests: acceptance lies between."""
    overlap_nb = torch.minimum(buckets.reachable_p_nb, buckets.q_nb)
    return overlap_nb[:, :-1].sum(-1), overlap_nb.sum(-1)


def token_losses(
    logits_nN: Tensor, targets: Targets, terms: Sequence[LossTerm], columns_V: Tensor | None = None
) -> dict[str, Tensor]:
    """Per token [n]: each term's unweighted value by name, and acc_low, acc_high, top1 (both laws' best tokens agree).

    The last three carry no gradient. Computed in float32 at least.
    """
    if logits_nN.dtype.itemsize < torch.float32.itemsize:
        logits_nN = logits_nN.float()
    buckets = make_buckets(logits_nN, targets, columns_V)
    values = {}
    for term in terms:
        if term.name == "ce":
            values["ce"] = cross_entropy(logits_nN, targets.token_n, columns_V, buckets.log_total_n)
        elif term.name == "jsd":
            values["jsd"] = jensen_shannon(buckets, term.beta)
        else:
            values[term.name] = LOSSES[term.name](buckets)
    with torch.no_grad():
        values["acc_low"], values["acc_high"] = acceptance_bounds(buckets)
        best_n = targets.top_ids_nK[:, 0] if columns_V is None else columns_V[targets.top_ids_nK[:, 0]]
        values["top1"] = (logits_nN.argmax(-1) == best_n).float()
    return values


def chunk_elements_on(device: torch.device) -> int:
    """How many logits may exist in float32 at a time on this device."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS
    return max(CHUNK_ELEMENTS, torch.cuda.get_device_properties(device).total_memory // GPU_SHARE // 4)


def chunked_losses(
    hidden_nD: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Targets,
    terms: Sequence[LossTerm],
    columns_V: Tensor | None = None,
    *,
    num_columns: int,
    chunk_elements: int = CHUNK_ELEMENTS,
    losses: Callable[..., dict[str, Tensor]] = token_losses,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted loss summed over n tokens, and each value of `token_losses` summed (no gradient), float32.

    Logits exist for at most chunk_elements / num_columns tokens at a time, forward and backward: each chunk is
    computed again in the backward pass, so that memory is a few float32 copies of one chunk's logits, whatever n is.
    `losses` is `token_losses` or what it was compiled to.
    """

    def sums(hidden_cD: Tensor, rows: Targets) -> tuple[Tensor, ...]:
        values = losses(head(hidden_cD), rows, terms, columns_V)
        loss = sum(
            (term.weight * values[term.name].sum() for term in terms), hidden_cD.new_zeros((), dtype=torch.float32)
        )
        return (loss, *(value.detach().sum() for value in values.values()))

    names = [*dict.fromkeys(term.name for term in terms), *METRICS]
    most = max(1, chunk_elements // num_columns)
    size = math.ceil(len(hidden_nD) / max(1, math.ceil(len(hidden_nD) / most))) or 1  # chunks of about one size
    parts = [
        checkpoint(sums, hidden_nD[first : first + size], targets[first : first + size], use_reentrant=False)
        for first in range(0, len(hidden_nD), size)
    ]
    if not parts:  # a sequence of padding alone still takes part in the collectives of the backward pass
        return hidden_nD.float().sum() + head(hidden_nD).float().sum(), dict.fromkeys(
            names, hidden_nD.new_zeros(()).float()
        )
    totals = [torch.stack(column).sum() for column in zip(*parts, strict=True)]
    return totals[0], dict(zip(names, totals[1:], strict=True))
