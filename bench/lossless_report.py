"""Gate G1's verdict and its table, from the rows of bench.lossless.run_g1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.law_stats import FAMILY_ERROR, TV_SIGMAS
from pipeline.results import gate

Rows = Sequence[dict[str, Any]]


def g1_gate(rows: Rows) -> dict[str, Any]:
    """Gate G1: value is the worst total variation in standard deviations above E0."""
    laws = [row for row in rows if row["statistic"] != "acceptance"]
    if not laws:
        return gate("not run", limit=TV_SIGMAS, reason="no case was sampled")
    failed = [row for row in rows if not row["passed"]]
    worst = max(laws, key=lambda row: row["tv_sigmas"])
    reason = _summary(laws, worst, len(rows) - len(laws))
    if failed:
        named = ", ".join(f"{row['suite']}/{row['case']}/{row['statistic']} (k={row['k']})" for row in failed[:5])
        reason = f"{len(failed)} of {len(rows)} comparisons failed: {named}; {reason}"
    return gate("fail" if failed else "pass", value=round(worst["tv_sigmas"], 3), limit=TV_SIGMAS, reason=reason)


def _summary(laws: Rows, worst: dict[str, Any], num_acceptance: int) -> str:
    smallest = min(row["p_value"] for row in laws)
    return (
        f"{len(laws)} laws of {laws[0]['samples']} samples each: worst total variation {worst['tv']:.4f} "
        f"(E0 {worst['e0']:.4f}, limit {worst['tv_limit']:.4f}); smallest chi-squared p {smallest:.2g} at a "
        f"family-wise error of {FAMILY_ERROR:g}; acceptance by position compared in {num_acceptance} cases"
    )


def format_table(rows: Rows) -> str:
    """The rows as text: N, E0, TV, its limit and chi-squared's p of every law; acceptance found and
    expected."""
    width = max((len(row["case"]) for row in rows), default=4) + 2
    head = f"{'suite':<10}{'k':<9}{'case':<{width}}{'statistic':<12}{'N':>7}{'E0':>9}{'TV':>9}{'limit':>9}{'chi2 p':>9}"
    return "\n".join([head, *(_line(row, width) for row in rows)])


def _line(row: dict[str, Any], width: int) -> str:
    start = f"{row['suite']:<10}{row['k']:<9}{row['case']:<{width}}{row['statistic']:<12}{row['samples']:>7}"
    verdict = "pass" if row["passed"] else "FAIL"
    if row["statistic"] == "acceptance":
        pairs = zip(row["alpha_by_position"], row["alpha_expected"], strict=True)
        return f"{start}  found/expected {', '.join(f'{a:.3f}/{b:.3f}' for a, b in pairs)}  {verdict}"
    return f"{start}{row['e0']:>9.4f}{row['tv']:>9.4f}{row['tv_limit']:>9.4f}{row['p_value']:>9.2g}  {verdict}"
