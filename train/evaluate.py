"""What a draft is worth: acceptance by the engine itself, prompt by prompt, at temperatures 0 and 1.

Acceptance at draft position i counts the rounds in which all before i were accepted, so the chances multiply:

    tokens a round at k  =  1 + a1 + a1 a2 + ... + a1 a2 .. ak
    a draft pays at k    while  tokens at k > k c + 1,  c = time of a draft step / time of a verification

The break-even ratio is the largest such c over k. Intervals: train.intervals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from data.common import stable_seed
from pipeline.config_train import STOCK
from pipeline.results import gate
from specdec import AcceptanceStats, Engine, Request, SamplingParams
from train.intervals import gain_interval, ratio_interval

TEMPERATURES = (0.0, 1.0)
MIN_GAIN = 0.05  # gate G3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How acceptance is measured: the same for every draft that is compared."""

    k: int = 8
    batch: int = 8
    max_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


def measure(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    setting: Setting,
    check_stop: Callable[[], None] = lambda: None,
) -> list[AcceptanceStats]:
    """Decode every prompt once; what was drafted and accepted in each. ValueError when one fails."""
    longest = max(map(len, prompts)) + setting.max_tokens
    engine = Engine(target, draft, k=setting.k, num_slots=min(setting.batch, len(prompts)), capacity=longest)
    tickets = [engine.submit(_request(ids, number, temperature, setting)) for number, ids in enumerate(prompts)]
    found: dict[int, AcceptanceStats] = {}
    while engine.has_work:
        check_stop()
        for ticket, completion in engine.step():
            if completion.finish_reason == "error":
                raise ValueError(f"prompt {tickets.index(ticket)}: {completion.error}")
            found[ticket] = completion.stats
    return [found[ticket] for ticket in tickets]


def _request(ids: Sequence[int], number: int, temperature: float, setting: Setting) -> Request:
    params = SamplingParams(
        temperature=temperature,
        max_tokens=setting.max_tokens,
        stop_ids=setting.stop_ids,
        seed=stable_seed(setting.seed, number, temperature),
    )
    return Request(prompt_ids=ids, params=params)


def tokens_by_k(alpha_by_position: Sequence[float]) -> list[float]:
    """Expected tokens a round at k = 1, 2, ...; a position that was never reached counts as never accepted."""
    reached = accumulate((0.0 if a != a else a for a in alpha_by_position), mul)
    return [1.0 + total for total in accumulate(reached)]


def break_even(tokens: Sequence[float]) -> float:
    """The cost ratio c up to which some draft length pays: the largest (tokens at k - 1) / k."""
    return max((each - 1) / k for k, each in enumerate(tokens, start=1))


def pairs(stats: Sequence[AcceptanceStats]) -> np.ndarray:
    """(accepted, tested) drafts of each prompt [P, 2]."""
    return np.array([(sum(each.accepted), sum(each.reached)) for each in stats], dtype=float)


def columns(temperature: float, stats: Sequence[AcceptanceStats], base: Sequence[AcceptanceStats]) -> dict[str, Any]:
    """The values of one draft on one set at one temperature; `base`: the stock draft's, for the gain."""
    total = sum(stats, AcceptanceStats())
    tokens = tokens_by_k(total.alpha_by_position)
    gain = total.alpha - sum(base, AcceptanceStats()).alpha
    values = {
        "alpha": total.alpha,
        "alpha_ci": ratio_interval(pairs(stats)),
        "alpha_by_position": total.alpha_by_position,
        "tokens_by_k": tokens,
        "break_even_c": break_even(tokens),
        "gain": gain,
        "gain_ci": gain_interval(pairs(stats), pairs(base)),
    }
    return {_named(name, temperature): value for name, value in values.items()}


def _named(name: str, temperature: float) -> str:
    """alpha_t1, alpha_t1_ci: an interval's name ends with _ci wherever the temperature goes."""
    stem = name.removesuffix("_ci")
    return f"{stem}_t{temperature:g}{name[len(stem) :]}"


def compare(
    target: Any,
    drafts: Mapping[str, Callable[[], Any]],
    prompt_sets: Mapping[str, Sequence[Sequence[int]]],
    setting: Setting,
    check_stop: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One row a draft and set; `drafts` makes a fresh drafter of each, STOCK among them."""
    rows = []
    for domain, prompts in prompt_sets.items():
        found: dict[str, dict[float, list[AcceptanceStats]]] = {}
        for name, make in drafts.items():
            found[name] = {
                temperature: measure(target, make(), prompts, temperature, setting, check_stop)
                for temperature in TEMPERATURES
            }
        base = found[STOCK]
        for name, by_temperature in found.items():
            row: dict[str, Any] = {"loss": name, "domain": domain, "prompts": len(prompts), "k": setting.k}
            for temperature, stats in by_temperature.items():
                row |= columns(temperature, stats, base[temperature])
            rows.append(row)
    return rows


def g3_gate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """G3: in every domain in which the draft was trained, at both temperatures, the best draft's acceptance is at least
    0.05 above the stock's and the gain's interval above zero. Best: by its smallest gain."""
    ours = [row for row in rows if row["in_domain"] and row["loss"] != STOCK]
    if not ours:
        return gate("not run", limit=MIN_GAIN, reason="no distilled draft was measured in domain")
    by_draft: dict[str, list[Mapping[str, Any]]] = {}
    for row in ours:
        by_draft.setdefault(row["loss"], []).append(row)
    name, best = max(by_draft.items(), key=lambda item: _smallest_gain(item[1]))
    above_zero = all((row[f"gain_t{t:g}_ci"] or [0.0])[0] > 0 for row in best for t in TEMPERATURES)
    told = "; ".join(_told(row, t) for row in best for t in TEMPERATURES)
    return gate(
        "pass" if above_zero and _smallest_gain(best) >= MIN_GAIN else "fail",
        value=round(_smallest_gain(best), 4),
        limit=MIN_GAIN,
        reason=f"{name}, {told}",
    )


def line(row: Mapping[str, Any]) -> str:
    """One row for a terminal."""
    values = [f"T={t:g} {row[f'alpha_t{t:g}']:.3f} {_interval(row[f'alpha_t{t:g}_ci'])}" for t in (1.0, 0.0)]
    return f"{row['loss']:<28}{row['domain']:<14}{'  '.join(values)}  pays up to c = {row['break_even_c_t0']:.2f}"


def _smallest_gain(rows: Sequence[Mapping[str, Any]]) -> float:
    return min(row[f"gain_t{t:g}"] for row in rows for t in TEMPERATURES)


def _told(row: Mapping[str, Any], temperature: float) -> str:
    alpha, gain = row[f"alpha_t{temperature:g}"], row[f"gain_t{temperature:g}"]
    bounds = _interval(row[f"gain_t{temperature:g}_ci"])
    return f"{row['domain']} at T = {temperature:g}: {alpha - gain:.3f} to {alpha:.3f}, gain {gain:.3f} {bounds}"


def _interval(bounds: Sequence[float] | None) -> str:
    return "(no interval)" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
