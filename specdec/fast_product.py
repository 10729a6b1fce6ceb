"""The Triton kernel of products of few rows: split-K, with what stands beside a product in a decoder layer.

With at most 16 rows a product only reads its weight once, and what counts is how many reads are in flight. Split-K
(Osama et al. 2023, "Stream-K", arXiv 2301.03598, section 3) lets SPLITS programs share the K of one block of N outputs.
Each leaves its float32 sum; the one that arrives last, told by a counter a block, adds them up in the order of the
splits, so the result does not depend on who was last, and sets the counter back for the next launch. Where a program's
weights are a single block they are loaded while the kernel before still runs (specdec.fast_kernels). A gated product,
SiLU(x G^T) * (x U^T) of a weight that holds G above U, takes a row of each in turn: one program has both.

With the roundings of `add_norm` it may normalise a residual stream as it reads it (the norm's weights, which no kernel
writes, are loaded before the wait too), or add its result to the stream and leave the sum of squares of each row of its
block: specdec.fast_residual says how these go together, and why that is safe while kernels overlap. Shapes: M rows, K
inputs, N outputs.
"""

import triton
import triton.language as tl

from specdec.fast_kernels import kept_token, let_next_start, silu_times, wait_for_last, weighted


@triton.jit
def _dot(x, scale, norm_weight, weight, NORM: tl.constexpr, DOT: tl.constexpr):
    """x, or its norm, times the weight, in float32."""
    if NORM:
        x = weighted(x.to(tl.float32), scale, norm_weight[None, :], x.dtype).to(x.dtype)
    return tl.dot(x.to(DOT), weight.to(DOT), input_precision="tf32x3")


@triton.jit
def _scale(squares_ptr, real, token, parts, K, epsilon, PARTS: tl.constexpr):
    """What the norm multiplies each token with, by its sums of squares."""
    CHUNK: tl.constexpr = min(PARTS, 4096 // token.shape[0])  # what the registers have room for
    squares = tl.zeros([token.shape[0], CHUNK], tl.float32)
    for first in tl.static_range(0, PARTS, CHUNK):
        part = first + tl.arange(0, CHUNK)[None, :]
        squares += tl.load(squares_ptr + token[:, None] * parts + part, mask=real & (part < parts), other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / K + epsilon)[:, None]


@triton.jit
def _by_blocks(
    x_row_ptr,
    weight_row_ptr,
    norm_ptr,
    real,
    within,
    scale,
    norm_weight,
    begin,
    stop,
    K,
    k,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
):
    """x, or its norm, times the weight, of the inputs from `begin` to `stop`."""
    total = tl.zeros([real.shape[0], within.shape[1]], tl.float32)
    for start in range(begin, stop, k.shape[0]):
        at = start + k
        x = tl.load(x_row_ptr + at[None, :], mask=real & (at[None, :] < K), other=0.0)
        weight = tl.load(weight_row_ptr + at[:, None], mask=within & (at[:, None] < K), other=0.0)
        total += _dot(x, scale, norm_weight, weight, NORM, DOT)
        if NORM:  # a turn ahead: too narrow for the asynchronous loads that x and weight get
            at += k.shape[0]
            norm_weight = tl.load(norm_ptr + at, mask=at < K, other=0.0)
    return total


@triton.jit
def _arrived(place_ptr, arrived_ptr, total, split):
    """Leave the sum of one split; how many of the others had left theirs."""
    tl.store(place_ptr + split * total.numel, total, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's part of the sum is written before this program counts as arrived
    return tl.atomic_add(arrived_ptr, 1, sem="acq_rel")


@triton.jit
def _all_splits(place_ptr, arrived_ptr, total, SPLITS: tl.constexpr):
    """What all splits left, in their order; the counter is as it was before."""
    tl.store(arrived_ptr, 0)
    total = tl.zeros_like(total)
    for other in range(SPLITS):
        total += tl.load(place_ptr + other * total.numel, cache_modifier=".cg")
    return total


@triton.jit
def _store_gated(out_ptr, total, block, m, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    gate, up = tl.split(total.reshape(BLOCK_M, BLOCK_N // 2, 2))
    column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    inside = (m[:, None] < M) & (column[None, :] < N // 2)
    here = out_ptr + m[:, None] * (N // 2) + column[None, :]
    tl.store(here, silu_times(gate, up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add(here, squares_ptr, added_to, total, real, within, part):
    """Store the stream's new values, and their sum of squares as this part of a row's."""
    values = (added_to + total.to(here.dtype.element_ty).to(tl.float32)).to(here.dtype.element_ty)
    tl.store(here, values, mask=real & within)
    values = values.to(tl.float32)
    tl.store(squares_ptr + part, tl.sum(values * values, 1)[:, None], mask=real)


@triton.jit(do_not_specialize=["M", "q", "keep", "parts"])
def split_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    squares_ptr,
    partial_ptr,
    arrived_ptr,
    epsilon,
    M,
    N,
    K,
    q,
    keep,
    parts,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    GATED: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a block of outputs and a split of K. HELD: a split is one block, loaded before x is waited for.
    PARTS > 0: x is a stream with `parts` <= PARTS sums of squares a row. ADD: out is a stream."""
    NORM: tl.constexpr = PARTS > 0
    let_next_start(EARLY)
    block, split = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    share = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    begin, stop = split * share, tl.minimum((split + 1) * share, K)
    token, scale, norm_weight, at = kept_token(m, q, keep) if NORM else m, 1.0, 1.0, begin + k
    row = n // 2 + (n % 2) * (N // 2) if GATED else n
    real, within, here = m[:, None] < M, n[None, :] < N, out_ptr + m[:, None] * N + n[None, :]
    weight_row_ptr = weight_ptr + row.to(tl.int64)[None, :] * K
    if HELD:
        weight = tl.load(weight_row_ptr + at[:, None], mask=within & (at[:, None] < K), other=0.0)
    if NORM:
        norm_weight = tl.load(norm_ptr + at, mask=at < K, other=0.0)
    wait_for_last(EARLY)
    if ADD:  # other programs write what lies beside it in a cache line: only the L2 cache is read
        added_to = tl.load(here, mask=real & within, other=0.0, cache_modifier=".cg").to(tl.float32)
    if NORM:
        scale = _scale(squares_ptr, real, token, parts, K, epsilon, PARTS)
    x_row_ptr = x_ptr + token[:, None] * K
    if HELD:
        x = tl.load(x_row_ptr + at[None, :], mask=real & (at[None, :] < K), other=0.0)
        total = _dot(x, scale, norm_weight, weight, NORM, DOT)
    else:
        total = _by_blocks(
            x_row_ptr, weight_row_ptr, norm_ptr, real, within, scale, norm_weight, begin, stop, K, k, NORM, DOT
        )
    if SPLITS > 1:
        place = block * SPLITS * BLOCK_M * BLOCK_N + m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        if _arrived(partial_ptr + place, arrived_ptr + block, total, split) < SPLITS - 1:
            return
        total = _all_splits(partial_ptr + place, arrived_ptr + block, total, SPLITS)
    if BIAS:
        total += tl.load(bias_ptr + row, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        _store_gated(out_ptr, total, block, m, M, N, BLOCK_M, BLOCK_N)
    elif ADD:
        _add(here, squares_ptr, added_to, total, real, within, m[:, None] * tl.num_programs(0) + block)
    else:
        tl.store(here, total.to(out_ptr.dtype.element_ty), mask=real & within)
