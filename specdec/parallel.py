"""A draft that proposes k tokens in one forward, given a checkpoint trained for it (PARD, arXiv 2504.18583)."""

import torch
from transformers import PreTrainedModel

from specdec.drafter import ModelDrafter, Proposal, last_tokens
from specdec.rng import Purpose, uniforms
from specdec.sampling import Features, constrain_logits, law_of, sample
from specdec.state import RowState
from specdec.vocab import VocabularyMap


class ParallelDrafter(ModelDrafter):
    """Feeds the last k_max + 1 committed tokens and k - 1 mask tokens; column i predicts the i-th token ahead.

    mask_id: the token the checkpoint was trained with (default: the config's `pard_token`). A mask's keys and values
    stand for no committed token, so nothing behind the row's length is kept: the next round feeds what was
    committed since (at most k_max + 1 tokens, so that the shape never changes).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        k_max: int,
        mask_id: int | None = None,
        vocabulary: VocabularyMap | None = None,
    ) -> None:
        super().__init__(model, vocabulary=vocabulary)
        mask = getattr(model.config, "pard_token", None) if mask_id is None else mask_id
        if mask is None:
            raise ValueError("the draft's config names no pard_token; give mask_id, the token it was trained with")
        self.mask_id, self.window = int(mask), k_max + 1

    def _drafts_seen(self, k: int) -> int:
        return 0

    def propose(self, state: RowState, k: int, features: Features, live: int | None) -> Proposal:
        lengths_B = state.lengths_B
        known_BW = last_tokens(state, self.window)
        if self.vocabulary is not None:
            known_BW = self.vocabulary.input_ids_V[known_BW]
        masks_BM = torch.full_like(known_BW[:, :1], self.mask_id).expand(-1, k - 1)
        tokens_Bq = torch.cat([known_BW, masks_BM], 1)
        q = tokens_Bq.shape[1]
        plan = self.model.cache.plan(lengths_B - self.window, state.drafting_B * q, q, slice(0, len(lengths_B)), live)
        logits_BKN = self.model.forward(tokens_Bq, plan, keep=k)
        self.model.cache.lengths_B[: len(lengths_B)] -= state.drafting_B * (k - 1)  # the masks
        logits_BKV = logits_BKN if self.vocabulary is None else self.vocabulary.expand(logits_BKN)
        positions_BK = lengths_B.unsqueeze(1) + torch.arange(k, device=lengths_B.device)
        counts_BKV = None
        if features.penalties and state.law.counts_BV is not None:
            counts_BKV = state.law.counts_BV.unsqueeze(1).expand(-1, k, -1)
        constrained_BKV, bad_BK = constrain_logits(logits_BKV, state.law, positions_BK, counts_BKV, features)
        usable_BK = ~bad_BK & torch.isfinite(constrained_BKV.amax(-1))
        law_BKV = law_of(torch.where(usable_BK.unsqueeze(-1), constrained_BKV, 0.0), state.law, features)
        uniform_BK = uniforms(state.seeds_B, lengths_B, positions_BK, Purpose.DRAFT)
        drafts_BK = sample(law_BKV.flatten(0, 1), uniform_BK.flatten()).view_as(uniform_BK)
        usable_B = usable_BK.long().cumprod(1).sum(1)
        return Proposal(
            drafts_BK=drafts_BK,
            draft_probs_BKV=None if features.all_greedy else law_BKV,
            num_drafts_B=torch.minimum(usable_B, self.model.max_positions - lengths_B),
            bad_B=bad_BK.any(1),
        )
