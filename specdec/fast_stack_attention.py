"""Attention of a decoder layer, from the query-key-value product to its combined output. Shapes as in
specdec.fast_stack_kernel."""

import triton
import triton.language as tl

from specdec.fast_kernels import _rotated, _weighted
from specdec.fast_stack_layout import COLUMNS
from specdec.fast_stack_products import address_of, to_l2

_QUERY_NORM, _KEY_NORM, _KEYS, _VALUES = (
    tl.constexpr(COLUMNS.index(name)) for name in ("query_norm", "key_norm", "keys", "values")
)


@triton.jit
def _turn_ahead(f, w, layer, token, real, COLUMN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr):
    """What heads of tokens [R] are normalised and rotated with: the norm's weights for a dimension and for its partner
    [1, D], cosine and signed sine [R, D]."""
    D: tl.constexpr = S.dim
    d = tl.arange(0, D)[None, :]
    angle = tl.load(w.positions + token, mask=real, other=0)[:, None] * D + d
    cosine = tl.load(f.cosine + angle, mask=real[:, None], other=0.0)
    sine = tl.load(f.sine + angle, mask=real[:, None], other=0.0).to(tl.float32)
    sine = tl.where(d < D // 2, sine, -sine).to(DTYPE)
    weight, partner_weight = cosine, sine
    if S.head_norms:
        norm_ptr = address_of(f, layer, COLUMN, DTYPE)
        weight, partner_weight = tl.load(norm_ptr + d), tl.load(norm_ptr + (d + D // 2) % D)
    return weight, partner_weight, cosine, sine


@triton.jit
def _head(b, f, token, head, real, turn, S: tl.constexpr):
    """Heads [R] of tokens [R], normalised and rotated: [R, D]."""
    D: tl.constexpr = S.dim
    WIDTH: tl.constexpr = (S.heads + 2 * S.kv_heads) * S.dim
    DTYPE: tl.constexpr = b.qkv.dtype.element_ty
    d = tl.arange(0, D)[None, :]
    here = b.qkv + (token * WIDTH + head * D)[:, None]
    x = tl.load(here + d, mask=real[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    y = tl.load(here + (d + D // 2) % D, mask=real[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    if S.head_norms:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + f.head_epsilon)[:, None]
        x = _weighted(x, scale, turn[0], DTYPE)
        y = _weighted(y, scale, turn[1], DTYPE)
    return _rotated(x, y, turn[2].to(tl.float32), turn[3].to(tl.float32), DTYPE).to(DTYPE)


@triton.jit
def _place_of(item, S: tl.constexpr):
    """(split, key head, row of the batch) of an item."""
    return item % S.splits, item // S.splits % S.kv_heads, item // (S.splits * S.kv_heads)


@triton.jit
def _queries_of(row, group, w, S: tl.constexpr):
    """Tokens and heads of the queries that share a key head [QUERIES], and which of them are real."""
    REPEAT: tl.constexpr = S.heads // S.kv_heads
    QUERIES: tl.constexpr = S.queries
    r = tl.arange(0, QUERIES)
    return row * w.q + r // REPEAT, group * REPEAT + r % REPEAT, r < w.q * REPEAT


@triton.jit
def attend_ahead(f, w, layer, item, S: tl.constexpr, DTYPE: tl.constexpr):
    """What an item needs that does not come from the phase before, and its slots on their way to the L2 cache."""
    TOKENS: tl.constexpr = S.tokens
    SPLITS: tl.constexpr = S.splits
    BLOCK_S: tl.constexpr = S.block_s
    split, group, row = _place_of(item, S)
    length = tl.load(w.last + row).to(tl.int32) + 1
    blocks = (length + BLOCK_S - 1) // BLOCK_S
    share = (blocks + SPLITS - 1) // SPLITS
    begin = tl.minimum(split * share, blocks)
    stop = tl.minimum(begin + share, blocks)
    cache_row = w.first_row + row.to(tl.int64)
    if S.indexed:
        cache_row = tl.load(w.rows + row)
    start = cache_row * w.row_stride + group * w.head_stride
    keys_ptr = address_of(f, layer, _KEYS, DTYPE) + start
    values_ptr = address_of(f, layer, _VALUES, DTYPE) + start
    if S.prefetch > 1:
        for i in range(begin, stop):
            slot = tl.minimum(i * BLOCK_S + tl.arange(0, BLOCK_S), length - 1)
            to_l2(keys_ptr, slot, S.dim, S.dim)
            to_l2(values_ptr, slot, S.dim, S.dim)
    token, _, real = _queries_of(row, group, w, S)
    position = tl.load(w.positions + token, mask=real, other=-1)
    query_turn = _turn_ahead(f, w, layer, token, real, _QUERY_NORM, S, DTYPE)
    j = tl.arange(0, TOKENS)
    slot = tl.load(w.slots + row * w.q + j, mask=j < w.q, other=-1)
    key_turn = _turn_ahead(f, w, layer, row * w.q + j, j < w.q, _KEY_NORM, S, DTYPE)
    return begin, stop, length, keys_ptr, values_ptr, position, query_turn, slot, key_turn


@triton.jit
def attend_item(b, f, w, item, known, S: tl.constexpr):
    """One row's queries of one key head, and one split of the row's live slots. known: of attend_ahead."""
    D: tl.constexpr = S.dim
    SPLITS: tl.constexpr = S.splits
    QUERIES: tl.constexpr = S.queries
    split, group, row = _place_of(item, S)
    begin, stop, length, keys_ptr, values_ptr, position, query_turn, slot, key_turn = known
    token, head, real = _queries_of(row, group, w, S)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    out = tl.full([QUERIES, D], 0.0, tl.float32)
    if begin < stop:
        # Of the row's new tokens, those that go to slots of this split; padding's slot lies behind all.
        mine = (slot >= begin * S.block_s) & (slot < tl.minimum(stop * S.block_s, length))
        if tl.sum(mine.to(tl.int32), 0) > 0:
            _store_new(b, f, w, row, group, slot, mine, key_turn, keys_ptr, values_ptr, S)
        query = _head(b, f, token, head, real, query_turn, S)
        tl.debug_barrier()  # the new keys and values are read by other threads than those that wrote them
        top, total, out = _attend_blocks(
            query, position, begin, stop, length, keys_ptr, values_ptr, f.scale, top, total, out, S
        )
    place = (token * S.heads + head) * SPLITS + split
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(b.out + place[:, None] * D + tl.arange(0, D)[None, :], out / total[:, None], mask=real[:, None])
    tl.store(b.lse + place, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=real)


@triton.jit
def _store_new(b, f, w, row, group, slot, mine, turn, keys_ptr, values_ptr, S: tl.constexpr):
    """Write the row's new keys and values that are mine [TOKENS] into the cache."""
    D: tl.constexpr = S.dim
    TOKENS: tl.constexpr = S.tokens
    WIDTH: tl.constexpr = (S.heads + 2 * S.kv_heads) * S.dim
    j, d = tl.arange(0, TOKENS), tl.arange(0, D)[None, :]
    token = row * w.q + j
    key = _head(b, f, token, S.heads + group + j * 0, mine, turn, S)
    here = b.qkv + (token * WIDTH + (S.heads + S.kv_heads + group) * D)[:, None] + d
    value = tl.load(here, mask=mine[:, None], other=0.0, cache_modifier=".cg")
    tl.store(keys_ptr + slot[:, None] * D + d, key, mask=mine[:, None])
    tl.store(values_ptr + slot[:, None] * D + d, value, mask=mine[:, None])


@triton.jit
def _attend_blocks(query, position, begin, stop, length, keys_ptr, values_ptr, scale, top, total, out, S: tl.constexpr):
    """Running maximum, sum and weighted sum over blocks [begin, stop)."""
    D: tl.constexpr = S.dim
    BLOCK_S: tl.constexpr = S.block_s
    STAGES: tl.constexpr = S.stages
    DOT: tl.constexpr = S.dot
    d = tl.arange(0, D)
    for i in tl.range(begin, stop, num_stages=STAGES):
        slot = i * BLOCK_S + tl.arange(0, BLOCK_S)
        live = slot < length
        key = tl.load(keys_ptr + slot[None, :] * D + d[:, None], mask=live[None, :], other=0.0)
        value = tl.load(values_ptr + slot[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(query.to(DOT), key.to(DOT), input_precision="tf32x3") * scale
        score = tl.where(slot[None, :] <= position[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen nothing yet
        weight = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + tl.dot(weight.to(value.dtype).to(DOT), value.to(DOT), input_precision="tf32x3")
        top = new_top
    return top, total, out


@triton.jit
def combined(b, w, S: tl.constexpr):
    """This program's part of attention's output, added up over the splits: float32 [TOKENS, block]."""
    TOKENS: tl.constexpr = S.tokens
    D: tl.constexpr = S.dim
    SPLITS: tl.constexpr = S.splits
    BLOCK: tl.constexpr = S.out.block
    PART: tl.constexpr = S.heads * S.dim // S.out.parts
    DTYPE: tl.constexpr = b.residual.dtype.element_ty
    split, t, inner = (
        tl.arange(0, SPLITS)[:, None, None],
        tl.arange(0, TOKENS)[None, :, None],
        tl.arange(0, BLOCK)[None, None, :],
    )
    k = (tl.program_id(0) % S.out.parts) * PART + inner
    inside = (t < w.num_tokens) & (inner < PART)
    place = (t * S.heads + k // D) * SPLITS + split
    lse = tl.load(b.lse + place, mask=inside, other=0.0, cache_modifier=".cg")
    out = tl.load(b.out + place * D + k % D, mask=inside, other=0.0, cache_modifier=".cg")
    weight = tl.exp2(lse - tl.max(lse, 0)[None])
    return (tl.sum(weight * out, 0) / tl.sum(weight, 0)).to(DTYPE).to(tl.float32)
