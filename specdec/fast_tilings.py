"""How each product of a model is cut up for its kernel (specdec.fast_linear): timed, on a CUDA device only.

A product by itself is timed over all layers' weights of its shape in one CUDA graph, so that they come from memory as
they do in a forward and not from the L2 cache, and against torch's. Products beside a residual stream follow each other
or attention without anything between: of those, the fastest by themselves are timed again in a graph of whole forwards,
one kind after the other, with the best so far of the other kinds. What was found is kept for the next process
(specdec.fast_choices). Shapes: M rows, K inputs, N outputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from specdec.fast_choices import KeptChoices, kept_or_timed
from specdec.fast_kernels import add_norm
from specdec.fast_linear import MAX_ROWS, ROW_CLASSES, Product, Tiling
from specdec.fast_residual import Norm, Normed, Residual

# What a candidate must gain over torch's product, which is chosen when in doubt.
_WORTH_IT = 0.97
_THREE_TF32 = 2e-6  # relative error of a float32 product on a GPU
# How many of the fastest by themselves are tried beside a residual stream.
_TRIED = 6
_CLASS_ROWS = 1, MAX_ROWS // 2, 32, 64  # what each of ROW_CLASSES is timed with
Seconds = Callable[[Callable[[], object]], float]  # how long a call takes: `graph_seconds`

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

# Block of outputs, of inputs, splits: with more than MAX_ROWS rows, beside a residual stream; and the largest weight
# whose product is short enough for an early start to pay.
_WIDE = ((32, 128, 1), (64, 128, 1), (128, 64, 1), (32, 128, 4), (64, 64, 4), (64, 128, 2))
_WIDE_PROGRAMS = 64, 8 * 132
_EARLY_UP_TO = 2**24


@dataclass(frozen=True)
class Choice:
    """What is fastest (None: torch), and the kernel's tilings that are right, from the fastest to the slowest."""

    plain: Tiling | None
    ranked: tuple[Tiling, ...]

    @classmethod
    def of(cls, kept: Any) -> "Choice":
        plain, ranked = kept
        return cls(plain=_tiling(plain), ranked=tuple(Tiling(**each) for each in ranked))

    def kept(self) -> Any:
        return _fields(self.plain), [asdict(tiling) for tiling in self.ranked]


Key = tuple[object, ...]
# By kind and number of products: for one row, for few.
Choices = dict[Key, tuple[Choice, ...]]
# By kinds of a model's products: those of each kind beside a residual stream, for each of ROW_CLASSES.
FusedChoices = dict[Key, dict[Key, tuple[Tiling | None, ...]]]
# (rows, whether fused) -> the products of a forward of so many tokens.
Forward = Callable[[int, bool], Callable[[], object]]


def choose_tilings(
    products: Sequence[Product], seconds: Seconds, known: Choices, kept: KeptChoices | None = None
) -> None:
    """Give all products of each shape what is fastest there for one and for several rows, and note it in `known`, where
    the next engine on such a model finds it, and in `kept`, where the next process does."""
    for N, K in {tuple(product.weight_NK.shape) for product in products}:
        for tiling in candidates(N, K):
            products[0].scratch.reserve(*tiling.scratch(N))
    for key, group in _by_kind(products).items():
        if key not in known:
            known[key] = kept_or_timed(
                kept,
                key,
                partial(_timed_by_class, group, seconds),
                of=lambda values: tuple(map(Choice.of, values)),
                to=lambda choices: [choice.kept() for choice in choices],
            )
        for product in group:
            product.single, product.few = (choice.plain for choice in known[key])


def choose_fused(
    reading: Sequence[Product],
    adding: Sequence[Product],
    forward: Forward,
    seconds: Seconds,
    choices: Choices,
    known: FusedChoices,
    kept: KeptChoices | None = None,
) -> tuple[bool, ...]:
    """Give the products that read a residual stream, and those that add to it, what is fastest in a forward, and note
    it in `known`. For each of ROW_CLASSES, whether that is faster than a forward with norms and additions between the
    products; where it is not, or the kernel cannot be one of them, they have None. choices: what `choose_tilings`
    found."""
    groups = {(*key, False): group for key, group in _by_kind(reading).items()}
    groups |= {(*key, True): group for key, group in _by_kind(adding).items()}
    all_kinds = tuple(groups)
    if all_kinds not in known:

        def timed() -> dict[Key, tuple[Tiling | None, ...]]:
            chosen = [_fastest_together(groups, which, forward, seconds, choices) for which in range(len(ROW_CLASSES))]
            return {key: tuple(each.get(key) for each in chosen) for key in groups}

        known[all_kinds] = kept_or_timed(
            kept,
            all_kinds,
            timed,
            of=lambda values: {key: tuple(map(_tiling, each)) for key, each in zip(groups, values, strict=True)},
            to=lambda found: [list(map(_fields, each)) for each in found.values()],
        )
    for key, group in groups.items():
        for product in group:
            product.fused = known[all_kinds][key]
            _reserve(product, product.fused)
    return tuple(tiling is not None for tiling in reading[0].fused)


def _tiling(fields: dict[str, Any] | None) -> Tiling | None:
    return None if fields is None else Tiling(**fields)


def _fields(tiling: Tiling | None) -> dict[str, Any] | None:
    return None if tiling is None else asdict(tiling)


def untimed(products: Sequence[Product]) -> None:
    """Tilings for Triton's interpreter, which takes milliseconds a program: two splits of two blocks where possible.
    None for the most rows, so that tests see both ways."""
    for product in products:
        block_n, block_k = (min(128, triton.next_power_of_2(triton.cdiv(size, 2))) for size in product.weight_NK.shape)
        tiling = Tiling(block_n=max(16, block_n), block_k=max(16, block_k), splits=2, warps=4, stages=1)
        product.scratch.reserve(*tiling.scratch(len(product.weight_NK), ROW_CLASSES[2]))
        product.fused = tiling, tiling, tiling, None


def _by_kind(products: Sequence[Product]) -> dict[Key, list[Product]]:
    groups: dict[Key, list[Product]] = {}
    for product in products:
        groups.setdefault(product.kind, []).append(product)
    return {(*kind, len(group)): group for kind, group in groups.items()}


def _timed_by_class(group: list[Product], seconds: Seconds) -> tuple[Choice, ...]:
    return tuple(_timed(group, rows, seconds) for rows in _CLASS_ROWS[:2])


def _timed(group: list[Product], rows: int, seconds: Seconds) -> Choice:
    first = group[0]
    N, K = first.weight_NK.shape
    x_MK = torch.randn(rows, K, device=first.weight_NK.device).to(first.weight_NK.dtype)
    by_torch = seconds(partial(_in_turn, group, x_MK, Product.by_torch))
    taken = {
        tiling: seconds(partial(_in_turn, group, x_MK, partial(Product.by_splits, tiling=tiling)))
        for tiling in candidates(N, K)
        if _agrees(first, x_MK, tiling)
    }
    ranked = tuple(sorted(taken, key=taken.__getitem__))
    plain = ranked[0] if ranked and taken[ranked[0]] < _WORTH_IT * by_torch else None
    return Choice(plain, ranked)


def _fastest_together(
    groups: dict[Key, list[Product]], which: int, forward: Forward, seconds: Seconds, choices: Choices
) -> dict[Key, Tiling]:
    """Of each kind, for one row class; nothing if some kind has none, or that is no faster than without."""
    rows = _CLASS_ROWS[which]
    fitting = {key: _fitting(group[0], bool(key[-1]), which, choices[key[:-1]]) for key, group in groups.items()}
    if not all(fitting.values()):
        return {}
    best = {key: tilings[0] for key, tilings in fitting.items()}
    for key, group in groups.items():
        _set(group, which, best[key])
    run, best_seconds = forward(rows, True), math.inf
    for key, group in groups.items():
        for tiling in fitting[key]:
            _set(group, which, tiling)
            taken = seconds(run)
            if taken < best_seconds:
                best[key], best_seconds = tiling, taken
        _set(group, which, best[key])
    return best if best_seconds < seconds(forward(rows, False)) else {}


def _fitting(product: Product, adds: bool, which: int, choices: tuple[Choice, ...]) -> list[Tiling]:
    N, K = product.weight_NK.shape
    if which < len(choices):  # one kernel serves both, so what is fast for one row is tried for several, and vice versa
        tried = tuple(dict.fromkeys(tiling for choice in choices for tiling in choice.ranked[: _TRIED // len(choices)]))
    else:
        tried = tuple(wide_candidates(N, K))
    _reserve(product, tried)
    agrees = _agrees_adding if adds else _agrees_reading
    return [tiling for tiling in tried if agrees(product, _CLASS_ROWS[which], tiling)]


def _reserve(product: Product, tilings: Sequence[Tiling | None]) -> None:
    for tiling in tilings:
        if tiling is not None:
            product.scratch.reserve(*tiling.scratch(len(product.weight_NK), ROW_CLASSES[-1]))


def _set(group: list[Product], which: int, tiling: Tiling) -> None:
    for product in group:
        product.fused = *product.fused[:which], tiling, *product.fused[which + 1 :]


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


def wide_candidates(N: int, K: int) -> list[Tiling]:
    """What is tried for more rows than MAX_ROWS."""
    lowest, highest = _WIDE_PROGRAMS
    return [
        Tiling(block_n=block_n, block_k=block_k, splits=splits, warps=4, stages=4, early=N * K <= _EARLY_UP_TO)
        for block_n, block_k, splits in _WIDE
        if (splits == 1 if N > _SPLIT_UP_TO else lowest <= triton.cdiv(N, block_n) * splits <= highest)
    ]


def _agrees(product: Product, x_MK: Tensor, tiling: Tiling) -> bool:
    """Whether the kernel fits on the device and gives torch's product, up to the rounding of the result."""
    try:
        got = product.by_splits(x_MK, tiling)
    except triton.OutOfResources:
        return False
    return _close(got, product.by_torch(x_MK))


def _agrees_reading(product: Product, rows: int, tiling: Tiling) -> bool:
    """The same of the norm of a residual stream."""
    weight_NK = product.weight_NK
    values_TE = torch.randn(rows, weight_NK.shape[1], device=weight_NK.device).to(weight_NK.dtype)
    residual = Residual(values_TE=values_TE, squares_TP=values_TE.float().square().sum(1, keepdim=True))
    norm = Norm(weight_E=torch.rand_like(values_TE[0]) + 0.5, epsilon=1e-6)
    try:
        got = product.by_splits(Normed(residual=residual, norm=norm), tiling)
    except triton.OutOfResources:
        return False
    return _close(got, product.by_torch(add_norm(None, values_TE, norm.weight_E, norm.epsilon)))


def _agrees_adding(product: Product, rows: int, tiling: Tiling) -> bool:
    """The same of a residual stream that is added to, and of its sums of squares."""
    N, K = product.weight_NK.shape
    x_TK = torch.randn(rows, K, device=product.weight_NK.device).to(product.weight_NK.dtype)
    values_TE = 8 * torch.randn(rows, N, device=x_TK.device).to(x_TK.dtype)
    expected = values_TE + product.by_torch(x_TK)
    residual = Residual(values_TE=values_TE, squares_TP=product.scratch.squares(rows, 1))
    try:
        added = product.added(residual, x_TK, tiling)
    except triton.OutOfResources:
        return False
    squares_T = values_TE.double().square().sum(1)
    agree = torch.allclose(added.squares_TP.double().sum(1), squares_T, rtol=1e-5)
    return agree and _close(values_TE, expected)


def _close(got: Tensor, expected: Tensor) -> bool:
    error = (got.double() - expected.double()).norm()
    return bool(error <= max(4 * torch.finfo(got.dtype).eps, _THREE_TF32) * expected.double().norm())


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
