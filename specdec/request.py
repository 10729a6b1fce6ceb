"""What a user asks for (Request, SamplingParams) and gets back (Completion)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING

from specdec.stats import AcceptanceStats

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling law; every field is applied to the target and to the draft alike.

    Order of processing: allowed / banned ids, stop ids while fewer than `min_tokens` are out, repetition penalty
    (Keskar et al., CTRL, arXiv 1909.05858; prompt and output), frequency and presence penalty (output only),
    temperature, min_p (arXiv 2407.01082), top_k (ties kept), top_p (Holtzman et al., arXiv 1904.09751).
    `temperature=0` is greedy: the lowest index among the largest logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_ids: Sequence[int] | None = None
    banned_ids: Sequence[int] = ()
    max_tokens: int = 128
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    seed: int = 0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_allowed_mask(self) -> bool:
        return self.allowed_ids is not None or len(self.banned_ids) > 0

    def checked(self, vocab_size: int) -> "SamplingParams":
        """The same in plain numbers and tuples; ValueError naming the field, what was got and what is expected."""
        numbers = {name: _number(name, getattr(self, name), low, high) for name, low, high in _NUMBERS}
        wholes = {name: _whole(name, getattr(self, name), low, high) for name, low, high in _WHOLES}
        ids = {name: id_tuple(name, getattr(self, name), vocab_size) for name in ("banned_ids", "stop_ids")}
        if self.allowed_ids is not None:
            ids["allowed_ids"] = id_tuple("allowed_ids", self.allowed_ids, vocab_size)
        plain = replace(self, **numbers, **wholes, **ids)  # type: ignore[arg-type]
        if 0.0 < plain.temperature < 1e-3:
            raise ValueError(f"temperature is {self.temperature!r}; expected 0 (greedy) or a number from 0.001 on")
        if plain.min_tokens > plain.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        plain._check_some_token_is_possible(vocab_size)
        return plain

    def _check_some_token_is_possible(self, vocab_size: int) -> None:
        allowed = set(range(vocab_size)) if self.allowed_ids is None else set(self.allowed_ids)
        if self.has_allowed_mask and not allowed - set(self.banned_ids):
            raise ValueError("allowed_ids without banned_ids is empty: no token could be sampled")
        if self.min_tokens > 0 and not allowed - set(self.banned_ids) - set(self.stop_ids):
            raise ValueError("min_tokens forbids the stop ids, and no other token is allowed")


_NUMBERS = (
    ("temperature", 0.0, 1e4),
    ("top_p", 1e-9, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-2, 1e2),
    ("presence_penalty", -1e4, 1e4),
    ("frequency_penalty", -1e4, 1e4),
)
_WHOLES = (
    ("top_k", 0, 2**31),
    ("max_tokens", 1, 2**31),
    ("min_tokens", 0, 2**31),
    ("seed", -(2**63), 2**63 - 1),
)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, Real) and math.isfinite(value) and low <= float(value) <= high:
        return float(value)
    raise ValueError(f"{name} is {value!r}; expected a number from {low} to {high}")


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, Integral) and low <= int(value) <= high:
        return int(value)
    raise ValueError(f"{name} is {value!r}; expected a whole number from {low} to {high}")


def id_tuple(name: str, ids: object, vocab_size: int) -> tuple[int, ...]:
    """Token ids as plain numbers; ValueError for what is not a list of whole numbers in [0, vocab_size)."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids  # an array or a tensor
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise ValueError(f"{name} is a {type(ids).__name__}; expected a list or tuple of token ids")
    for token in listed:
        if not (isinstance(token, Integral) and 0 <= int(token) < vocab_size):
            raise ValueError(f"{name} holds {token!r}; expected whole numbers from 0 to {vocab_size - 1}")
    return tuple(map(int, listed))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt (token ids, at least one) and how to continue it."""

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str | int | None = None

    def checked(self, vocab_size: int) -> "Request":
        """The same in plain Python numbers; ValueError saying what is wrong with it."""
        prompt_ids = id_tuple("prompt_ids", self.prompt_ids, vocab_size)
        if not prompt_ids:
            raise ValueError("the prompt is empty; expected at least one token id")
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params is a {type(self.params).__name__}; expected SamplingParams")
        return replace(self, prompt_ids=prompt_ids, params=self.params.checked(vocab_size))


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The target's raw law (before any processing) at each completion token, natural logarithms.

    token_logprob float32 [T]; top_ids int32 [T, n] and top_logprobs float32 [T, n], largest first; tail_mass
    float32 [T], the probability of all tokens outside the top n.
    """

    token_logprob: "np.ndarray"
    top_ids: "np.ndarray"
    top_logprobs: "np.ndarray"
    tail_mass: "np.ndarray"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a request. A stop id that ended it is the last of `token_ids`."""

    id: str | int | None
    token_ids: list[int]
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    error: str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    logprobs: TokenLogprobs | None = None
