"""One cell of the bench grid: every variant on the same prompts, batch and temperature, as flat result
rows."""

from collections.abc import Callable, Mapping, Sequence
from math import comb
from statistics import mean, median
from typing import Any

import numpy as np

from bench import measure
from bench.drafters import PLAIN, Label, drafter_of, length_of
from bench.measure import EngineVariant, Pass, TransformersVariant, Variant, Workload
from specdec import AcceptanceStats
from train.intervals import ratio_interval

LEVEL = 0.95


def make_variants(
    target: Any, drafts: Mapping[str | None, Any], labels: Sequence[Label], workload: Workload
) -> tuple[list[Label], list[Variant]]:
    """k = 0 first (the one that speeds refer to), then transformers, then the engine as each label says. `drafts` by
    Label.draft."""
    batch, capacity = workload.batch, workload.longest
    transformers = Label(engine="transformers", drafter="none", controller="none", k=0)
    variants: list[Variant] = [
        EngineVariant(target, None, k=0, batch=batch, capacity=capacity),
        TransformersVariant(target, batch=batch),
        *(
            EngineVariant(
                target,
                drafter_of(label, drafts.get(label.draft)),
                k=length_of(label),
                batch=batch,
                capacity=capacity,
            )
            for label in labels
        ),
    ]
    return [PLAIN, transformers, *labels], variants


def measure_cell(
    target: Any,
    drafts: Mapping[str | None, Any],
    labels: Sequence[Label],
    workload: Workload,
    *,
    repeats: int,
    check_stop: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Warm up, measure interleaved, and give one row a variant. `check_stop` may raise between two passes."""
    labels, variants = make_variants(target, drafts, labels, workload)
    measure.warm_up(variants, workload, check_stop)
    measured = measure.interleave(variants, workload, repeats, check_stop)
    baseline = measured[0]
    return [row(label, workload, passes, baseline) for label, passes in zip(labels, measured, strict=True)]


def row(label: Label, workload: Workload, passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, Any]:
    """The measured values of one variant; `baseline` are the passes of k = 0 in the same repeats."""
    if label.engine == "specdec" and not all(each.rounds for each in passes):
        raise ValueError(
            f"in no round were all {workload.batch} slots decoding; lower the batch or raise bench_engine.max_tokens"
        )
    whole = sum(passes[1:], passes[0])
    values: dict[str, Any] = {
        "engine": label.engine,
        "drafter": label.drafter,
        "draft": label.draft,
        "controller": label.controller,
        "k": label.k,
        "batch": workload.batch,
        "prompt_tokens": round(mean(map(len, workload.prompts))),
        "context": round(measure.mean_context(workload, whole)),
        "temperature": workload.temperature,
        "acceptance": "real",
        "repeats": len(passes),
        "tokens": whole.tokens,
        "full_rounds": len(whole.rounds),
    }
    values |= whole.memory
    if workload.temperature == 0:
        plain = sum(baseline[1:], baseline[0])
        values["texts"] = len(whole.texts)
        values["texts_as_plain"] = sum(a == b for a, b in zip(whole.texts, plain.texts, strict=True))
    values |= summarise("tokens_per_s", [measure.tokens_per_s(each) for each in passes])
    values |= summarise("tokens_per_s_wall", [measure.tokens_per_s_wall(each) for each in passes])
    if label.engine == "specdec":
        values |= _engine_values(passes, baseline)
        values |= {"speedup": 1.0} if passes is baseline else _speedup(passes, baseline)
        values |= acceptance_values(whole.acceptance)
        values["mean_k"] = mean(stats.k for stats in whole.rounds)
    values["ci_level"] = round(median_interval([0.0] * len(passes))[2], 4) if len(passes) > 1 else None
    return values


def _speedup(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, Any]:
    """Ratios within each repeat, as what disturbs a repeat disturbs both."""
    ratios = [
        measure.tokens_per_s(mine) / measure.tokens_per_s(plain) for mine, plain in zip(passes, baseline, strict=True)
    ]
    return summarise("speedup", ratios)


def _engine_values(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, Any]:
    values = summarise("target_step_ms", [measure.round_times_ms(plain)["verify_ms"] for plain in baseline])
    times = [measure.round_times_ms(each) for each in passes]
    for name in dict.fromkeys(name for each in times for name in each):
        values |= summarise(name, [each[name] for each in times if name in each])  # some may have drafted nothing
    return values


def summarise(name: str, values: Sequence[float]) -> dict[str, Any]:
    """{name: median over repeats}, and {name_ci: [low, high]} when there are several."""
    result: dict[str, Any] = {name: median(values)}
    if len(values) > 1:
        result[f"{name}_ci"] = list(median_interval(values)[:2])
    return result


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, high, level): an interval of order statistics for the median, free of any assumed distribution.

    The narrowest with at least 95 % coverage, or minimum to maximum when there are too few values for that:
    the median of n values lies between their minimum and maximum with probability 1 - 2 / 2**n, 0.75 for n =
    3.
    """
    ordered, n = sorted(values), len(values)
    for skipped in range((n - 1) // 2, -1, -1):
        level = 1 - 2 * sum(comb(n, i) for i in range(skipped + 1)) / 2**n
        if level >= LEVEL or skipped == 0:
            return ordered[skipped], ordered[n - 1 - skipped], level
    raise AssertionError("no values to take the median of")


def acceptance_values(acceptance: Sequence[tuple[int, AcceptanceStats]]) -> dict[str, Any]:
    """alpha, its 95 % interval over prompts, alpha_by_position, tokens_per_round (a mean over row-rounds)."""
    total = sum((stats for _, stats in acceptance), AcceptanceStats())
    return {
        "alpha": total.alpha,
        "alpha_ci": alpha_interval(acceptance),
        "alpha_by_position": total.alpha_by_position,
        "tokens_per_round": total.tokens_per_round,
    }


def alpha_interval(acceptance: Sequence[tuple[int, AcceptanceStats]]) -> list[float] | None:
    """Bootstrap interval of alpha over prompts, as the completions of one prompt are not independent.

    None when fewer than two prompts had a draft tested.
    """
    num_prompts = 1 + max((prompt for prompt, _ in acceptance), default=0)
    counts_P2 = np.zeros((num_prompts, 2))
    for prompt, stats in acceptance:
        counts_P2[prompt] += (sum(stats.accepted), sum(stats.reached))
    return ratio_interval(counts_P2)
