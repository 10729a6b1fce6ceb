"""The attention kernel against one softmax at a time in float64, with NaN in every slot that must not be read."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from specdec import fast_attention
from specdec.fast_attention import MAX_QUERIES, attend, decode_attention
from specdec.kvcache import Plan, RaggedCache

ROWS, KV_HEADS, DIM, CAPACITY = 3, 2, 16, 140
SCALE = 0.3
# Relative error: in float32 sums in another order, and a GPU's products of three TF32 ones; half precision rounds
# weights and result once each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def ragged_cache(lengths: list[int], dtype: torch.dtype, device: str) -> RaggedCache:
    """Random keys and values up to each row's length, NaN behind it."""
    cache = RaggedCache({0: (KV_HEADS, DIM)}, num_rows=ROWS, capacity=CAPACITY, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    for buffer in cache.layers[0]:
        buffer.fill_(math.nan)
        for row, length in enumerate(lengths):
            buffer[row, :, :length] = torch.randn(KV_HEADS, length, DIM, generator=generator).to(buffer)
    return cache


def one_softmax_at_a_time(
    query_BqHD: Tensor, cache: RaggedCache, rows: list[int], plan: Plan, window: int | None, sinks: int
) -> Tensor:
    keys, values = (buffer.double().cpu() for buffer in cache.layers[0])
    B, q, H, _ = query_BqHD.shape
    out = torch.zeros(query_BqHD.shape, dtype=torch.float64)
    for b in range(B):
        for j in range(q):
            last = int(plan.positions_Bq[b, j])
            seen = [s for s in range(last + 1) if window is None or s > last - window or s < sinks]
            for h in range(H):
                group = h // (H // KV_HEADS)
                scores = keys[rows[b], group, seen] @ query_BqHD[b, j, h].double().cpu() * SCALE
                out[b, j, h] = scores.softmax(0) @ values[rows[b], group, seen]
    return out


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


def planned(cache: RaggedCache, lengths: list[int], rows: slice | list[int], q: int) -> tuple[Plan, list[int]]:
    """A plan whose queries are the last q tokens of each of these rows (fewer where a row is shorter)."""
    listed = list(range(ROWS))[rows] if isinstance(rows, slice) else rows
    device = cache.lengths_B.device
    ends = torch.tensor([lengths[row] for row in listed], device=device)
    index = rows if isinstance(rows, slice) else torch.tensor(rows, device=device)
    return cache.plan(ends - q, torch.full_like(ends, q), q, index, None), listed


@pytest.mark.parametrize(
    "lengths, rows, q, repeat, window, sinks, splits",
    [
        ([1, 64, 65], slice(0, 3), 1, 1, None, 0, 1),
        ([1, 64, 140], slice(0, 3), 1, 4, None, 0, 2),
        ([5, 63, 129], slice(1, 3), 5, 3, None, 0, 4),
        ([16, 70, 140], [2, 0], 5, 13, None, 0, 2),  # 65 query rows a key head: two tiles
        ([9, 70, 130], slice(0, 3), 3, 2, 20, 0, 1),
        ([70, 66, 140], [0, 2], 5, 2, 76, 0, 4),  # the first query sees a block more than the last
        ([9, 70, 140], slice(0, 3), 2, 2, 10, 4, 2),
        ([9, 70, 140], slice(0, 3), 2, 1, 5, 70, 4),
    ],
)
def test_equals_one_softmax_at_a_time(kernel_device, lengths, rows, q, repeat, window, sinks, splits) -> None:
    """NaN in stale slots, in the trash slot and in rows that take no part would show in any result they reach."""
    cache = ragged_cache(lengths, torch.float32, kernel_device)
    plan, listed = planned(cache, lengths, rows, q)
    query = torch.randn(len(listed), q, KV_HEADS * repeat, DIM, generator=torch.Generator().manual_seed(2))
    options = {"window": window, "sinks": sinks}
    got = decode_attention(query.to(kernel_device), cache.layers[0], plan, scale=SCALE, splits=splits, **options)
    expected = one_softmax_at_a_time(query, cache, listed, plan, window, sinks)
    assert relative_error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_up_to_rounding(kernel_device, dtype) -> None:
    lengths = [3, 64, 130]
    cache = ragged_cache(lengths, dtype, kernel_device)
    plan, listed = planned(cache, lengths, slice(0, 3), 3)
    query = torch.randn(3, 3, 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = decode_attention(query.to(kernel_device), cache.layers[0], plan, scale=SCALE, splits=4)
    assert got.dtype == dtype
    assert relative_error(got, one_softmax_at_a_time(query, cache, listed, plan, None, 0)) < TOLERANCE[dtype]


def test_partial_results_that_nobody_wrote_do_not_count(kernel_device, monkeypatch) -> None:
    """Splits beyond a row's length leave their part of the scratch as they found it."""
    lengths = [1, 64, 140]
    cache = ragged_cache(lengths, torch.float32, kernel_device)
    plan, listed = planned(cache, lengths, slice(0, 3), 1)
    query = torch.randn(3, 1, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(kernel_device)

    real = torch.Tensor.new_empty

    def poisoned(self: Tensor, *shape: int, **options: object) -> Tensor:
        made = real(self, *shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    got = decode_attention(query, cache.layers[0], plan, scale=SCALE, splits=8)
    monkeypatch.undo()
    assert relative_error(got, one_softmax_at_a_time(query, cache, listed, plan, None, 0)) < TOLERANCE[torch.float32]


def test_padding_gives_finite_numbers(kernel_device) -> None:
    """Rows without a token in this forward, and columns beyond a row's tokens, under a window that excludes slot 0."""
    lengths = [130, 130, 130]
    cache = ragged_cache(lengths, torch.float32, kernel_device)
    start_B, new_B = torch.tensor([[126, 128, 0], [4, 2, 0]], device=kernel_device)
    plan = cache.plan(start_B, new_B, 4, slice(0, 3), None)
    query = torch.randn(3, 4, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(kernel_device)
    got = decode_attention(query, cache.layers[0], plan, scale=SCALE, window=9)
    assert torch.isfinite(got).all()
    expected = one_softmax_at_a_time(query, cache, [0, 1, 2], plan, 9, 0)
    assert relative_error(got[0], expected[0]) < TOLERANCE[torch.float32]
    assert relative_error(got[1, :2], expected[1, :2]) < TOLERANCE[torch.float32]


def test_queries_may_be_a_part_of_a_wider_row(kernel_device) -> None:
    """As in the fused qkv product."""
    lengths = [10, 70, 80]
    cache = ragged_cache(lengths, torch.float32, kernel_device)
    plan, listed = planned(cache, lengths, slice(0, 3), 2)
    wide = torch.randn(3, 2, 4 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(kernel_device)
    query = wide[:, :, : 2 * KV_HEADS]
    got = decode_attention(query, cache.layers[0], plan, scale=SCALE)
    assert relative_error(got, one_softmax_at_a_time(query, cache, listed, plan, None, 0)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("q", [MAX_QUERIES, MAX_QUERIES + 1])
def test_more_queries_than_the_kernel_takes_go_through_torch(kernel_device, monkeypatch, q) -> None:
    lengths = [20, 33, 80]
    cache = ragged_cache(lengths, torch.float32, kernel_device)
    for buffer in cache.layers[0]:
        buffer.nan_to_num_(0.0)  # torch multiplies masked slots by 0
    plan, listed = planned(cache, lengths, [0, 2], q)
    query = torch.randn(2, q, 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(kernel_device)
    if q > MAX_QUERIES:
        monkeypatch.setattr(fast_attention, "decode_attention", None)
    got = attend(query, cache.layers[0], plan, scale=SCALE, window=30)
    assert relative_error(got, one_softmax_at_a_time(query, cache, listed, plan, 30, 0)) < TOLERANCE[torch.float32]
