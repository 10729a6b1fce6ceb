"""Acceptance that is imposed instead of measured, for timing models whose own means nothing (random weights).

Of the bench only: the text that comes out is not the target's. Every row measured so is labelled, `label(0.87)` being
"synthetic:0.87".

The rule, the sampling and all memory traffic are the engine's own. Only the logits change on their way from the target
to the rule: a draft that is to be accepted gets a logit far above all others, one that is to be rejected one far below.
The draws are counter-based (request, round, position), so that they are the same in a replayed graph and whatever runs
beside the request. They cost a round about a dozen launches of a few bytes each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import Engine
from specdec.kvcache import Plan
from specdec.rng import uniforms

_STREAM = 0  # beside the engine's own purposes (specdec.rng.Purpose)
_FAR = 1e4


def label(alpha: float) -> str:
    """How results name an imposed acceptance."""
    return f"synthetic:{alpha:g}"


class ImposedAcceptance:
    """Takes over the target's forward in `engine`, for as long as that lives. alpha_K: probability that the draft at
    each position is accepted when it is reached, 1 after a `set` of less positions than the engine drafts."""

    def __init__(self, engine: Engine, alpha: float | Sequence[float]) -> None:
        device = engine._target.device
        self.alpha_K = torch.ones(engine.k_max, dtype=torch.float64, device=device)
        self._seeds_B = engine._state.seeds_B
        self._whole = engine._target.forward
        self.set(alpha)
        engine._target.forward = self._forward  # type: ignore[method-assign]

    def set(self, alpha: float | Sequence[float]) -> None:
        """Another acceptance, in place: graphs read it where it is. ValueError for what is no probability."""
        each = [alpha] * len(self.alpha_K) if isinstance(alpha, float | int) else list(alpha)
        if len(each) > len(self.alpha_K) or not all(0 <= a <= 1 for a in each):
            raise ValueError(f"alpha is {alpha}; expected at most {len(self.alpha_K)} numbers from 0 to 1")
        self.alpha_K.fill_(1.0)
        self.alpha_K[: len(each)] = torch.tensor(each, dtype=torch.float64, device=self.alpha_K.device)

    def _forward(self, tokens_Bq: Tensor, plan: Plan, keep: int) -> Tensor:
        logits_BJV = self._whole(tokens_Bq, plan, keep)
        if keep == 1 or keep != tokens_Bq.shape[1]:  # a prompt, or a round without drafts
            return logits_BJV
        return impose(logits_BJV, tokens_Bq, plan.positions_Bq, self._seeds_B[: len(tokens_Bq)], self.alpha_K)


def impose(logits_BJV: Tensor, tokens_BJ: Tensor, positions_BJ: Tensor, seeds_B: Tensor, alpha_K: Tensor) -> Tensor:
    """`logits_BJV`, changed in place: position j decides on the draft tokens_BJ[:, j + 1]."""
    draws_BK = uniforms(seeds_B, positions_BJ[:, 0], positions_BJ[:, 1:], _STREAM)
    accepted_BK = draws_BK < alpha_K[: draws_BK.shape[1]]
    wanted_BK = torch.where(accepted_BK, _FAR, -_FAR).to(logits_BJV.dtype)
    return logits_BJV.scatter_(2, tokens_BJ.roll(-1, 1).unsqueeze(2)[:, :-1], wanted_BK.unsqueeze(2))
