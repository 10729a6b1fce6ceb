"""Are these samples from that law? Total variation against its noise floor, chi-squared, and impossible
cells.

For N samples of a law p over cells x, the expected total variation between the observed frequencies and p is
at most about E0 = sum_x sqrt(p (1 - p)) / sqrt(2 pi N) (each |n/N - p| has mean sqrt(2/pi) standard
deviations; cells with few expected samples have less). A sampler of another law at distance d shows about
max(d, E0) or more; E0 + 4 standard deviations is what is allowed. As TV is skewed, a correct sampler exceeds
that in about 1 of 10,000 data sets at 512 cells and 1 of 2,000 at 8 (tests/test_law.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

TV_SIGMAS = 4.0
FAMILY_ERROR = 1e-4
_BOOTSTRAPS = 200
_MIN_EXPECTED = 5.0


@dataclass(frozen=True, kw_only=True)
class LawCheck:
    """One comparison of `samples` observations with a law. `impossible` counts observations in cells of
    probability zero."""

    samples: int
    e0: float
    tv: float
    tv_sd: float
    chi2: float
    dof: int
    p_value: float
    impossible: int

    @property
    def tv_limit(self) -> float:
        return self.e0 + TV_SIGMAS * self.tv_sd

    @property
    def tv_ok(self) -> bool:
        """The total variation alone; whether the chi-squared value is acceptable depends on the whole family:
        see `holm`."""
        return self.impossible == 0 and self.tv <= self.tv_limit + 1e-9

    @property
    def tv_sigmas(self) -> float:
        """How many standard deviations the total variation lies above E0; inf when the law has no noise and
        it is off."""
        if self.impossible:
            return float("inf")
        return (self.tv - self.e0) / self.tv_sd if self.tv_sd > 0 else (0.0 if self.tv <= 1e-9 else float("inf"))


def check_law(counts: np.ndarray, law: np.ndarray, *, seed: int) -> LawCheck:
    """Compare `counts` (whole numbers) with `law` (probabilities summing to 1), arrays of one shape."""
    if counts.shape != law.shape:
        raise ValueError(f"counts have shape {counts.shape}, the law has {law.shape}; expected the same cells")
    counts, law = counts.ravel(), law.ravel() / law.sum()
    samples = int(counts.sum())
    possible = law > 0
    chi2, dof = chi_squared(counts[possible], law[possible] * samples)
    return LawCheck(
        samples=samples,
        e0=expected_tv(law, samples),
        tv=total_variation(counts, law),
        tv_sd=bootstrap_tv_sd(law[possible], samples, seed=seed),
        chi2=chi2,
        dof=dof,
        p_value=chi_squared_tail(chi2, dof),
        impossible=int(counts[~possible].sum()),
    )


def expected_tv(law: np.ndarray, samples: int) -> float:
    """E0, the expected total variation at `samples` observations, in the normal approximation (an upper bound
    for rare cells)."""
    return float(np.sqrt(law * np.clip(1 - law, 0, None)).sum() / np.sqrt(2 * np.pi * samples))


def total_variation(counts: np.ndarray, law: np.ndarray) -> float:
    return float(0.5 * np.abs(counts / counts.sum() - law).sum())


def bootstrap_tv_sd(law: np.ndarray, samples: int, *, seed: int) -> float:
    """Standard deviation of the total variation over data sets drawn from the law itself (parametric
    bootstrap)."""
    draws = np.random.default_rng(seed).multinomial(samples, law, size=_BOOTSTRAPS)
    return float((0.5 * np.abs(draws / samples - law).sum(axis=1)).std(ddof=1))


def chi_squared(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, cells expected fewer than 5 times pooled into one.

    When the pool itself is expected fewer than 5 times the smallest other cell joins it.
    """
    order = np.argsort(expected)
    counts, expected = counts[order].astype(np.float64), expected[order]
    pooled = int((expected < _MIN_EXPECTED).sum())
    while 0 < pooled < len(expected) and expected[:pooled].sum() < _MIN_EXPECTED:
        pooled += 1
    if pooled:
        counts = np.concatenate([[counts[:pooled].sum()], counts[pooled:]])
        expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def chi_squared_tail(chi2: float, dof: int) -> float:
    """P(X >= chi2) for a chi-squared X; 1 when there is nothing to test (dof 0)."""
    if dof <= 0:
        return 1.0
    return float(
        torch.special.gammaincc(torch.tensor(dof / 2, dtype=torch.float64), torch.tensor(chi2 / 2, dtype=torch.float64))
    )


def holm(p_values: Sequence[float], family_error: float = FAMILY_ERROR) -> list[bool]:
    """Which hypotheses stand (True) when the chance of rejecting any true one is to be at most
    `family_error`.

    Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6 (1979).
    """
    stands = [True] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > family_error / (len(p_values) - rank):
            break
        stands[index] = False
    return stands
