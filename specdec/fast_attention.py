"""Attention of a few new tokens a row to a ragged cache, in Triton; it reads what is live and nothing else.

Split over the context as flash-decoding does (Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context
inference"): a row's live tokens, in blocks of S, are shared out over a fixed number of programs. Each keeps the running
maximum m and sum l of FlashAttention (arXiv 2205.14135) over its blocks and leaves out_i = sum p v / l and lse_i = m +
log2 l; a second kernel adds them up: out = sum_i 2^(lse_i - max lse) out_i / sum_i 2^(lse_i - max lse). A program reads
its row's length on the device, so one grid, and thus one CUDA graph, serves all lengths, and a program whose share is
empty exits at once. Worked example: 64 splits and 1,000 live tokens in blocks of 64 are 16 blocks, one each for the
first 16 programs; 20,000 tokens are 313 blocks, five each for 63 programs.

Query heads that share a key head are rows of one tile (r = query * repeat + head), so keys and values are read once
for all of them. Scores and sums are in float32 (with float32 tensors the products too, to about 1e-6: three TF32
products each, since plain ones would spill registers). A slot behind the row's length is never loaded: stale NaN cannot
leak. Shapes: B rows, q queries, H query heads, G key heads, D head dimension, C slots of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention import attend_live
from specdec.fast_kernels import INTERPRETED, early, let_next_start, row_offset, wait_for_last
from specdec.kvcache import Plan, live_part

MAX_QUERIES = 16
_MAX_TILE, _MAX_SPLITS = 64, 64
# Programs that keep a multiprocessor's loads in flight; what stands in for a GPU's 132 under the interpreter.
_PROGRAMS_PER_PROCESSOR, _INTERPRETED_PROCESSORS = 4, 4
_LOG2_E = 1.4426950408889634
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _blocks_of(last_ptr, row, q, WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr):
    """(live tokens, blocks of sinks, first block after them, blocks in all) of a row. Its last position ends what is
    read; its first real one, at most q - 1 before, begins the window (padding has position 0)."""
    length = tl.load(last_ptr + row).to(tl.int32) + 1
    end = (length + BLOCK_S - 1) // BLOCK_S
    sink_blocks = 0
    first = 0
    if WINDOW > 0:
        sink_blocks = tl.minimum((SINKS + BLOCK_S - 1) // BLOCK_S, end)
        first = tl.maximum(tl.maximum(length - q - WINDOW + 1, 0) // BLOCK_S, sink_blocks)
    return length, sink_blocks, first, sink_blocks + end - first


@triton.jit
def _seen(slot, position, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    seen = slot <= position
    if WINDOW > 0:
        seen = seen & ((slot > position - WINDOW) | (slot < SINKS))
    return seen


@triton.jit
def _attend_split(
    query_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    last_ptr,
    rows_ptr,
    out_ptr,
    lse_ptr,
    scale,
    q,
    token_stride,
    row_stride,
    head_stride,
    G: tl.constexpr,
    REPEAT: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a split, a tile of queries of one key head, and a row of the batch."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    split, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, sink_blocks, first, num_blocks = _blocks_of(last_ptr, b, q, WINDOW, SINKS, BLOCK_S)
    share = (num_blocks + SPLITS - 1) // SPLITS
    begin, stop = split * share, tl.minimum((split + 1) * share, num_blocks)
    if begin >= stop:
        return
    group = tile % G
    r = (tile // G) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = r < q * REPEAT
    token = b * q + r // REPEAT
    head = group * REPEAT + r % REPEAT
    position = tl.load(positions_ptr + token, mask=real, other=-1)
    d = tl.arange(0, D)
    query = tl.load(query_ptr + (token * token_stride + head * D)[:, None] + d[None, :], mask=real[:, None], other=0.0)
    row = b.to(tl.int64)
    if INDEXED:
        row = tl.load(rows_ptr + b)
    start = row * row_stride + group * head_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    out = tl.full([BLOCK_M, D], 0.0, tl.float32)
    for i in range(begin, stop):
        block = tl.where(i < sink_blocks, i, i - sink_blocks + first)
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        live = slot < length
        key = tl.load(keys_ptr + start + slot[None, :] * D + d[:, None], mask=live[None, :], other=0.0)
        score = tl.dot(query.to(DOT), key.to(DOT), input_precision="tf32x3") * scale
        score = tl.where(_seen(slot[None, :], position[:, None], WINDOW, SINKS), score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen nothing yet
        weight = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weight, 1)
        value = tl.load(values_ptr + start + slot[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        out = out * rescale[:, None] + tl.dot(weight.to(value.dtype).to(DOT), value.to(DOT), input_precision="tf32x3")
        top = new_top
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (token * G * REPEAT + head) * SPLITS + split
    tl.store(out_ptr + place[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    if SPLITS > 1:
        tl.store(lse_ptr + place, top + tl.log2(total), mask=real)


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    last_ptr,
    out_ptr,
    q,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a token and head: the weighted sum of what the splits that had something to read left."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    place = tl.program_id(0)
    b = place // (H * q)
    _, _, _, num_blocks = _blocks_of(last_ptr, b, q, WINDOW, SINKS, BLOCK_S)
    share = (num_blocks + SPLITS - 1) // SPLITS
    split = tl.arange(0, SPLITS)
    written = split * share < num_blocks
    d = tl.arange(0, D)
    lse = tl.load(lse_ptr + place * SPLITS + split, mask=written, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    here = partial_ptr + (place * SPLITS + split)[:, None] * D + d[None, :]
    partial = tl.load(here, mask=written[:, None], other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + place * D + d, out.to(out_ptr.dtype.element_ty))


def attend(
    query_BqHD: Tensor,
    cache_BGCD: tuple[Tensor, Tensor],
    plan: Plan,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each row's queries, at the plan's positions, to its own slots up to there: [B, q, H, D].

    The new keys and values are in the cache already. window: only the last `window` positions are seen. More than
    MAX_QUERIES queries go through torch on the live part. query_BqHD may be a strided view whose last two dimensions
    are dense.
    """
    if query_BqHD.shape[1] <= MAX_QUERIES:
        return decode_attention(query_BqHD, cache_BGCD, plan, scale=scale, window=window)
    keys_BGSD, values_BGSD = (live_part(buffer, plan) for buffer in cache_BGCD)
    return attend_live(query_BqHD.transpose(1, 2), keys_BGSD, values_BGSD, plan, scale=scale, window=window)


def decode_attention(
    query_BqHD: Tensor,
    cache_BGCD: tuple[Tensor, Tensor],
    plan: Plan,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    splits: int | None = None,
) -> Tensor:
    """`attend` for at most MAX_QUERIES queries. sinks: with a window, the first `sinks` positions are seen too (arXiv
    2309.17453, positions left as they are). splits: programs over a row's context, a power of two; by default
    enough of them to fill the GPU."""
    B, q, H, D = query_BqHD.shape
    keys_BGCD, values_BGCD = cache_BGCD
    _, G, width, _ = keys_BGCD.shape
    repeat = H // G
    block_m = min(_MAX_TILE, max(16, triton.next_power_of_2(repeat * q)))
    tiles = G * triton.cdiv(repeat * q, block_m)
    block_s = 64 if D <= 128 else 32
    splits = splits or _splits_for(B * tiles, triton.cdiv(width, block_s), query_BqHD.device)
    out_BqHD = query_BqHD.new_empty(B, q, H, D)
    partial_N = out_BqHD if splits == 1 else out_BqHD.new_empty(B * q * H * splits * D, dtype=torch.float32)
    lse_N = partial_N if splits == 1 else partial_N.new_empty(B * q * H * splits)
    first, rows_B = row_offset(plan)
    reach = {"WINDOW": window or 0, "SINKS": sinks, "BLOCK_S": block_s, "SPLITS": splits}
    reach |= early(out_BqHD.device)
    _attend_split[(splits, tiles, B)](
        query_BqHD,
        keys_BGCD[first:],
        values_BGCD[first:],
        plan.positions_Bq,
        plan.last_B,
        plan.positions_Bq if rows_B is None else rows_B,
        partial_N,
        lse_N,
        scale * _LOG2_E,
        q,
        query_BqHD.stride(1),
        keys_BGCD.stride(0),
        keys_BGCD.stride(1),
        G=G,
        REPEAT=repeat,
        D=D,
        INDEXED=rows_B is not None,
        BLOCK_M=block_m,
        # The interpreter multiplies the bits of bfloat16; there the same rounded numbers are taken as float32.
        DOT=tl.float32 if INTERPRETED else _TRITON_TYPES[query_BqHD.dtype],
        num_warps=4,
        num_stages=2,
        **reach,
    )
    if splits > 1:
        _combine[(B * q * H,)](partial_N, lse_N, plan.last_B, out_BqHD, q, H=H, D=D, num_warps=4, **reach)
    return out_BqHD


def _splits_for(programs: int, num_blocks: int, device: torch.device) -> int:
    """The power of two that fills the GPU with `programs` times as many, within what a full cache can use."""
    processors = _INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs)
    return min(triton.next_power_of_2(wanted), triton.next_power_of_2(num_blocks), _MAX_SPLITS)
