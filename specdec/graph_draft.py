"""Draft steps whose every input and output lies on the device, so that one graph serves all of them.

A round's first step feeds the last two committed tokens; each further one feeds the token before it. Which step it
is, and with that its position, its uniform and the column its token goes to, is a number on the device that the step
itself moves on: one graph is replayed k - 1 times, and another k costs nothing. The law is that of
`ModelDrafter.propose`, which stays the reference.

B rows, K = k_max positions, V the target's vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafter import Drafter, ModelDrafter, Proposal, last_tokens
from specdec.kernels import round_kernels
from specdec.rng import Purpose, uniforms
from specdec.sampling import Features
from specdec.state import RowState


class DraftBuffers:
    """What a round drafted, at addresses that never change, for all rows of the engine.

    step_1: index of the step drawn last; alive_B: rows all of whose drafts so far count; num_drafts_B: how many.
    law_BKV and counts_BV are made when a sampled, or a penalised, round first needs them.
    """

    def __init__(self, num_rows: int, k_max: int, vocab_size: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._zeros = zeros
        self.num_rows, self.k_max, self.vocab_size = num_rows, k_max, vocab_size
        self.drafts_BK, self.num_drafts_B, self.step_1 = zeros(num_rows, k_max), zeros(num_rows), zeros(1)
        self.uniform_BK = zeros(num_rows, k_max, dtype=torch.float64)
        self.alive_B, self.bad_B = zeros(num_rows, dtype=torch.bool), zeros(num_rows, dtype=torch.bool)
        self.law_BKV: Tensor | None = None
        self.counts_BV: Tensor | None = None

    def need_law(self, dtype: torch.dtype) -> None:
        """Make room for laws of this type, which a drafter does not change."""
        if self.law_BKV is None:
            self.law_BKV = self._zeros(self.num_rows, self.k_max, self.vocab_size, dtype=dtype)
        assert self.law_BKV.dtype == dtype, "one drafter, one type of law"

    def need_counts(self) -> None:
        if self.counts_BV is None:
            self.counts_BV = self._zeros(self.num_rows, self.vocab_size, dtype=torch.int32)

    def proposal(self, rows: int, k: int, *, has_law: bool) -> Proposal:
        """The first k drafts of the first rows, as views."""
        law_BKV = self.law_BKV[:rows, :k] if has_law and self.law_BKV is not None else None
        return Proposal(
            drafts_BK=self.drafts_BK[:rows, :k],
            draft_probs_BKV=law_BKV,
            num_drafts_B=self.num_drafts_B[:rows],
            bad_B=self.bad_B[:rows],
        )

    def hold(self, proposal: Proposal) -> Proposal:
        """The same proposal in these buffers; nothing is copied when it is there already."""
        rows, k = proposal.drafts_BK.shape
        has_law = proposal.draft_probs_BKV is not None
        if proposal.draft_probs_BKV is not None:
            self.need_law(proposal.draft_probs_BKV.dtype)
        held = self.proposal(rows, k, has_law=has_law)
        if held.drafts_BK.data_ptr() != proposal.drafts_BK.data_ptr():
            held.drafts_BK.copy_(proposal.drafts_BK)
            held.num_drafts_B.copy_(proposal.num_drafts_B)
            held.bad_B.copy_(proposal.bad_B)
            if held.draft_probs_BKV is not None and proposal.draft_probs_BKV is not None:
                held.draft_probs_BKV.copy_(proposal.draft_probs_BKV)
        return held


def drafts_step_by_step(drafter: Drafter | None) -> bool:
    """Whether this module's steps are what the drafter does."""
    return isinstance(drafter, ModelDrafter) and type(drafter).propose is ModelDrafter.propose


@dataclass(frozen=True, kw_only=True)
class DraftSteps:
    """The two kinds of steps for the rows of `state`; live: as Plan has it."""

    drafter: ModelDrafter
    buffers: DraftBuffers
    state: RowState
    features: Features
    live: int | None

    def first(self) -> None:
        """Draw every uniform of the round and the first token, from the last two committed ones."""
        buffers, state, B = self.buffers, self.state, len(self.state.lengths_B)
        lengths_B, window = state.lengths_B, self.drafter.window
        if not self.features.all_greedy:
            positions_BK = lengths_B.unsqueeze(1) + torch.arange(buffers.k_max, device=lengths_B.device)
            buffers.uniform_BK[:B].copy_(uniforms(state.seeds_B, lengths_B, positions_BK, Purpose.DRAFT))
        if self._counts_BV is not None and state.law.counts_BV is not None:
            self._counts_BV.copy_(state.law.counts_BV)
        if (kernels := round_kernels(lengths_B.device)) is not None:
            self._draw(*kernels.begin_drafts(state, buffers, window))
            return
        buffers.step_1.zero_()
        buffers.alive_B.fill_(True)
        buffers.bad_B.fill_(False)
        buffers.num_drafts_B.zero_()
        self._draw(last_tokens(state, window), lengths_B - window)

    def next(self) -> None:
        """Draw the token after the one drawn last."""
        if (kernels := round_kernels(self.state.lengths_B.device)) is not None:
            self._draw(*kernels.next_draft(self.state, self.buffers))
            return
        drawn_B1 = self.buffers.drafts_BK[: len(self.state.lengths_B)].index_select(1, self.buffers.step_1)
        start_B = self.state.lengths_B + self.buffers.step_1
        self.buffers.step_1.add_(1)
        self._draw(drawn_B1, start_B)

    @property
    def _counts_BV(self) -> Tensor | None:
        if not self.features.penalties or self.buffers.counts_BV is None:
            return None
        return self.buffers.counts_BV[: len(self.state.lengths_B)]

    def _draw(self, tokens_Bq: Tensor, start_B: Tensor) -> None:
        buffers, state, counts_BV = self.buffers, self.state, self._counts_BV
        logits_B1V = self.drafter._step(tokens_Bq, start_B, state, self.live)
        kernels = round_kernels(logits_B1V.device)
        if kernels is not None and self.features.argmax_only and self.drafter.takes_any_largest:
            drawn_B1, bad_B1 = kernels.largest(logits_B1V)
            kernels.note_draft(state, buffers, drawn_B1, bad_B1, None, self.drafter.model.max_positions)
            return
        B = len(state.lengths_B)
        positions_B1 = state.lengths_B.unsqueeze(1) + buffers.step_1
        uniform_B = buffers.uniform_BK[:B].index_select(1, buffers.step_1).squeeze(1)
        drawn_B, law_BV, bad_B, usable_B = self.drafter._draw(
            logits_B1V, state, positions_B1, counts_BV, self.features, uniform_B
        )
        if kernels is not None:
            kernels.note_draft(state, buffers, drawn_B, bad_B, usable_B, self.drafter.model.max_positions)
        else:
            self._note(drawn_B, bad_B, usable_B, positions_B1)
        if not self.features.all_greedy:
            assert buffers.law_BKV is not None
            buffers.law_BKV[:B].index_copy_(1, buffers.step_1, law_BV.unsqueeze(1))
        if counts_BV is not None:
            counts_BV.scatter_add_(1, drawn_B.unsqueeze(1), torch.ones_like(counts_BV[:, :1]))

    def _note(self, drawn_B: Tensor, bad_B: Tensor, usable_B: Tensor, positions_B1: Tensor) -> None:
        buffers, B = self.buffers, len(drawn_B)
        buffers.drafts_BK[:B].index_copy_(1, buffers.step_1, drawn_B.unsqueeze(1))
        buffers.bad_B[:B] |= bad_B
        # As the reference counts: drafts up to the first unusable one, and within the positions the draft is built for.
        buffers.alive_B[:B] &= usable_B & (positions_B1.squeeze(1) < self.drafter.model.max_positions)
        buffers.num_drafts_B[:B] += buffers.alive_B[:B]
