"""Products of few rows with a weight, y = x W^T + b: torch's, or a Triton split-K kernel where that is faster.

With at most 16 rows a product only reads its weight once, and what counts is how many reads are in flight. Split-K
(Osama et al. 2023, "Stream-K", arXiv 2301.03598, section 3) lets SPLITS programs share the K of one block of N outputs.
Each leaves its float32 sum; the one that arrives last, told by a counter a block, adds them up in the order of the
splits, so the result does not depend on who was last, and sets the counter back for the next launch. Where a program's
weights are a single block they are loaded while the kernel before still runs (specdec.fast_kernels). A gated product,
SiLU(x G^T) * (x U^T) of a weight that holds G above U, takes a row of each in turn: one program has both.

Which kernel a weight gets is timed, on a CUDA device only: a CUDA graph over all layers' weights of that shape, so
that they come from memory as they do in a forward and not from the L2 cache. Shapes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specdec.fast_kernels import INTERPRETED, add_norm, early, let_next_start, silu_mul, silu_times, wait_for_last

MAX_ROWS = 16
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# What a candidate must gain over torch's product, which is chosen when in doubt.
_WORTH_IT = 0.97


@triton.jit(do_not_specialize=["M"])
def _split_product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    GATED: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a block of outputs and a split of K. HELD: a split is one block, which is loaded before x is waited
    for."""
    let_next_start(EARLY)
    block, split = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    share = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    begin, stop = split * share, tl.minimum((split + 1) * share, K)
    row = n
    if GATED:
        row = n // 2 + (n % 2) * (N // 2)
    weight_row_ptr = weight_ptr + row.to(tl.int64)[None, :] * K
    if HELD:
        at = begin + k
        weight = tl.load(weight_row_ptr + at[:, None], mask=(n[None, :] < N) & (at[:, None] < K), other=0.0)
        wait_for_last(EARLY)
        x = tl.load(x_ptr + m[:, None] * K + at[None, :], mask=(m[:, None] < M) & (at[None, :] < K), other=0.0)
        total = tl.dot(x.to(DOT), weight.to(DOT), input_precision="tf32x3")
    else:
        wait_for_last(EARLY)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(begin, stop, BLOCK_K):
            at = start + k
            x = tl.load(x_ptr + m[:, None] * K + at[None, :], mask=(m[:, None] < M) & (at[None, :] < K), other=0.0)
            weight = tl.load(weight_row_ptr + at[:, None], mask=(n[None, :] < N) & (at[:, None] < K), other=0.0)
            total += tl.dot(x.to(DOT), weight.to(DOT), input_precision="tf32x3")
    if SPLITS > 1:
        place = (m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]) + block * SPLITS * BLOCK_M * BLOCK_N
        tl.store(partial_ptr + place + split * BLOCK_M * BLOCK_N, total, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part of the sum is written before this program counts as arrived
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived_ptr + block, 0)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in range(SPLITS):
            total += tl.load(partial_ptr + place + other * BLOCK_M * BLOCK_N, cache_modifier=".cg")
    if BIAS:
        total += tl.load(bias_ptr + row, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(total.reshape(BLOCK_M, BLOCK_N // 2, 2))
        column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = (m[:, None] < M) & (column[None, :] < N // 2)
        here = out_ptr + m[:, None] * (N // 2) + column[None, :]
        tl.store(here, silu_times(gate, up, out_ptr.dtype.element_ty), mask=inside)
    else:
        inside = (m[:, None] < M) & (n[None, :] < N)
        tl.store(out_ptr + m[:, None] * N + n[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one launch cuts a product up, and whether it may start early (a long one gains nothing by that)."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    early: bool = True

    def scratch(self, N: int) -> tuple[int, int]:
        """(floats of partial sums, counters) that N outputs need."""
        blocks = triton.cdiv(N, self.block_n)
        return blocks * self.splits * MAX_ROWS * self.block_n, blocks


# The fewer the outputs, the more splits it takes to have enough programs; an output head has enough with one.
_SPLIT_UP_TO = 65_536
CANDIDATES = tuple(
    Tiling(block_n=block_n, block_k=block_k, splits=splits, warps=4, stages=stages, early=early)
    for block_n, block_k, splits, stages in (
        (32, 128, 1, 5),
        (64, 128, 1, 3),
        (64, 128, 1, 5),
        (64, 256, 1, 3),
        (128, 128, 1, 3),
        (32, 128, 2, 5),
        (32, 128, 4, 3),
        (64, 128, 4, 4),
    )
    for early in (True, False)
)


# Outputs by inputs that a program holds at once, and the fewest and most programs: a GPU of 132 multiprocessors has to
# have all of them at once, or the later ones load nothing ahead.
_HELD_BLOCKS = ((16, 256), (16, 512), (32, 256), (32, 512))
_HELD_PROGRAMS = 64, 4 * 132


class Scratch:
    """Partial sums and counters, shared by all products of one model: they run one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.partial_N = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived_N = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, floats: int, counters: int) -> None:
        """Make room; what was there before is let go, so nothing captured may use it yet."""
        if floats > len(self.partial_N):
            self.partial_N = self.partial_N.new_empty(floats)
        if counters > len(self.arrived_N):
            self.arrived_N = self.arrived_N.new_zeros(counters)


@dataclass(kw_only=True)
class Product:
    """One weight [N, K], its bias, and how to multiply one row, or few (up to MAX_ROWS), with it (None: torch). gated:
    the result is SiLU of its first half times its second."""

    weight_NK: Tensor
    bias_N: Tensor | None
    scratch: Scratch
    gated: bool = False
    single: Tiling | None = None
    few: Tiling | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What its time depends on."""
        weight_NK = self.weight_NK
        return *weight_NK.shape, self.bias_N is not None, self.gated, weight_NK.dtype, weight_NK.device

    def __call__(self, x_MK: Tensor) -> Tensor:
        """x W^T + b: [M, K] -> [M, N], or [M, N / 2] where it is gated."""
        rows = len(x_MK)
        tiling = self.single if rows == 1 else self.few if rows <= MAX_ROWS else None
        return self.by_torch(x_MK) if tiling is None else self.by_splits(x_MK, tiling)

    def by_torch(self, x_MK: Tensor) -> Tensor:
        out_MN = functional.linear(x_MK, self.weight_NK, self.bias_N)
        return silu_mul(out_MN) if self.gated else out_MN

    def by_splits(self, x_MK: Tensor, tiling: Tiling) -> Tensor:
        return split_product(x_MK, self.weight_NK, self.bias_N, tiling, self.scratch, gated=self.gated)


# By kind and number of products: for one row, for few.
Choices = dict[tuple[object, ...], tuple[Tiling | None, Tiling | None]]


def split_product(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tiling: Tiling, scratch: Scratch, *, gated: bool = False
) -> Tensor:
    """x W^T + b by the split-K kernel, for at most MAX_ROWS rows, gated or not; all dense. The scratch has been
    reserved."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    out_MN = x_MK.new_empty(M, N // 2 if gated else N)
    _split_product[(triton.cdiv(N, tiling.block_n), tiling.splits)](
        x_MK,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        out_MN,
        scratch.partial_N,
        scratch.arrived_N,
        M,
        N,
        K,
        BIAS=bias_N is not None,
        SPLITS=tiling.splits,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        # The interpreter multiplies the bits of bfloat16; there the same rounded numbers are taken as float32.
        DOT=tl.float32 if INTERPRETED else _TRITON_TYPES[x_MK.dtype],
        GATED=gated,
        HELD=tiling.splits * tiling.block_k >= K,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **(early(x_MK.device) if tiling.early else {"EARLY": False}),
    )
    return out_MN


def choose_tilings(
    products: Sequence[Product], seconds: Callable[[Callable[[], object]], float], known: Choices
) -> None:
    """Give all products of each shape what is fastest there for one and for several rows, and note it in `known`, where
    the next engine on such a model finds it. seconds: how long a call takes (`graph_seconds`)."""
    by_shape: dict[tuple[object, ...], list[Product]] = {}
    for product in products:
        by_shape.setdefault(product.kind, []).append(product)
    for N, K in {tuple(product.weight_NK.shape) for product in products}:
        for tiling in candidates(N, K):
            products[0].scratch.reserve(*tiling.scratch(N))
    for kind, group in by_shape.items():
        key = (*kind, len(group))
        if key not in known:
            known[key] = _fastest(group, 1, seconds), _fastest(group, MAX_ROWS // 2, seconds)
        for product in group:
            product.single, product.few = known[key]


def _fastest(group: list[Product], rows: int, seconds: Callable[[Callable[[], object]], float]) -> Tiling | None:
    first = group[0]
    N, K = first.weight_NK.shape
    x_MK = torch.randn(rows, K, device=first.weight_NK.device).to(first.weight_NK.dtype)
    best = None
    best_seconds = _WORTH_IT * seconds(partial(_in_turn, group, x_MK, Product.by_torch))
    for tiling in candidates(N, K):
        if not _agrees(first, x_MK, tiling):
            continue
        taken = seconds(partial(_in_turn, group, x_MK, partial(Product.by_splits, tiling=tiling)))
        if taken < best_seconds:
            best, best_seconds = tiling, taken
    return best


def _in_turn(group: list[Product], x_MK: Tensor, multiply: Callable[[Product, Tensor], Tensor]) -> None:
    """As in a forward a product comes after a small kernel, whose time is all it has to get ready."""
    weight_K = torch.ones_like(x_MK[0])
    for product in group:
        multiply(product, add_norm(None, x_MK, weight_K, 1e-6))


def candidates(N: int, K: int) -> list[Tiling]:
    """What is tried for N outputs of K inputs."""
    found = [tiling for tiling in CANDIDATES if tiling.splits == 1 or N <= _SPLIT_UP_TO]
    for block_n, block_k in _HELD_BLOCKS:
        splits, warps = triton.cdiv(K, block_k), 4 if block_n * block_k <= 8192 else 8
        if _HELD_PROGRAMS[0] <= triton.cdiv(N, block_n) * splits <= _HELD_PROGRAMS[1]:
            found.append(Tiling(block_n=block_n, block_k=block_k, splits=splits, warps=warps, stages=1))
    return found


def _agrees(product: Product, x_MK: Tensor, tiling: Tiling) -> bool:
    """Whether the kernel fits on the device and gives torch's product, up to the rounding of the result."""
    expected = product.by_torch(x_MK).double()
    try:
        got = product.by_splits(x_MK, tiling).double()
    except triton.OutOfResources:
        return False
    return bool((got - expected).norm() <= 4 * torch.finfo(x_MK.dtype).eps * expected.norm())


def graph_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Device time of one replay of `run` captured in a CUDA graph: the median of `repeats`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]
