"""Gate G6 from bench.vllm_speed: the plugin's adaptive length loses nothing against plain decoding, at any batch and
acceptance; the speeds that were aimed at beside those measured.

The plugin may be set up in several ways; the one is judged whose worst cell is best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.serving_checks import LEAST_SPEEDUP
from pipeline.results import gate

AIM_ACCEPTANCE = "synthetic:0.87"
AIMS = {1: 420.0, 4: 1550.0, 16: 5200.0, 64: 13200.0}  # tokens a second by batch, at that acceptance


def with_speedups(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row beside plain decoding at its batch and temperature: `speedup` on the same model runner, and against each
    runner's."""
    found = [dict(row) for row in rows]
    plain = {
        (row["runner"], row["batch"], row.get("temperature")): row["tokens_per_s"]
        for row in found
        if row.get("controller") == "none" and "tokens_per_s" in row
    }
    for row in found:
        for name, runner in (("speedup", row["runner"]), ("of_plain_v1", "V1"), ("of_plain_v2", "V2")):
            base = plain.get((runner, row["batch"], row.get("temperature")))
            if "tokens_per_s" in row and base:
                row[name] = row["tokens_per_s"] / base
    return found


def g6(rows: Sequence[Mapping[str, Any]], obstacle: str | None) -> dict[str, Any]:
    """{"rows", "gate"} from rows with speedups. obstacle: why the gate does not apply here, None where it does."""
    if obstacle is not None:
        return {"rows": [], "gate": gate("not run", limit=LEAST_SPEEDUP, reason=obstacle)}
    ours = [row for row in rows if row["plugin"] and row["controller"] == "adaptive"]
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for row in ours:
        if "speedup" in row:
            by_method.setdefault(row["method"], []).append(row)
    if not by_method:
        return {"rows": [], "gate": gate("not run", limit=LEAST_SPEEDUP, reason="no adaptive cell was measured")}
    # The one with most cells, and among equals the one whose worst is best.
    method, cells = max(by_method.items(), key=lambda item: (len(item[1]), min(r["speedup"] for r in item[1])))
    worst = min(cells, key=lambda row: row["speedup"])
    open_cells = len([row for row in ours if row["method"] == method]) - len(cells)
    told = (
        f"{method}: slowest beside plain decoding at batch {worst['batch']}, {worst['acceptance']}: "
        f"{worst['speedup']:.2f}x; {_aims_told(cells)}"
    )
    missing = missing_cells(cells)
    value = worst["speedup"]
    evidence = [evidence_row(row) for row in cells]
    if value < LEAST_SPEEDUP:
        return {"rows": evidence, "gate": gate("fail", value=value, limit=LEAST_SPEEDUP, reason=told)}
    if missing or open_cells:
        told = f"{told}; not measured yet: {missing or open_cells}"
        return {"rows": evidence, "gate": gate("not run", value=value, limit=LEAST_SPEEDUP, reason=told)}
    return {"rows": evidence, "gate": gate("pass", value=value, limit=LEAST_SPEEDUP, reason=told)}


def missing_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """Batches that lack an acceptance which another batch has, and batches aimed at that have none; in words."""
    wanted = {row["acceptance"] for row in cells}
    lacking = {batch: wanted - {row["acceptance"] for row in cells if row["batch"] == batch} for batch in AIMS}
    return "; ".join(f"batch {batch}, {', '.join(sorted(names))}" for batch, names in lacking.items() if names)


def evidence_row(row: Mapping[str, Any]) -> dict[str, Any]:
    aim = AIMS.get(row["batch"]) if row["acceptance"] == AIM_ACCEPTANCE else None
    return {
        "gate": "G6",
        "method": row["method"],
        "case": f"batch {row['batch']}, {row['acceptance']}",
        "tokens_per_s": row["tokens_per_s"],
        "of_plain": row["speedup"],
        "aim": aim,
        "aim_met": None if aim is None else row["tokens_per_s"] >= aim,
    }


def _aims_told(cells: Sequence[Mapping[str, Any]]) -> str:
    aimed = {row["batch"]: row["tokens_per_s"] for row in cells if row["acceptance"] == AIM_ACCEPTANCE}
    listed = [f"{aimed[batch]:.0f} of {aim:.0f} at {batch}" for batch, aim in AIMS.items() if batch in aimed]
    return f"tokens/s of those aimed at, {AIM_ACCEPTANCE}: {', '.join(listed) or 'none measured'}"
