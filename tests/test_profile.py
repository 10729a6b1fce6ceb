"""Stage 06: events into groups, what a phase's time is made of, bytes and ratios, and the stage's resume."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bench import profile_cell
from bench.bench_engine import inputs
from bench.kernel_groups import (
    ACTIVATION,
    ATTENTION,
    COPIES,
    GROUPS,
    HOST,
    NORM_ROPE,
    OTHER,
    PROJECTIONS,
    SAMPLING,
    Work,
    group_of,
    shares,
)
from bench.memory import kv_bytes_by_config
from bench.profile_cell import Shape, group_rows, phases_of, prepared_engine, summary_of
from bench.profile_cell import profile_cell as measure
from bench.profile_engine import RESULT, ROWS, STAGE, Profiler, body
from bench.profile_kernels import GAPS, MOST, OTHERS, busy_ms, gaps_of, kernel_rows
from bench.profile_tables import cells_of, cost_table, group_table, kernel_table, roofline_table
from bench.tiny_models import tiny_model
from bench.traced import kernel_work, operator_work, traced
from pipeline.config import load_config
from pipeline.results import read_result
from pipeline.stage import run_stage
from specdec import graphs
from specdec.kv_size import kv_numbers
from specdec.model import CachedModel
from tests.tape import Tape

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
SHAPE = Shape(batch=2, context=9, k=2, repeats=2, temperature=1.0)
LAYER = ("specdec:phase", "specdec:model", "specdec:attention layer")
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor>>"


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    shape: dict[str, Any] = {"vocab": 32, "dtype": torch.float32}
    return tiny_model("qwen3", layers=3, **shape), tiny_model("qwen3", layers=1, seed=1, **shape)


@pytest.mark.parametrize(
    "name, around, group",
    [
        # Names as an H200 and a CPU give them.
        ("nvjet_sm90_tst_64x8_64x16_1x2_h_bz_TNT", (*LAYER, "specdec:linear", "aten::mm"), PROJECTIONS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", (), PROJECTIONS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", (), PROJECTIONS),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", LAYER, ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)", LAYER, ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", LAYER, ATTENTION),
        ("aten::bmm", (*LAYER, "specdec:attention"), ATTENTION),
        ("aten::_softmax", (*LAYER, "aten::scaled_dot_product_attention"), ATTENTION),
        (
            "void (anonymous namespace)::elementwise_kernel_with_index<int, arange>",
            (*LAYER, "specdec:attention"),
            ATTENTION,
        ),
        (ELEMENTWISE, LAYER, NORM_ROPE),
        (ELEMENTWISE, (*LAYER, "specdec:norm", "aten::mul"), NORM_ROPE),
        (ELEMENTWISE, ("specdec:phase", "specdec:model", "specdec:mlp"), ACTIVATION),
        (ELEMENTWISE, ("specdec:phase", "specdec:model"), ACTIVATION),
        (ELEMENTWISE, ("specdec:phase",), SAMPLING),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", ("specdec:phase",), SAMPLING),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>", ("specdec:phase",), SAMPLING),
        ("triton_poi_fused_mul_silu_0", ("specdec:phase", "specdec:model", "specdec:mlp"), ACTIVATION),
        ("aten::__rshift__", ("specdec:phase",), SAMPLING),
        ("aten::rms_norm", ("specdec:phase", "specdec:model", "specdec:norm"), NORM_ROPE),
        ("Memcpy DtoH (Device -> Pageable)", ("specdec:phase", "aten::copy_"), COPIES),
        ("aten::index_copy_", (*LAYER, "specdec:cache"), COPIES),
        ("aten::embedding", ("specdec:phase", "specdec:model", "specdec:embedding"), COPIES),
        ("aten::copy_", (*LAYER, "specdec:norm"), NORM_ROPE),
        ("aten::view", LAYER, HOST),
        ("cudaLaunchKernel", LAYER, HOST),
        ("specdec:linear", LAYER, HOST),
        ("decoder_layers", (), PROJECTIONS),
        ("a_kernel_nobody_knows", (*LAYER, "specdec:norm"), OTHER),
        ("aten::brand_new_operator", ("specdec:phase",), OTHER),
        ("aten::additive", ("specdec:phase",), OTHER),
    ],
)
def test_groups_by_name_and_place(name: str, around: tuple[str, ...], group: str) -> None:
    assert group_of(name, around) == group


def test_no_time_is_lost_between_groups_and_the_unknown_is_named() -> None:
    work = [Work(name=name, around=(), ms=ms) for name, ms in (("mystery", 3.0), ("aten::mm", 1.0), ("mystery", 2.0))]
    found = {share.group: share for share in shares(work)}
    assert tuple(found) == GROUPS
    assert sum(share.ms for share in found.values()) == 6.0
    assert (found[OTHER].ms, found[OTHER].count, found[OTHER].top) == (5.0, 2, ("mystery",))
    assert found[ATTENTION].top == ()


def event(
    name: str, parent: Any = None, *, at: float = 0.0, ms: float = 0.0, kernels: Any = (), device: Any = DeviceType.CPU
) -> Any:
    event.count = getattr(event, "count", 0) + 1  # type: ignore[attr-defined]
    span = SimpleNamespace(start=1e3 * at, end=1e3 * (at + ms))
    found = {"name": name, "cpu_parent": parent, "kernels": list(kernels), "device_type": device, "time_range": span}
    return SimpleNamespace(**found, self_cpu_time_total=1e3 * ms, id=event.count)  # type: ignore[attr-defined]


def kernel(name: str, ms: float) -> Any:
    return SimpleNamespace(name=name, duration=1e3 * ms)


def on_device(name: str, at: float, ms: float) -> Any:
    return event(name, at=at, ms=ms, device=DeviceType.CUDA)


def test_kernels_are_counted_once_by_call_and_none_is_dropped() -> None:
    """One that no operator launched (a graph's) is the device's time all the same; one before the first call is not."""
    calls = [event("specdec:phase", at=at) for at in (10.0, 20.0)]
    layers = [event("specdec:mlp", call, at=call.time_range.start / 1e3) for call in calls]
    ops = [event("aten::mul", layer, kernels=[kernel(ELEMENTWISE, 2.0)]) for layer in layers]
    ranges = on_device("specdec:mlp", 11.0, 9.0)
    device = [on_device(ELEMENTWISE, at, 2.0) for at in (11.0, 21.0)]
    replayed = [on_device("attend_share", 13.0, 1.0), on_device(ELEMENTWISE, 24.0, 3.0), on_device("gemm", 5.0, 50.0)]
    first, second = kernel_work([*calls, *layers, *ops, *replayed, *device, ranges])
    assert [(w.name, w.ms, w.start_ms) for w in first] == [(ELEMENTWISE, 2.0, 11.0), ("attend_share", 1.0, 13.0)]
    assert [(w.name, w.ms) for w in second] == [(ELEMENTWISE, 2.0), (ELEMENTWISE, 3.0)]
    assert [group_of(w.name, w.around) for w in first + second] == [ACTIVATION, ATTENTION, ACTIVATION, SAMPLING]


def test_every_kernel_of_the_engine_has_a_group() -> None:
    """In a graph its name is all there is."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "specdec").glob("*.py")]
    made = {name for text in sources for name in re.findall(r"@triton\.jit\s+def (\w+)", text)}
    launched = {name for text in sources for name in re.findall(r"^\s+(\w+)\[[^\]]+\]\(", text, re.MULTILINE)} & made
    assert len(launched) > 10
    assert not {name for name in launched if group_of(name) == OTHER}


def work_at(*spans: tuple[str, float, float]) -> list[Work]:
    return [Work(name=name, around=(), ms=ms, start_ms=start) for name, start, ms in spans]


def test_kernels_that_overlap_keep_the_device_busy_once() -> None:
    work = work_at(("b", 3.0, 4.0), ("a", 1.0, 3.0), ("inside", 3.5, 1.0), ("late", 9.0, 1.0), ("next", 10.0005, 1.0))
    assert busy_ms(work) == pytest.approx(6.0 + 1.0 + 1.0)
    assert gaps_of(work) == [("b", 2.0)]


def test_kernels_by_time_and_what_none_fills() -> None:
    work = work_at(*((f"k{i}", 10.0 * i, 1.0 + i) for i in range(MOST + 2)), ("k13", 200.0, 1.0))
    rows = {row["kernel"]: row for row in kernel_rows("draft step", work, 0.4, parts=4)}
    assert list(rows)[:2] == ["k13", "k12"]
    assert rows["k13"]["kernel_ms"] == pytest.approx(15.0 / 4)
    assert rows["k13"]["events"] == 0.5
    assert (rows[OTHERS]["kernel_ms"], rows[OTHERS]["events"]) == (pytest.approx(3.0 / 4), 0.5)
    assert rows[GAPS]["kernel_ms"] == pytest.approx((400 - busy_ms(work)) / 4)
    assert rows[GAPS]["share"] == pytest.approx((400 - busy_ms(work)) / 400)
    assert rows[GAPS]["top"][0] == "56000.0 us after k13"
    spent = [Work(name=name, around=(), ms=1.0) for name in ("aten::mm", "specdec:mlp", "aten::view", "aten::mm")]
    on_cpu = kernel_rows("verify", [*spent, spent[0]], 0.1)
    assert [(row["kernel"], row["share"]) for row in on_cpu] == [("aten::mm", 0.6), (HOST, 0.4)]


def test_operators_outside_a_call_do_not_count() -> None:
    call = event("specdec:phase", ms=1.0)
    inside, outside = event("aten::mm", call, ms=2.0), event("aten::mm", ms=4.0)
    (work,) = operator_work([call, inside, outside])
    assert [(w.name, w.ms) for w in work] == [("specdec:phase", 1.0), ("aten::mm", 2.0)]


def test_gaps_are_what_kernels_leave_of_the_unprofiled_time() -> None:
    work = work_at(("gemm", 0.0, 3.0), ("Memcpy DtoH", 5.0, 1.0))
    rows = {row["group"]: row for row in group_rows("round", work, 0.010, torch.device("cuda"))}
    assert rows[HOST]["group_ms"] == pytest.approx(6.0)
    assert rows[PROJECTIONS]["share"] == pytest.approx(0.3)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    on_cpu = group_rows("round", [*work, Work(name="aten::view", around=(), ms=4.0)], 0.010, torch.device("cpu"))
    assert {row["group"]: row["group_ms"] for row in on_cpu}[HOST] == 4.0


def test_a_forward_is_taken_apart_and_left_as_it_was(pair: tuple[Any, Any]) -> None:
    engine = prepared_engine(*pair, SHAPE)
    target = engine._target
    hooks = [len(module._forward_hooks) for module in target.module.modules()]
    run = profile_cell.phases_of(engine, SHAPE)["verify"]
    with torch.inference_mode():
        before = run()
        found = {share.group: share for share in shares(traced(run, [target]))}
        assert torch.equal(run(), before)
    assert [len(module._forward_hooks) for module in target.module.modules()] == hooks
    assert "update" not in target.cache.__dict__
    for group in (ATTENTION, PROJECTIONS, NORM_ROPE, ACTIVATION, COPIES, HOST):
        assert found[group].ms > 0, group
    products = 7 * 3 + 1  # seven a layer, and the head
    assert sum(w.name == "aten::mm" for w in traced(run, [target])) == products
    assert found[OTHER].ms < 0.05 * sum(share.ms for share in found.values())


def test_bytes_of_a_step(pair: tuple[Any, Any]) -> None:
    """Tied: the embedding is the head and is read once. Untied: the head alone."""
    tied = CachedModel(pair[0], num_rows=2, capacity=8)
    untied = tiny_model("llama", vocab=32, layers=1, dtype=torch.float32)
    sizes = {name: p.nbytes for name, p in untied.named_parameters()}
    config = tied.config
    in_cache = profile_cell.kv_bytes_per_token(tied)
    assert (
        in_cache == 2 * 3 * config.num_key_value_heads * config.head_dim * 4 == kv_bytes_by_config(config, tied.dtype)
    )
    for model in (pair[0], untied):
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        table = model.get_input_embeddings().weight.nbytes
        whole = sum(p.nbytes for p in model.parameters())
        assert profile_cell.weight_bytes(model) == whole - (0 if is_tied else table)
    assert sizes
    shape = Shape(batch=3, context=10, k=1, repeats=1, temperature=0.0)
    per_token = profile_cell.kv_bytes_per_token(tied)
    assert profile_cell.step_bytes(tied, shape) == profile_cell.weight_bytes(tied.module) + 30 * per_token


@pytest.mark.parametrize(
    "given, numbers",
    [
        ({"num_key_value_heads": 2, "head_dim": 16}, 2 * 3 * 2 * 16),
        ({"num_key_value_heads": 2}, 2 * 3 * 2 * 10),
        ({}, 2 * 3 * 4 * 10),
        ({"num_key_value_heads": None, "head_dim": None}, 2 * 3 * 4 * 10),
    ],
)
def test_a_config_that_names_neither_key_heads_nor_their_size(given: dict[str, Any], numbers: int) -> None:
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, hidden_size=40, **given)
    assert kv_numbers(config) == numbers


def test_ratios_and_bandwidth_from_times(pair: tuple[Any, Any]) -> None:
    models = [CachedModel(model, num_rows=2, capacity=16) for model in pair]
    seconds = {"draft": [0.2, 0.4, 0.3], "target step": [0.5] * 3, "verify": [0.6] * 3, "round": [1.0] * 3}
    values = summary_of(seconds, SHAPE, models, copy_speed=2.0)
    assert values["draft_step_ms"] == pytest.approx(150.0)
    assert values["draft_step_ms_ci"] == pytest.approx([100.0, 200.0])
    assert values["cost_ratio"] == pytest.approx(0.3)
    assert values["verify_ratio"] == pytest.approx(1.2)
    assert values["overhead_ms"] == pytest.approx(100.0)
    speed = profile_cell.step_bytes(models[0], SHAPE) / 0.5 / 1e9
    assert values["target_step_gb_per_s"] == pytest.approx(speed)
    assert values["target_step_of_copy"] == pytest.approx(speed / 2.0)
    assert values["target_step_floor_ms"] / values["target_step_ms"] == pytest.approx(values["target_step_of_copy"])
    assert values["round_floor_ms"] == pytest.approx(
        SHAPE.k * values["draft_step_floor_ms"] + values["verify_floor_ms"]
    )
    assert values["round_of_copy"] == pytest.approx(values["round_floor_ms"] / values["round_ms"])


def test_rounds_of_a_cell_fit_its_rows(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """A draft that is the target is accepted always: the most tokens that the rounds can commit."""
    target, _ = pair
    greedy = Shape(batch=2, context=9, k=3, repeats=2, temperature=0.0)
    rows = measure(target, target, greedy, copy_speed=1.0, traces=tmp_path)
    assert rows[0]["round_ms"] > 0
    assert (rows[0]["variant"], rows[0]["graphs"]) == ("eager", profile_cell.NO_GRAPHS)
    assert sum("group" in row for row in rows) == 4 * len(GROUPS)
    assert {row["phase"] for row in rows if "kernel" in row} == {"draft step", "target step", "verify", "round"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_engine_replays_is_what_is_measured(
    pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """With a tape in the place of CUDA graphs. After the phases the engine decodes on as if nothing had been."""
    monkeypatch.setattr(graphs, "capture_for", lambda device: Tape())
    shape = dataclasses.replace(SHAPE, temperature=temperature)
    rows = measure(*pair, shape, copy_speed=1.0, traces=tmp_path, graphs=True)
    assert rows[0]["variant"] == "graphs"
    assert " captured in " in rows[0]["graphs"]
    for stem in ("draft", "target_step", "verify", "round"):
        assert rows[0][f"{stem}_launched_ms"] > 0
    engines = [prepared_engine(*pair, shape, graphs=replayed) for replayed in (True, False)]
    with torch.inference_mode():
        logits = [phases_of(engine, shape)["verify"]() for engine in engines]
    torch.testing.assert_close(*logits)
    for engine in engines[:1]:
        with torch.inference_mode():
            for name, run in phases_of(engine, shape).items():
                if name != "round":
                    run()
    texts = [[slot.tokens for slot in engine._slots for _ in range(3) if not engine.step()] for engine in engines]
    assert texts[0] == texts[1]


def test_a_context_that_the_target_is_not_built_for_is_refused(pair: tuple[Any, Any]) -> None:
    long = Shape(batch=1, context=100_000, k=2, repeats=2, temperature=0.0)
    pair[0].config.max_position_embeddings, before = 64, pair[0].config.max_position_embeddings
    try:
        with pytest.raises(
            ValueError, match=r"profile.contexts: got 100000, .* built for 64 tokens: expected at most \d"
        ):
            prepared_engine(*pair, long)
    finally:
        pair[0].config.max_position_embeddings = before


def run(*overrides: str) -> dict[str, Any]:
    return read_result(run_stage(STAGE, load_config(CONFIG, overrides), body) / RESULT)


def test_the_stage_keeps_finished_cells_and_prints_tables(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    real = Profiler.make_cell

    def failing(self: Profiler, shape: Shape, folder: Path) -> None:
        made.append(folder.name.lstrip(".").split("-", 1)[1])
        if len(made) == 2:
            raise KeyboardInterrupt
        real(self, shape, folder)

    monkeypatch.setattr(Profiler, "make_cell", failing)
    with pytest.raises(KeyboardInterrupt):
        run()
    folder = data_root / "tiny" / STAGE.name
    kept = (folder / "cell-B1-C16" / ROWS).read_bytes()
    result = run()
    assert [name[-6:] for name in made] == ["B1-C16", "B2-C16", "B2-C16"]
    assert (folder / "cell-B1-C16" / ROWS).read_bytes() == kept
    cells = cells_of(result)
    assert [(row["batch"], row["context"], row["drafter"]) for row in cells] == [(1, 16, "model"), (2, 16, "model")]
    assert len(cost_table(result)) == 2
    assert len(group_table(result)) == len(roofline_table(result)) == 8
    assert cost_table(result)["variant"].tolist() == ["eager", "eager"]
    assert set(kernel_table(result)["step"]) == {"draft step", "target step", "verify", "round"}
    printed = capsys.readouterr().out
    assert "graphs: none: CUDA graphs need an NVIDIA GPU" in printed
    assert "other" in printed
    trace = json.loads(gzip.decompress((folder / "cell-B2-C16" / "round.trace.json.gz").read_bytes()))
    assert any(each.get("name") == "specdec:attention layer" for each in trace["traceEvents"])
    with pytest.raises(ValueError, match=r"profile.k: 2 -> 3"):
        run("profile.k=3")


def test_a_trained_draft_is_an_input() -> None:
    assert inputs(load_config(CONFIG, ["models.draft={trained: sft}"])) == ("03_train_draft",)
    assert STAGE.inputs is inputs


def test_tables_show_graphs_where_they_were_captured() -> None:
    row = {"batch": 1, "context": 8, "k": 2, "draft_step_ms": 1.0, "round_launch_ms": 2.5}
    table = cost_table({"rows": [row]})
    assert table["round launch ms"].tolist() == ["2.5"]
    assert "round launch ms" not in cost_table({"rows": [{"batch": 1, "context": 8, "k": 2}]})


@pytest.mark.gpu
def test_graphs_and_kernels_on_a_gpu(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, draft = (model.to("cuda") for model in pair)
    summary, *parts = measure(target, draft, SHAPE, copy_speed=1.0, traces=tmp_path)
    assert summary["variant"].endswith("graphs")
    assert summary["round_launch_ms"] > 0
    by_group = {row["group"]: row["group_ms"] for row in parts if "group" in row and row["phase"] == "verify"}
    assert by_group[PROJECTIONS] > 0
    assert by_group[OTHER] < 0.05 * sum(by_group.values())
    for step in ("draft step", "target step", "verify", "round"):
        kernels = [row for row in parts if "kernel" in row and row["phase"] == step]
        assert kernels[-1]["kernel"] == GAPS
        assert len(kernels) > 2
