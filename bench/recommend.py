"""From rows to a decision: which method under which load, what to expect of it, and whether its output is proven.

A pure function of a run's rows and gates. It says "do not speculate" when that is what the numbers say.

- A method is judged at a load by the geometric mean of its speedups over that load's cells (prompts, temperatures,
  contexts), and only when it was measured in all of them: else an easy set of prompts would win.
- It *pays* when the lower end of that mean's interval is above 1. Without repeats there is no interval; then it has to
  be 10 % faster, which is the noise of a single short run.
- Under vLLM a method whose greedy texts are not those of vLLM without speculation is not taken, however fast.
- Of methods within 3 % of the best one, an adaptive draft length is taken: it still holds when prompts change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report_data import (
    ENGINES,
    Load,
    Method,
    Row,
    cell_of,
    geometric_mean,
    is_number,
    load_of,
    method_of,
    speeds,
)

NOISE, CLOSE, SLOWER = 1.10, 0.97, 0.98
PROOFS = ("G1", "G2")
PLAIN = "no speculation"
MEMORY = {
    "peak_memory_gib": "peak memory, GiB",
    "kv_gib": "of it keys and values, GiB",
    "kv_tokens": "tokens that the cache holds",
    "max_concurrency": "requests of full length that the cache holds",
}
MEMORY_WORDS = {"peak_memory_gib": "memory {:.3g} GiB at the peak", "max_concurrency": "room for {:.3g} full requests"}


@dataclass(frozen=True, kw_only=True)
class Score:
    """A method at a load. speedup: geometric mean over `cells` cells; low: of the intervals' lower ends, None without
    repeats; worst: (prompts, speedup) of the slowest cell; memory: by name, the largest measured; texts: under vLLM,
    (greedy texts that are those without speculation or part from them at a tie, texts compared)."""

    method: Method
    speedup: float
    low: float | None
    worst: tuple[str, float]
    cells: int
    tokens_per_s: tuple[float, float]
    alpha: float | None
    memory: Mapping[str, float]
    texts: tuple[int, int] | None

    @property
    def is_different(self) -> bool:
        return self.texts is not None and self.texts[0] < self.texts[1]

    @property
    def pays(self) -> bool:
        return self.low > 1.0 if self.low is not None else self.speedup >= NOISE


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to do at one load. verdict: pays, unclear (faster, but not by more than the noise), does not pay; best: the
    method chosen or, where none pays, the best of those that were measured."""

    load: Load
    verdict: str
    best: Score | None
    plain: Score | None
    scores: Sequence[Score]
    reason: str

    @property
    def method(self) -> str:
        return self.best.method.label if self.best and self.verdict == "pays" else PLAIN

    @property
    def memory(self) -> str:
        """What the method takes, beside what plain decoding takes; empty where that was not measured."""
        if not self.best:
            return ""
        plain = self.plain.memory if self.plain else {}
        return "; ".join(
            words.format(self.best.memory[name]) + (f" (plain decoding: {plain[name]:.3g})" if name in plain else "")
            for name, words in MEMORY_WORDS.items()
            if name in self.best.memory
        )


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """verdict: use (it pays somewhere and the output is proven), plain (it pays nowhere), unproven (it pays, but what
    proves the output does not hold or was not run), unknown (nothing was measured); proofs: a sentence each."""

    verdict: str
    headline: str
    reasons: Sequence[str]
    cautions: Sequence[str]
    proofs: Sequence[str]
    choices: Sequence[Choice]


def recommend(rows: Iterable[Row], gates: Mapping[str, Mapping[str, Any]]) -> Recommendation:
    """The decision that the rows and gates of a run support."""
    by_load: dict[Load, list[Row]] = defaultdict(list)
    for row in speeds(rows):
        by_load[load_of(row)].append(row)
    choices = [choose(load, by_load[load]) for load in sorted(by_load)]
    choices = [choice for choice in choices if choice.scores]
    paying = [choice for choice in choices if choice.verdict == "pays"]
    unproven = list(_unproven(paying, gates))
    failed = [name for name in PROOFS if gates.get(name, {}).get("state") == "fail" and name not in unproven]
    if not choices:
        verdict = "unknown"
    elif not paying:
        verdict = "plain"
    else:
        verdict = "unproven" if unproven else "use"
    return Recommendation(
        verdict=verdict,
        headline=_headline(verdict, choices, unproven),
        reasons=[choice.reason for choice in choices],
        cautions=list(_cautions(choices, [*failed, *unproven])),
        proofs=[] if failed or unproven else list(_proofs(choices, gates)),
        choices=choices,
    )


def _unproven(paying: Sequence[Choice], gates: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """What would prove the output of the methods that pay, and does not: G1 and G2 for this engine's, the comparison of
    greedy texts for vLLM's."""
    engines = {choice.load.engine for choice in paying}
    if "specdec" in engines:
        yield from (name for name in PROOFS if gates.get(name, {}).get("state") != "pass")
    if any(choice.best and not choice.best.texts for choice in paying if choice.load.engine == "vllm"):
        yield "vLLM's greedy texts"


def _proofs(choices: Sequence[Choice], gates: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name in PROOFS:
        if gates.get(name, {}).get("state") == "pass":
            yield f"{name}: {gates[name]['reason']}."
    compared = {c.best.method.label: c.best.texts for c in choices if c.verdict == "pays" and c.best and c.best.texts}
    for label, (same, total) in compared.items():
        yield f"vLLM, {label}: {same} of {total} greedy texts are those without speculation."


def choose(load: Load, rows: Sequence[Row]) -> Choice:
    """The method for one load; `rows` are its measured speeds."""
    scores = sorted(_scores(rows), key=lambda score: -score.speedup)
    plain = next((score for score in scores if not score.method.drafts), None)
    drafting = [score for score in scores if score.method.drafts]
    best = _preferred(drafting)
    if best is None:
        verdict = "does not pay"
    elif best.pays:
        verdict = "pays"
    else:
        verdict = "unclear" if best.speedup > 1 else "does not pay"
    reason = _reason(load, verdict, best, drafting)
    return Choice(load=load, verdict=verdict, best=best, plain=plain, scores=drafting, reason=reason)


def _scores(rows: Sequence[Row]) -> Iterable[Score]:
    cells = {cell_of(row) for row in rows if method_of(row).drafts}
    of_method: dict[Method, dict[Any, Row]] = defaultdict(dict)
    for row in rows:
        if is_number(row["speedup"]) and row["speedup"] > 0:
            of_method[method_of(row)][cell_of(row)] = row
    for method, measured in of_method.items():
        if not method.drafts or cells <= set(measured):
            yield _score(method, list(measured.values()))


def _score(method: Method, rows: Sequence[Row]) -> Score:
    bounds = [row.get("speedup_ci") for row in rows]
    lows = [bound[0] for bound in bounds if bound and is_number(bound[0]) and bound[0] > 0]
    slowest = min(rows, key=lambda row: row["speedup"])
    rates = [row["tokens_per_s"] for row in rows]
    alphas = [row["alpha"] for row in rows if is_number(row.get("alpha"))]
    memory = {name: [row[name] for row in rows if is_number(row.get(name))] for name in MEMORY}
    return Score(
        method=method,
        speedup=geometric_mean([row["speedup"] for row in rows]),
        low=geometric_mean(lows) if len(lows) == len(rows) else None,
        worst=(str(slowest.get("prompt_set") or "these prompts"), slowest["speedup"]),
        cells=len(rows),
        tokens_per_s=(min(rates), max(rates)),
        alpha=sum(alphas) / len(alphas) if alphas else None,
        memory={name: max(values) for name, values in memory.items() if values},
        texts=_texts(rows),
    )


def _texts(rows: Sequence[Row]) -> tuple[int, int] | None:
    """The server that all these rows are of decoded the same texts once."""
    compared = [row for row in rows if is_number(row.get("texts")) and is_number(row.get("texts_same"))]
    if not compared:
        return None
    return compared[0]["texts_same"] + (compared[0].get("texts_tied") or 0), compared[0]["texts"]


def _preferred(scores: Sequence[Score]) -> Score | None:
    """The fastest, or an adaptive one that is as good as that; `scores` come with the fastest first."""
    scores = [score for score in scores if not score.is_different]
    if not scores:
        return None
    close = [score for score in scores if score.speedup >= CLOSE * scores[0].speedup]
    return next((score for score in close if score.method.controller == "adaptive"), scores[0])


def _reason(load: Load, verdict: str, best: Score | None, drafting: Sequence[Score]) -> str:
    start = f"{load.phrase[0].upper()}{load.phrase[1:]} ({ENGINES.get(load.engine, load.engine)})"
    if best is None:
        return f"{start}: no method with unchanged texts was measured beside plain decoding."
    gain = f"{best.speedup:.2f}x" + (f" (at least {best.low:.2f}x)" if best.low is not None else "")
    if verdict == "does not pay":
        return f"{start} plain decoding is fastest: the best method, {best.method.label}, reaches {gain}."
    if verdict == "unclear":
        need = "its interval reaches down to 1" if best.low is not None else "one run cannot tell that from noise"
        return f"{start}, {best.method.label} reaches {gain}; {need}, so decode plainly or measure longer."
    fastest = drafting[0]
    why = (
        "the fastest measured" if best is fastest else f"within 3 % of {fastest.method.label} ({fastest.speedup:.2f}x)"
    )
    cells = "one cell" if best.cells == 1 else f"{best.cells} cells"
    return f"{start}, {best.method.label} reaches {gain}, mean of {cells}: {why}."


def _headline(verdict: str, choices: Sequence[Choice], unproven: Sequence[str]) -> str:
    if verdict == "unknown":
        return "Nothing to recommend yet: this run measured no method beside plain decoding."
    if verdict == "plain":
        return "Do not speculate here: no method measured is clearly faster than plain decoding."
    engines = list(dict.fromkeys(choice.load.engine for choice in choices))
    parts = [_use([choice for choice in choices if choice.load.engine == engine]) for engine in engines]
    if len(engines) > 1:
        parts = [f"in {ENGINES.get(e, e)}, {part}" for e, part in zip(engines, parts, strict=True)]
    text = ". ".join(f"{part[0].upper()}{part[1:]}" for part in parts) + "."
    if verdict == "unproven":
        return f"{_listing(unproven)} not proven, so not yet: {text[0].lower()}{text[1:]}"
    return text


def _use(choices: Sequence[Choice]) -> str:
    """What to do at the loads of one engine."""
    by_method: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_method[choice.method].append(choice)
    plain = by_method.pop(PLAIN, [])
    parts = []
    for method, of in by_method.items():
        gains = [f"{choice.best.speedup:.2f}x {choice.load.phrase}" for choice in of if choice.best]
        parts.append(f"use {method}: {_listing(gains)}")
    if plain:
        loads = _listing([choice.load.phrase for choice in plain])
        parts.append(f"decode plainly {loads}" if parts else "decode plainly")
    return "; ".join(parts)


def _cautions(choices: Sequence[Choice], unproven: Sequence[str]) -> Iterable[str]:
    for name in unproven:
        yield f"{name} failed or was not run: the output is not proven unchanged."
    for choice in choices:
        best = choice.best
        if best and choice.verdict == "pays" and best.worst[1] < SLOWER:
            yield (
                f"{best.method.label} is slower than plain decoding on {best.worst[0]} ({best.worst[1]:.2f}x), "
                f"{choice.load.phrase}."
            )
    for label in dict.fromkeys(s.method.label for choice in choices for s in choice.scores if s.is_different):
        yield f"{label} changed greedy texts in vLLM and is not recommended."
    if any(score.low is None for choice in choices for score in choice.scores):
        yield "Measured without repeats: no intervals, and differences under 10 % are noise."


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
