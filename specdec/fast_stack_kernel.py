"""All decoder layers of a small model as one Triton kernel that stays on the device from the first layer to the last.

With few tokens a layer's weights are read in 2 to 3 us, but each of its ten launches costs as much as that alone. Here
one program a multiprocessor does its share of every phase, and the programs wait for each other in between:

0. residual += the layer before; norm; its rows of the query-key-value product
1. per row, key head and split of the context: head norms and rotary embedding, the new keys and values into the cache,
   flash-decoding over the live slots (as in specdec.fast_attention), which leaves out_i and lse_i
2. the splits combined for its part of K, and its rows of the output product: one partial sum a part of K
3. residual += the partial sums; norm; its rows of gate and up; SiLU(gate) * up
4. its rows of the down product

A program asks for its weights of the next phase between its arrival at the barrier and its waiting there: they depend
on nobody. All sums are in a fixed order, so that every run gives the same bits; numbers are rounded where
specdec.fast_kernels rounds them.

The barrier. Arriving: every thread's stores, a barrier of the program's threads, one atomic add with release at the
scope of the GPU. Waiting: one thread reads the counter with acquire until all have arrived, then a barrier of the
program's threads. In PTX's memory model the release covers the other threads' stores (the barrier in the program orders
them before it), the acquire sees it through the chain of atomic adds, and the second barrier orders the loads of
all threads after it; they bypass the first-level cache (.cg), which is not coherent. The counter only grows, modulo
2^32: the program that ends a launch leaves where the next one begins, so a graph replays without a reset. The launch is
cooperative: either all programs are resident, or there is no launch. A wait that lasts seconds is given up, the others
of that launch soon after, and whatever is computed from then on is NaN.

Shapes: T tokens (rounded up to a power of two: TOKENS), E hidden size, H query heads, G key heads, D head dimension,
F = (H + 2 G) D, I width of the MLP, R rows of a tile of weights.
"""

import triton
import triton.language as tl

from specdec.fast_stack_attention import attend_ahead, attend_item, combined
from specdec.fast_stack_layout import BEGAN, COLUMNS
from specdec.fast_stack_products import ahead, down, gate_and_up, norm_ahead, project, project_out, tiles_to_l2

_BEGAN = tl.constexpr(BEGAN)
_INPUT_NORM, _MLP_NORM = tl.constexpr(COLUMNS.index("input_norm")), tl.constexpr(COLUMNS.index("mlp_norm"))
# One thread: reads until the arrivals reach $2, at most some seconds; at once, or soon, when a wait was given up.
_WAIT = tl.constexpr("""{
    .reg .pred stop;
    .reg .s32 word, left;
    mov.u32 word, %tid.x;
    setp.ne.s32 stop, word, 0;
    @stop bra DONE;
    mov.s32 left, 4194304;
POLL:
    ld.acquire.gpu.global.s32 word, [$1];
    sub.s32 word, word, $2;
    setp.ge.s32 stop, word, 0;
    @stop bra DONE;
    sub.s32 left, left, 1;
    and.b32 word, left, 1023;
    setp.ne.s32 stop, word, 0;
    @stop bra POLL;
    ld.relaxed.gpu.global.s32 word, [$1+256];
    setp.ne.s32 stop, word, 0;
    @stop bra DONE;
    setp.ne.s32 stop, left, 0;
    @stop bra POLL;
    st.relaxed.gpu.global.s32 [$1+256], 1;
DONE:
    mov.s32 $0, 0;
}""")


@triton.jit
def _arrive(sync_ptr):
    tl.debug_barrier()
    tl.atomic_add(sync_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _wait(sync_ptr, arrivals):
    tl.inline_asm_elementwise(_WAIT, "=r,l,r", [sync_ptr.to(tl.int64), arrivals], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["first_layer", "stop_layer"])
def _stack(f, w, b, first_layer, stop_layer, S: tl.constexpr, PHASE: tl.constexpr):
    """Layers [first_layer, stop_layer): all phases (PHASE = -1), or one of them, without barriers."""
    QKV: tl.constexpr = S.qkv
    OUT: tl.constexpr = S.out
    GATE: tl.constexpr = S.gate
    UP: tl.constexpr = S.up
    DOWN: tl.constexpr = S.down
    DTYPE: tl.constexpr = b.residual.dtype.element_ty
    ALL: tl.constexpr = PHASE < 0
    P = tl.num_programs(0)
    num_items = w.num_tokens // w.q * S.kv_heads * S.splits
    arrivals = 0
    if ALL:
        arrivals = tl.load(b.sync + _BEGAN)
    qkv_norm = norm_ahead(f, first_layer, _INPUT_NORM, S, DTYPE)
    qkv_tiles = ahead(f, first_layer, 1, QKV, S, DTYPE)
    for layer in range(first_layer, stop_layer):
        if ALL or PHASE == 0:
            project(b, f, w, layer, qkv_norm, qkv_tiles, S)
        if ALL:
            _arrive(b.sync)
        out_tiles = ahead(f, layer, 1, OUT, S, DTYPE)
        known = attend_ahead(f, w, layer, tl.minimum(tl.program_id(0), num_items - 1), S, DTYPE)
        tiles_to_l2(f, layer, GATE, S, DTYPE)
        tiles_to_l2(f, layer, UP, S, DTYPE)
        if ALL:
            arrivals += P
            _wait(b.sync, arrivals)
        if ALL or PHASE == 1:
            for i in range((num_items - tl.program_id(0) + P - 1) // P):
                item = tl.program_id(0) + i * P
                attend_item(b, f, w, item, known, S)
                known = attend_ahead(f, w, layer, tl.minimum(item + P, num_items - 1), S, DTYPE)
        if ALL:
            _arrive(b.sync)
        tiles_to_l2(f, layer, DOWN, S, DTYPE)
        if ALL:
            arrivals += P
            _wait(b.sync, arrivals)
        if ALL or PHASE == 2:
            project_out(b, f, layer, combined(b, w, S), out_tiles, S)
        if ALL:
            _arrive(b.sync)
        gate_norm = norm_ahead(f, layer, _MLP_NORM, S, DTYPE)
        gate_tiles = ahead(f, layer, 1, GATE, S, DTYPE)
        up_tiles = ahead(f, layer, 1, UP, S, DTYPE)
        more = layer + 1 < stop_layer
        next_layer = tl.where(more, layer + 1, layer)
        tiles_to_l2(f, next_layer, QKV, S, DTYPE)
        if ALL:
            arrivals += P
            _wait(b.sync, arrivals)
        if ALL or PHASE == 3:
            gate_and_up(b, f, w, layer, gate_norm, gate_tiles, up_tiles, S)
        if ALL:
            _arrive(b.sync)
        down_tiles = ahead(f, layer, 1, DOWN, S, DTYPE)
        tiles_to_l2(f, next_layer, OUT, S, DTYPE)
        if ALL:
            arrivals += P
            _wait(b.sync, arrivals)
        if ALL or PHASE == 4:
            down(b, f, w, layer, down_tiles, S)
        if ALL and more:
            _arrive(b.sync)
            arrivals += P
        qkv_norm = norm_ahead(f, next_layer, _INPUT_NORM, S, DTYPE)
        qkv_tiles = ahead(f, next_layer, tl.where(more, 1, 0), QKV, S, DTYPE)
        if ALL and more:
            _wait(b.sync, arrivals)
    if ALL:
        tl.store(b.sync + _BEGAN, arrivals, mask=tl.program_id(0) == 0)
