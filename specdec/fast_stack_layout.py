"""What the kernel of specdec.fast_stack_kernel is given: sizes, addresses and buffers. Shapes as there."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

# Columns of the table of addresses, one row a layer.
COLUMNS = ("input_norm", "qkv", "query_norm", "key_norm", "out", "mlp_norm", "gate_up", "down", "keys", "values")
PHASES = 5
# Where in the words that the barrier needs: arrivals, where the launch began, whether a wait was given up; each in a
# cache line of its own.
SYNC_WORDS = 96
BEGAN, FAILED = 32, 64


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one program multiplies of a product with rows [first, first + outputs) of the weight in that column of the
    table: `tiles` tiles of `rows` outputs of one of `parts` parts of the inputs, each in `chunks` chunks of `block` (a
    power of two)."""

    column: int
    first: int
    outputs: int
    inputs: int
    rows: int
    tiles: int
    parts: int
    chunks: int
    block: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the kernel is compiled for. stages: of the loop over a split's context; prefetch: 0 loads weights where they
    are used, 1 ahead of the barrier before, 2 has them moved to the L2 cache two phases before, too. tensor_cores:
    whether they do the products. warps: of a program."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    width: int
    qkv: Share
    out: Share
    gate: Share
    up: Share
    down: Share
    splits: int
    queries: int
    block_s: int
    stages: int
    head_norms: bool
    indexed: bool
    prefetch: int
    tensor_cores: bool
    warps: int
    dot: Any


class Fixed(NamedTuple):
    """Of the model. table: addresses [layers, COLUMNS]; cosine and sine [positions, D]."""

    table: Tensor
    cosine: Tensor
    sine: Tensor
    epsilon: float
    head_epsilon: float
    scale: float


class Where(NamedTuple):
    """Of the plan and the cache, T = B * q; strides in elements."""

    positions: Tensor
    slots: Tensor
    last: Tensor
    rows: Tensor
    num_tokens: int
    q: int
    first_row: int
    row_stride: int
    head_stride: int


class Buffers(NamedTuple):
    """residual and second take turns; qkv [T, F]; out [T, H, splits, D] and lse [T, H, splits] of the splits; sums
    [parts, T, E]; act [T, I]; x [T, E]: what the last layer's MLP adds to `residual`."""

    residual: Tensor
    second: Tensor
    qkv: Tensor
    out: Tensor
    lse: Tensor
    sums: Tensor
    act: Tensor
    x: Tensor
    sync: Tensor
