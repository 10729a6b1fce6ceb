"""Tokens that the draft has not been fed yet, because nothing was drafted in the steps that processed them.

Shapes: B rows of one step, N tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_draft_spec.drafting import on_device


@dataclass(frozen=True, kw_only=True)
class Owed:
    """What to feed, request after request and within a request in order. lengths: tokens a request, all positive.

    tokens_N, positions_N: on the device; a position is the token's place in its request.
    """

    names: list[str]
    lengths: list[int]
    tokens_N: torch.Tensor
    positions_N: torch.Tensor


class Pending:
    """A log of steps in which every row processed one token. Nothing in it waits for the device."""

    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}
        self._tokens: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    @property
    def total(self) -> int:
        """Tokens owed over all requests."""
        return sum(map(len, self._tokens))

    @property
    def lags(self) -> dict[str, int]:
        """Tokens owed by request."""
        return {name: len(places) for name, places in self._places.items()}

    @property
    def longest(self) -> int:
        return max(map(len, self._places.values()), default=0)

    def add(self, names: list[str], tokens_B: torch.Tensor, positions_B: torch.Tensor) -> None:
        """One step. The tensors are copied: vLLM writes the next step into the same buffers."""
        start = self.total
        for b, name in enumerate(names):
            self._places.setdefault(name, []).append(start + b)
        self._tokens.append(tokens_B.clone())
        self._positions.append(positions_B.clone())

    def take(self) -> Owed:
        """All of it; afterwards nothing is owed."""
        device = self._tokens[0].device
        order_N = on_device([place for places in self._places.values() for place in places], device)
        owed = Owed(
            names=list(self._places),
            lengths=[len(places) for places in self._places.values()],
            tokens_N=torch.cat(self._tokens)[order_N],
            positions_N=torch.cat(self._positions)[order_N],
        )
        self._places, self._tokens, self._positions = {}, [], []
        return owed
