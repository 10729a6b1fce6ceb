"""Stage 06: events into groups, what a phase's time is made of, bytes and ratios, and the stage's resume."""

from __future__ import annotations

import gzip
import json
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
from bench.profile_cell import Shape, graph_ratio, group_rows, prepared_engine, summary_of
from bench.profile_cell import profile_cell as measure
from bench.profile_engine import RESULT, ROWS, STAGE, Profiler, body
from bench.profile_tables import cost_table, group_table
from bench.tiny_models import tiny_model
from bench.traced import UNATTACHED, kernel_work, operator_work, traced
from pipeline.config import load_config
from pipeline.results import read_result
from pipeline.stage import run_stage
from specdec.model import CachedModel

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


def event(name: str, parent: Any = None, *, ms: float = 0.0, kernels: Any = (), device: Any = DeviceType.CPU) -> Any:
    event.count = getattr(event, "count", 0) + 1  # type: ignore[attr-defined]
    span = SimpleNamespace(elapsed_us=lambda: 1e3 * ms)
    found = {"name": name, "cpu_parent": parent, "kernels": list(kernels), "device_type": device, "time_range": span}
    return SimpleNamespace(**found, self_cpu_time_total=1e3 * ms, id=event.count)  # type: ignore[attr-defined]


def kernel(name: str, ms: float) -> Any:
    return SimpleNamespace(name=name, duration=1e3 * ms)


def test_kernels_are_counted_once_by_call_and_none_is_dropped() -> None:
    """A kernel that no operator launched (a graph's, a library's) is time of the device all the same."""
    calls = [event("specdec:phase") for _ in range(2)]
    layers = [event("specdec:mlp", call) for call in calls]
    ops = [event("aten::mul", layer, kernels=[kernel(ELEMENTWISE, 2.0)]) for layer in layers]
    outside = event("aten::mm", kernels=[kernel("gemm", 50.0)])
    device = [event(n, ms=ms, device=DeviceType.CUDA) for n, ms in ((ELEMENTWISE, 4.0), ("graph", 1.0))]
    ranges = event("specdec:mlp", ms=9.0, device=DeviceType.CUDA)
    first, second = kernel_work([*calls, *layers, *ops, *device, ranges])
    assert [(w.name, w.ms) for w in first] == [(ELEMENTWISE, 2.0), (UNATTACHED, pytest.approx(0.5))]
    assert [group_of(w.name, w.around) for w in second] == [ACTIVATION, OTHER]
    assert [(w.name, w.ms) for w in kernel_work([calls[0], layers[0], ops[0], outside])[0]] == [(ELEMENTWISE, 2.0)]


def test_operators_outside_a_call_do_not_count() -> None:
    call = event("specdec:phase", ms=1.0)
    inside, outside = event("aten::mm", call, ms=2.0), event("aten::mm", ms=4.0)
    (work,) = operator_work([call, inside, outside])
    assert [(w.name, w.ms) for w in work] == [("specdec:phase", 1.0), ("aten::mm", 2.0)]


def test_gaps_are_what_kernels_leave_of_the_unprofiled_time() -> None:
    work = [Work(name="gemm", around=(), ms=3.0), Work(name="Memcpy DtoH", around=(), ms=1.0)]
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
    assert profile_cell.kv_bytes_per_token(tied) == 2 * 3 * config.num_key_value_heads * config.head_dim * 4
    for model in (pair[0], untied):
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        table = model.get_input_embeddings().weight.nbytes
        whole = sum(p.nbytes for p in model.parameters())
        assert profile_cell.weight_bytes(model) == whole - (0 if is_tied else table)
    assert sizes
    shape = Shape(batch=3, context=10, k=1, repeats=1, temperature=0.0)
    per_token = profile_cell.kv_bytes_per_token(tied)
    assert profile_cell.step_bytes(tied, shape) == profile_cell.weight_bytes(tied.module) + 30 * per_token


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


def test_rounds_of_a_cell_fit_its_rows(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """A draft that is the target is accepted always: the most tokens that the rounds can commit."""
    target, _ = pair
    greedy = Shape(batch=2, context=9, k=3, repeats=2, temperature=0.0)
    rows = measure(target, target, greedy, copy_speed=1.0, traces=tmp_path)
    assert rows[0]["round_ms"] > 0
    assert rows[0]["graphs"].startswith("not run: ")
    assert len(rows) == 1 + 4 * len(GROUPS)


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
    cells = [row for row in result["rows"] if "group" not in row]
    assert [(row["batch"], row["context"], row["drafter"]) for row in cells] == [(1, 16, "model"), (2, 16, "model")]
    assert len(cost_table(result)) == 2
    assert len(group_table(result)) == 8
    printed = capsys.readouterr().out
    assert "not run: CUDA graphs need an NVIDIA GPU" in printed
    assert "other" in printed
    trace = json.loads(gzip.decompress((folder / "cell-B2-C16" / "round.trace.json.gz").read_bytes()))
    assert any(each.get("name") == "specdec:attention layer" for each in trace["traceEvents"])
    with pytest.raises(ValueError, match=r"profile.k: 2 -> 3"):
        run("profile.k=3")


def test_a_trained_draft_is_an_input() -> None:
    assert inputs(load_config(CONFIG, ["models.draft={trained: sft}"])) == ("03_train_draft",)
    assert STAGE.inputs is inputs


def test_cost_ratio_of_graphs() -> None:
    assert graph_ratio({"graphs": "not run"}, 4) == {}
    assert graph_ratio({"draft_graph_ms": 2.0, "target_step_graph_ms": 5.0}, 4) == {"cost_ratio_graph": 0.1}


def test_tables_show_graphs_where_they_were_captured() -> None:
    row = {"batch": 1, "context": 8, "k": 2, "draft_step_ms": 1.0, "round_launch_ms": 2.5}
    table = cost_table({"rows": [row]})
    assert table["round launch ms"].tolist() == ["2.5"]
    assert "round launch ms" not in cost_table({"rows": [{"batch": 1, "context": 8, "k": 2}]})


@pytest.mark.gpu
def test_graphs_and_kernels_on_a_gpu(pair: tuple[Any, Any], tmp_path: Path) -> None:
    target, draft = (model.to("cuda") for model in pair)
    summary, *groups = measure(target, draft, SHAPE, copy_speed=1.0, traces=tmp_path)
    assert summary["graphs"] == "captured"
    assert summary["round_graph_ms"] < summary["round_eager_ms"]
    assert summary["cost_ratio_graph"] > 0
    by_group = {row["group"]: row["group_ms"] for row in groups if row["phase"] == "verify"}
    assert by_group[PROJECTIONS] > 0
    assert by_group[OTHER] < 0.05 * sum(by_group.values())
