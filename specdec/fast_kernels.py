"""Triton kernels for what stands between a decoder layer's matrix products.

One launch each where the modules of transformers take several: residual add + RMS norm (arXiv 1910.07467); RMS norm
of query and key heads + rotary embedding (arXiv 2104.09864) + the write of keys and values into the ragged cache;
SiLU(gate) * up (arXiv 2002.05202). All arithmetic is in float32, rounded to the model's dtype wherever the modules
round, so that in half precision too the difference to them is a last bit here and there.

A forward is some 300 launches in a row, each of a few microseconds, so their beginnings and ends count. On a GPU that
can (compute capability 9.0 on, "programmatic dependent launch" in the CUDA programming guide) a kernel is started while
the one before it still runs: it says at once that the next may start (`let_next_start`), gets ready with what no kernel
writes, its weights, and then waits until the kernel before it is complete (`wait_for_last`). Every program of every
kernel here waits before it writes, or reads what was written, and so none ends before all that came before has.

Run by Triton's interpreter where TRITON_INTERPRET=1 was set before the first import of triton; then CPU tensors
work. Shapes: T = B * q tokens, E hidden size, H query heads, G key heads, D head dimension, F = (H + 2 G) * D, I width
of the MLP, C capacity of the cache.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kvcache import Plan

_SILU_BLOCK = 1024


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The kernel after this one may be started once every program of this one has come here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Returns when the kernel before this one has ended and what it wrote can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def weighted(values, scale, weight, DTYPE: tl.constexpr):
    """values * scale * weight, rounded before and after the weight."""
    return ((values * scale).to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def kept_token(row, q, keep):
    """The token of a kept one: rows of q tokens each have their last `keep` kept."""
    return (row // keep) * q + (q - keep) + row % keep


@triton.jit
def _add_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    epsilon,
    num_rows,
    width,
    q,
    keep,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS kept tokens a program: residual += x; out = norm(residual) * weight."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    let_next_start(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    token = kept_token(row, q, keep)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < width)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    wait_for_last(EARLY)
    values = tl.load(residual_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(x_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + token * width + column, values.to(DTYPE), mask=inside)
        values = values.to(DTYPE).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + epsilon)[:, None]
    tl.store(out_ptr + row * width + column, weighted(values, scale, weight, DTYPE).to(DTYPE), mask=inside)


@triton.jit
def silu_times(gate, up, DTYPE: tl.constexpr):
    """SiLU(gate) * up of float32 numbers, rounded where the modules round."""
    gate = gate.to(DTYPE).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    return (silu * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, num_tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    let_next_start(EARLY)
    wait_for_last(EARLY)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (token < num_tokens) & (column < width)
    here = gate_up_ptr + token * 2 * width + column
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, silu_times(gate, up, DTYPE), mask=inside)


@triton.jit
def _rotated(first, second, cosine, sine, DTYPE: tl.constexpr):
    """first * cosine - second * sine, each product rounded as the modules do."""
    return (first * cosine).to(DTYPE).to(tl.float32) - (second * sine).to(DTYPE).to(tl.float32)


@triton.jit
def turned(
    low,
    high,
    weight_low,
    weight_high,
    cosine,
    sine,
    epsilon,
    D: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The halves of heads [N, D / 2], in float32, normalised where NORM and rotated, with the modules' roundings."""
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + epsilon)[:, None]
        low, high = weighted(low, scale, weight_low, DTYPE), weighted(high, scale, weight_high, DTYPE)
    turned_low, turned_high = _rotated(low, high, cosine, sine, DTYPE), _rotated(high, low, cosine, -sine, DTYPE)
    return turned_low.to(DTYPE), turned_high.to(DTYPE)


@triton.jit
def _rotate_and_store(
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
    epsilon,
    num_items,
    q,
    row_stride,
    head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    INDEXED: tl.constexpr,
    ITEMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ITEMS heads of tokens a program: a query head is rotated where it lies, a key or value head goes to the cache."""
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    let_next_start(EARLY)
    wait_for_last(EARLY)
    HALF: tl.constexpr = D // 2
    item = (tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)).to(tl.int64)[:, None]
    token, head = item // (H + 2 * G), item % (H + 2 * G)
    half = tl.arange(0, HALF)[None, :]
    real, is_query, is_value = item < num_items, head < H, head >= H + G
    here = qkv_ptr + item * D + half
    low = tl.load(here, mask=real, other=0.0).to(tl.float32)
    high = tl.load(here + HALF, mask=real, other=0.0).to(tl.float32)
    weight_low, weight_high = 1.0, 1.0
    if NORM:
        weight_ptr = tl.where(is_query, query_weight_ptr, key_weight_ptr) + half
        weight_low, weight_high = tl.load(weight_ptr), tl.load(weight_ptr + HALF)
    angle = tl.load(positions_ptr + token, mask=real, other=0) * D + half
    cosine, sine = tl.load(cosine_ptr + angle).to(tl.float32), tl.load(sine_ptr + angle).to(tl.float32)
    turned_low, turned_high = turned(low, high, weight_low, weight_high, cosine, sine, epsilon, D, NORM, DTYPE)
    low, high = tl.where(is_value, low.to(DTYPE), turned_low), tl.where(is_value, high.to(DTYPE), turned_high)
    tl.store(here, low, mask=real & is_query)
    tl.store(here + HALF, high, mask=real & is_query)
    stored = real & (head >= H)
    row = token // q
    if INDEXED:
        row = tl.load(rows_ptr + row, mask=stored, other=0)
    slot = tl.load(slots_ptr + token, mask=stored, other=0)
    there = (
        tl.where(is_value, values_ptr, keys_ptr) + row * row_stride + ((head - H) % G) * head_stride + slot * D + half
    )
    tl.store(there, low, mask=stored)
    tl.store(there + HALF, high, mask=stored)


# A kernel that @triton.jit left to the interpreter is not a JITFunction.
INTERPRETED = not isinstance(_add_norm, triton.runtime.JITFunction)


# Multiply and add in one would skip a rounding that the modules make between them.
UNFUSED = {} if INTERPRETED else {"enable_fp_fusion": False}


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels may be started there before the one before them has ended."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


def early(device: torch.device) -> dict[str, bool]:
    """What a launch on this device is given for that."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def add_norm(
    x_TE: Tensor | None, residual_TE: Tensor, weight_E: Tensor, epsilon: float, *, q: int = 1, keep: int = 1
) -> Tensor:
    """residual += x (in place, unless x is None), and norm(residual) * weight of the last `keep` of each row's q
    tokens: [T / q * keep, E]. Tokens that are not kept are left as they are."""
    T, E = residual_TE.shape
    out_NE = residual_TE.new_empty(T // q * keep, E)
    block = triton.next_power_of_2(E)
    rows = rows_a_program(len(out_NE))
    _add_norm[(triton.cdiv(len(out_NE), rows),)](
        residual_TE if x_TE is None else x_TE,
        residual_TE,
        weight_E,
        out_NE,
        epsilon,
        len(out_NE),
        E,
        q,
        keep,
        ADD=x_TE is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early(out_NE.device),
    )
    return out_NE


def silu_mul(gate_up_TJ: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half: [T, 2 I] -> [T, I]."""
    T, width = gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2
    out_TI = gate_up_TJ.new_empty(T, width)
    rows = rows_a_program(T)
    grid = (triton.cdiv(T, rows), triton.cdiv(width, _SILU_BLOCK))
    _silu_mul[grid](gate_up_TJ, out_TI, T, width, ROWS=rows, BLOCK=_SILU_BLOCK, num_warps=4, **early(out_TI.device))
    return out_TI


def rotate_and_store(
    qkv_TF: Tensor,
    norms_D: tuple[Tensor, Tensor] | None,
    epsilon: float,
    angles_CD: tuple[Tensor, Tensor],
    cache_BGCD: tuple[Tensor, Tensor],
    plan: Plan,
) -> None:
    """Normalise (where norms_D, the weights for query and key heads, are given) and rotate the query heads in place
    and the key heads on their way into the cache; write key and value heads at the planned slots.

    qkv_TF holds H query, G key and G value heads a token. angles_CD: cosine and sine by position. D a power of two.
    """
    keys_BGCD, values_BGCD = cache_BGCD
    _, G, _, D = keys_BGCD.shape
    heads = qkv_TF.shape[1] // D
    first, rows_B = row_offset(plan)
    query_D, key_D = norms_D or (qkv_TF, qkv_TF)
    num_items = len(qkv_TF) * heads
    items = rows_a_program(num_items, on_gpu=4)
    _rotate_and_store[(triton.cdiv(num_items, items),)](
        qkv_TF,
        query_D,
        key_D,
        *angles_CD,
        plan.positions_Bq,
        plan.slots_Bq,
        plan.positions_Bq if rows_B is None else rows_B,
        keys_BGCD[first:],
        values_BGCD[first:],
        epsilon,
        num_items,
        plan.positions_Bq.shape[1],
        keys_BGCD.stride(0),
        keys_BGCD.stride(1),
        H=heads - 2 * G,
        G=G,
        D=D,
        NORM=norms_D is not None,
        INDEXED=rows_B is not None,
        ITEMS=items,
        num_warps=2,
        **UNFUSED,
        **early(qkv_TF.device),
    )


def rows_a_program(rows: int, on_gpu: int = 1) -> int:
    """The interpreter runs one program after the other, milliseconds each: it gets a single large one."""
    return triton.next_power_of_2(rows) if INTERPRETED else on_gpu


def row_offset(plan: Plan) -> tuple[int, Tensor | None]:
    """The plan's rows as (first row of the cache, None), or as (0, their indices) where they do not lie side by
    side."""
    return (plan.rows.start or 0, None) if isinstance(plan.rows, slice) else (0, plan.rows)
