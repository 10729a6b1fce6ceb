"""What bench.vllm_speed measures: methods, each one engine of vLLM, and their cells in the order of what is most missed
when time runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.synthetic import label

DRAFT, HEAD = "$DRAFT", "$EAGLE3"  # model folders, filled in when an engine is started
ADAPTIVE = "adaptive"
OWN = {"draft": "own", "log_interval_s": 0}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One engine of vLLM. controller: "none", "fixed", "schedule" or "adaptive", and k the most tokens it drafts;
    speculative: vLLM's speculative config without k and acceptance; plugin: settings of vllm_draft_spec, None without
    it; ks: fixed lengths that are measured in the same engine beside the adaptive one; runner: vLLM's model runner;
    tokens_per_round: imposed in place of the acceptances that other methods are given."""

    name: str
    drafter: str
    controller: str = "fixed"
    k: int = 0
    speculative: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] | None = None
    ks: tuple[int, ...] = ()
    runner: str = "V1"
    tokens_per_round: float | None = None
    async_scheduling: bool | None = None


def _native(k: int) -> Method:
    return Method(name=f"draft-k{k}", drafter="model", k=k, speculative={"method": "draft_model", "model": DRAFT})


def _ours(name: str, plugin: Mapping[str, Any], **more: Any) -> Method:
    speculative = {"method": "draft_model", "model": DRAFT}
    return Method(name=name, drafter="model", controller=ADAPTIVE, k=8, speculative=speculative, plugin=plugin, **more)


SCHEDULE = [[1, 8, 4], [9, 32, 2], [33, 64, 1]]
# The most wanted first: so many as fit on the device run together, the others after them.
METHODS = (
    Method(name="none", drafter="none", controller="none"),
    _ours("plugin-own-fast", OWN | {"fast": True}, ks=(4, 6, 2, 8, 0)),
    Method(name="none-v2", drafter="none", controller="none", runner="V2"),
    _native(4),
    Method(
        name="eagle3",
        drafter="eagle3",
        k=3,
        speculative={"method": "eagle3", "model": HEAD},
        runner="V2",
        tokens_per_round=2.3,
    ),
    _native(2),
    _ours("plugin", {"log_interval_s": 0}, ks=(4, 0)),
    _ours("plugin-own-fast-sync", OWN | {"fast": True}, async_scheduling=False),
    _ours("plugin-own", OWN, ks=(4,)),
    Method(
        name="schedule",
        drafter="model",
        controller="schedule",
        k=4,
        speculative={
            "method": "draft_model",
            "model": DRAFT,
            "num_speculative_tokens_per_batch_size": SCHEDULE,
        },
    ),
    _native(1),
    Method(name="ngram", drafter="ngram", k=4, speculative={"method": "ngram", "prompt_lookup_max": 4}),
    Method(name="suffix", drafter="suffix", k=8, speculative={"method": "suffix"}),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The bench's extent. batches: the one that is missed least comes last. alphas: the acceptances imposed, the one
    that targets are about first; shifting: two that take turns pass by pass; none of both where acceptance is `real`,
    which says of what kind. prompts: ids of each, of the set so called; random ones of prompt_tokens where there are
    none, else that is the longest's. passes_of_few: with fewer than four rows, since acceptance is drawn."""

    batches: Sequence[int] = (1, 16, 64, 4)
    alphas: Sequence[float] = (0.87, 0.35, 0.6)
    shifting: tuple[float, ...] = (0.87, 0.35)
    real: str | None = None
    temperatures: Sequence[float] = (0.0,)
    prompts: Sequence[Sequence[int]] = ()
    prompt_set: str = "random"
    prompt_tokens: int = 256
    new_tokens: int = 256
    passes: int = 3
    passes_of_few: int = 5

    def passes_at(self, batch: int) -> int:
        return self.passes_of_few if batch < 4 else self.passes


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the result. alphas: the acceptance of one pass after the other, none where there is nothing to impose;
    acceptance: what the row says of it; rank: 0 for what the targets are about, 6 for what comes last."""

    method: str
    batch: int
    controller: str
    k: int
    alphas: tuple[float, ...] = ()
    acceptance: str | None = None
    temperature: float = 0.0
    rank: int = 0

    @property
    def name(self) -> str:
        """Says which cell a row is; the same in every run."""
        length = self.controller if self.controller == "none" else f"{self.controller} {self.k}"
        about = [self.acceptance] if self.acceptance else []
        about += [f"T = {self.temperature:g}"] if self.temperature else []
        return ", ".join([self.method, f"batch {self.batch}", length, *about])


def ordered(methods: Sequence[Method], sizes: Sizes) -> list[Cell]:
    """Every cell once: by rank, then batch, then method. Where drafts are accepted less often, or by turns, the largest
    batch comes first: they cost most there."""
    found = [
        cell
        for method in methods
        for batch in sizes.batches
        for temperature in sizes.temperatures
        for cell in cells_of(method, batch, temperature, sizes)
    ]
    return sorted(found, key=lambda c: (c.rank, -c.batch if c.rank in (1, 2) else sizes.batches.index(c.batch)))


def cells_of(method: Method, batch: int, temperature: float, sizes: Sizes) -> Iterator[Cell]:
    """Rank 0: ours and what it is measured against; 1 and 2: ours at other acceptances or temperatures, and where two
    take turns; 3 and 4: other methods, and these at what is missed least; 5: ours at fixed lengths; 6: the rest."""
    adaptive = method.controller == ADAPTIVE
    ours = adaptive or (method.controller == "none" and method.runner == "V1")
    first = temperature == sizes.temperatures[0]

    def cell(k: int, rank: int, alphas: tuple[float, ...] = (), acceptance: str | None = None, **more: Any) -> Cell:
        named = {"method": method.name, "controller": method.controller} | more
        return Cell(batch=batch, k=k, rank=rank, alphas=alphas, acceptance=acceptance, temperature=temperature, **named)

    for place, (alphas, told) in enumerate(_acceptances(method, sizes)):
        if ours:
            rank = 2 if len(alphas) > 1 else 1 if place or not first else 0
        else:
            rank = 6 if place else 4 if batch == sizes.batches[-1] or not first else 3
        yield cell(method.k, rank, alphas, told)
        for k in method.ks:
            if k and len(alphas) < 2:  # under a load that shifts a fixed length's speed follows from the two
                yield cell(k, 5 if first and not place else 6, alphas, told, controller="fixed")
    if 0 in method.ks:
        yield cell(0, 5 if first else 6, controller="fixed")


def _acceptances(method: Method, sizes: Sizes) -> Iterator[tuple[tuple[float, ...], str | None]]:
    """(acceptance of the passes in turn, its name) of each cell at a batch."""
    if method.controller == "none":
        yield (), None
    elif sizes.real is not None:
        yield (), sizes.real
    elif method.tokens_per_round is not None:
        yield (), f"synthetic: {method.tokens_per_round:g} tokens a round"
    else:
        yield from (((alpha,), label(alpha)) for alpha in sizes.alphas)
        if sizes.shifting:
            yield sizes.shifting, shifting_label(sizes.shifting)


def shifting_label(alphas: Sequence[float]) -> str:
    return f"{label(alphas[0])} and {' and '.join(f'{alpha:g}' for alpha in alphas[1:])} in turn"
