"""What proposes tokens: the interface every drafter follows, and the draft model.

A drafter does its host work in `prepare` (before a round) and `committed` (after it); `propose` and `roll_back` are
the tensor code inside the round. Whatever it proposes, the output follows the target's law, as long as each token was
drawn from the law given with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.feed import Feed, feed
from specdec.model import CachedModel
from specdec.rng import Purpose, uniforms
from specdec.sampling import Features, constrain_logits, law_of, sample
from specdec.slots import Slot
from specdec.state import RowState
from specdec.vocab import VocabularyMap
from specdec.window import Window


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A drafter's tokens; draft_probs_BKV is the law each was drawn from (None: one-hot); num_drafts_B of them
    count in each row; bad_B marks rows whose draft logits were not finite somewhere (no draft from there on counts)."""

    drafts_BK: Tensor
    draft_probs_BKV: Tensor | None
    num_drafts_B: Tensor
    bad_B: Tensor


@runtime_checkable
class Drafter(Protocol):
    """Host side: attach, admit, feed, prepare, committed, release. Inside the round: propose, roll_back."""

    def attach(self, target: CachedModel, num_slots: int, capacity: int) -> None:
        """Make the buffers for an engine of this target; ValueError when the two do not go together."""

    def admit(self, slots: Sequence[Slot]) -> None:
        """These slots hold new requests; nothing of the former ones counts any more."""

    def feed(self, slots: Sequence[Slot], chunk: int) -> None:
        """Read up to `chunk` more prompt tokens of each new slot, between rounds."""

    def prepare(self, slots: Sequence[Slot], k: int, chunk: int) -> int:
        """Get ready to propose k tokens for these rows (others draft nothing in this round); how many tokens they
        were fed to catch up, over all rows."""

    def propose(self, state: RowState, k: int, features: Features, live: int | None) -> Proposal:
        """k tokens for each row of `state` (k > 0); fewer columns, never more, when no row has so many to propose."""

    def roll_back(self, state: RowState) -> None:
        """Forget what was not committed."""

    def committed(self, slots: Sequence[Slot], before: Sequence[int], lengths: Sequence[int]) -> None:
        """A round took each slot from `before` tokens to its length; `lengths`: each row's draft length in it."""

    def lag(self, slot: Slot) -> int:
        """Tokens that the row must be fed before it can draft again. Asked after `committed`, before `release`."""

    def release(self, slot: Slot) -> None:
        """The slot's request is done."""


def no_proposal(state: RowState) -> Proposal:
    """K = 0: plain autoregressive decoding through the same machinery."""
    zero_B = torch.zeros_like(state.lengths_B)
    return Proposal(
        drafts_BK=zero_B.unsqueeze(1)[:, :0], draft_probs_BKV=None, num_drafts_B=zero_B, bad_B=zero_B.bool()
    )


class ModelDrafter:
    """Drafts with a smaller model of the same vocabulary, or of another one through a VocabularyMap; by the fast
    forward if the target's engine asks for it.

    min_confidence: a row stops drafting where the largest probability of the draft's law is below it. The test comes
    before the token is drawn, so it depends on the text alone and the law holds; a test of the drawn token's own
    probability would bias the output.
    """

    model: CachedModel
    window = 2  # committed tokens that the first step of a round feeds

    def __init__(
        self, model: PreTrainedModel, *, vocabulary: VocabularyMap | None = None, min_confidence: float = 0.0
    ) -> None:
        if not 0.0 <= min_confidence < 1.0:
            raise ValueError(f"min_confidence is {min_confidence}; expected at least 0 and below 1")
        self._source = model
        self.vocabulary = vocabulary
        self.min_confidence = min_confidence

    def attach(self, target: CachedModel, num_slots: int, capacity: int) -> None:
        refuse_second_engine(self, "_held")
        if self._source.device != target.device:
            raise ValueError(f"target is on {target.device}, draft on {self._source.device}; expected one device")
        self.build(target.vocab_size, num_slots, capacity, fast=target.fast)
        self._held = [0] * num_slots  # the host's copy of the cache's lengths

    def build(
        self, target_size: int, num_rows: int, capacity: int, window: Window | None = None, *, fast: bool | None = False
    ) -> None:
        """Make the cache, for a target with `target_size` output ids; ValueError when the vocabularies do not match.
        What `attach` does, and enough for a caller that feeds the rows itself and then calls `propose`."""
        self.model = CachedModel(self._source, num_rows=num_rows, capacity=capacity, window=window, fast=fast)
        if self.vocabulary is None:
            check_same_vocabulary(target_size, self.model.vocab_size)
        else:
            self.vocabulary.check(target_size, self.model.vocab_size)
            self.vocabulary = self.vocabulary.to(self.model.device)

    @property
    def takes_any_largest(self) -> bool:
        """Whether a greedy row's draft is the largest logit's id, whatever the others are."""
        return self.vocabulary is None and not self.min_confidence

    def admit(self, slots: Sequence[Slot]) -> None:
        rows = [slot.row for slot in slots]
        self.model.cache.lengths_B[rows] = 0
        for row in rows:
            self._held[row] = 0

    def feed(self, slots: Sequence[Slot], chunk: int) -> None:
        feed(self.model, [f for slot in slots if (f := self._next_feed(slot, chunk))])

    def prepare(self, slots: Sequence[Slot], k: int, chunk: int) -> int:
        """Feed what was missed in rounds without drafts: all but the last tokens, which the first step is fed."""
        behind = [slot for slot in slots if self.lag(slot)]
        missed = sum(map(self.lag, behind))
        while feeds := [f for slot in behind if (f := self._next_feed(slot, chunk))]:
            feed(self.model, feeds)
        return missed

    def _next_feed(self, slot: Slot, chunk: int) -> Feed | None:
        start = self._held[slot.row]
        end = max(start, min(slot.length - 1, start + chunk))
        self._held[slot.row] = end
        tokens = slot.tokens[start:end]
        if self.vocabulary is not None:
            tokens = self.vocabulary.input_ids_V[torch.tensor(tokens, dtype=torch.int64)].tolist()
        return Feed(row=slot.row, start=start, tokens=tokens) if end > start else None

    def propose(self, state: RowState, k: int, features: Features, live: int | None) -> Proposal:
        """Draw k tokens a row from the draft, which has seen all but the last one or two committed tokens.

        The first step always feeds the last two committed tokens: after a fully accepted round the draft has seen
        neither, else the first one rewrites keys and values that are already right; so the shape never changes.
        Nothing is drafted at positions the draft was not built for.
        """
        lengths_B = state.lengths_B
        positions_BK = lengths_B.unsqueeze(1) + torch.arange(k, device=lengths_B.device)
        uniform_BK = uniforms(state.seeds_B, lengths_B, positions_BK, Purpose.DRAFT)
        counts_BV = state.law.counts_BV.clone() if features.penalties and state.law.counts_BV is not None else None
        tokens_Bq, start_B = last_tokens(state, self.window), lengths_B - self.window
        drafts, laws, bad, usable = [], [], [], []
        for i in range(k):
            logits_B1V = self._step(tokens_Bq, start_B, state, live)
            drawn_B, law_BV, bad_B, usable_B = self._draw(
                logits_B1V, state, positions_BK[:, i : i + 1], counts_BV, features, uniform_BK[:, i]
            )
            drafts.append(drawn_B)
            laws.append(law_BV)
            bad.append(bad_B)
            usable.append(usable_B)
            if counts_BV is not None:
                counts_BV.scatter_add_(1, drawn_B.unsqueeze(1), torch.ones_like(counts_BV[:, :1]))
            tokens_Bq, start_B = drawn_B.unsqueeze(1), lengths_B + i
        usable_B = torch.stack(usable, 1).long().cumprod(1).sum(1)
        return Proposal(
            drafts_BK=torch.stack(drafts, 1),
            draft_probs_BKV=None if features.all_greedy else torch.stack(laws, 1),
            num_drafts_B=torch.minimum(usable_B, self.model.max_positions - lengths_B),
            bad_B=torch.stack(bad, 1).any(1),
        )

    def _step(self, tokens_Bq: Tensor, start_B: Tensor, state: RowState, live: int | None) -> Tensor:
        """One forward; the logits over the target's ids after the last token [B, 1, V]."""
        q = tokens_Bq.shape[1]
        plan = self.model.cache.plan(start_B, state.drafting_B * q, q, slice(0, len(start_B)), live)
        if self.vocabulary is None:
            return self.model.forward(tokens_Bq, plan, keep=1)
        logits_B1N = self.model.forward(self.vocabulary.input_ids_V[tokens_Bq], plan, keep=1)
        return self.vocabulary.expand(logits_B1N)

    def _draw(
        self,
        logits_B1V: Tensor,
        state: RowState,
        positions_B1: Tensor,
        counts_BV: Tensor | None,
        features: Features,
        uniform_B: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One token a row: (token_B, the law it was drawn from [B, V], bad_B, usable_B)."""
        counts_B1V = None if counts_BV is None else counts_BV.unsqueeze(1)
        constrained_B1V, bad_B1 = constrain_logits(logits_B1V, state.law, positions_B1, counts_B1V, features)
        bad_B = bad_B1.squeeze(1)
        usable_B = ~bad_B
        if self.vocabulary is not None:
            # It may know none of the allowed tokens: it proposes nothing there.
            usable_B = usable_B & torch.isfinite(constrained_B1V.amax(-1)).squeeze(1)
            constrained_B1V = torch.where(usable_B.view(-1, 1, 1), constrained_B1V, 0.0)
        if self.min_confidence:
            precise = torch.promote_types(constrained_B1V.dtype, torch.float32)
            confidence_B = constrained_B1V.squeeze(1).softmax(-1, dtype=precise).amax(-1)
            usable_B = usable_B & (confidence_B >= self.min_confidence)
        if features.all_greedy:
            token_B = constrained_B1V.argmax(-1).squeeze(1)
            return token_B, constrained_B1V.squeeze(1), bad_B, usable_B
        law_BV = law_of(constrained_B1V, state.law, features).squeeze(1)
        return sample(law_BV, uniform_B), law_BV, bad_B, usable_B

    def roll_back(self, state: RowState) -> None:
        """The draft has seen d1 .. d(k-1): keep those that were committed."""
        lengths_B = self.model.cache.lengths_B[: len(state.lengths_B)]
        torch.minimum(lengths_B, (state.lengths_B - 1).clamp(min=0), out=lengths_B)

    def committed(self, slots: Sequence[Slot], before: Sequence[int], lengths: Sequence[int]) -> None:
        k = max(lengths)
        for slot, length, own in zip(slots, before, lengths, strict=True):
            if own > 0:
                self._held[slot.row] = min(length + self._drafts_seen(k), slot.length - 1)
            if slot.draft_bad:  # what it holds may be the cause: it reads the text again
                self.model.cache.clear_rows([slot.row])
                self._held[slot.row] = 0

    def lag(self, slot: Slot) -> int:
        missed = slot.length - self._held[slot.row]
        return missed - 1 if missed > self.window and not slot.undrafted else 0

    def _drafts_seen(self, k: int) -> int:
        """Of k drafts the model has been fed all but the last."""
        return k - 1

    def release(self, slot: Slot) -> None:
        if slot.draft_failures or slot.finish_reason in ("error", "cancelled"):
            self.model.cache.clear_rows([slot.row])


def refuse_second_engine(drafter: object, made_by_attach: str) -> None:
    """ValueError when the drafter already has the buffers of an engine: its state is by row of that engine."""
    if hasattr(drafter, made_by_attach):
        raise ValueError(f"this {type(drafter).__name__} belongs to another engine; make a new one for each engine")


def last_tokens(state: RowState, count: int) -> Tensor:
    """The last `count` committed tokens [B, count]; a shorter row repeats its first one (planned as padding)."""
    back = torch.arange(-count, 0, device=state.lengths_B.device)
    return state.tokens_BT.gather(1, (state.lengths_B.unsqueeze(1) + back).clamp(min=0))


def check_same_vocabulary(target_size: int, draft_size: int) -> None:
    """ValueError with both sizes when the output vocabularies (padding included) differ."""
    if target_size != draft_size:
        raise ValueError(
            f"vocabularies differ: target {target_size} tokens, draft {draft_size}; acceptance compares probabilities "
            f"token by token. Use a draft of the target's family or one made from its layers, or give the draft's "
            f"ids in the target's vocabulary: ModelDrafter(model, vocabulary=intersection_map(...))"
        )
