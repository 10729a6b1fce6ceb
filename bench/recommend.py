"""From rows to a decision: which method under which load, what to expect of it, and whether its output is proven.

A pure function of a run's rows and gates. It says "do not speculate" when that is what the numbers say.

- A method is judged at a load by the geometric mean of its speedups over that load's cells (prompts, temperatures,
  contexts), and only when it was measured in all of them: else an easy set of prompts would win.
- It *pays* when the lower end of that mean's interval is above 1. Without repeats there is no interval; then it has to
  be 10 % faster, which is the noise of a single short run.
- Of methods within 3 % of the best one, an adaptive draft length is taken: it still holds when prompts change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report_data import Load, Method, Row, cell_of, geometric_mean, is_number, load_of, method_of, speeds

NOISE, CLOSE, SLOWER = 1.10, 0.97, 0.98
PROOFS = ("G1", "G2")
MEMORY = {
    "peak_memory_gib": "peak memory of the engine, GiB",
    "kv_tokens": "tokens that the server's cache holds",
    "max_concurrency": "requests of full length that the cache holds",
}


@dataclass(frozen=True, kw_only=True)
class Score:
    """A method at a load. speedup: geometric mean over `cells` cells; low: of the intervals' lower ends, None without
    repeats; worst: (prompts, speedup) of the slowest cell; memory: by name, the largest measured."""

    method: Method
    speedup: float
    low: float | None
    worst: tuple[str, float]
    cells: int
    tokens_per_s: tuple[float, float]
    alpha: float | None
    memory: Mapping[str, float]

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
        return self.best.method.label if self.best and self.verdict == "pays" else "no speculation"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """verdict: use (it pays somewhere and the output is proven), plain (it pays nowhere), unproven (it pays, but G1 or
    G2 does not hold), unknown (nothing was measured)."""

    verdict: str
    headline: str
    reasons: Sequence[str]
    cautions: Sequence[str]
    choices: Sequence[Choice]


def recommend(rows: Iterable[Row], gates: Mapping[str, Mapping[str, Any]]) -> Recommendation:
    """The decision that the rows and gates of a run support."""
    by_load: dict[Load, list[Row]] = defaultdict(list)
    for row in speeds(rows):
        by_load[load_of(row)].append(row)
    choices = [choose(load, by_load[load]) for load in sorted(by_load)]
    choices = [choice for choice in choices if choice.scores]
    unproven = [name for name in PROOFS if gates.get(name, {}).get("state") != "pass"]
    paying = [choice for choice in choices if choice.verdict == "pays"]
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
        cautions=list(_cautions(choices, gates)),
        choices=choices,
    )


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
    )


def _preferred(scores: Sequence[Score]) -> Score | None:
    """The fastest, or an adaptive one that is as good as that; `scores` come with the fastest first."""
    if not scores:
        return None
    close = [score for score in scores if score.speedup >= CLOSE * scores[0].speedup]
    return next((score for score in close if score.method.controller == "adaptive"), scores[0])


def _reason(load: Load, verdict: str, best: Score | None, drafting: Sequence[Score]) -> str:
    start = f"At {load.label} ({load.engine})"
    if best is None:
        return f"{start}: no method was measured beside plain decoding on the same prompts."
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
    by_method: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_method[choice.method].append(choice)
    parts = [_use(method, of) for method, of in by_method.items() if method != "no speculation"]
    plain = by_method.get("no speculation", [])
    if plain:
        parts.append(f"decode plainly at {_listing([choice.load.label for choice in plain])}")
    text = "; ".join(parts)
    text = f"{text[0].upper()}{text[1:]}."
    return f"{_listing(unproven)} not proven, so not yet: {text}" if verdict == "unproven" else text


def _use(method: str, choices: Sequence[Choice]) -> str:
    gains = [f"{choice.best.speedup:.2f}x at {choice.load.label}" for choice in choices if choice.best]
    return f"use {method}: {_listing(gains)}"


def _cautions(choices: Sequence[Choice], gates: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name in PROOFS:
        state = gates.get(name, {}).get("state", "not run")
        if state != "pass":
            yield f"{name} {'failed' if state == 'fail' else 'was not run'}: the output is not proven unchanged."
    for choice in choices:
        best = choice.best
        if best and choice.verdict == "pays" and best.worst[1] < SLOWER:
            yield (
                f"At {choice.load.label}, {best.method.label} is slower than plain decoding on "
                f"{best.worst[0]} ({best.worst[1]:.2f}x)."
            )
    if any(score.low is None for choice in choices for score in choice.scores):
        yield "Measured without repeats: no intervals, and differences under 10 % are noise."


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
