"""What acceptance by position has to be: enumerated from cache-free forwards of target and draft.

In a round at context c with drafts d1, d2, ... the prefix d1..di is accepted with probability prod_j min(p,
q)(d_j | c d_<j): d_j is drawn with probability q and kept with probability min(1, p / q). Rejected after
d1..di, the round ends with x with probability (p - min(p, q))(x) times that; so the law of the contexts at
which rounds start is enumerated as well, and with it how often position i is reached and accepted. A fault
that makes the draft worse (a hole in its cache, a stale tail) leaves the text exact and shows only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.law import Oracle, Tokens, has_ended, next_laws
from specdec import AcceptanceStats, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the acceptance of a request depends on. `draft_params` differ from `params` only for a draft that
    honestly samples otherwise.

    k_of_round: the number of drafts in the request's n-th round, n = 0, 1, ... A row drafts no more than it may still
    commit besides the token that every round adds, and nothing at positions from `draft_max_positions` on.
    """

    target: Oracle
    draft: Oracle
    prompt: Tokens
    params: SamplingParams
    draft_params: SamplingParams
    k_of_round: Callable[[int], int]
    draft_max_positions: int = 2**31

    def room(self, output: Tokens) -> int:
        """How many drafts a round that starts after `output` has room for."""
        length = len(self.prompt) + len(output)
        return max(0, min(self.params.max_tokens - len(output) - 1, self.draft_max_positions - length))


@dataclass(frozen=True, kw_only=True)
class AcceptanceLaw:
    """Expected counts a request, float64 [k]; index i is draft position i + 1."""

    reached: np.ndarray
    accepted: np.ndarray

    @property
    def alpha(self) -> np.ndarray:
        """Acceptance at each position conditional on reaching it; nan where it never is."""
        with np.errstate(invalid="ignore"):
            return self.accepted / self.reached


@dataclass(kw_only=True)
class _Walk:
    """Sums over the enumeration: mass[n] maps contexts to the probability that round n starts there."""

    reached: np.ndarray
    accepted: np.ndarray
    following: dict[Tokens, float] = field(default_factory=dict)

    def start_next_round(self, output: Tokens, mass: float) -> None:
        self.following[output] = self.following.get(output, 0.0) + mass


def enumerate_acceptance(setting: Setting, *, k_max: int) -> AcceptanceLaw:
    """Expected reached and accepted counts of one request from its first round to its end."""
    walk = _Walk(reached=np.zeros(k_max), accepted=np.zeros(k_max))
    starts: dict[Tokens, float] = {(): 1.0}
    round_index = 0
    while starts:
        walk.following = {}
        for room, group in _by_room(starts, setting).items():
            _enumerate_round(setting, group, min(setting.k_of_round(round_index), room), walk)
        starts = {o: mass for o, mass in walk.following.items() if not has_ended(o, setting.params)}
        round_index += 1
    return AcceptanceLaw(reached=walk.reached, accepted=walk.accepted)


def _by_room(starts: dict[Tokens, float], setting: Setting) -> dict[int, dict[Tokens, float]]:
    """The starts by how many drafts they have room for."""
    groups: dict[int, dict[Tokens, float]] = {}
    for output, mass in starts.items():
        groups.setdefault(setting.room(output), {})[output] = mass
    return groups


def _enumerate_round(setting: Setting, starts: dict[Tokens, float], k: int, walk: _Walk) -> None:
    """One round from every start: `alive` maps accepted prefixes that have not ended to their probability."""
    alive = starts
    for position in range(k + 1):
        target_laws = next_laws(setting.target, setting.prompt, setting.params, alive)
        if position == k:
            draft_laws = {
                output: np.zeros(setting.target.vocab) for output in alive
            }  # bonus token: nothing drafted here
        else:
            draft_laws = next_laws(setting.draft, setting.prompt, setting.draft_params, alive)
        accepted: dict[Tokens, float] = {}
        for output, mass in alive.items():
            p, q = target_laws[output], draft_laws[output]
            kept = np.minimum(p, q)
            if position < k:
                walk.reached[position] += mass
                walk.accepted[position] += mass * kept.sum()
            for token in np.flatnonzero(p):
                grown = (*output, int(token))
                walk.start_next_round(grown, mass * (p[token] - kept[token]))
                if not has_ended(grown, setting.params):
                    accepted[grown] = mass * kept[token]
        alive = {output: mass for output, mass in accepted.items() if mass > 0}


def acceptance_z(stats: Sequence[AcceptanceStats], alpha: np.ndarray) -> np.ndarray:
    """Standard scores by position of independent requests' counts against `alpha`, float64 [k].

    A request's residual accepted_i - alpha_i * reached_i has mean zero exactly, whatever the number of its
    rounds; its spread is taken from the requests. 0 where there is no residual at all (alpha = 1 and all
    accepted), inf where alpha is 1 and something was rejected.
    """
    reached = _padded([one.reached for one in stats], len(alpha))
    accepted = _padded([one.accepted for one in stats], len(alpha))
    residual = accepted - np.nan_to_num(alpha) * reached
    spread = np.sqrt((residual**2).sum(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(spread > 1e-6, residual.sum(axis=0) / spread, 0.0)
    certain = np.isclose(alpha, 1.0, atol=1e-9, rtol=0.0) & (accepted.sum(axis=0) < reached.sum(axis=0))
    return np.where(certain, -np.inf, scores)


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    padded = np.zeros((len(rows), width))
    for index, row in enumerate(rows):
        padded[index, : min(len(row), width)] = row[:width]
    return padded
