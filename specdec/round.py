"""The inside of a round after drafting: verify the proposal in one forward, apply the rule, commit.

Fixed-shape tensor code over the first B slots: no Python branch on a row's data and no host synchronisation between
the first draft step and the one packed tensor that reports what happened, so that a CUDA graph can hold it.
Shapes: B rows, K = k drafted positions, J = K + 1, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafter import Drafter, Proposal, last_tokens, no_proposal
from specdec.kernels import round_kernels
from specdec.model import CachedModel
from specdec.rng import Purpose, uniforms
from specdec.sampling import Features, constrain_logits, law_of, verify_drafts, verify_drafts_greedy
from specdec.state import RowState
from specdec.timing import PhaseTimer

Rule = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class EagerRounds:
    """The inside of a round, one kernel launched after the other; `specdec.graphs` replays it instead.

    captures: how many graphs were made so far (a round that made one says nothing about its cost).
    """

    captures = 0

    def __init__(self, target: CachedModel, top_logprobs: int, rule: Rule) -> None:
        self._target, self._top_logprobs, self._rule = target, top_logprobs, rule

    def rows(self, used: int) -> int:
        """How many of the first rows a round works on when the last one decoding is number `used`."""
        return used

    def propose(self, drafter: Drafter | None, state: RowState, k: int, features: Features, live: int) -> Proposal:
        """Up to k drafts for each row."""
        return drafter.propose(state, k, features, live) if drafter else no_proposal(state)

    def settle(
        self,
        drafter: Drafter | None,
        state: RowState,
        proposal: Proposal,
        features: Features,
        live: int | None,
        timer: PhaseTimer | None = None,
    ) -> Tensor:
        """Verify, apply the rule, commit, roll both caches back; the packed report. timer: told when the target's
        forward ends."""
        logits_BJV = score(state, self._target, proposal, live)
        if timer is not None:
            timer.mark("verify")
        packed = decide(state, self._target, proposal, logits_BJV, features, self._top_logprobs, self._rule)
        if drafter is not None:
            drafter.roll_back(state)
        return packed


def score(state: RowState, target: CachedModel, proposal: Proposal, live: int | None) -> Tensor:
    """The target's logits [B, J, V] for [pending, d1 .. dK], in one forward."""
    J = proposal.drafts_BK.shape[1] + 1
    lengths_B = state.lengths_B
    if (kernels := round_kernels(lengths_B.device)) is not None:
        tokens_BJ, start_B, num_new_B = kernels.verify_inputs(state, proposal.drafts_BK)
    else:
        tokens_BJ = torch.cat([last_tokens(state, 1), proposal.drafts_BK], 1)
        start_B, num_new_B = lengths_B - 1, state.active_B * J
    plan = target.cache.plan(start_B, num_new_B, J, slice(0, len(lengths_B)), live)
    return target.forward(tokens_BJ, plan, keep=J)


def decide(
    state: RowState,
    target: CachedModel,
    proposal: Proposal,
    logits_BJV: Tensor,
    features: Features,
    top_logprobs: int = 0,
    rule: Rule = verify_drafts,
) -> Tensor:
    """Apply the rule, commit, roll the target's cache back; the packed report, int64 [B, columns]."""
    J = logits_BJV.shape[1]
    kernels = round_kernels(logits_BJV.device)
    plain = kernels is not None and state.law.counts_BV is None and not top_logprobs
    report: Tensor
    if plain and features.argmax_only:
        choice_BJ, bad_BJ = kernels.largest(logits_BJV)
        report = kernels.commit(state, target.cache.lengths_B, proposal, bad_BJ, chosen=choice_BJ)
        return report
    wanted_B = _wanted(state, proposal)
    proposal = replace(proposal, num_drafts_B=torch.minimum(proposal.num_drafts_B, wanted_B).clamp(min=0))
    positions_BJ = state.lengths_B.unsqueeze(1) + torch.arange(J, device=logits_BJV.device)
    counts_BJV = _counts_with_drafts(state, proposal.drafts_BK) if features.penalties else None
    constrained_BJV, bad_BJ = constrain_logits(logits_BJV, state.law, positions_BJ, counts_BJV, features)
    if features.allowed or features.min_tokens:
        # Every allowed token may have a logit of -inf: nothing can be sampled there.
        impossible_BJ = ~torch.isfinite(constrained_BJV.amax(-1))
        bad_BJ = bad_BJ | impossible_BJ
        constrained_BJV = torch.where(impossible_BJ.unsqueeze(-1), 0.0, constrained_BJV)
    accepted_B, next_B = _apply_rule(state, proposal, constrained_BJV, positions_BJ, features, rule)
    if plain:
        report = kernels.commit(state, target.cache.lengths_B, proposal, bad_BJ, chosen=next_B, accepted_B=accepted_B)
        return report
    out_BJ = _committed_tokens(proposal.drafts_BK, accepted_B, next_B)
    report = _commit(state, target, proposal, wanted_B, out_BJ, accepted_B, bad_BJ)
    if not top_logprobs:
        return report
    return torch.cat([report, _raw_logprobs(logits_BJV, out_BJ, top_logprobs)], 1)


def _wanted(state: RowState, proposal: Proposal) -> Tensor:
    """The most drafts that count: no more than the row may still commit besides the token that every round adds, nor
    than its quota of this round."""
    room_B = torch.minimum(state.limit_B - state.lengths_B - 1, state.quota_B)
    return room_B.clamp(0, proposal.drafts_BK.shape[1])


def _apply_rule(
    state: RowState,
    proposal: Proposal,
    constrained_BJV: Tensor,
    positions_BJ: Tensor,
    features: Features,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    if features.all_greedy:
        return verify_drafts_greedy(proposal.drafts_BK, constrained_BJV.argmax(-1), proposal.num_drafts_B)
    return rule(
        proposal.drafts_BK,
        proposal.draft_probs_BKV,
        law_of(constrained_BJV, state.law, features),
        proposal.num_drafts_B,
        uniforms(state.seeds_B, state.lengths_B, positions_BJ[:, :-1], Purpose.ACCEPT),
        uniforms(state.seeds_B, state.lengths_B, positions_BJ, Purpose.TARGET),
    )


def _counts_with_drafts(state: RowState, drafts_BK: Tensor) -> Tensor:
    """Output counts before each verified position [B, J, V]: position j has seen d1 .. dj of this round too."""
    assert state.law.counts_BV is not None
    B, K = drafts_BK.shape
    added_BJV = torch.zeros(B, K + 1, state.law.counts_BV.shape[1], dtype=torch.int32, device=drafts_BK.device)
    added_BJV[:, 1:].scatter_(2, drafts_BK.unsqueeze(2), 1)
    return state.law.counts_BV.unsqueeze(1) + added_BJV.cumsum(1, dtype=torch.int32)


def _committed_tokens(drafts_BK: Tensor, accepted_B: Tensor, next_B: Tensor) -> Tensor:
    """Accepted drafts, then the added token, in place; what follows is filler [B, J]."""
    out_BJ = torch.cat([drafts_BK, next_B.unsqueeze(1)], 1)
    return out_BJ.scatter(1, accepted_B.unsqueeze(1), next_B.unsqueeze(1))


def _commit(
    state: RowState,
    target: CachedModel,
    proposal: Proposal,
    wanted_B: Tensor,
    out_BJ: Tensor,
    accepted_B: Tensor,
    bad_BJ: Tensor,
) -> Tensor:
    """Append what was accepted, ending a row at its first stop id, and roll the target's cache back to it."""
    J = out_BJ.shape[1]
    column_J = torch.arange(J, device=out_BJ.device)
    target_bad_B = (bad_BJ & (column_J <= accepted_B.unsqueeze(1))).any(1)
    is_stop_BJ = (out_BJ.unsqueeze(2) == state.law.stop_BS.unsqueeze(1)).any(2)
    stop_at_B = torch.where(is_stop_BJ, column_J, J).amin(1)
    stopped_B = stop_at_B <= accepted_B
    committed_B = torch.minimum(accepted_B, stop_at_B) + 1
    committed_B = committed_B * (state.active_B & ~target_bad_B)
    real_BJ = column_J < committed_B.unsqueeze(1)
    trash = state.tokens_BT.shape[1] - 1
    slots_BJ = torch.where(real_BJ, state.lengths_B.unsqueeze(1) + column_J, trash)
    state.tokens_BT.scatter_(1, slots_BJ, out_BJ)
    if state.law.counts_BV is not None:
        state.law.counts_BV.scatter_add_(1, out_BJ, real_BJ.to(torch.int32))
    state.lengths_B += committed_B
    B = len(committed_B)
    target.cache.lengths_B[:B] -= torch.where(state.active_B, J - committed_B, 0)
    tested_B = torch.minimum(accepted_B, stop_at_B) + 1
    reached_B = torch.minimum(proposal.num_drafts_B, tested_B)
    columns = (  # in the order of REPORT_COLUMNS
        committed_B,
        torch.minimum(accepted_B, reached_B),
        reached_B,
        torch.minimum(wanted_B, tested_B) - reached_B,
        proposal.num_drafts_B,
        stopped_B,
        target_bad_B,
        proposal.bad_B,
    )
    state.active_B &= ~(stopped_B | target_bad_B | (state.lengths_B >= state.limit_B))
    return torch.cat([torch.stack([c.long() for c in columns], 1), out_BJ], 1)


def _raw_logprobs(logits_BJV: Tensor, out_BJ: Tensor, n: int) -> Tensor:
    """Target's raw law at each position as int64 bits of float64, plus ids: [B, J * (2 + 2n)].

    Per position: logprob of the committed token, probability outside the top n, n ids, n logprobs.
    """
    logits_BJV = logits_BJV.double()
    top_BJn, ids_BJn = logits_BJV.topk(n, dim=-1)
    norm_BJ1 = logits_BJV.logsumexp(-1, keepdim=True)
    token_BJ1 = logits_BJV.gather(-1, out_BJ.unsqueeze(-1)) - norm_BJ1
    top_BJn = top_BJn - norm_BJ1
    tail_BJ1 = (1.0 - top_BJn.exp().sum(-1, keepdim=True)).clamp(min=0.0)
    values = torch.cat([token_BJ1, tail_BJ1, top_BJn], -1).view(torch.int64)
    return torch.cat([values[..., :2], ids_BJn, values[..., 2:]], -1).flatten(1)
