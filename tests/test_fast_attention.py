"""The attention kernels against a softmax in float64, with NaN in every slot that must not be read."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from specdec import fast_attention
from specdec.fast_attention import MAX_QUERIES, attend, attend_short, counters
from specdec.fast_attention_kernels import _halves, _turned, _weight_halves
from specdec.fast_kernels import UNFUSED, rotate_and_store
from specdec.kvcache import Plan, RaggedCache

ROWS, SCALE, EPSILON = 4, 0.3, 1e-6
# Relative error: in float32 sums in another order, and a GPU's products of three TF32 ones; half precision rounds
# weights and result once each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@dataclass(kw_only=True)
class Fed:
    """Rows of a cache with random tokens up to `starts`, NaN behind them, and the product of new tokens; `new` of them
    a row, `width` columns (by default the most of a row)."""

    starts: list[int]
    new: list[int]
    rows: slice | list[int] | None = None
    width: int | None = None
    kv_heads: int = 1
    repeat: int = 2
    dim: int = 16
    norm: bool = True
    capacity: int = 300
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.q = self.width or max(self.new)
        self.listed = list(range(len(self.starts))) if self.rows is None else self.rows
        self.generator = torch.Generator().manual_seed(1)
        self.cache = self._cache()
        heads = (self.repeat + 2) * self.kv_heads
        self.qkv = self.drawn(len(self.starts) * self.q, heads * self.dim)
        self.norms = tuple(1 + self.drawn(self.dim) / 5 for _ in "qk") if self.norm else None
        half = self.dim // 2
        angle = torch.arange(self.capacity).unsqueeze(1) / 10000 ** (torch.arange(half) / half)
        self.angles = tuple(f(angle.repeat(1, 2)).to(self.dtype).to(self.device) for f in (torch.cos, torch.sin))
        self.arrived = torch.zeros(counters(len(self.starts), self.kv_heads), dtype=torch.int32, device=self.device)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def _cache(self) -> RaggedCache:
        options = {"num_rows": ROWS, "capacity": self.capacity, "dtype": self.dtype, "device": self.device}
        cache = RaggedCache({0: (self.kv_heads, self.dim)}, **options)
        for buffer in cache.layers[0]:
            buffer.fill_(math.nan)
            for row, start in zip(self.listed, self.starts, strict=True):
                buffer[row, :, : max(start, 0)] = self.drawn(self.kv_heads, max(start, 0), self.dim)
        return cache

    def plan(self, cache: RaggedCache) -> Plan:
        start_B, new_B = torch.tensor([self.starts, self.new], device=self.device)
        rows = slice(0, len(self.starts)) if self.rows is None else torch.tensor(self.rows, device=self.device)
        return cache.plan(start_B, new_B, self.q, rows, None)

    def attended(self, **options: object) -> Tensor:
        """By the kernels: [B, q, H, D]."""
        inputs = self.norms, EPSILON, self.angles, self.cache.layers[0], self.plan(self.cache), self.arrived
        return attend_short(self.qkv, *inputs, scale=SCALE, **options).view(len(self.starts), self.q, -1, self.dim)

    def expected(self, window: int | None = None, sinks: int = 0) -> tuple[Tensor, RaggedCache, Tensor]:
        """(attention in float64, the cache afterwards, which tokens are no padding [B, q])."""
        cache = RaggedCache({0: (self.kv_heads, self.dim)}, num_rows=ROWS, capacity=self.capacity, dtype=self.dtype)
        cache.layers = {0: tuple(buffer.clone() for buffer in self.cache.layers[0])}
        cache.lengths_B = self.cache.lengths_B.clone()
        plan, qkv = self.plan(cache), self.qkv.clone()
        rotate_and_store(qkv, self.norms, EPSILON, self.angles, cache.layers[0], plan)
        heads = self.repeat * self.kv_heads
        query_BqHD = qkv.view(len(self.starts), self.q, -1, self.dim)[:, :, :heads].double()
        out_BqHD = torch.zeros_like(query_BqHD)
        real_Bq = plan.slots_Bq != self.capacity
        slot_C = torch.arange(self.capacity + 1, device=self.device)
        for b, j in real_Bq.nonzero().tolist():
            last = plan.positions_Bq[b, j]
            seen_C = (slot_C <= last) & ((slot_C > last - (window or self.capacity)) | (slot_C < sinks))
            keys_GSD, values_GSD = (buffer[self.listed[b]][:, seen_C].double() for buffer in cache.layers[0])
            query_GRD = query_BqHD[b, j].view(self.kv_heads, self.repeat, -1)
            weights_GRS = (query_GRD @ keys_GSD.transpose(1, 2) * SCALE).softmax(-1)
            out_BqHD[b, j] = (weights_GRS @ values_GSD).flatten(0, 1)
        return out_BqHD.cpu(), cache, real_Bq.cpu()


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


# What is fed, and what the attention is told.
CASES = {
    "one query": ({"starts": [0, 64, 260], "new": [1, 1, 1], "repeat": 4, "kv_heads": 2}, {"splits": 4}),
    "across a block's end": ({"starts": [63, 127, 128], "new": [2, 2, 2]}, {"splits": 2}),
    "one split": ({"starts": [63, 200], "new": [2, 2]}, {"splits": 1}),
    "as many parts as there can be": (
        {"starts": [2170], "new": [1], "repeat": 4, "dim": 128, "capacity": 2200},
        {"splits": 32},
    ),
    "ragged, with a row left out": ({"starts": [0, 70, 270], "new": [5, 0, 3], "dim": 64}, {"splits": 4}),
    "nothing fed": ({"starts": [200, 0], "new": [0, 0], "width": 1}, {"splits": 2}),
    "padding at both ends": ({"starts": [-2, 70], "new": [9, 3], "repeat": 1, "norm": False}, {}),
    "rows by index": ({"starts": [150, 20], "new": [1, 2], "rows": [3, 1], "dim": 64, "norm": False}, {}),
    "seven heads a key head, two tiles": ({"starts": [140], "new": [10], "repeat": 7, "dim": 64}, {"splits": 2}),
    "window": ({"starts": [9, 290], "new": [2, 2]}, {"window": 140, "splits": 4}),
    "window that excludes where padding is": ({"starts": [120, 2], "new": [3, 5], "repeat": 1}, {"window": 9}),
    "window and sinks": ({"starts": [66, 230], "new": [5, 4]}, {"window": 20, "sinks": 70, "splits": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_softmax(kernel_device, name) -> None:
    """NaN in stale slots, in the trash slot and in rows that take no part would show in any result they reach. Twice:
    the counters are as they were, and tokens that are fed again are not seen twice."""
    case, options = CASES[name]
    fed = Fed(**case, device=kernel_device)
    reach = {key: options[key] for key in ("window", "sinks") if key in options}
    expected, cache, real_Bq = fed.expected(**reach)
    outs = [fed.attended(**options) for _ in range(2)]
    assert torch.equal(*outs)
    assert torch.isfinite(outs[0]).all()
    assert not fed.arrived.any()
    assert not outs[0][~real_Bq.any(1)].any(), "a row without a token reads nothing"
    if real_Bq.any():
        assert relative_error(outs[0][real_Bq], expected[real_Bq]) < TOLERANCE[torch.float32]
    assert_stored(fed, cache)


def assert_stored(fed: Fed, reference: RaggedCache) -> None:
    """The new keys and values have the bits of `rotate_and_store` (on a GPU the sums of a norm may be in another
    order); no other slot has changed, and none but the trash slot has become a number."""
    exact = fed.device == "cpu" or not fed.norm
    for ours, theirs in zip(fed.cache.layers[0], reference.layers[0], strict=True):
        ours, theirs = (buffer[:, :, :-1] for buffer in (ours, theirs))
        tolerance = 0.0 if exact else 4 * torch.finfo(fed.dtype).eps
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("repeat", [1, 4])
def test_half_precision_up_to_rounding(kernel_device, dtype, repeat) -> None:
    """Added up in the same launch, and in another."""
    fed = Fed(starts=[3, 150], new=[2, 3], repeat=repeat, dim=64, dtype=dtype, device=kernel_device)
    expected, cache, real_Bq = fed.expected()
    got = fed.attended(splits=2)
    assert got.dtype == dtype
    assert relative_error(got[real_Bq], expected[real_Bq]) < TOLERANCE[dtype]
    assert_stored(fed, cache)


@triton.jit
def _turn(
    qkv_ptr,
    weight_ptr,
    cosine_ptr,
    sine_ptr,
    positions_ptr,
    out_ptr,
    epsilon,
    heads,
    stride,
    D: tl.constexpr,
    NORM: tl.constexpr,
    N: tl.constexpr,
):
    n, d = tl.arange(0, N), tl.arange(0, D)
    weight = _weight_halves(weight_ptr, D, NORM)
    position = tl.load(positions_ptr + n // heads)
    halves = _halves(qkv_ptr + n // heads * stride + n % heads * D, n >= 0, position, cosine_ptr, sine_ptr, D)
    turned = _turned(halves, weight, epsilon, D, NORM, qkv_ptr.dtype.element_ty)
    tl.store(out_ptr + n[:, None] * D + d[None, :], turned)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [True, False])
def test_queries_have_the_bits_of_rotate_and_store(kernel_device, dtype, norm) -> None:
    fed = Fed(starts=[3, 150], new=[4, 4], norm=norm, dim=64, dtype=dtype, device=kernel_device)
    plan, out = fed.plan(fed.cache), torch.zeros(16, fed.dim, dtype=dtype, device=kernel_device)
    inputs = fed.qkv, fed.norms[0] if norm else fed.qkv, *fed.angles, plan.positions_Bq
    _turn[(1,)](*inputs, out, EPSILON, 2, fed.qkv.stride(0), D=fed.dim, NORM=norm, N=16, **UNFUSED)
    rotated = fed.qkv.clone()
    rotate_and_store(rotated, fed.norms, EPSILON, fed.angles, fed.cache.layers[0], plan)
    expected = rotated.view(8, -1, fed.dim)[:, :2].reshape(16, fed.dim)
    tolerance = 0.0 if kernel_device == "cpu" or not norm else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("repeat", [1, 5])
def test_partial_results_that_nobody_wrote_do_not_count(kernel_device, monkeypatch, repeat) -> None:
    """Splits beyond a row's length leave their part of the scratch as they found it."""
    fed = Fed(starts=[1, 64, 290], new=[1, 1, 1], repeat=repeat, device=kernel_device)
    expected, _, _ = fed.expected()
    real = torch.Tensor.new_empty

    def poisoned(self: Tensor, *shape: int, **options: object) -> Tensor:
        made = real(self, *shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    got = fed.attended(splits=4)
    monkeypatch.undo()
    assert relative_error(got, expected) < TOLERANCE[torch.float32]


def test_few_query_rows_take_one_launch(kernel_device, monkeypatch) -> None:
    fed = Fed(starts=[150, 290], new=[2, 1], device=kernel_device)
    expected, _, real_Bq = fed.expected()
    monkeypatch.setattr(fast_attention, "combine", None)
    assert relative_error(fed.attended(splits=4)[real_Bq], expected[real_Bq]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("q", [MAX_QUERIES, MAX_QUERIES + 1])
def test_more_queries_than_the_kernel_takes_go_through_torch(kernel_device, monkeypatch, q) -> None:
    fed = Fed(starts=[4, 60], new=[q, q], rows=[0, 2], capacity=80, device=kernel_device)
    for buffer in fed.cache.layers[0]:
        buffer.nan_to_num_(0.0)  # torch multiplies masked slots by 0
    expected, cache, _ = fed.expected(window=30)
    if q > MAX_QUERIES:
        monkeypatch.setattr(fast_attention, "attend_short", None)
    inputs = fed.norms, EPSILON, fed.angles, fed.cache.layers[0], fed.plan(fed.cache), fed.arrived
    got = attend(fed.qkv, *inputs, scale=SCALE, window=30).view_as(expected)
    assert relative_error(got, expected) < TOLERANCE[torch.float32]
    assert_stored(fed, cache)


@pytest.mark.gpu
@pytest.mark.parametrize("q", [1, 2, 5, 9, 16])
@pytest.mark.parametrize("repeat", [2, 4])
def test_one_graph_serves_all_lengths(q, repeat) -> None:
    """As large as in Qwen3-0.6B and Qwen3-8B, in bfloat16; replayed often, since programs arrive in any order."""
    capacity, dtype = 4096, torch.bfloat16
    sizes = {"kv_heads": 8, "repeat": repeat, "dim": 128, "capacity": capacity, "dtype": dtype, "device": "cuda"}
    graph, captured = torch.cuda.CUDAGraph(), Fed(starts=[0, 0, 0], new=[q, q, q], **sizes)
    plan = captured.plan(captured.cache)
    inputs = captured.norms, EPSILON, captured.angles, captured.cache.layers[0], plan, captured.arrived
    attend(captured.qkv, *inputs, scale=SCALE)
    with torch.cuda.graph(graph):
        out = attend(captured.qkv, *inputs, scale=SCALE)
    for starts in ([0, 1, 63], [64, 300, 1000], [4000, 2047, 129]):
        fed = Fed(starts=starts, new=[q, max(q - 2, 0), q], **sizes)
        expected, cache, real_Bq = fed.expected()
        now = fed.plan(fed.cache)
        plan.positions_Bq.copy_(now.positions_Bq)
        plan.slots_Bq.copy_(now.slots_Bq)
        captured.qkv.copy_(fed.qkv)
        for ours, theirs in zip(captured.cache.layers[0], fed.cache.layers[0], strict=True):
            ours.copy_(theirs)
        for old, new in zip(captured.norms, fed.norms, strict=True):
            old.copy_(new)
        first = None
        for _ in range(200):
            graph.replay()
            first = out.clone() if first is None else first
            assert torch.equal(out, first)
        got = first.view(3, q, -1, 128)
        assert relative_error(got[real_Bq], expected[real_Bq]) < TOLERANCE[dtype]
        fed.cache = captured.cache
        assert_stored(fed, cache)
