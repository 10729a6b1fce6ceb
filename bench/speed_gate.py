"""Gate G5: speculation against the same engine's plain decoding at batch 1, for one pair of models on one kind of GPU.

Where vLLM's plain decoding was measured in the same run, ours must be no slower.

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
    no_slower, beside = against_vllm(rows)
    reason = (
        f"{worst['case']}, k = {worst['k']}: a round of {worst['round_ms']:.2f} ms, of plain decoding "
        f"{worst['plain_round_ms']:.2f} ms, at acceptance {A}; {beside}"
    )
    state = "pass" if value >= LIMIT and no_slower else "fail"
    return {"rows": evidence, "gate": gate(state, value=value, limit=LIMIT, reason=reason)}


def against_vllm(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """(whether plain decoding at batch 1 is no slower than vLLM's of the same run, the two speeds in words)."""
    theirs = [row["tokens_per_s"] for row in rows if is_vllm(row) and row["batch"] == 1]
    ours = [row["tokens_per_s"] for row in rows if is_plain(row) and row["batch"] == 1]
    if not theirs:
        return True, "vLLM's plain decoding is measured by 05_bench_vllm"
    told = f"plain decoding {max(ours):.0f} tokens/s, vLLM's {max(theirs):.0f}"
    return max(ours) >= max(theirs), told


def best_variant(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of bench.engine_speed's rows those that gate G5 is about: the fastest variant's without drafts and at
    acceptance A, and vLLM's."""
    ours = [row for row in rows if row.get("engine") == "specdec" and "tokens_per_s" in row]
    plain = [row for row in ours if is_plain(row)]
    judged = [row for row in ours if row.get("acceptance") == f"synthetic:{A}" and "speedup" in row]
    fastest = max((row for row in judged if row["batch"] == 1), key=lambda row: row["tokens_per_s"], default=None)
    variant = None if fastest is None else fastest["variant"]
    found = [row for row in (*plain, *judged) if row["variant"] == variant]
    return found + [row for row in rows if is_vllm(row)]


def is_vllm(row: Mapping[str, Any]) -> bool:
    """Whether this is vLLM's plain decoding, beside which ours is shown."""
    return (row.get("engine"), row.get("drafter")) == ("vllm", "none") and "tokens_per_s" in row


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
