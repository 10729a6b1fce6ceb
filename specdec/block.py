"""Block verification: an exact rule that accepts more tokens than judging each draft alone.

Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2. With
r_i = min(r_{i-1} p_i(d_i) / q_i(d_i), 1), r_0 = 1, the block d_1 .. d_i is good with probability

    h_i = s_i / (s_i + 1 - r_i),   s_i = sum_x max(r_i p_{i+1}(x) - q_{i+1}(x), 0),   h_K = r_K,

each tested with a uniform of its own; the longest good block is accepted, and the next token comes from
norm(max(r_n p_{n+1} - q_{n+1}, 0)), or from p after the last draft. Unlike the token rule it looks at drafts behind a
rejection, so a position that is drafted again must get fresh randomness (specdec.rng names the round).
"""

import torch
from torch import Tensor

from specdec.sampling import sample


def verify_block(
    drafts_BK: Tensor,
    draft_probs_BKV: Tensor | None,
    target_probs_BJV: Tensor,
    num_drafts_B: Tensor,
    accept_uniform_BK: Tensor,
    target_uniform_BJ: Tensor,
) -> tuple[Tensor, Tensor]:
    """Same contract as `specdec.sampling.verify_drafts`: (num_accepted_B, next_token_B), int64."""
    B, K = drafts_BK.shape
    rows_B = torch.arange(B, device=drafts_BK.device)
    if K == 0:
        return torch.zeros_like(num_drafts_B), sample(target_probs_BJV[:, 0], target_uniform_BJ[:, 0])
    q_BKV = draft_probs_BKV if draft_probs_BKV is not None else _one_hot(drafts_BK, target_probs_BJV)
    p_BK = target_probs_BJV[:, :K].gather(-1, drafts_BK.unsqueeze(-1)).squeeze(-1).double()
    q_BK = q_BKV.gather(-1, drafts_BK.unsqueeze(-1)).squeeze(-1).double()
    # Behind the last draft q is zero: the residual of the longest block is then p itself.
    real_BK = torch.arange(K, device=drafts_BK.device) < num_drafts_B.unsqueeze(1)
    q_BKV = q_BKV.masked_fill(~real_BK.unsqueeze(-1), 0.0)
    r_B, num_accepted_B = torch.ones_like(p_BK[:, 0]), torch.zeros_like(num_drafts_B)
    weights_BV = _excess(r_B, target_probs_BJV[:, 0], q_BKV[:, 0])
    for i in range(K):
        r_B = (r_B * p_BK[:, i] / q_BK[:, i]).clamp(max=1.0).nan_to_num(0.0)
        is_last_B = num_drafts_B == i + 1
        next_q_BV = q_BKV[:, i + 1] if i + 1 < K else torch.zeros_like(q_BKV[:, 0])
        excess_BV = _excess(r_B, target_probs_BJV[:, i + 1], next_q_BV)
        mass_B = excess_BV.sum(-1, dtype=torch.float64)
        share_B = torch.where(mass_B > 0, mass_B / (mass_B + 1.0 - r_B), 0.0)
        good_B = (accept_uniform_BK[:, i] < torch.where(is_last_B, r_B, share_B)) & real_BK[:, i]
        num_accepted_B = torch.where(good_B, i + 1, num_accepted_B)
        bonus_BV = torch.where(is_last_B.unsqueeze(1), target_probs_BJV[:, i + 1], excess_BV)
        weights_BV = torch.where(good_B.unsqueeze(1), bonus_BV, weights_BV)
    empty_B1 = weights_BV.sum(-1, keepdim=True) <= 0
    weights_BV = torch.where(empty_B1, target_probs_BJV[rows_B, num_accepted_B], weights_BV)
    return num_accepted_B, sample(weights_BV, target_uniform_BJ.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1))


def _excess(r_B: Tensor, p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return (r_B.unsqueeze(1).to(p_BV.dtype) * p_BV - q_BV).clamp(min=0)


def _one_hot(drafts_BK: Tensor, target_probs_BJV: Tensor) -> Tensor:
    zeros_BKV = torch.zeros_like(target_probs_BJV[:, : drafts_BK.shape[1]])
    return zeros_BKV.scatter_(-1, drafts_BK.unsqueeze(-1), 1.0)
