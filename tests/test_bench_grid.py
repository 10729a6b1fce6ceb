"""Dimensions of stage 04's grid: drafts, contexts, prompt sets by category; memory of a variant; gate G5."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import speed_gate
from bench.adaptive import engine_shares
from bench.bench_engine import cells, inputs
from bench.cells import measure_cell
from bench.contexts import stretched, token_ids
from bench.draft_model import as_draft, draft_name
from bench.drafters import labels_of
from bench.grid import Bench
from bench.measure import EngineVariant, Pass, Workload
from bench.memory import GIB, with_peak
from bench.speed_gate import A, g5, obstacle
from bench.tables import speed_table
from bench.tiny_models import tiny_model
from pipeline.config import load_config
from pipeline.models import load_tokenizer
from pipeline.sources import Prompt, load_prompts, state
from specdec import NgramDrafter

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
WORKLOAD = Workload(prompts=((1, 2, 3), (4, 5, 6)), batch=2, temperature=0.0, max_tokens=6, stop_ids=(), seed=0)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    shape: dict[str, Any] = {"vocab": 32, "dtype": torch.float32}
    return tiny_model("llama", layers=2, **shape), tiny_model("llama", layers=1, seed=1, **shape)


def test_a_stretched_prompt_ends_with_itself_and_never_holds_its_answer() -> None:
    prompts, answers = [[1, 1], [2, 2], [3, 3]], [[10], [20], [30]]
    assert stretched(1, prompts, answers, 8) == [3, 3, 30, 1, 1, 10, 2, 2]
    assert stretched(1, prompts, answers, 4) == [1, 10, 2, 2]
    assert stretched(1, prompts, answers, 1) == [2]
    long = stretched(1, prompts, answers, 40)
    assert len(long) == 40
    assert 20 not in long
    assert stretched(0, [[7, 8]], [[9]], 5) == [8, 7, 8, 7, 8]


def test_prompts_are_real_text_at_every_length(data_root: Path) -> None:
    tokenizer = load_tokenizer(load_config(CONFIG).models)
    prompts = [
        Prompt(id=f"s/{n}", source="s", messages=[{"role": "user", "content": text}], reference=f"answer {n}")
        for n, text in enumerate(("one", "two"))
    ]
    plain = token_ids(tokenizer, prompts, 0)
    assert [len(ids) for ids in token_ids(tokenizer, prompts, 90)] == [90, 90]
    first = tokenizer.decode(token_ids(tokenizer, prompts, 90)[0])
    assert first.endswith(tokenizer.decode(plain[0]))
    assert "two<|im_end|>\n<|im_start|>assistant\nanswer 1<|im_start|>user\none" in first


def test_the_grid_has_every_load_and_a_name_for_each() -> None:
    config = load_config(CONFIG, ["bench_engine.contexts=[0, 64]"])
    files = [cell.file for cell in cells(config)]
    assert len(files) == len(set(files)) == 8
    assert files[:2] == ["cell-arithmetic-T0-B1.json", "cell-arithmetic-T0-B1-C64.json"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ([], ()),
        (["models.draft={trained: sft}"], ("03_train_draft",)),
        (["bench_engine.drafts=[stock]"], ("03_train_draft",)),
    ],
)
def test_drafts_of_stage_03_make_it_an_input(changes: list[str], expected: tuple[str, ...]) -> None:
    assert inputs(load_config(CONFIG, changes)) == expected


def test_drafts_by_name() -> None:
    config = load_config(CONFIG, ["bench_engine.drafts=[stock, sft_kd]"])
    assert as_draft(config, "stock").models.draft.keep_layers == 2
    assert as_draft(config, "sft_kd").models.draft.trained == "sft_kd"
    assert draft_name(as_draft(config, None)) == "keep_layers=2"
    with pytest.raises(ValueError, match=r"bench_engine.drafts: got 'sfd', expected stock, sft, sft_kd"):
        load_config(CONFIG, ["bench_engine.drafts=[sfd]"])
    with pytest.raises(ValueError, match="'stock', which stands for the draft before training"):
        load_config(CONFIG, ["train.drafts=[{name: stock, loss: [{name: ce}]}]"])


def test_each_draft_is_a_row_with_each_controller(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    labels = labels_of(["model", "ngram"], ["fixed", "geometric", "adaptive"], [2], ["stock", "sft"])
    rows = measure_cell(target, {"stock": draft, "sft": target}, labels, WORKLOAD, repeats=1)[2:]
    controllers = ("fixed", "geometric", "adaptive")
    wanted = [("model", "stock"), ("model", "sft"), ("ngram", None)]
    assert [(r["drafter"], r["draft"], r["controller"]) for r in rows] == [(*w, c) for w in wanted for c in controllers]
    by_draft = {row["draft"]: row["alpha"] for row in rows if row["controller"] == "fixed" and row["draft"]}
    assert by_draft["sft"] == 1.0  # it is the target
    assert by_draft["stock"] < 1.0


@pytest.mark.parametrize("names", [["stock", "sft"], []])
def test_the_stage_names_the_drafts_in_its_rows(names: list[str], data_root: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("bench.grid.load_draft", lambda config, target, device: target)
    config = load_config(CONFIG, [f"bench_engine.drafts=[{', '.join(names)}]", "bench_engine.ks=[1]"])
    bench = Bench(config, lambda: None)
    rows = bench.cell(config.bench_engine.prompts[0], 0.0, 1, 80)["rows"]
    drafts = [row["draft"] for row in rows if row["drafter"] == "model" and row["controller"] == "fixed"]
    assert drafts == (names or ["keep_layers=2"])
    assert {row["draft"] for row in rows if row["drafter"] == "none"} == {None}
    assert {row["prompt_tokens"] for row in rows} == {80}
    with pytest.raises(ValueError, match=r"9000 prompt tokens, expected at most 4084"):
        bench.prompt_ids(config.bench_engine.prompts[0], 9000)


def test_memory_is_that_of_the_variant_alone(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    plain, drafted, looked_up = (
        EngineVariant(target, each, k=0 if each is None else 2, batch=2, capacity=16).run(WORKLOAD.requests(0, 0))
        for each in (None, draft, NgramDrafter())
    )
    layer = 2 * target.config.num_key_value_heads * target.config.head_dim * 4
    per_token = {1: layer, 2: 2 * layer}
    assert plain.memory["kv_bytes_per_token"] == looked_up.memory["kv_bytes_per_token"] == per_token[2]
    assert drafted.memory["kv_bytes_per_token"] == per_token[1] + per_token[2]
    assert plain.memory["kv_tokens"] == drafted.memory["kv_tokens"] == 32
    assert drafted.memory["kv_gib"] * GIB >= 32 * (per_token[1] + per_token[2])
    if plain.memory["peak_memory_gib"] is not None:
        weights = sum(p.nbytes for p in target.parameters()) / GIB
        assert plain.memory["peak_memory_gib"] >= weights + plain.memory["kv_gib"]


def test_the_peak_is_seen_after_it_was_given_back() -> None:
    def spike() -> int:
        return int(torch.ones(64 << 20, dtype=torch.uint8).sum())

    result, extra = with_peak(spike, torch.device("cpu"))
    assert result == 64 << 20
    if extra is None:
        pytest.skip("this kernel does not let a process reset its peak")
    assert extra > 48 << 20
    _, later = with_peak(lambda: None, torch.device("cpu"))
    assert later is not None
    assert later < 48 << 20


def test_of_two_passes_the_larger_peak_counts() -> None:
    first, second = (Pass(texts=[], wall_s=1.0, memory={"kv_tokens": 8, "peak_memory_gib": gib}) for gib in (2.0, None))
    assert (first + second).memory == (second + first).memory == {"kv_tokens": 8, "peak_memory_gib": 2.0}


def grid_row(**changes: Any) -> dict[str, Any]:
    base = {"engine": "specdec", "drafter": "none", "draft": None, "controller": "none", "k": 0, "prompt_set": "a"}
    load = {"temperature": 0.0, "batch": 1, "prompt_tokens": 64, "repeats": 3, "tokens_per_s": 10.0, "round_ms": 5.0}
    return base | load | {"speedup": 1.0} | changes


DRAFTED = {"drafter": "model", "draft": "sft", "controller": "fixed"}


def test_g5_takes_the_best_length_of_the_worst_cell() -> None:
    rows = [
        grid_row(),
        grid_row(**DRAFTED, k=1, round_ms=4.0),
        grid_row(**DRAFTED, k=4, round_ms=8.0),
        grid_row(prompt_tokens=4096, round_ms=6.0),
        grid_row(**DRAFTED, prompt_tokens=4096, k=4, round_ms=9.0),
        grid_row(batch=4, round_ms=9.0),
        grid_row(**DRAFTED, batch=4, k=4, round_ms=90.0),
    ]
    found = g5(rows, None)
    tokens = (1 - A**5) / (1 - A)
    assert found["gate"]["state"] == "pass"
    assert found["gate"]["value"] == pytest.approx(min(tokens * 5 / 8, tokens * 6 / 9))
    assert len(found["rows"]) == 3
    slow = [row | {"round_ms": 20.0} if row["drafter"] == "model" else row for row in rows]
    judged = g5(slow, None)["gate"]
    assert judged["state"] == "fail"
    assert "64 prompt tokens, model sft, k = 4: a round of 20.00 ms, of plain decoding 5.00 ms" in judged["reason"]


def test_g5_says_why_it_did_not_run() -> None:
    big = SimpleNamespace(**speed_gate.TARGET)
    small = SimpleNamespace(**speed_gate.DRAFT)
    assert obstacle("NVIDIA H200", big, small) is None
    assert "this is a CPU" in (obstacle("a CPU", big, small) or "")
    assert "the draft's are {'model_type': 'qwen3', 'hidden_size': 4096" in (obstacle("NVIDIA H200", big, big) or "")
    for reason in ("needs one NVIDIA H200; this is a CPU", None):
        record = g5([grid_row()], reason)["gate"]
        assert record["state"] == "not run"
        assert record["reason"]


def test_g4_compares_a_controller_with_its_own_draft_at_its_own_context() -> None:
    adaptive = DRAFTED | {"controller": "adaptive"}
    rows = [
        grid_row(tokens_per_s=10.0),
        grid_row(**DRAFTED, k=2, tokens_per_s=20.0),
        grid_row(**DRAFTED | {"draft": "stock"}, k=2, tokens_per_s=40.0),
        grid_row(**adaptive, k=2, tokens_per_s=19.0),
        grid_row(prompt_tokens=4096, tokens_per_s=4.0),
        grid_row(**DRAFTED, prompt_tokens=4096, k=2, tokens_per_s=80.0),
    ]
    (share,) = engine_shares(rows)
    assert share["of_best_fixed"] == pytest.approx(0.95)
    assert share["of_plain"] == pytest.approx(1.9)
    assert share["case"].endswith("64 prompt tokens, model sft")


def test_the_table_has_contexts_only_where_they_differ() -> None:
    one = {"rows": [grid_row(), grid_row(prompt_set="b", prompt_tokens=70)]}
    assert "prompt tokens" not in speed_table(one)
    two = {"rows": [grid_row(prompt_tokens=512), grid_row()]}
    assert speed_table(two)["prompt tokens"].tolist() == ["64", "512"]


def test_prompts_by_category(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": f"p{n}", "category": category} for n, category in enumerate(("qa", "rag", "qa", "writing"))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def texts(source: str) -> set[str]:
        return {prompt.messages[0]["content"] for prompt in load_prompts("s", source, 10, seed=0)}

    assert texts(f"jsonl:{path}#qa") == {"p0", "p2"}
    assert texts(f"jsonl:{path}#rag,writing") == {"p1", "p3"}
    assert texts(f"jsonl:{path}") == {"p0", "p1", "p2", "p3"}
    assert state(f"jsonl:{path}#qa") == state(f"jsonl:{path}")
    with pytest.raises(ValueError, match="no row of category 'rug'; did you mean 'rag'"):
        texts(f"jsonl:{path}#rug")
