"""The engines and cases that gate G1 decodes.

`demo_suites` is small enough for 20,000 samples a case in about a minute on one core; `full_suites` is the
whole grid of temperature x top-k x top-p x min-p x penalties, with every model family and draft length.
"""

from __future__ import annotations

import itertools
from typing import Any

from bench.lossless import Case, Suite
from bench.tiny_models import noisy_copy, tiny_model
from specdec import SamplingParams

_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6}
_TEMPERATURES = (0.6, 1.0, 1.4)
# Prompts of different length and content; the numbers have no meaning and are taken modulo the vocabulary.
_PROMPTS = ((3,), (1, 0, 6, 3, 1), (2, 7), (4, 1, 3, 3, 0, 2, 1, 5, 0), (1, 2, 3), (7, 0, 3, 5, 6, 0, 0))


def make_case(
    index: int, *, vocab: int = 8, max_tokens: int = 4, depth: int = 4, window: int = 3, **changes: Any
) -> Case:
    """A case named after what it changes; its prompt depends on `index`."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **changes})
    shown = [("T", params.temperature)] + [
        (_SHORT.get(key, key), value) for key, value in changes.items() if key != "temperature"
    ]
    name = " ".join(f"{key}={_text(value)}" for key, value in shown)
    prompt = tuple(token % vocab for token in _PROMPTS[index % len(_PROMPTS)])
    return Case(name=name, prompt=prompt, params=params, depth=depth, window=window)


_SHORT = {"repetition_penalty": "rep", "presence_penalty": "pres", "frequency_penalty": "freq"}


def _text(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def pairwise_cases() -> tuple[Case, ...]:
    """Nine cases in which every two levels of temperature, top-k, top-p and (min-p or penalties) meet: an
    orthogonal array L9 (Taguchi)."""
    top_ks, top_ps = (0, 5, 3), (1.0, 0.9, 0.7)
    extras: tuple[dict[str, Any], ...] = ({}, {"min_p": 0.05}, _PENALTIES)
    cells = itertools.product(range(3), range(3))
    return tuple(
        make_case(
            i, temperature=_TEMPERATURES[a], top_k=top_ks[b], top_p=top_ps[(a + b) % 3], **extras[(a + 2 * b) % 3]
        )
        for i, (a, b) in enumerate(cells)
    )


def ending_cases() -> tuple[Case, ...]:
    """Stop ids, length limits, allowed and banned ids, greedy rows beside sampled ones."""
    return (
        make_case(1, stop_ids=(2, 5), min_tokens=2, max_tokens=6),
        make_case(3, stop_ids=(1,), temperature=1.4, max_tokens=2),
        make_case(2, allowed_ids=(0, 2, 3, 7), banned_ids=(3,), max_tokens=3),
        make_case(0, temperature=0.0, frequency_penalty=0.6, max_tokens=5),
    )


def grid_cases() -> tuple[Case, ...]:
    """Temperature x top-k x top-p x min-p x penalties, each off and on."""
    on_off = itertools.product(_TEMPERATURES, (0, 4), (1.0, 0.85), (0.0, 0.06), ({}, _PENALTIES))
    return tuple(
        make_case(i, temperature=t, top_k=k, top_p=p, min_p=m, **penalties)
        for i, (t, k, p, m, penalties) in enumerate(on_off)
    )


def pairwise_suite(k: int = 3, family: str = "qwen3") -> Suite:
    target = tiny_model(family, seed=1)
    draft = noisy_copy(target, noise=0.3, seed=2)
    return Suite(name=family, target=target, draft=draft, ks=(k,), cases=pairwise_cases())


def ending_suite() -> Suite:
    """A draft of another family, and a draft length that changes every round, 0 included."""
    target, draft = tiny_model("llama", seed=3), tiny_model("gemma3", seed=4)
    return Suite(name="endings", target=target, draft=draft, ks=(3, 0, 1, 2), cases=ending_cases())


def deep_suite(k: int = 4) -> Suite:
    """The joint law of tokens 4 to 6: several rounds, rejections and rollbacks lie before them."""
    target = tiny_model("qwen2", vocab=4, layers=2, seed=5)
    shape: dict[str, Any] = {"vocab": 4, "max_tokens": 6, "depth": 6}
    cases = (make_case(4, **shape), make_case(1, temperature=0.6, frequency_penalty=0.7, **shape))
    return Suite(name="deep", target=target, draft=noisy_copy(target, noise=0.3, seed=6), ks=(k,), cases=cases)


def wide_suite(family: str, k: int) -> Suite:
    """32 tokens: the law of the first, and the joint law of the first two."""
    target = tiny_model(family, vocab=32, layers=2, seed=7)
    shape: dict[str, Any] = {"vocab": 32, "max_tokens": 3, "depth": 2, "window": 2}
    cases = tuple(
        make_case(i, temperature=t, top_p=p, **shape) for i, (t, p) in enumerate([(0.6, 1.0), (1.0, 0.9), (1.4, 1.0)])
    )
    return Suite(
        name=f"{family} V=32", target=target, draft=noisy_copy(target, noise=0.3, seed=8), ks=(k,), cases=cases
    )


def demo_suites() -> tuple[Suite, ...]:
    return (pairwise_suite(), ending_suite())


def full_suites() -> tuple[Suite, ...]:
    target = tiny_model("qwen3", seed=1)
    grid = Suite(name="grid", target=target, draft=noisy_copy(target, noise=0.3, seed=2), ks=(3,), cases=grid_cases())
    families = (
        pairwise_suite(1, "qwen2"),
        pairwise_suite(2, "llama"),
        pairwise_suite(4, "gemma2"),
        pairwise_suite(8, "gemma3"),
    )
    return (grid, *families, ending_suite(), deep_suite(), wide_suite("gemma2", 2), wide_suite("qwen3", 1))
