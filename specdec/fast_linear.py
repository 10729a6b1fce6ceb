"""Products of few rows with a weight, y = x W^T + b: torch's, or a Triton kernel (specdec.fast_product) where that is
faster, which then can take in the norm before a product or the addition to the residual stream after it.

Which tiling a weight gets is timed: specdec.fast_tilings. Shapes: M rows, K inputs, N outputs, T tokens, P parts of a
row's sum of squares (specdec.fast_residual).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specdec.fast_kernels import INTERPRETED, early, silu_mul
from specdec.fast_product import split_product_kernel
from specdec.fast_residual import Normed, Residual

MAX_ROWS = 16
# The most rows of each class of fused tilings; of more than one, also the rows of a program's block.
ROW_CLASSES = 1, MAX_ROWS, 32, 64
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SMALLEST_BLOCK_N = 16


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one launch cuts a product up, and whether it may start early (a long one gains nothing by that)."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    early: bool = True

    def scratch(self, N: int, rows: int = MAX_ROWS) -> tuple[int, int, int]:
        """(floats of partial sums, counters, parts of sums of squares) that N outputs of so many rows need."""
        blocks = triton.cdiv(N, self.block_n)
        floats = blocks * self.splits * rows * self.block_n
        return floats if self.splits > 1 else 0, blocks, blocks * rows


class Scratch:
    """Partial sums and counters, shared by all products of one model: they run one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.partial_N = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived_N = torch.zeros(0, dtype=torch.int32, device=device)
        self.squares_N = torch.empty(ROW_CLASSES[-1], dtype=torch.float32, device=device)

    def reserve(self, floats: int, counters: int, squares: int) -> None:
        """Make room; what was there before is let go, so nothing captured may use it yet."""
        if floats > len(self.partial_N):
            self.partial_N = self.partial_N.new_empty(floats)
        if counters > len(self.arrived_N):
            self.arrived_N = self.arrived_N.new_zeros(counters)
        if squares > len(self.squares_N):
            self.squares_N = self.squares_N.new_empty(squares)

    def squares(self, rows: int, parts: int) -> Tensor:
        """Room for the sums of squares of a residual stream, over those of the last one: [rows, parts]."""
        return self.squares_N[: rows * parts].view(rows, parts)


@dataclass(kw_only=True)
class Product:
    """One weight [N, K], its bias, and how to multiply one row, or few (up to MAX_ROWS), with it (None: torch). gated:
    the result is SiLU of its first half times its second. fused: how, for each of ROW_CLASSES, beside a residual stream
    (`of`, `add_to`; None: in no way)."""

    weight_NK: Tensor
    bias_N: Tensor | None
    scratch: Scratch
    gated: bool = False
    single: Tiling | None = None
    few: Tiling | None = None
    fused: tuple[Tiling | None, ...] = (None,) * len(ROW_CLASSES)

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

    def by_splits(self, x_MK: Tensor | Normed, tiling: Tiling) -> Tensor:
        return split_product(x_MK, self.weight_NK, self.bias_N, tiling, self.scratch, gated=self.gated)

    def of(self, normed: Normed) -> Tensor:
        """The product of the norm of a residual stream, in one launch."""
        return self.by_splits(normed, self._beside_a_stream(normed.rows))

    def add_to(self, residual: Residual, x_TK: Tensor) -> Residual:
        """residual += x W^T + b in place, in one launch; with the sums of squares that it has then."""
        return self.added(residual, x_TK, self._beside_a_stream(len(x_TK)))

    def added(self, residual: Residual, x_TK: Tensor, tiling: Tiling) -> Residual:
        return add_product(residual, x_TK, self.weight_NK, self.bias_N, tiling, self.scratch)

    def _beside_a_stream(self, rows: int) -> Tiling:
        tiling = self.fused[row_class(rows)]
        assert tiling is not None
        return tiling


def row_class(rows: int) -> int:
    """Which of ROW_CLASSES, the smallest, has room for so many rows."""
    return next(i for i, most in enumerate(ROW_CLASSES) if rows <= most)


def split_product(
    x_MK: Tensor | Normed,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiling: Tiling,
    scratch: Scratch,
    *,
    gated: bool = False,
) -> Tensor:
    """x W^T + b by the split-K kernel, for at most as many rows as ROW_CLASSES have, gated or not; all dense. The
    scratch has been reserved for the rows of the class."""
    rows, N = x_MK.rows if isinstance(x_MK, Normed) else len(x_MK), len(weight_NK)
    out_MN = weight_NK.new_empty(rows, N // 2 if gated else N)
    _launch(x_MK, weight_NK, bias_N, out_MN, None, tiling, scratch, gated=gated)
    return out_MN


def add_product(
    residual: Residual, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tiling: Tiling, scratch: Scratch
) -> Residual:
    """residual += x W^T + b in place, in the same way; with its sums of squares in the scratch."""
    squares_TP = scratch.squares(len(x_TK), triton.cdiv(len(weight_NK), tiling.block_n))
    _launch(x_TK, weight_NK, bias_N, residual.values_TE, squares_TP, tiling, scratch, gated=False)
    return Residual(values_TE=residual.values_TE, squares_TP=squares_TP)


def _launch(
    x_MK: Tensor | Normed,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_MN: Tensor,
    squares_MP: Tensor | None,
    tiling: Tiling,
    scratch: Scratch,
    *,
    gated: bool,
) -> None:
    """squares_MP: where the sums of squares go of an out that is added to."""
    N, K = weight_NK.shape
    normed = x_MK if isinstance(x_MK, Normed) else None
    x, squares = (normed.residual.values_TE, normed.residual.squares_TP) if normed else (x_MK, squares_MP)
    split_product_kernel[(triton.cdiv(N, tiling.block_n), tiling.splits)](
        x,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        normed.norm.weight_E if normed else weight_NK,
        out_MN,
        scratch.squares_N if squares is None else squares,
        scratch.partial_N,
        scratch.arrived_N,
        normed.norm.epsilon if normed else 0.0,
        len(out_MN),
        N,
        K,
        normed.q if normed else 1,
        normed.keep if normed else 1,
        squares.shape[1] if squares is not None else 1,
        BIAS=bias_N is not None,
        # The same for all who may have left the sums, so that a tiling is compiled once.
        PARTS=triton.next_power_of_2(triton.cdiv(K, _SMALLEST_BLOCK_N)) if normed else 0,
        ADD=squares_MP is not None,
        SPLITS=tiling.splits,
        BLOCK_M=max(MAX_ROWS, ROW_CLASSES[row_class(len(out_MN))]),
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        # The interpreter multiplies the bits of bfloat16; there the same rounded numbers are taken as float32.
        DOT=tl.float32 if INTERPRETED else _TRITON_TYPES[weight_NK.dtype],
        GATED=gated,
        HELD=tiling.splits * tiling.block_k >= K,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **(early(weight_NK.device) if tiling.early else {"EARLY": False}),
    )
