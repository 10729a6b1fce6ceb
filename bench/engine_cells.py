"""What the engine's speed bench measures, in the order of what is most missed when time runs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VARIANTS = ("eager", "graphs", "fast", "fast+graphs")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The whole bench's extent. variants: of VARIANTS, the best one first; the others are measured at fewer lengths;
    warm_rounds: of each length before any is timed."""

    variants: Sequence[str]
    batches: Sequence[int] = (1, 16, 64, 4)
    contexts: Sequence[int] = (1000, 8000, 32000)
    alphas: Sequence[float] = (0.87, 0.6, 0.35)
    ks: Sequence[int] = (4, 6, 8, 2)
    few_ks: Sequence[int] = (4,)
    prompt_tokens: int = 256
    new_tokens: int = 256
    repeats: int = 20
    passes: int = 3
    passes_of_few: int = 9  # with fewer than four rows, since acceptance is drawn
    warm_rounds: int = 3

    @property
    def k_max(self) -> int:
        return max(self.ks)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the result. what: "steps" (times at one context), "speed" (tokens a second of the engine, with k = 0
    where alpha is None), "transformers", "assisted" or "vllm" (the same requests elsewhere, method says how)."""

    what: str
    variant: str = ""
    batch: int = 1
    context: int = 0
    alpha: float | None = None
    controller: str = "none"
    k: int = 0
    method: str = ""

    @property
    def name(self) -> str:
        """Says which cell a row is; the same in every run."""
        parts = [self.what, self.variant or self.method, f"batch {self.batch}"]
        parts += [f"context {self.context}"] if self.context else []
        parts += [f"alpha {self.alpha:g}"] if self.alpha is not None else []
        parts += [f"{self.controller} {self.k}"] if self.what == "speed" else []
        return ", ".join(parts)


def ordered(sizes: Sizes) -> list[Cell]:
    """Every cell once. Cells of one engine stand together, as each engine has to be built and captured."""
    best, *others = sizes.variants
    first, *more_alphas = sizes.alphas
    beside = list(_beside(sizes))
    groups = [
        [cell for batch in sizes.batches[:3] for cell in _speeds(best, batch, first, sizes.ks, sizes.k_max)],
        _steps(best, sizes.batches, sizes.contexts),
        [cell for cell in beside if cell.batch == sizes.batches[0] and cell.method in ("eager", "4 tokens")],
        [cell for batch in sizes.batches[3:] for cell in _speeds(best, batch, first, sizes.ks, sizes.k_max)],
        [Cell(what="vllm", method="generate", batch=batch) for batch in sizes.batches],
        beside,
        [
            cell
            for batch in sizes.batches
            for alpha in more_alphas
            for cell in _speeds(best, batch, alpha, sizes.ks, sizes.k_max)
        ],
        [  # each compiles for a minute or more
            Cell(what="transformers", method="static cache, compiled", batch=batch) for batch in sizes.batches[1:]
        ],
        [
            cell
            for variant in others
            for batch in sizes.batches
            for cell in _speeds(variant, batch, first, sizes.few_ks, sizes.k_max)
        ],
        [cell for variant in others for cell in _steps(variant, sizes.batches, sizes.contexts)],
    ]
    return list(dict.fromkeys(cell for group in groups for cell in group))


def _speeds(variant: str, batch: int, alpha: float, ks: Sequence[int], k_max: int) -> Iterator[Cell]:
    yield Cell(what="speed", variant=variant, batch=batch)
    yield Cell(what="speed", variant=variant, batch=batch, alpha=alpha, controller="adaptive", k=k_max)
    for k in ks:
        yield Cell(what="speed", variant=variant, batch=batch, alpha=alpha, controller="fixed", k=k)


def _steps(variant: str, batches: Sequence[int], contexts: Sequence[int]) -> list[Cell]:
    return [
        Cell(what="steps", variant=variant, batch=batch, context=context) for context in contexts for batch in batches
    ]


def _beside(sizes: Sizes) -> Iterator[Cell]:
    """The same requests elsewhere. transformers' assisted generation takes one row at a time."""
    for batch in sizes.batches:
        yield Cell(what="transformers", method="eager", batch=batch)
    yield Cell(what="assisted", method="4 tokens", alpha=sizes.alphas[0])
    for batch in sizes.batches[:1]:
        yield Cell(what="transformers", method="static cache, compiled", batch=batch)
