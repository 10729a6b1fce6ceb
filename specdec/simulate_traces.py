"""Acceptance traces for the simulator: synthetic ones, and those recorded from an engine.

A trace says for every token of every request with what probability a draft of it is accepted, and holds one uniform
number for each, so that all controllers meet the same luck. R requests, T tokens.

A recorded trace is a JSON-lines file, one test a line in the order in which they happened: `[row, position, accepted]`
with the request's number, the draft position from 1, and 0 or 1. A test at position 1 begins a round; accepted drafts
and one more token (the correction, or the bonus after a fully accepted draft) are committed by it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MARGIN = 64  # tokens beyond a request's end that its last round may still draft


@dataclass(frozen=True, kw_only=True)
class Trace:
    """alpha_RT, uniform_RT: as above, MARGIN tokens longer than the requests; lengths_R: tokens of each request;
    by_position: factors on alpha by draft position (the last one holds for all later ones)."""

    name: str
    alpha_RT: np.ndarray
    uniform_RT: np.ndarray
    lengths_R: np.ndarray
    by_position: tuple[float, ...] = (1.0,)

    def chances(self, requests: np.ndarray, offsets: np.ndarray, k: int) -> np.ndarray:
        """[B, k]: P(draft i accepted | those before it) in a round that begins at each row's offset."""
        positions = np.arange(k)
        factors = np.asarray(self.by_position)[np.minimum(positions, len(self.by_position) - 1)]
        return np.clip(self.alpha_RT[requests[:, None], offsets[:, None] + positions] * factors, 0, 1)

    def accepted(self, requests: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[B]: how many of each row's first drafts are accepted."""
        k = int(lengths.max())
        if k == 0:
            return np.zeros(len(lengths), int)
        uniforms = self.uniform_RT[requests[:, None], offsets[:, None] + np.arange(k)]
        good = (uniforms < self.chances(requests, offsets, k)) & (np.arange(k) < lengths[:, None])
        return np.cumprod(good, axis=1).sum(axis=1)

    @property
    def mean_alpha(self) -> float:
        return float(self.alpha_RT.mean())


def from_alphas(
    name: str, alpha_RT: np.ndarray, *, seed: int, by_position: Sequence[float] = (1.0,), spread: float = 0.0
) -> Trace:
    """A trace with given rates. spread: request lengths vary evenly by this share below the full length."""
    rng = np.random.default_rng(seed)
    requests, tokens = alpha_RT.shape
    lengths_R = np.round(tokens * (1 - spread * rng.random(requests))).astype(int)
    padded = np.concatenate([alpha_RT, np.repeat(alpha_RT[:, -1:], MARGIN, axis=1)], axis=1)
    return Trace(
        name=name,
        alpha_RT=padded,
        uniform_RT=rng.random(padded.shape),
        lengths_R=lengths_R,
        by_position=tuple(by_position),
    )


def stationary(alpha: float, *, requests: int, tokens: int, seed: int, by_position: Sequence[float] = (1.0,)) -> Trace:
    return from_alphas(f"a={alpha:g}", np.full((requests, tokens), alpha), seed=seed, by_position=by_position)


def phases(alphas: Sequence[float], *, phase_tokens: int, count: int, requests: int, seed: int) -> Trace:
    """`count` phases of so many tokens a row, with the rates in turn."""
    rates = np.repeat([alphas[i % len(alphas)] for i in range(count)], phase_tokens)
    return from_alphas("phases " + "/".join(f"{a:g}" for a in alphas), np.tile(rates, (requests, 1)), seed=seed)


def mixed_rows(alphas: Sequence[float], *, requests: int, tokens: int, seed: int) -> Trace:
    """Requests of different rates, drawn at random, and of different lengths."""
    rates = np.random.default_rng(seed).choice(alphas, requests)
    return from_alphas("mixed rows", np.tile(rates[:, None], (1, tokens)), seed=seed + 1, spread=0.5)


def write_tests(path: Path, tests: Iterable[tuple[int, int, int]]) -> None:
    """Write (row, position, accepted) in the order in which the tests happened."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps([int(row), int(position), int(accepted)]) + "\n" for row, position, accepted in tests
        )


def read_recorded(path: Path) -> Trace:
    """A recorded trace; tokens that were never tested (bonus tokens) are taken to go as the one before them.

    Raises ValueError naming file and line for a line that is not `[row, position, accepted]`.
    """
    outcomes: dict[int, list[int]] = {}
    last_accepted: dict[int, bool] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row, position, accepted = _read_test(path, number, line)
        known = outcomes.setdefault(row, [])
        if position == 1 and last_accepted.get(row):
            known.append(known[-1])  # the round before was accepted in full, so its bonus token was not tested
        known.append(accepted)
        last_accepted[row] = bool(accepted)
    if not outcomes:
        raise ValueError(f"{path} has no tests; expected lines of [row, position, accepted]")
    return _from_outcomes(path.stem, list(outcomes.values()))


def _read_test(path: Path, number: int, line: str) -> tuple[int, int, int]:
    try:
        row, position, accepted = json.loads(line)
        if isinstance(row, int) and isinstance(position, int) and position >= 1 and accepted in (0, 1):
            return row, position, int(accepted)
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{path}:{number}: got {line[:60]!r}; expected [row, position from 1, 0 or 1]")


def _from_outcomes(name: str, outcomes: Sequence[Sequence[int]]) -> Trace:
    longest = max(map(len, outcomes)) + MARGIN
    alpha_RT = np.array([[*row, *[row[-1]] * (longest - len(row))] for row in outcomes], dtype=float)
    return Trace(
        name=name,
        alpha_RT=alpha_RT,
        uniform_RT=np.full(alpha_RT.shape, 0.5),
        lengths_R=np.array([len(row) for row in outcomes]),
    )
