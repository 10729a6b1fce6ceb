"""Products of few tokens with the tiles of weights that one program holds. Shapes as in specdec.fast_stack_kernel."""

import triton
import triton.language as tl

from specdec.fast_kernels import _weighted
from specdec.fast_stack_layout import COLUMNS, FAILED

_COLUMNS = tl.constexpr(len(COLUMNS))
_FAILED = tl.constexpr(FAILED)


@triton.jit
def address_of(f, layer, COLUMN: tl.constexpr, DTYPE: tl.constexpr):
    address = tl.load(f.table + layer * _COLUMNS + COLUMN)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _tiles(f, layer, wanted, SHARE: tl.constexpr, DTYPE: tl.constexpr):
    """This program's tiles of a weight, chunk by chunk, each [R, block]; zeros where they are not wanted."""
    N: tl.constexpr = SHARE.outputs
    K: tl.constexpr = SHARE.inputs
    ROWS: tl.constexpr = SHARE.rows
    BLOCK: tl.constexpr = SHARE.block
    PARTS: tl.constexpr = SHARE.parts
    TILES: tl.constexpr = SHARE.tiles
    CHUNKS: tl.constexpr = SHARE.chunks
    weight_ptr = address_of(f, layer, SHARE.column, DTYPE) + SHARE.first * K + (tl.program_id(0) % PARTS) * (K // PARTS)
    tiles = ()
    for j in tl.static_range(TILES):
        n = _first_row(j, SHARE) + tl.arange(0, ROWS)[:, None]
        for chunk in tl.static_range(CHUNKS):
            k = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = (n < N * wanted) & (k < K // PARTS)
            tiles += (tl.load(weight_ptr + n * K + k, mask=inside, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _first_row(j, SHARE: tl.constexpr):
    PARTS: tl.constexpr = SHARE.parts
    return (tl.program_id(0) // PARTS * SHARE.tiles + j) * SHARE.rows


@triton.jit
def _ready(x, CHUNKS: tl.constexpr, S: tl.constexpr):
    """Inputs, chunks of float32 [TOKENS, block], as `_times` takes them. For the tensor cores: inputs shared out over
    the warps, the tokens repeated up to 16 [WARPS, 16, block / WARPS]."""
    TOKENS: tl.constexpr = S.tokens
    DOT: tl.constexpr = S.dot
    BLOCK: tl.constexpr = x[0].shape[1]
    WARPS: tl.constexpr = S.warps if S.warps * 16 <= BLOCK else BLOCK // 16
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        if S.tensor_cores:
            repeated = tl.broadcast_to(x[chunk].to(DOT)[None], [16 // TOKENS, TOKENS, BLOCK])
            split = tl.reshape(repeated, [16, WARPS, BLOCK // WARPS])
            chunks += (tl.permute(split, (1, 0, 2)),)  # type: ignore[assignment]
        else:
            chunks += (x[chunk],)  # type: ignore[assignment]
    return chunks


@triton.jit
def _times(x, tiles, j, CHUNKS: tl.constexpr, S: tl.constexpr):
    """The products of all tokens' inputs with tile j: float32 [16 or TOKENS, R]."""
    ROWS: tl.constexpr = tiles[j * CHUNKS].shape[0]
    if S.tensor_cores:
        DOT: tl.constexpr = S.dot
        WARPS: tl.constexpr = x[0].shape[0]
        total = tl.zeros([WARPS, 16, ROWS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            split = tl.reshape(tiles[j * CHUNKS + chunk].to(DOT), [ROWS, WARPS, x[0].shape[2]])
            total = tl.dot(x[chunk], tl.permute(split, (1, 2, 0)), total, input_precision="tf32x3")
        out = tl.sum(total, 0)
    else:
        TOKENS: tl.constexpr = S.tokens
        out = tl.zeros([TOKENS, ROWS], tl.float32)
        for t in tl.static_range(TOKENS):
            products = _products(x[0], tiles[j * CHUNKS], t, TOKENS)
            for chunk in tl.static_range(1, CHUNKS):
                products += _products(x[chunk], tiles[j * CHUNKS + chunk], t, TOKENS)
            out = tl.where(tl.arange(0, TOKENS)[:, None] == t, tl.sum(products, 1)[None, :], out)
    return out


@triton.jit
def _products(x_TK, weight_RK, t, TOKENS: tl.constexpr):
    """Token t's inputs times each row of the weight, not yet added up."""
    x_K = tl.sum(tl.where(tl.arange(0, TOKENS)[:, None] == t, x_TK, 0.0), 0)
    return weight_RK.to(tl.float32) * x_K[None, :]


@triton.jit
def _store(out_ptr, y, first, N: tl.constexpr, S: tl.constexpr):
    """Outputs [tokens, R] from `first` on in rows of N."""
    t = tl.arange(0, y.shape[0])[:, None]
    n = first + tl.arange(0, y.shape[1])[None, :]
    tl.store(out_ptr + t * N + n, y.to(out_ptr.dtype.element_ty), mask=(t < S.tokens) & (n < N))


@triton.jit
def _normed(
    residual_ptr,
    new_ptr,
    added_ptr,
    num_added,
    weight,
    epsilon,
    num_tokens,
    S: tl.constexpr,
    PARTS: tl.constexpr,
):
    """new = residual + the sum of PARTS addends of the first `num_added` tokens; norm(new) * weight: float32 [TOKENS,
    block]."""
    BLOCK: tl.constexpr = S.qkv.block
    TOKENS: tl.constexpr = S.tokens
    E: tl.constexpr = S.hidden
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    t, e = tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (t < num_tokens) & (e < E)
    values = tl.load(residual_ptr + t * E + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    added = tl.zeros_like(values)
    for part in tl.static_range(PARTS):
        here = added_ptr + (part * TOKENS + t) * E + e
        added += tl.load(here, mask=inside & (t < num_added), other=0.0, cache_modifier=".cg").to(tl.float32)
    values = (values + added.to(DTYPE).to(tl.float32)).to(DTYPE)
    tl.store(new_ptr + t * E + e, values, mask=inside & (t >= tl.program_id(0) * TOKENS))
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / E + epsilon)[:, None]
    return _weighted(values, scale, weight, DTYPE)


@triton.jit
def to_l2(base_ptr, row, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Ask for WIDTH elements of each of the rows [R]: they go to the L2 cache, and nobody waits for them."""
    LINE: tl.constexpr = 1024 // base_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (WIDTH + LINE - 1) // LINE
    line = tl.arange(0, triton.next_power_of_2(LINES))[None, :]
    here = base_ptr + row[:, None] * STRIDE + tl.minimum(line * LINE, WIDTH - 1)
    asm: tl.constexpr = "{ prefetch.global.L2 [$1]; mov.s32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l", [here.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def tiles_to_l2(f, layer, SHARE: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr):
    """This program's tiles on their way to the L2 cache."""
    TILES: tl.constexpr = SHARE.tiles
    ROWS: tl.constexpr = SHARE.rows
    PARTS: tl.constexpr = SHARE.parts
    K: tl.constexpr = SHARE.inputs
    if S.prefetch > 1:
        weight_ptr = address_of(f, layer, SHARE.column, DTYPE) + SHARE.first * K
        weight_ptr += (tl.program_id(0) % PARTS) * (K // PARTS)
        for j in tl.static_range(TILES):
            n = tl.minimum(_first_row(j, SHARE) + tl.arange(0, ROWS), SHARE.outputs - 1)
            to_l2(weight_ptr, n, K // PARTS, K)


@triton.jit
def ahead(f, layer, wanted, SHARE: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr):
    """The tiles, where they are asked for ahead of the barrier; else they are loaded where they are used."""
    tiles = ()
    if S.prefetch > 0:
        tiles = _tiles(f, layer, wanted, SHARE, DTYPE)
    return tiles


@triton.jit
def norm_ahead(f, layer, COLUMN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr):
    """The weight of a norm [1, block]."""
    BLOCK: tl.constexpr = S.qkv.block
    e = tl.arange(0, BLOCK)[None, :]
    return tl.load(address_of(f, layer, COLUMN, DTYPE) + e, mask=e < S.hidden, other=0.0)


@triton.jit
def project(b, f, w, layer, norm, weights, S: tl.constexpr):
    F: tl.constexpr = (S.heads + 2 * S.kv_heads) * S.dim
    SHARE: tl.constexpr = S.qkv
    TILES: tl.constexpr = SHARE.tiles
    DTYPE: tl.constexpr = b.residual.dtype.element_ty
    if S.prefetch == 0:
        weights = _tiles(f, layer, 1, SHARE, DTYPE)
    x = _normed(b.residual, b.second, b.x, w.num_tokens * (layer > 0), norm, f.epsilon, w.num_tokens, S, 1)
    x = _ready((x,), 1, S)
    for j in tl.static_range(TILES):
        _store(b.qkv, _times(x, weights, j, 1, S), _first_row(j, SHARE), F, S)


@triton.jit
def project_out(b, f, layer, x, weights, S: tl.constexpr):
    E: tl.constexpr = S.hidden
    SHARE: tl.constexpr = S.out
    TILES: tl.constexpr = SHARE.tiles
    if S.prefetch == 0:
        weights = _tiles(f, layer, 1, SHARE, b.residual.dtype.element_ty)
    part = tl.program_id(0) % S.out.parts
    x = _ready((x,), 1, S)
    for j in tl.static_range(TILES):
        _store(b.sums + part * S.tokens * E, _times(x, weights, j, 1, S), _first_row(j, SHARE), E, S)


@triton.jit
def gate_and_up(b, f, w, layer, norm, gates, ups, S: tl.constexpr):
    WIDTH: tl.constexpr = S.width
    SHARE: tl.constexpr = S.gate
    UP: tl.constexpr = S.up
    TILES: tl.constexpr = SHARE.tiles
    DTYPE: tl.constexpr = b.residual.dtype.element_ty
    if S.prefetch == 0:
        gates = _tiles(f, layer, 1, SHARE, DTYPE)
        ups = _tiles(f, layer, 1, UP, DTYPE)
    x = _normed(b.second, b.residual, b.sums, w.num_tokens, norm, f.epsilon, w.num_tokens, S, S.out.parts)
    x = _ready((x,), 1, S)
    for j in tl.static_range(TILES):
        gate = _times(x, gates, j, 1, S).to(DTYPE).to(tl.float32)
        up = _times(x, ups, j, 1, S).to(DTYPE).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
        _store(b.act, silu * up, _first_row(j, SHARE), WIDTH, S)


@triton.jit
def down(b, f, w, layer, weights, S: tl.constexpr):
    """What a wait that was given up has spoilt becomes NaN here."""
    E: tl.constexpr = S.hidden
    SHARE: tl.constexpr = S.down
    TILES: tl.constexpr = SHARE.tiles
    CHUNKS: tl.constexpr = SHARE.chunks
    DTYPE: tl.constexpr = b.residual.dtype.element_ty
    if S.prefetch == 0:
        weights = _tiles(f, layer, 1, SHARE, DTYPE)
    failed = tl.load(b.sync + _FAILED, cache_modifier=".cg")
    x = _ready(_activations(b.act, w.num_tokens, S), CHUNKS, S)
    for j in tl.static_range(TILES):
        y = tl.where(failed == 0, _times(x, weights, j, CHUNKS, S), float("nan"))
        _store(b.x, y, _first_row(j, SHARE), E, S)


@triton.jit
def _activations(act_ptr, num_tokens, S: tl.constexpr):
    """The down product's inputs in chunks of float32 [TOKENS, block]."""
    WIDTH: tl.constexpr = S.width
    TOKENS: tl.constexpr = S.tokens
    SHARE: tl.constexpr = S.down
    BLOCK: tl.constexpr = SHARE.block
    CHUNKS: tl.constexpr = SHARE.chunks
    t = tl.arange(0, TOKENS)[:, None]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        k = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (t < num_tokens) & (k < WIDTH)
        loaded = tl.load(act_ptr + t * WIDTH + k, mask=inside, other=0.0, cache_modifier=".cg")
        chunks += (loaded.to(tl.float32),)  # type: ignore[assignment]
    return chunks
