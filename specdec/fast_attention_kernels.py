"""The Triton kernels of specdec.fast_attention: attention to a share of a row's tokens, and adding up the shares.

r: rows of queries of one key head, M in a tile; S slots in a block; D head dimension. Tensors in memory are named by
the pointers to them, with the shapes that specdec.fast_attention gives.
"""

import triton
import triton.language as tl

from specdec.fast_kernels import let_next_start, turned, wait_for_last

MAX_QUERIES = 16
# Blocks that a program has at least: below, adding up costs more than another program gains.
LEAST_SHARE = 2
_LEAST_SHARE, _COLUMNS = tl.constexpr(LEAST_SHARE), tl.constexpr(MAX_QUERIES)
# Elements of the splits' parts that are added up at once: registers of 128 threads.
_MERGED_AT_ONCE = tl.constexpr(8192)
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _new_columns(positions_ptr, slots_ptr, row, q, trash):
    """(column, position, slot, whether it is a token and no padding) of a row's new tokens [COLUMNS]."""
    column = tl.arange(0, _COLUMNS)
    position = tl.load(positions_ptr + row * q + column, mask=column < q, other=0)
    slot = tl.load(slots_ptr + row * q + column, mask=column < q, other=trash)
    return column, position, slot, slot != trash


@triton.jit
def _shared_out(position, is_token, WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr, SPLITS):
    """How a row is read: (cached tokens, blocks of sinks, first block after them, blocks in all, blocks a program). The
    new tokens are the last block; a row without any reads nothing."""
    start = tl.min(tl.where(is_token, position, _FAR), 0).to(tl.int32)
    start = tl.where(start == _FAR, 0, start)
    end = (start + BLOCK_S - 1) // BLOCK_S
    sink_blocks = 0
    first = 0
    if WINDOW > 0:
        sink_blocks = tl.minimum((SINKS + BLOCK_S - 1) // BLOCK_S, end)
        first = tl.maximum(tl.maximum(start - WINDOW + 1, 0) // BLOCK_S, sink_blocks)
    blocks = sink_blocks + end - first + 1
    return start, sink_blocks, first, blocks, tl.maximum((blocks + SPLITS - 1) // SPLITS, _LEAST_SHARE)


@triton.jit
def _seen(slot, position, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    seen = slot <= position
    if WINDOW > 0:
        seen = seen & ((slot > position - WINDOW) | (slot < SINKS))
    return seen


@triton.jit
def _query_rows(tile, row, q, G: tl.constexpr, REPEAT: tl.constexpr, N: tl.constexpr):
    """(whether there is such a query, its token, its head) of N rows of a tile of a batch row."""
    r = (tile // G) * N + tl.arange(0, N)
    return r < q * REPEAT, row * q + r // REPEAT, (tile % G) * REPEAT + r % REPEAT


@triton.jit
def _weight_halves(weight_ptr, D: tl.constexpr, NORM: tl.constexpr):
    low, high = 1.0, 1.0
    if NORM:
        here = weight_ptr + tl.arange(0, D // 2)[None, :]
        low, high = tl.load(here), tl.load(here + D // 2)
    return low, high


@triton.jit
def _halves(head_ptr, real, position, cosine_ptr, sine_ptr, D: tl.constexpr):
    """(lower half, upper half, cosine, sine) of heads [N, D / 2] in float32, zeros where not real."""
    half = tl.arange(0, D // 2)[None, :]
    here, angle, real = head_ptr[:, None] + half, position[:, None] * D + half, real[:, None]
    low, high = tl.load(here, mask=real, other=0.0), tl.load(here + D // 2, mask=real, other=0.0)
    cosine, sine = tl.load(cosine_ptr + angle, mask=real, other=0.0), tl.load(sine_ptr + angle, mask=real, other=0.0)
    return low.to(tl.float32), high.to(tl.float32), cosine.to(tl.float32), sine.to(tl.float32)


@triton.jit
def _turned(halves, weight, epsilon, D: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """The heads [N, D] whose halves these are, with the bits of `rotate_and_store`."""
    low, high = turned(halves[0], halves[1], weight[0], weight[1], halves[2], halves[3], epsilon, D, NORM, DTYPE)
    return tl.join(low, high).permute(0, 2, 1).reshape(low.shape[0], D)


@triton.jit
def _added(top, total, out, query, key, value, seen, scale, DOT: tl.constexpr):
    """The running softmax after keys [D, S] and values [S, D], of which `seen` [M, S] count."""
    score = tl.dot(query.to(DOT), key.to(DOT), input_precision="tf32x3") * scale
    score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen nothing yet
    weight, rescale = tl.exp2(score - shift[:, None]), tl.exp2(top - shift)
    part = tl.dot(weight.to(value.dtype).to(DOT), value.to(DOT), input_precision="tf32x3")
    return new_top, total * rescale + tl.sum(weight, 1), out * rescale[:, None] + part


@triton.jit
def _merged(partial_ptr, lse_ptr, place, real, parts, SPLITS: tl.constexpr, D: tl.constexpr):
    """The weighted sum of the first `parts` splits' results for the heads at `place` [R]: [R, D]."""
    AT_ONCE: tl.constexpr = min(SPLITS, max(1, _MERGED_AT_ONCE // (place.shape[0] * D)))
    d = tl.arange(0, D)[None, None, :]
    top = tl.full([place.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([place.shape[0]], tl.float32)
    out = tl.zeros([place.shape[0], D], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        here, written = place[None, :] * SPLITS + split[:, None], (split < parts)[:, None] & real[None, :]
        lse = tl.load(lse_ptr + here, mask=written, other=float("-inf"), cache_modifier=".cg")
        there = partial_ptr + here[:, :, None] * D + d
        partial = tl.load(there, mask=written[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, rescale = tl.exp2(lse - shift[None, :]), tl.exp2(top - shift)
        total = total * rescale + tl.sum(weight, 0)
        out = out * rescale[:, None] + tl.sum(partial * weight[:, :, None], 0)
        top = new_top
    return out / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _leave(out, place, real, out_ptr, D: tl.constexpr):
    here = out_ptr + place[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(here, out.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _row_ptrs(keys_ptr, values_ptr, rows_ptr, b, group, width, G: tl.constexpr, D: tl.constexpr, INDEXED: tl.constexpr):
    """Where the keys and the values of one head of a batch row begin in the cache."""
    row = b.to(tl.int64)
    if INDEXED:
        row = tl.load(rows_ptr + b)
    begin = (row * G + group) * width * D
    return keys_ptr + begin, values_ptr + begin


@triton.jit
def _store(buffer_ptr, new, slot, is_new, D: tl.constexpr):
    tl.store(buffer_ptr + slot[:, None] * D + tl.arange(0, D)[None, :], new, mask=is_new[:, None])


@triton.jit
def _over_cache(
    running,
    query,
    position,
    cache_ptrs,
    blocks,
    scale,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DOT: tl.constexpr,
):
    """The running softmax (top, total, out) after the blocks of cached tokens from begin to stop; slots from `start` on
    are not read."""
    top, total, out = running
    keys_ptr, values_ptr = cache_ptrs
    begin, stop, start, sink_blocks, first = blocks
    D: tl.constexpr = query.shape[1]
    for i in range(begin, stop):
        slot = tl.where(i < sink_blocks, i, i - sink_blocks + first) * BLOCK_S + tl.arange(0, BLOCK_S)
        cached, here = slot < start, slot[:, None] * D + tl.arange(0, D)[None, :]
        key = tl.load(keys_ptr + here, mask=cached[:, None], other=0.0)
        value = tl.load(values_ptr + here, mask=cached[:, None], other=0.0)
        seen = cached[None, :] & _seen(slot[None, :], position[:, None], WINDOW, SINKS)
        top, total, out = _added(top, total, out, query, tl.trans(key), value, seen, scale, DOT)
    return top, total, out


@triton.jit
def _hand_in(
    running,
    at,
    left,
    q,
    G: tl.constexpr,
    REPEAT: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
):
    """What a split found goes to the output where nothing else does; else to the others' results, which whoever comes
    last adds up, unless another launch will."""
    top, total, out = running
    split, tile, b, parts = at
    out_ptr, partial_ptr, lse_ptr, arrived_ptr = left
    D: tl.constexpr = out.shape[1]
    real, token, head = _query_rows(tile, b, q, G, REPEAT, out.shape[0])
    place = token * G * REPEAT + head
    result = out / tl.where(total == 0.0, 1.0, total)[:, None]
    if parts == 1:
        _leave(result, place, real, out_ptr, D)
    else:
        here = place * SPLITS + split
        there = here[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(partial_ptr + there, result, mask=real[:, None], cache_modifier=".cg")
        tl.store(lse_ptr + here, top + tl.log2(total), mask=real, cache_modifier=".cg")
        if MERGED_ROWS > 0:
            tl.debug_barrier()  # every thread's part is written before this program counts as arrived
            counter_ptr = arrived_ptr + b * G + tile
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1:
                tl.store(counter_ptr, 0)
                few_real, few_token, few_head = _query_rows(tile, b, q, G, REPEAT, MERGED_ROWS)
                few = few_token * G * REPEAT + few_head
                _leave(_merged(partial_ptr, lse_ptr, few, few_real, parts, SPLITS, D), few, few_real, out_ptr, D)


@triton.jit
def attend_share(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cosine_ptr,
    sine_ptr,
    positions_ptr,
    slots_ptr,
    rows_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    epsilon,
    scale,
    q,
    width,
    G: tl.constexpr,
    REPEAT: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    NORM: tl.constexpr,
    INDEXED: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a split, a tile of queries of a key head, and a batch row. MERGED_ROWS: 0 where `combine` follows."""
    let_next_start(EARLY)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    query_weight = _weight_halves(query_weight_ptr, D, NORM)
    key_weight = _weight_halves(key_weight_ptr, D, NORM)
    wait_for_last(EARLY)
    split, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column, new_position, new_slot, is_new = _new_columns(positions_ptr, slots_ptr, b, q, width - 1)
    start, sink_blocks, first, blocks, share = _shared_out(new_position, is_new, WINDOW, SINKS, BLOCK_S, SPLITS)
    begin, stop = split * share, tl.minimum((split + 1) * share, blocks)
    if begin >= stop:
        return
    # Loads first: those of the new keys are on their way while the queries are turned.
    real, token, head = _query_rows(tile, b, q, G, REPEAT, BLOCK_M)
    position = tl.load(positions_ptr + token, mask=real, other=-1)
    halves = _halves(qkv_ptr + (token * (REPEAT + 2) * G + head) * D, real, position, cosine_ptr, sine_ptr, D)
    fed = is_new & (column < tl.where(stop == blocks, q, 0))
    new_ptr = qkv_ptr + ((b * q + column) * (REPEAT + 2) * G + REPEAT * G + tile % G) * D
    new_halves = _halves(new_ptr, fed, new_position, cosine_ptr, sine_ptr, D)
    new_value = tl.load(new_ptr[:, None] + G * D + tl.arange(0, D)[None, :], mask=fed[:, None], other=0.0)
    query = _turned(halves, query_weight, epsilon, D, NORM, DTYPE)
    keys_ptr, values_ptr = _row_ptrs(keys_ptr, values_ptr, rows_ptr, b, tile % G, width, G, D, INDEXED)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, D], tl.float32)
    if stop == blocks:
        new_key = _turned(new_halves, key_weight, epsilon, D, NORM, DTYPE)
        if tile < G:  # one tile of a key head's queries is enough
            _store(keys_ptr, new_key, new_slot, is_new, D)
            _store(values_ptr, new_value, new_slot, is_new, D)
        seen = is_new[None, :] & _seen(new_position[None, :], position[:, None], WINDOW, SINKS)
        top, total, out = _added(top, total, out, query, tl.trans(new_key), new_value, seen, scale, DOT)
    blocks_here = begin, tl.minimum(stop, blocks - 1), start, sink_blocks, first
    cache_ptrs, running = (keys_ptr, values_ptr), (top, total, out)
    running = _over_cache(running, query, position, cache_ptrs, blocks_here, scale, WINDOW, SINKS, BLOCK_S, DOT)
    at, left = (split, tile, b, (blocks + share - 1) // share), (out_ptr, partial_ptr, lse_ptr, arrived_ptr)
    _hand_in(running, at, left, q, G, REPEAT, SPLITS, MERGED_ROWS)


@triton.jit
def combine(
    positions_ptr,
    slots_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q,
    width,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a token and head: the weighted sum of what the splits left, unless one split did it all."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    place = tl.program_id(0) + tl.arange(0, 1)
    _, position, _, is_new = _new_columns(positions_ptr, slots_ptr, tl.program_id(0) // (H * q), q, width - 1)
    _, _, _, blocks, share = _shared_out(position, is_new, WINDOW, SINKS, BLOCK_S, SPLITS)
    parts = (blocks + share - 1) // share
    if parts > 1:
        _leave(_merged(partial_ptr, lse_ptr, place, place >= 0, parts, SPLITS, D), place, place >= 0, out_ptr, D)
