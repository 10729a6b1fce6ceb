"""Gate G4: the adaptive controller against fixed draft lengths, in the engine's cells and on shifting acceptance.

The engine part compares measured speeds, where a few per cent can be told only from repeats: cells measured less than
MIN_REPEATS times are shown and not judged. The shifting part is simulated (specdec.simulate_run): seeds are fixed, and
times are exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from bench.speed_gate import cell_name, is_plain, same_cell
from pipeline.results import gate
from specdec.controller import Adaptive, FixedK
from specdec.simulate_costs import CostModel, cost_models
from specdec.simulate_run import Noise, OneLength, Run, Truth, calibrate, simulate
from specdec.simulate_traces import Trace, phases

OF_BEST_FIXED, OF_ORACLE, OF_PLAIN = 0.97, 0.95, 0.98
MIN_REPEATS = 3
TABLES = ("h200-first", "cpu")
RATES, PHASE_TOKENS, K_MAX = (0.9, 0.35), 2000, 8


def g4(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"rows", "gate"} from the engine's result rows and the simulation."""
    evidence = [*engine_shares(rows), *(shifting_share(cost_models()[name]) for name in TABLES)]
    return {"rows": evidence, "gate": g4_gate(evidence)}


def engine_shares(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adaptive's speed in each cell over the best fixed length's and over k = 0's."""
    for row in rows:
        if row.get("controller") != "adaptive":
            continue
        beside = [each for each in rows if same_cell(each, row)]
        fixed = [r["tokens_per_s"] for r in beside if r["controller"] == "fixed" and _drafter(r) == _drafter(row)]
        plain = [r["tokens_per_s"] for r in beside if is_plain(r)]
        yield {
            "gate": "G4",
            "case": f"engine: {cell_name(row)}",
            "of_best_fixed": row["tokens_per_s"] / max(fixed + plain),
            "of_oracle": None,
            "of_plain": row["tokens_per_s"] / plain[0],
            "judged": row["repeats"] >= MIN_REPEATS,
        }


def shifting_share(cost: CostModel) -> dict[str, Any]:
    """The same for a row whose acceptance changes every 2,000 tokens, against the length best in each phase too."""
    trace = shifting_trace()
    speed = shifting_run(cost, "adaptive").speed
    fixed = [simulate(trace, cost, OneLength(FixedK(k)), slots=1).speed for k in range(K_MAX + 1)]
    return {
        "gate": "G4",
        "case": f"simulated: acceptance {RATES[0]} and {RATES[1]} in turn, costs {cost.name}",
        "of_best_fixed": speed / max(fixed),
        "of_oracle": speed / shifting_run(cost, "oracle").speed,
        "of_plain": speed / fixed[0],
        "judged": True,
    }


def shifting_trace() -> Trace:
    """One row of RATES in turn."""
    return phases(RATES, phase_tokens=PHASE_TOKENS, count=2, requests=1, seed=6)


def shifting_run(cost: CostModel, policy: Literal["adaptive", "oracle"]) -> Run:
    """That row decoded by the adaptive controller, or by the policy that knows all rates and costs."""
    if policy == "oracle":
        return simulate(shifting_trace(), cost, Truth(cost, K_MAX), slots=1)
    adaptive = Adaptive(K_MAX)
    calibrate(adaptive, cost, rows=1, repeats=5, noise=Noise(), seed=7)
    return simulate(shifting_trace(), cost, OneLength(adaptive), slots=1)


def g4_gate(evidence: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pass when no judged case is below its limits; the value is the smallest share over its limit."""
    margins = {row["case"]: _margin(row) for row in evidence}
    judged = {row["case"]: margins[row["case"]] for row in evidence if row["judged"]}
    worst = min(judged, key=judged.__getitem__)
    shown = {case: margin for case, margin in margins.items() if case not in judged}
    reason = f"{len(judged)} cases judged; least above its limit: {worst}"
    if shown:
        least = min(shown, key=shown.__getitem__)
        reason += (
            f"; {len(shown)} cells with under {MIN_REPEATS} repeats not judged, worst {shown[least]:.3f} ({least})"
        )
    return gate("pass" if judged[worst] >= 1.0 else "fail", value=judged[worst], limit=1.0, reason=reason)


def _margin(row: Mapping[str, Any]) -> float:
    """The smallest of the case's shares over their limits; a simulated one has to be ahead of every fixed length."""
    if row["of_oracle"] is None:
        return min(row["of_best_fixed"] / OF_BEST_FIXED, row["of_plain"] / OF_PLAIN)
    return min(row["of_best_fixed"], row["of_oracle"] / OF_ORACLE, row["of_plain"] / OF_PLAIN)


def _drafter(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["drafter"], row.get("draft")
