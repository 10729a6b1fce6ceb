"""Gate G5: speculation against the same engine's plain decoding at batch 1, for one pair of models on one kind of GPU.

The gate is about the engine, so acceptance is fixed: a round's time is measured, and the tokens it gives are those
expected when every draft is accepted with probability A, (1 - A^(k+1)) / (1 - A). The speed that was measured with the
acceptance of the pair at hand stands beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.results import gate

A, LIMIT = 0.87, 2.0
DEVICE = "H200"
TARGET = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}  # Qwen3-8B
DRAFT = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}  # Qwen3-0.6B


def obstacle(device: str, target: Any, draft: Any) -> str | None:
    """Why the gate does not apply to this device and these configs of models; None where it does."""
    if DEVICE not in device:
        return f"needs one NVIDIA {DEVICE}; this is {device}"
    for role, config, wanted in (("target", target, TARGET), ("draft", draft, DRAFT)):
        got = {name: getattr(config, name, None) for name in wanted}
        if got != wanted:
            return f"needs the shapes of Qwen3-8B and Qwen3-0.6B; the {role}'s are {got}"
    return None


def g5(rows: Sequence[Mapping[str, Any]], obstacle: str | None) -> dict[str, Any]:
    """{"rows", "gate"} from the engine's result rows: in every cell of batch 1 the best fixed length counts, of all
    cells the worst."""
    if obstacle is not None:
        return {"rows": [], "gate": gate("not run", limit=LIMIT, reason=obstacle)}
    evidence = list(expected_speeds(rows))
    if not evidence:
        reason = "the grid has no fixed length of a draft model at batch 1"
        return {"rows": [], "gate": gate("not run", limit=LIMIT, reason=reason)}
    best: dict[str, dict[str, Any]] = {}
    for row in evidence:
        best[row["case"]] = max(best.get(row["case"], row), row, key=lambda each: each["expected_speedup"])
    worst = min(best.values(), key=lambda row: row["expected_speedup"])
    value = worst["expected_speedup"]
    reason = (
        f"{worst['case']}, k = {worst['k']}: a round of {worst['round_ms']:.2f} ms, of plain decoding "
        f"{worst['plain_round_ms']:.2f} ms, at acceptance {A}; vLLM's plain decoding is measured by 05_bench_vllm"
    )
    return {
        "rows": evidence,
        "gate": gate("pass" if value >= LIMIT else "fail", value=value, limit=LIMIT, reason=reason),
    }


def expected_speeds(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each fixed length of a draft model at batch 1, at acceptance A."""
    for row in rows:
        if (row.get("batch"), row.get("drafter"), row.get("controller")) != (1, "model", "fixed"):
            continue
        (plain,) = [each for each in rows if same_cell(each, row) and is_plain(each)]
        expected = (1 - A ** (row["k"] + 1)) / (1 - A)
        yield {
            "gate": "G5",
            "case": cell_name(row),
            "k": row["k"],
            "round_ms": row["round_ms"],
            "plain_round_ms": plain["round_ms"],
            "acceptance": f"synthetic:{A}",
            "expected_speedup": expected * plain["round_ms"] / row["round_ms"],
            "measured_speedup": row["speedup"],
        }


def same_cell(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows were measured on the same requests."""
    names = ("prompt_set", "temperature", "batch", "prompt_tokens")
    return all(one.get(name) == other.get(name) for name in names)


def is_plain(row: Mapping[str, Any]) -> bool:
    """Whether this is the engine without drafts, which speeds refer to."""
    return (row.get("engine"), row.get("drafter")) == ("specdec", "none")


def cell_name(row: Mapping[str, Any]) -> str:
    """A row's cell and drafter in words."""
    drafter = f"{row['drafter']} {row['draft']}" if row.get("draft") else row["drafter"]
    tokens = f", {row['prompt_tokens']} prompt tokens" if "prompt_tokens" in row else ""
    return f"{row['prompt_set']}, T = {row['temperature']:g}, batch {row['batch']}{tokens}, {drafter}"
