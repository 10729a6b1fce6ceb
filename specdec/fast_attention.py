"""Attention of a few new tokens a row to a ragged cache, in Triton, from the product of queries, keys and values on.

Split over the context as flash-decoding does (Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context
inference"): a row's cached tokens, in blocks of S, and its new ones, a block of their own at the end, are shared out
over a fixed number of programs. Each keeps the running maximum m and sum l of FlashAttention (arXiv 2205.14135) over
its blocks and leaves out_i = sum p v / l and lse_i = m + log2 l, and out = sum_i 2^(lse_i - max lse) out_i / sum_i
2^(lse_i - max lse). A program reads its row's first new position on the device, so one grid, and thus one CUDA graph,
serves all lengths, and a program whose share is empty ends at once. Worked example: 64 splits and 1,000 cached tokens
in blocks of 64 are 17 blocks with the new tokens', two each for the first 8 programs and one for the ninth; 20,000 are
314 blocks, five each for 62 programs and four for the last.

The program with the last share also normalises and rotates the new keys and writes keys and values into the cache.
Nobody reads a slot from the first new position on from the cache: writing and reading need no order, and stale NaN
there cannot leak. Queries are normalised and rotated again by each program, which is cheaper than a launch before it.
With few query rows and parts a key head the program that arrives last, told by a counter as in specdec.fast_linear,
adds the parts up; with more a second launch does, since one program would take too long.

Query heads that share a key head are rows of one tile (r = query * repeat + head), so keys and values are read once
for all of them. Scores and sums are in float32 (with float32 tensors the products too, to about 1e-6: three TF32
products each, since plain ones would spill registers). Shapes: B rows of q queries, T = B * q, H query heads, G key
heads, D head dimension, F = (H + 2 G) * D, C slots of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention import attend_live
from specdec.fast_attention_kernels import LEAST_SHARE, MAX_QUERIES, attend_share, combine
from specdec.fast_kernels import INTERPRETED, UNFUSED, early, rotate_and_store, row_offset
from specdec.kvcache import Plan, live_part

_MAX_TILE, _MAX_SPLITS = 64, 64
# So many query rows a key head at most, and so many parts of them, are added up in the same launch. With more parts one
# program takes long: on an H200 a step of the 8B at 8,000 tokens took 0.6 ms longer for one token than for two.
_MERGED_ROWS, _MERGED_PARTS = 4, 16
# Programs that keep a multiprocessor's loads in flight; what stands in for a GPU's 132 under the interpreter.
_PROGRAMS_PER_PROCESSOR, _INTERPRETED_PROCESSORS = 4, 4
_LOG2_E = 1.4426950408889634
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def attend(
    qkv_TF: Tensor,
    norms_D: tuple[Tensor, Tensor] | None,
    epsilon: float,
    angles_CD: tuple[Tensor, Tensor],
    cache_BGCD: tuple[Tensor, Tensor],
    plan: Plan,
    arrived_N: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`rotate_and_store`, and causal attention of each row's queries to its own slots up to their positions: [T, H *
    D]. More than MAX_QUERIES a row go through torch on the live part; fewer do not see padding, and what padding gives
    is finite.

    arrived_N: zeros, int32, as many as `counters` says; zeros again afterwards. window: only the last `window`
    positions are seen. The parts of qkv_TF may be overwritten.
    """
    B, q = plan.positions_Bq.shape
    if q <= MAX_QUERIES:
        return attend_short(
            qkv_TF, norms_D, epsilon, angles_CD, cache_BGCD, plan, arrived_N, scale=scale, window=window
        )
    rotate_and_store(qkv_TF, norms_D, epsilon, angles_CD, cache_BGCD, plan)
    _, G, _, D = cache_BGCD[0].shape
    query_BHqD = qkv_TF.view(B, q, -1, D)[:, :, : -2 * G].transpose(1, 2)
    keys_BGSD, values_BGSD = (live_part(buffer, plan) for buffer in cache_BGCD)
    return attend_live(query_BHqD, keys_BGSD, values_BGSD, plan, scale=scale, window=window).view(B * q, -1)


def counters(num_rows: int, kv_heads: int) -> int:
    """How many counters the attention of at most `num_rows` rows needs."""
    return num_rows * kv_heads


def attend_short(
    qkv_TF: Tensor,
    norms_D: tuple[Tensor, Tensor] | None,
    epsilon: float,
    angles_CD: tuple[Tensor, Tensor],
    cache_BGCD: tuple[Tensor, Tensor],
    plan: Plan,
    arrived_N: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    splits: int | None = None,
) -> Tensor:
    """`attend` for at most MAX_QUERIES queries. sinks: with a window, the first `sinks` positions are seen too (arXiv
    2309.17453, positions left as they are). splits: programs over a row's context, a power of two; by default
    enough of them to fill the GPU."""
    B, q = plan.positions_Bq.shape
    keys_BGCD, values_BGCD = cache_BGCD
    _, G, width, D = keys_BGCD.shape
    H = qkv_TF.shape[1] // D - 2 * G
    query_rows = H // G * q
    block_m = min(_MAX_TILE, max(16, triton.next_power_of_2(query_rows)))
    tiles = G * triton.cdiv(query_rows, block_m)
    block_s = 64 if D <= 128 else 32
    splits = splits or _splits_for(B * tiles, triton.cdiv(width, block_s) + 1, qkv_TF.device)
    merged_rows = _merged_rows(query_rows, splits)
    assert merged_rows == 0 or len(arrived_N) >= counters(B, G), "too few counters"
    out_TJ = qkv_TF.new_empty(B * q, H * D)
    partial_N = qkv_TF.new_empty(B * q * H * splits * D, dtype=torch.float32)
    lse_N = partial_N.new_empty(B * q * H * splits)
    first, rows_B = row_offset(plan)
    reach = {"WINDOW": window or 0, "SINKS": sinks, "BLOCK_S": block_s, "SPLITS": splits, "D": D}
    reach |= early(out_TJ.device)
    attend_share[(splits, tiles, B)](
        qkv_TF,
        *(norms_D or (qkv_TF, qkv_TF)),
        *angles_CD,
        plan.positions_Bq,
        plan.slots_Bq,
        plan.positions_Bq if rows_B is None else rows_B,
        keys_BGCD[first:],
        values_BGCD[first:],
        out_TJ,
        partial_N,
        lse_N,
        arrived_N,
        epsilon,
        scale * _LOG2_E,
        q,
        width,
        G=G,
        REPEAT=H // G,
        NORM=norms_D is not None,
        INDEXED=rows_B is not None,
        MERGED_ROWS=merged_rows,
        BLOCK_M=block_m,
        # The interpreter multiplies the bits of bfloat16; there the same rounded numbers are taken as float32.
        DOT=tl.float32 if INTERPRETED else _TRITON_TYPES[qkv_TF.dtype],
        num_warps=4,
        # With two blocks a program both are on their way at once; float32 has no room for that.
        num_stages=3 if qkv_TF.element_size() == 2 else 2,
        **reach,
        **UNFUSED,
    )
    if splits > 1 and not merged_rows:
        at = plan.positions_Bq, plan.slots_Bq
        combine[(B * q * H,)](*at, out_TJ, partial_N, lse_N, q, width, H=H, num_warps=4, **reach)
    return out_TJ


def _merged_rows(query_rows: int, splits: int) -> int:
    """As many, to the next power of two, as the last program adds up; 0 where another launch does."""
    rows = triton.next_power_of_2(query_rows)
    return rows if query_rows <= _MERGED_ROWS and rows * splits <= _MERGED_PARTS else 0


def _splits_for(programs: int, num_blocks: int, device: torch.device) -> int:
    """The power of two that fills the GPU with `programs` times as many, within what a full cache can use."""
    processors = _INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs)
    useful = triton.cdiv(num_blocks, LEAST_SHARE)
    return min(triton.next_power_of_2(wanted), triton.next_power_of_2(useful), _MAX_SPLITS)
