"""The tables of bench.vllm_lengths for RESULTS_SERVING.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.tables import number
from pipeline.tables import to_markdown

SHARES = (
    (
        "charged_of_best_fixed",
        "Charged with the median price of each step's kind, which other processes disturb little",
    ),
    (
        "charged_from_start",
        "Charged, the adaptive controller's turn before included, at the start of which it knows nothing",
    ),
    ("of_best_fixed", "By the clock, the median over turns, each against the same turn of the fixed length"),
)
PRICES = {"step_rows": "rows", "step_k": "k", "draft_ms": "draft ms", "verify_ms": "verify ms"}


def section(result: Mapping[str, Any]) -> Iterator[str]:
    """Each length against the fixed one that was fastest on that load, and what the steps cost."""
    rows = [row for row in result["rows"] if "controller" in row]
    yield "\nDraft lengths in one engine, each against the fixed one that was fastest on that load."
    for key, told in SHARES:
        if key in rows[0]:
            yield f"\n{told}:\n\n{to_markdown(by_load(rows, key))}"
    if "acceptance" in rows[0]:
        yield f"\nWhat was drafted:\n\n{to_markdown(drafted(rows))}"
    if prices := [row for row in result["rows"] if "step_k" in row]:
        yield f"\n{_between(prices[0])}\n\n{to_markdown(price_list(prices))}"
    yield ""


def by_load(rows: Sequence[Mapping[str, Any]], key: str) -> pd.DataFrame:
    """Loads by controller."""
    table = pd.DataFrame(rows)
    shares = table.assign(share=table[key].map(number)).pivot(index="prompt_set", columns="controller", values="share")
    ordered = shares.loc[table["prompt_set"].unique(), table["controller"].unique()]
    return ordered.rename_axis(None, axis="columns").reset_index().rename(columns={"prompt_set": "load"})


def drafted(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Of each load: acceptance at the longest fixed length, and what the adaptive controller drafted."""
    loads = dict.fromkeys(row["prompt_set"] for row in rows)
    records = []
    for load in loads:
        here = {row["controller"]: row for row in rows if row["prompt_set"] == load}
        adaptive, longest = here["adaptive"], [row for name, row in here.items() if name != "adaptive"][-1]
        between = adaptive.get("shifts_between")
        name = f"{load}: {' and '.join(between)}, the sets furthest apart" if isinstance(between, list) else load
        records.append(
            {
                "load": name,
                f"accepted of those tested, {longest['controller']}": number(longest["acceptance"]),
                "adaptive's mean k": number(adaptive["mean_k"]),
                "adaptive's rounds, with the turn before": number(adaptive["rounds"]),
            }
        )
    return pd.DataFrame(records)


def price_list(prices: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        {told: [number(row[key]) for row in prices] for key, told in PRICES.items()},
    )


def _between(price: Mapping[str, Any]) -> str:
    return (
        f"Prices of a step; {number(price['between_ms'])} ms more for what is neither, and "
        f"{number(price['catch_up_ms'])} ms where the draft had to catch up:"
    )
