"""The laws that drafts were drawn from, kept until the drafts are verified.

vLLM keeps those of its latest drafting step only, and when one row of a batch is not among them it takes every row's
draft for certain (q = 1). The output's law does not mind: given any draft d, accepting it with probability p(d) and
else drawing from p without d gives p. But acceptance falls in all rows, from sum min(p, q) to sum p q. A row is missing
when it is a new one whose drafts are placeholders, or when its drafts are older, because it did not fit into the step
in between.

Shapes: B rows, k drafts, V vocabulary, N drafts in all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch


class Laws:
    """By request, the stack of laws [B, k, V] it is in, and its row there."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[torch.Tensor, int]] = {}

    def keep(self, names: Sequence[str], laws_BkV: torch.Tensor | None, living: Container[str]) -> None:
        """After a step that drafted for `names`: at random, or with certainty (None). Requests not in `living` go."""
        redrafted = set(names)
        self._rows = {name: place for name, place in self._rows.items() if name in living and name not in redrafted}
        if laws_BkV is not None:
            self._rows |= {name: (laws_BkV, b) for b, name in enumerate(names)}

    def forget(self, names: Iterable[str]) -> None:
        """Drafts of these will not be verified: whatever comes under these names has no law, and the memory is free."""
        for name in names:
            self._rows.pop(name, None)

    def of(self, names: Sequence[str], lengths: Sequence[int], drafts_N: torch.Tensor) -> torch.Tensor | None:
        """[N, V] for the drafts of `names`, `lengths` each; None where all of them are certain.

        A row of which nothing is kept has certain drafts: one-hot, and all zeros for a placeholder (-1), which is
        rejected whatever stands there and then drawn from the target's own law.
        """
        drafting = [(name, length) for name, length in zip(names, lengths, strict=True) if length]
        kept = [self._rows.get(name) for name, _ in drafting]
        known = next((place for place in kept if place), None)
        if known is None:
            return None
        whole = known[0]
        same = all(place and place[0] is whole and place[1] == b for b, place in enumerate(kept))
        if same and all(length == whole.shape[1] for _, length in drafting):
            return whole[: len(drafting)].flatten(0, 1)
        parts, start = [], 0
        for (_, length), place in zip(drafting, kept, strict=True):
            part = place[0][place[1], :length] if place else certain(drafts_N[start : start + length], whole.shape[2])
            parts.append(part)
            start += length
        return torch.cat(parts)


def without_drafts(scheduler_output: Any) -> list[str]:
    """Requests whose drafts, if they had any, are thrown away: preempted ones, and new ones, which may have the name of
    one that ended."""
    return [*(scheduler_output.preempted_req_ids or ()), *(new.req_id for new in scheduler_output.scheduled_new_reqs)]


def certain(drafts_N: torch.Tensor, vocab: int) -> torch.Tensor:
    """One-hot laws, float32 [N, vocab]; all zeros where the draft is -1."""
    laws_NV = torch.zeros(len(drafts_N), vocab, device=drafts_N.device)
    real_N = drafts_N >= 0
    return laws_NV.scatter_(1, drafts_N.clamp(min=0).long()[:, None], real_N.float()[:, None])
