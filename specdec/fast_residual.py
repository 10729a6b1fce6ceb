"""The residual stream of few tokens between a decoder layer's products, which normalise it and add to it themselves.

Between two products of few rows a residual add + RMS norm (arXiv 1910.07467) is a launch that takes as long as a small
product. The norm has to know a row's sum of squares, and every program of the product before knows its block's part of
that: so the product that adds to the stream leaves the parts, in float32, and the product that reads the stream sums
them up, in the same order in all of its programs, and normalises what it reads (specdec.fast_linear). The first parts
come with the embedding, here. Shapes: T tokens, E hidden size, P parts of a row's sum of squares, V vocabulary.

The stream is changed in place and all products share one buffer for the parts, while kernels overlap
(specdec.fast_kernels). That is safe as everything here that reads or writes either does so after `wait_for_last`, when
all earlier kernels have ended: a kernel that writes the stream, or the parts, meets no reader that is still running.
Within one launch no program reads parts and none reads another's block of the stream.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec.fast_kernels import early, let_next_start, rows_a_program, wait_for_last


@dataclass(frozen=True, kw_only=True)
class Norm:
    weight_E: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "Norm":
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if epsilon is None:
            raise ValueError(f"{type(module).__name__} has no epsilon")
        return cls(weight_E=module.weight.detach(), epsilon=float(epsilon))


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The stream and, in parts, the float32 sum of squares of each of its rows."""

    values_TE: Tensor
    squares_TP: Tensor


@dataclass(frozen=True, kw_only=True)
class Normed:
    """What a product reads: the norm of the last `keep` of each row's q tokens of the stream."""

    residual: Residual
    norm: Norm
    q: int = 1
    keep: int = 1

    @property
    def rows(self) -> int:
        return len(self.residual.values_TE) // self.q * self.keep


@triton.jit(do_not_specialize=["num_tokens"])
def _embed(
    tokens_ptr,
    embedding_ptr,
    values_ptr,
    squares_ptr,
    num_tokens,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS tokens a program: their embeddings, and the sum of squares of each."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (token[:, None] < num_tokens) & (column < width)
    which = tl.load(tokens_ptr + token, mask=token < num_tokens, other=0).to(tl.int64)
    values = tl.load(embedding_ptr + which[:, None] * width + column, mask=inside, other=0.0)
    tl.store(values_ptr + token[:, None] * width + column, values, mask=inside)
    values = values.to(tl.float32)
    tl.store(squares_ptr + token, tl.sum(values * values, 1), mask=token < num_tokens)


def embed(tokens_T: Tensor, embedding_VE: Tensor, squares_T1: Tensor) -> Residual:
    """The stream before the first layer; its sums of squares go to squares_T1. All dense."""
    T, E = len(tokens_T), embedding_VE.shape[1]
    values_TE = embedding_VE.new_empty(T, E)
    rows, block = rows_a_program(T), triton.next_power_of_2(E)
    _embed[(triton.cdiv(T, rows),)](
        tokens_T,
        embedding_VE,
        values_TE,
        squares_T1,
        T,
        E,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early(values_TE.device),
    )
    return Residual(values_TE=values_TE, squares_TP=squares_T1)
