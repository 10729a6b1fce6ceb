"""Bootstrap intervals over prompts: the tokens of one text are not independent, its prompts are.

P prompts; each contributes a part and a whole (accepted and tested drafts), and a rate is sum of parts / sum of wholes.
"""

import functools
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


def ratio_interval(pairs_P2: np.ndarray) -> list[float] | None:
    """The 95 % interval of a rate; None when fewer than two prompts have a whole above zero."""
    pairs_P2 = pairs_P2[pairs_P2[:, 1] > 0]
    if len(pairs_P2) < 2:
        return None
    part_S, whole_S = (_resampled(len(pairs_P2)) @ pairs_P2).T
    return _bounds(part_S / whole_S)


def gain_interval(pairs_P2: np.ndarray, base_P2: np.ndarray) -> list[float] | None:
    """The 95 % interval of the difference of two rates on the same prompts, resampled together."""
    both_P = (pairs_P2[:, 1] > 0) & (base_P2[:, 1] > 0)
    if both_P.sum() < 2:
        return None
    drawn_SP = _resampled(int(both_P.sum()))
    rates: Sequence[np.ndarray] = [(s := drawn_SP @ each[both_P])[:, 0] / s[:, 1] for each in (pairs_P2, base_P2)]
    return _bounds(rates[0] - rates[1])


@functools.lru_cache(maxsize=16)
def _resampled(count: int) -> np.ndarray:
    """How often each of `count` prompts is drawn in each resample."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)


def _bounds(values_S: np.ndarray) -> list[float]:
    return [float(bound) for bound in np.quantile(values_S, _TAILS)]
