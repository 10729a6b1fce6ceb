"""What a round does beside its forwards, as Triton kernels: draws, places in the cache, the largest logit.

In torch each of these is ten to sixty operations on a few numbers a row, of about 1.7 us apiece even in a CUDA graph.
All is integer arithmetic or comparison, so the results are torch's to the bit. The reference is in specdec.rng, kvcache
and sampling, which call what is here where `specdec.kernels.round_kernels` finds it; specdec.fast_steps has the
steps that read and write a round's buffers. Shapes: B rows, q new tokens, J verified positions, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.fast_kernels import INTERPRETED, early, let_next_start, wait_for_last

_LARGEST_SPLITS, _LARGEST_BLOCK = 32, 2048
# specdec.rng's constants
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _uniforms(
    seeds_ptr,
    starts_ptr,
    positions_ptr,
    out_ptr,
    count,
    columns,
    start_stride,
    row_stride,
    column_stride,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    row, column = item // columns, item % columns
    seed = tl.load(seeds_ptr + row, mask=inside, other=0)
    start = tl.load(starts_ptr + row * start_stride, mask=inside, other=0)
    position = tl.load(positions_ptr + row * row_stride + column * column_stride, mask=inside, other=0)
    key = _mix(_mix(seed + _GOLDEN) + start * _GOLDEN)
    bits = _mix(_mix(key ^ ((position * 4 + PURPOSE) * _GOLDEN)) + key)
    tl.store(out_ptr + item, _shift_right(bits, 11).to(tl.float64) * 1.1102230246251565e-16, mask=inside)


def uniforms(seeds_B: Tensor, starts_B: Tensor, positions_BN: Tensor, purpose: int) -> Tensor:
    """As specdec.rng.uniforms."""
    out_BN = torch.empty(positions_BN.shape, dtype=torch.float64, device=positions_BN.device)
    count, columns = out_BN.numel(), max(1, positions_BN.shape[1])
    if count:
        _uniforms[(triton.cdiv(count, 256),)](
            seeds_B,
            starts_B,
            positions_BN,
            out_BN,
            count,
            columns,
            starts_B.stride(0),
            *positions_BN.stride(),
            PURPOSE=int(purpose),
            BLOCK=256,
            **early(out_BN.device),
        )
    return out_BN


@triton.jit
def _place(
    start_ptr,
    new_ptr,
    lengths_ptr,
    positions_ptr,
    slots_ptr,
    num_rows,
    q,
    max_positions,
    capacity,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    start = tl.load(start_ptr + row, mask=inside, other=0)
    new = tl.load(new_ptr + row, mask=inside, other=0)
    column = tl.arange(0, BLOCK)[None, :]
    position = start[:, None] + column
    real = (column < new[:, None]) & (position >= 0) & (position < max_positions)
    place, written = row[:, None] * q + column, inside[:, None] & (column < q)
    position = tl.where(real & (column < q), position, 0)
    tl.store(positions_ptr + place, position, mask=written)
    tl.store(slots_ptr + place, tl.where(real, position, capacity), mask=written)
    tl.store(lengths_ptr + row, start + new, mask=inside & (new > 0))


def place(
    start_B: Tensor, num_new_B: Tensor, q: int, lengths_B: Tensor, max_positions: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Positions and slots [B, q], as RaggedCache.plan makes them; lengths_B, of the same rows, are set."""
    B = len(start_B)
    positions_Bq, slots_Bq = (torch.empty(B, q, dtype=torch.int64, device=start_B.device) for _ in "ps")
    rows = triton.next_power_of_2(B) if INTERPRETED else 4
    _place[(triton.cdiv(B, rows),)](
        start_B.contiguous(),
        num_new_B.contiguous(),
        lengths_B,
        positions_Bq,
        slots_Bq,
        B,
        q,
        max_positions,
        capacity,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(q),
        num_warps=1,
        **early(start_B.device),
    )
    return positions_Bq, slots_Bq


@triton.jit
def _largest_of_part(
    logits_ptr, value_ptr, index_ptr, V, share, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """The largest of a share of one row's logits and where it is first; NaN where one is NaN."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, split = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    begin, stop = split * share, tl.minimum((split + 1) * share, V)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = begin + at
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, stop, BLOCK):
        index = start + at
        here = logits_ptr + row.to(tl.int64) * V + index
        value = tl.load(here, mask=index < stop, other=float("-inf")).to(tl.float32)
        bad = bad | (value != value).to(tl.int32)
        above = value > top
        top, where = tl.where(above, value, top), tl.where(above, index, where)
    best = tl.max(top, 0)
    first = tl.min(tl.where(top == best, where, V), 0)
    place = row * SPLITS + split
    tl.store(value_ptr + place, tl.where(tl.max(bad, 0) > 0, float("nan"), best))
    tl.store(index_ptr + place, first)


@triton.jit
def _largest(value_ptr, index_ptr, token_ptr, bad_ptr, V, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    place = row * SPLITS + tl.arange(0, SPLITS)
    value, index = tl.load(value_ptr + place), tl.load(index_ptr + place)
    nan = tl.max((value != value).to(tl.int32), 0) > 0
    value = tl.where(value != value, float("-inf"), value)
    best = tl.max(value, 0)
    first = tl.min(tl.where(value == best, index, V), 0)
    tl.store(token_ptr + row, tl.minimum(first, V - 1).to(tl.int64))
    tl.store(bad_ptr + row, nan | (tl.abs(best) == float("inf")))


def largest(logits_BJV: Tensor) -> tuple[Tensor, Tensor]:
    """(the lowest of the largest logits' ids, int64 [B, J]; bad_BJ as constrain_logits has it, where the id is any)."""
    B, J, V = logits_BJV.shape
    rows, splits = B * J, 4 if INTERPRETED else _LARGEST_SPLITS
    value_N = torch.empty(rows * splits, dtype=torch.float32, device=logits_BJV.device)
    index_N = torch.empty(rows * splits, dtype=torch.int32, device=logits_BJV.device)
    token_BJ = torch.empty(B, J, dtype=torch.int64, device=logits_BJV.device)
    bad_BJ = torch.empty(B, J, dtype=torch.bool, device=logits_BJV.device)
    share = triton.cdiv(V, splits)
    options = {"SPLITS": splits, **early(logits_BJV.device)}
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(share))
    _largest_of_part[(rows, splits)](logits_BJV.contiguous(), value_N, index_N, V, share, BLOCK=block, **options)
    _largest[(rows,)](value_N, index_N, token_BJ, bad_BJ, V, num_warps=1, **options)
    return token_BJ, bad_BJ
