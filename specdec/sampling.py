"""From logits to tokens: the processed law, drawing from it, and the accept / reject rule.

Shapes: B rows, K drafted positions, J = K + 1 verified positions, V vocabulary, S stop ids.
Everything here is fixed-shape tensor code without a host synchronisation, so that it can be captured in a CUDA
graph. `Features` is what the host knows about the batch's parameters; it only skips work that would change no
row (a row's law is the same whichever features its neighbours switch on).
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

_NEG_INF = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Features:
    """Which steps of the processing any row of the batch needs (known on the host, part of a graph's key)."""

    all_greedy: bool = False
    any_greedy: bool = False
    penalties: bool = False
    allowed: bool = False
    min_tokens: bool = False
    min_p: bool = False
    top_p: bool = False
    max_top_k: int = 0

    @property
    def argmax_only(self) -> bool:
        """Whether the largest raw logit of each position is all that matters."""
        return self.all_greedy and not (self.penalties or self.allowed or self.min_tokens)


@dataclass(frozen=True, kw_only=True)
class LawParams:
    """Each row's sampling parameters as tensors: float64 / int64 [B], stop_BS padded with -1, masks bool [B, V]."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    min_length_B: Tensor  # sequence length from which stop ids are allowed
    stop_BS: Tensor
    allowed_BV: Tensor | None = None
    in_prompt_BV: Tensor | None = None
    counts_BV: Tensor | None = None  # int32, occurrences in the output so far

    def head(self, num_rows: int) -> "LawParams":
        """The first rows, as views."""
        cut = {f.name: getattr(self, f.name) for f in fields(self)}
        return LawParams(**{name: None if t is None else t[:num_rows] for name, t in cut.items()})


def constrain_logits(
    logits_BJV: Tensor, law: LawParams, positions_BJ: Tensor, counts_BJV: Tensor | None, features: Features
) -> tuple[Tensor, Tensor]:
    """Everything that comes before the temperature: allowed ids, early stop ids, penalties.

    logits_BJV: raw logits; positions_BJ: index in the sequence of the token each position decides; counts_BJV:
    occurrences of every token in the output before that position (needed with features.penalties).
    Returns (logits_BJV in at least float32, bad_BJ): bad marks a NaN, a +inf or no finite logit; such a position
    gets flat logits, so that nothing after it sees a NaN. With features.argmax_only they come back as they are: their
    argmax is the same in any precision, and copies of them would take longer than all that a greedy rule does.
    """
    bad_BJ = ~torch.isfinite(logits_BJV.amax(-1))
    if features.argmax_only:
        return logits_BJV, bad_BJ
    logits_BJV = logits_BJV.to(torch.promote_types(logits_BJV.dtype, torch.float32))
    logits_BJV = torch.where(bad_BJ.unsqueeze(-1), 0.0, logits_BJV)
    if features.allowed:
        assert law.allowed_BV is not None
        logits_BJV = logits_BJV.masked_fill(~law.allowed_BV.unsqueeze(1), _NEG_INF)
    if features.min_tokens:
        logits_BJV = _ban_early_stops(logits_BJV, law, positions_BJ)
    if features.penalties:
        assert counts_BJV is not None
        logits_BJV = _penalize(logits_BJV, law, counts_BJV)
    return logits_BJV, bad_BJ


def law_of(constrained_BJV: Tensor, law: LawParams, features: Features) -> Tensor:
    """The probabilities [B, J, V] that tokens are drawn from: temperature, min_p, top_k, top_p, softmax; one-hot at
    the lowest largest index in greedy rows."""
    if features.all_greedy:
        return _one_hot_argmax(constrained_BJV)
    probs_BJV = _tempered_and_filtered(constrained_BJV, law, features).softmax(-1)
    if features.any_greedy:
        greedy_B11 = (law.temperature_B == 0).view(-1, 1, 1)
        probs_BJV = torch.where(greedy_B11, _one_hot_argmax(constrained_BJV), probs_BJV)
    return probs_BJV


def _one_hot_argmax(logits_BJV: Tensor) -> Tensor:
    return torch.zeros_like(logits_BJV).scatter_(-1, logits_BJV.argmax(-1, keepdim=True), 1.0)


def _ban_early_stops(logits_BJV: Tensor, law: LawParams, positions_BJ: Tensor) -> Tensor:
    early_BJ1 = (positions_BJ < law.min_length_B.unsqueeze(1)).unsqueeze(-1)
    stop_B1S = law.stop_BS.unsqueeze(1)
    # The minimum with +inf leaves a logit as it is: padding ids (-1) point at token 0 and do nothing there.
    ceiling_BJS = torch.where(early_BJ1 & (stop_B1S >= 0), _NEG_INF, -_NEG_INF).to(logits_BJV.dtype)
    index_BJS = stop_B1S.clamp(min=0).expand_as(ceiling_BJS)
    return logits_BJV.scatter_reduce(-1, index_BJS, ceiling_BJS, "amin")


def _penalize(logits_BJV: Tensor, law: LawParams, counts_BJV: Tensor) -> Tensor:
    def per_row(param_B: Tensor) -> Tensor:
        return param_B.to(logits_BJV.dtype).view(-1, 1, 1)

    assert law.in_prompt_BV is not None
    in_output_BJV = counts_BJV > 0
    penalty = per_row(law.repetition_B)
    repeated_BJV = torch.where(logits_BJV > 0, logits_BJV / penalty, logits_BJV * penalty)
    logits_BJV = torch.where(in_output_BJV | law.in_prompt_BV.unsqueeze(1), repeated_BJV, logits_BJV)
    return logits_BJV - per_row(law.frequency_B) * counts_BJV - per_row(law.presence_B) * in_output_BJV


def _tempered_and_filtered(logits_BJV: Tensor, law: LawParams, features: Features) -> Tensor:
    """Temperature, then min_p, top_k, top_p; what is filtered out becomes -inf."""
    temperature_B = torch.where(law.temperature_B == 0, 1.0, law.temperature_B)
    logits_BJV = logits_BJV / temperature_B.to(logits_BJV.dtype).view(-1, 1, 1)
    if features.min_p:
        # prob >= min_p * max prob, in logits; log(0) = -inf keeps everything.
        floor_BJ1 = logits_BJV.amax(-1, keepdim=True) + law.min_p_B.to(logits_BJV.dtype).log().view(-1, 1, 1)
        logits_BJV = logits_BJV.masked_fill(logits_BJV < floor_BJ1, _NEG_INF)
    if features.max_top_k:
        logits_BJV = _keep_top_k(logits_BJV, law.top_k_B, features.max_top_k)
    if features.top_p:
        logits_BJV = _keep_top_p(logits_BJV, law.top_p_B)
    return logits_BJV


def _keep_top_k(logits_BJV: Tensor, top_k_B: Tensor, max_top_k: int) -> Tensor:
    largest_BJk = logits_BJV.topk(min(max_top_k, logits_BJV.shape[-1]), dim=-1).values
    index_BJ1 = (top_k_B.clamp(1, largest_BJk.shape[-1]) - 1).view(-1, 1, 1).expand(-1, largest_BJk.shape[1], 1)
    cut_BJV = logits_BJV < largest_BJk.gather(-1, index_BJ1)
    return logits_BJV.masked_fill(cut_BJV & (top_k_B > 0).view(-1, 1, 1), _NEG_INF)


def _keep_top_p(logits_BJV: Tensor, top_p_B: Tensor) -> Tensor:
    """In descending order (lowest index first among equals) keep a token while the mass before it is below top_p.

    Only values are sorted: the last kept value is a threshold, and of the tokens equal to it the first few stay.
    """
    sorted_BJV = _sorted_descending(logits_BJV)
    probs_BJV = sorted_BJV.softmax(-1, dtype=torch.float64)
    before_BJV = probs_BJV.cumsum(-1) - probs_BJV
    kept_BJ1 = (before_BJV < top_p_B.view(-1, 1, 1)).sum(-1, keepdim=True)
    lowest_BJ1 = sorted_BJV.gather(-1, kept_BJ1 - 1)
    above_BJV, equal_BJV = logits_BJV > lowest_BJ1, logits_BJV == lowest_BJ1
    equal_kept_BJ1 = kept_BJ1 - above_BJV.sum(-1, keepdim=True)
    keep_BJV = above_BJV | (equal_BJV & (equal_BJV.cumsum(-1, dtype=torch.int32) <= equal_kept_BJ1))
    return logits_BJV.masked_fill(~keep_BJV & (top_p_B < 1.0).view(-1, 1, 1), _NEG_INF)


def _sorted_descending(values: Tensor) -> Tensor:
    """Sorted along the last dimension. numpy's vectorised sort is 37 times torch's on a CPU (49,152 float32)."""
    if values.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values.numpy(), axis=-1))
    return values.sort(dim=-1, descending=True).values


def sample(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Inverse-CDF draw from unnormalised weights (each row with a positive sum); int64 [B].

    The cumulative sum is float64. Only tokens of positive weight qualify: a parallel scan may round two equal
    partial sums differently, and the tie must not fall to a token of weight zero.
    """
    positive_BV = weights_BV > 0
    cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64).masked_fill(~positive_BV, 0.0)
    threshold_B1 = uniform_B.unsqueeze(-1) * cdf_BV.amax(-1, keepdim=True)
    return (cdf_BV > threshold_B1).to(torch.uint8).argmax(-1)


def verify_drafts(
    drafts_BK: Tensor,
    draft_probs_BKV: Tensor | None,
    target_probs_BJV: Tensor,
    num_drafts_B: Tensor,
    accept_uniform_BK: Tensor,
    target_uniform_BJ: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: Leviathan et al. (arXiv 2211.17192), Algorithm 1; Chen et al. (arXiv 2302.01318).

    Draft d at position i is accepted with probability min(1, p_i(d) / q_i(d)); the first rejected position is
    sampled again from norm(max(p - q, 0)); when all are accepted, a bonus token comes from p. The committed tokens
    then follow p exactly, whatever q is, as long as each d was drawn from its q.

    draft_probs_BKV: the q that each draft was drawn from; None when every q is one-hot (a deterministic drafter).
    num_drafts_B: how many of the K are real in each row. Returns (num_accepted_B, next_token_B), int64.
    """
    K = drafts_BK.shape[1]
    p_BK = target_probs_BJV[:, :K].gather(-1, drafts_BK.unsqueeze(-1)).squeeze(-1).double()
    if draft_probs_BKV is None:
        q_BK = torch.ones_like(p_BK)
    else:
        q_BK = draft_probs_BKV.gather(-1, drafts_BK.unsqueeze(-1)).squeeze(-1).double()
    # Strictly below: with u = 0 a token of target probability 0 must still be rejected.
    accepted_BK = accept_uniform_BK * q_BK < p_BK
    accepted_BK &= torch.arange(K, device=drafts_BK.device) < num_drafts_B.unsqueeze(1)
    num_accepted_B = accepted_BK.long().cumprod(1).sum(1)
    weights_BV = _residual(drafts_BK, draft_probs_BKV, target_probs_BJV, num_drafts_B, num_accepted_B)
    uniform_B = target_uniform_BJ.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
    return num_accepted_B, sample(weights_BV, uniform_B)


def _residual(
    drafts_BK: Tensor,
    draft_probs_BKV: Tensor | None,
    target_probs_BJV: Tensor,
    num_drafts_B: Tensor,
    num_accepted_B: Tensor,
) -> Tensor:
    """max(p - q, 0) at the first rejected position; p itself after the last draft [B, V]."""
    rows_B = torch.arange(target_probs_BJV.shape[0], device=target_probs_BJV.device)
    p_BV = target_probs_BJV[rows_B, num_accepted_B]
    if drafts_BK.shape[1] == 0:
        return p_BV
    rejected_B = num_accepted_B.clamp(max=drafts_BK.shape[1] - 1)
    if draft_probs_BKV is None:
        q_BV = torch.zeros_like(p_BV).scatter_(1, drafts_BK[rows_B, rejected_B].unsqueeze(1), 1.0)
    else:
        q_BV = draft_probs_BKV[rows_B, rejected_B]
    q_BV = q_BV.masked_fill((num_accepted_B >= num_drafts_B).unsqueeze(1), 0.0)
    residual_BV = (p_BV - q_BV).clamp(min=0)
    # p == q up to rounding leaves no mass (such a rejection has probability about 0): p is then the law.
    empty_B1 = residual_BV.sum(-1, keepdim=True) <= 0
    return torch.where(empty_B1, p_BV, residual_BV)


def verify_drafts_greedy(drafts_BK: Tensor, target_argmax_BJ: Tensor, num_drafts_B: Tensor) -> tuple[Tensor, Tensor]:
    """`verify_drafts` for one-hot p and q, from the argmax alone. Returns (num_accepted_B, next_token_B)."""
    K = drafts_BK.shape[1]
    accepted_BK = drafts_BK == target_argmax_BJ[:, :K]
    accepted_BK &= torch.arange(K, device=drafts_BK.device) < num_drafts_B.unsqueeze(1)
    num_accepted_B = accepted_BK.long().cumprod(1).sum(1)
    return num_accepted_B, target_argmax_BJ.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
