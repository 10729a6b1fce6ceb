"""Cost tables for the simulator: what a round takes as a function of rows and draft lengths, in seconds.

The H200 tables come from measurements of Qwen3-8B with a Qwen3-0.6B draft at context 1,000; between and beyond the
measured batches they are linear in the rows. The imaginary ones take 1 s a plain round until a round holds SATURATION
tokens, and grow in proportion after that, as a memory-bound step does when it becomes compute-bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SATURATION = 256


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """step(rows): one draft step. verify(rows, tokens): scoring `tokens` in all, overhead included. feed_token_s:
    what each token that the draft has missed adds to the extra forward that feeds it. feed_after: so many missed tokens
    are fed at k = 0 too, as vllm_draft_spec does; None: only before drafting."""

    name: str
    step: Callable[[int], float]
    verify: Callable[[int, int], float]
    feed_token_s: float
    feed_after: int | None = None

    def draft_s(self, lengths: Sequence[int] | np.ndarray) -> float:
        """All draft steps of rows that draft `lengths`; a step runs over the rows that still draft."""
        lengths = np.asarray(lengths)
        return sum(self.step(int((lengths >= i).sum())) for i in range(1, int(lengths.max(initial=0)) + 1))

    def verify_s(self, lengths: Sequence[int] | np.ndarray) -> float:
        return self.verify(len(lengths), int(np.sum(lengths)) + len(lengths))

    def catch_up_s(self, rows: int, tokens: int) -> float:
        return self.step(rows) + self.feed_token_s * tokens if tokens else 0.0

    def round_s(self, rows: int, k: int) -> float:
        """A round of one length without catching up."""
        return k * self.step(rows) + self.verify(rows, rows * (k + 1))


def _piecewise(xs: Sequence[float], ys: Sequence[float]) -> Callable[[float], float]:
    """Linear between the points and beyond the last."""

    def at(x: float) -> float:
        i = min(max(int(np.searchsorted(xs, x)), 1), len(xs) - 1)
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + share * (ys[i] - ys[i - 1])

    return at


def imaginary(c: float) -> CostModel:
    """A plain round takes 1 s, a draft step c, at small batch."""

    def saturated(tokens: int) -> float:
        return float((1 + (tokens / SATURATION) ** 4) ** 0.25)

    return CostModel(
        name=f"c={c:g}",
        step=lambda rows: c * saturated(rows),
        verify=lambda rows, tokens: saturated(tokens),
        feed_token_s=c / SATURATION,
    )


def h200_first_kernels() -> CostModel:
    """Measured at batch 1, 16 and 64; the draft's prefill at 0.5 PFLOP/s."""
    rows = (1, 16, 64)
    step, plain, five = (_piecewise(rows, ms) for ms in ((1.41, 1.80, 3.11), (5.03, 5.72, 7.43), (5.13, 6.12, 12.6)))

    def verify(rows: int, tokens: int) -> float:
        extra = (tokens / rows - 1) / 4
        return (plain(rows) + extra * (five(rows) - plain(rows))) / 1e3

    return CostModel(name="h200-first", step=lambda rows: step(rows) / 1e3, verify=verify, feed_token_s=2.5e-6)


def h200_near_floor() -> CostModel:
    """c = 0.14: 0.6 ms a draft step, 4.2 ms a target step at batch 1; keys and values of 1,000 tokens a row and
    0.024 ms of arithmetic a token on top."""

    def verify(rows: int, tokens: int) -> float:
        return (max(4.17, 1.0 + 0.024 * tokens) + 0.035 * rows) / 1e3

    return CostModel(
        name="h200-floor",
        step=lambda rows: (max(0.57, 0.0025 * rows) + 0.027 * rows) / 1e3,
        verify=verify,
        feed_token_s=2.5e-6,
    )


def cpu() -> CostModel:
    """SmolLM2-135M in float32 on one core (a token 61 ms, 5 about 100, 64 about 270), its first four layers as the
    draft: several tokens cost visibly more than one."""
    return CostModel(
        name="cpu",
        step=lambda rows: 0.017 + 0.001 * rows,
        verify=lambda rows, tokens: 0.055 + 0.006 * tokens,
        feed_token_s=0.0004,
    )


def cost_models() -> dict[str, CostModel]:
    """All tables by name."""
    models = [h200_first_kernels(), h200_near_floor(), cpu(), *(imaginary(c) for c in (0.08, 0.15, 0.3, 0.8))]
    return {model.name: model for model in models}
