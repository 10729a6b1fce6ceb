"""The split-K product against torch's, and how a product is chosen."""

from collections import Counter

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from specdec import fast_linear, fast_tilings
from specdec.fast_kernels import add_norm
from specdec.fast_linear import MAX_ROWS, Product, Scratch, Tiling, row_class, split_product
from specdec.fast_residual import Norm, Normed, Residual, embed
from specdec.fast_tilings import Choice, candidates, choose_fused, choose_tilings, wide_candidates

# In float32 a GPU's products of three TF32 ones.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
SMALL = [
    Tiling(block_n=16, block_k=16, splits=1, warps=4, stages=2),
    Tiling(block_n=32, block_k=16, splits=2, warps=4, stages=2),
    Tiling(block_n=16, block_k=32, splits=4, warps=4, stages=2),  # more splits than K has blocks
    Tiling(block_n=16, block_k=128, splits=1, warps=4, stages=2),  # a split is a block
]


def product_of(
    outputs: int, inputs: int, dtype: torch.dtype, device: str, *, bias: bool, gated: bool = False
) -> Product:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype).to(device)
    bias_N = torch.randn(outputs, generator=generator).to(dtype).to(device) if bias else None
    return Product(weight_NK=weight, bias_N=bias_N, scratch=Scratch(torch.device(device)), gated=gated)


@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_equals_torchs_product(kernel_device, tiling, dtype, bias, gated) -> None:
    """Outputs and inputs that no block divides; again and again, since a launch must leave the counters at 0."""
    product = product_of(50, 70, dtype, kernel_device, bias=bias, gated=gated)
    product.scratch.reserve(*tiling.scratch(50))
    product.scratch.partial_N.fill_(torch.nan)
    for rows in (1, 5, MAX_ROWS):
        x = torch.randn(rows, 70, generator=torch.Generator().manual_seed(rows)).to(dtype).to(kernel_device)
        got = product.by_splits(x, tiling)
        bias_N = product.bias_N.double() if product.bias_N is not None else None
        expected = functional.linear(x.double(), product.weight_NK.double(), bias_N)
        if gated:
            expected = functional.silu(expected[:, :25]) * expected[:, 25:]
        error = (got.double() - expected).norm() / expected.norm()
        assert got.dtype == dtype
        assert error < TOLERANCE[dtype] * (3 if gated else 1)  # SiLU enlarges the rounding of its argument
        assert not product.scratch.arrived_N.any()


def assert_rounded_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for the order of a float32 sum: in half precision a last bit here and there."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    if got.dtype == torch.float32:
        assert error < 2e-6
    else:
        assert error < torch.finfo(got.dtype).eps / 4
        assert (got != expected).float().mean() < 0.05


def stream(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str) -> tuple[Product, Residual, Norm]:
    """A product that adds to a stream of `outputs`, after an embedding. Scratch is NaN where nothing was left."""
    product = product_of(outputs, inputs, dtype, device, bias=False)
    for tiling in SMALL:
        product.scratch.reserve(*tiling.scratch(2 * outputs, 64))
    for stale in (product.scratch.partial_N, product.scratch.squares_N):
        stale.fill_(torch.nan)
    generator = torch.Generator().manual_seed(rows)
    embedding_VE = 3 * torch.randn(9, outputs, generator=generator).to(dtype).to(device)
    tokens_T = torch.randint(9, (rows,), generator=generator).to(device)
    residual = embed(tokens_T, embedding_VE, product.scratch.squares(rows, 1))
    assert torch.equal(residual.values_TE, embedding_VE[tokens_T])
    weight_E = 1 + 0.2 * torch.randn(outputs, generator=generator)
    return product, residual, Norm(weight_E=weight_E.to(dtype).to(device), epsilon=1e-5)


# The interpreter cuts bfloat16 off where a GPU rounds; it rounds float16 right.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tiling", "rows", "width"), [*((each, 6, 40) for each in SMALL), (SMALL[3], 33, 1100)])
def test_products_beside_a_residual_stream(kernel_device, dtype, tiling, rows, width) -> None:
    """What `add_norm` between two products gives, for a stream that no block divides; the second reads kept tokens.
    With many rows, more sums of squares than are read at once."""
    inputs = 24
    adding, residual, norm = stream(rows, inputs, width, dtype, kernel_device)
    reading = product_of(20, width, dtype, kernel_device, bias=True, gated=True)
    reading.scratch = adding.scratch
    for product in (reading, adding):
        product.fused = (tiling,) * 4
    x_TK = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype).to(kernel_device)
    expected_TE = residual.values_TE.clone()
    got = reading.of(Normed(residual=residual, norm=norm))
    expected = reading.by_splits(add_norm(None, expected_TE, norm.weight_E, norm.epsilon), tiling)
    assert_rounded_alike(got, expected)
    for q, keep in ((1, 1), (3, 2)):
        residual = adding.add_to(residual, x_TK)
        y_TE = adding.by_splits(x_TK, tiling)
        normed_TE = add_norm(y_TE, expected_TE, norm.weight_E, norm.epsilon)
        assert torch.equal(residual.values_TE, expected_TE)
        squares_T = expected_TE.double().square().sum(1)
        torch.testing.assert_close(residual.squares_TP.double().sum(1), squares_T, rtol=1e-5, atol=0)
        got = reading.of(Normed(residual=residual, norm=norm, q=q, keep=keep))
        kept = normed_TE.view(rows // q, q, width)[:, q - keep :].flatten(0, 1)
        assert_rounded_alike(got, reading.by_splits(kept, tiling))
        assert not adding.scratch.arrived_N.any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS, 20, 32, 64])
def test_all_candidates_beside_a_residual_stream_on_a_gpu(rows) -> None:
    """In a graph of both, replayed while kernels overlap: each replay adds once, with the same bits each time."""
    inputs, width, dtype = 2048, 1024, torch.bfloat16
    adding, residual, norm = stream(rows, inputs, width, dtype, "cuda")
    reading = product_of(3072, width, dtype, "cuda", bias=False)
    reading.scratch = adding.scratch
    tried = candidates if rows <= MAX_ROWS else wide_candidates
    for product in (reading, adding):
        for tiling in tried(*product.weight_NK.shape):
            adding.scratch.reserve(*tiling.scratch(len(product.weight_NK), 64))
    x_TK = torch.randn(rows, inputs, device="cuda").to(dtype)
    start_TE = residual.values_TE.clone()
    expected_TE = start_TE.clone()
    normed_TE = add_norm(functional.linear(x_TK, adding.weight_NK), expected_TE, norm.weight_E, norm.epsilon)
    expected = functional.linear(normed_TE, reading.weight_NK)
    tilings = [tried(*product.weight_NK.shape) for product in (reading, adding)]
    for i in range(max(map(len, tilings))):
        reading.fused, adding.fused = ((each[i % len(each)],) * 4 for each in tilings)

        def run() -> torch.Tensor:
            residual.values_TE.copy_(start_TE)
            return reading.of(Normed(residual=adding.add_to(residual, x_TK), norm=norm))

        first = run().clone()
        torch.testing.assert_close(first, expected, rtol=2**-6, atol=0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [run() for _ in range(10)]
        for _ in range(5):
            graph.replay()
            assert all(torch.equal(out, first) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", candidates(1536, 1024))
def test_candidates_equal_torchs_product_on_a_gpu(tiling) -> None:
    product = product_of(1536, 1024, torch.bfloat16, "cuda", bias=False)
    product.scratch.reserve(*tiling.scratch(1536))
    for rows in (1, 16):
        x = torch.randn(rows, 1024, device="cuda").to(torch.bfloat16)
        for _ in range(3):
            got = split_product(x, product.weight_NK, None, tiling, product.scratch)
            torch.testing.assert_close(got, functional.linear(x, product.weight_NK), rtol=2**-6, atol=0.25)


def clock(monkeypatch: pytest.MonkeyPatch, fast: Tiling | None, torch_seconds: float):
    """A clock that finds `fast` to take 1 s, other tilings 3 s, and torch `torch_seconds`."""
    launched = []
    real = fast_linear.split_product

    def noted(x, weight, bias, tiling, scratch, *, gated):
        launched.append(tiling)
        return real(x, weight, bias, tiling, scratch, gated=gated)

    def seconds(run) -> float:
        launched.clear()
        run()
        return torch_seconds if not launched else 1.0 if launched[0] == fast else 3.0

    monkeypatch.setattr(fast_linear, "split_product", noted)
    return seconds


def test_the_fastest_is_chosen_for_each_shape_and_torch_when_nothing_gains(kernel_device, monkeypatch) -> None:
    monkeypatch.setattr(fast_tilings, "candidates", lambda outputs, inputs: SMALL)
    for torch_seconds, expected in ((2.0, SMALL[1]), (1.01, None)):
        products = [product_of(n, 16, torch.float32, kernel_device, bias=False) for n in (16, 16, 32)]
        for product in products:
            product.scratch = products[0].scratch
        known = {}
        choose_tilings(products, clock(monkeypatch, SMALL[1], torch_seconds), known)
        assert [(p.single, p.few) for p in products] == [(expected, expected)] * 3
        again = [product_of(16, 16, torch.float32, kernel_device, bias=False) for _ in range(2)]
        choose_tilings(again, lambda run: pytest.fail("was timed before"), known)
        assert [(p.single, p.few) for p in again] == [(expected, expected)] * 2
        monkeypatch.undo()
        monkeypatch.setattr(fast_tilings, "candidates", lambda outputs, inputs: SMALL)


def test_a_kernel_that_is_wrong_is_never_chosen(kernel_device, monkeypatch) -> None:
    monkeypatch.setattr(fast_tilings, "candidates", lambda outputs, inputs: SMALL)
    seconds = clock(monkeypatch, SMALL[1], 2.0)
    noted = fast_linear.split_product
    monkeypatch.setattr(fast_linear, "split_product", lambda *args, **options: 1.001 * noted(*args, **options))
    product = product_of(16, 16, torch.float32, kernel_device, bias=False)
    choose_tilings([product], seconds, {})
    assert (product.single, product.few) == (None, None)


def test_many_rows_go_through_torch(kernel_device) -> None:
    """A tiling's scratch has room for MAX_ROWS rows only."""
    product = product_of(32, 32, torch.float32, kernel_device, bias=True)
    product.single = product.few = SMALL[1]
    product.scratch.reserve(*SMALL[1].scratch(32))
    for rows in (1, MAX_ROWS, MAX_ROWS + 1):
        x = torch.randn(rows, 32, device=kernel_device)
        torch.testing.assert_close(product(x), functional.linear(x, product.weight_NK, product.bias_N))


def layers_of_products(device: str) -> tuple[list[Product], list[Product]]:
    """Two layers of (reading, adding) products that share their scratch."""
    reading, adding = ([product_of(n, 16, torch.float32, device, bias=False) for n in (32, 32)] for _ in range(2))
    for product in (*reading, *adding):
        product.scratch = reading[0].scratch
        for tiling in SMALL:
            product.scratch.reserve(*tiling.scratch(32))
    return reading, adding


def choices_of(products: list[Product], ranked: tuple[Tiling, ...]) -> dict:
    return {(*products[0].kind, len(products)): (Choice(None, ranked),) * 2}


def test_products_beside_a_stream_are_timed_together(kernel_device, monkeypatch) -> None:
    """Each gets what is best with what the others have, for each class of rows, or nothing where a forward without is
    faster; and nothing is timed twice."""
    monkeypatch.setattr(fast_tilings, "wide_candidates", lambda outputs, inputs: SMALL[:2])
    reading, adding = layers_of_products(kernel_device)
    choices = choices_of(reading, tuple(SMALL[:3]))
    # rows: best tilings (of the reading ones, of the adding ones)
    best = {1: (SMALL[2], SMALL[0]), 8: (SMALL[0], SMALL[1]), 32: (SMALL[1], SMALL[1]), 64: (SMALL[0], SMALL[0])}
    timed: list[tuple[int, bool]] = []

    def seconds(run) -> float:
        rows, fused = run()
        timed.append((rows, fused))
        pairs = zip((reading[0], adding[0]), best[rows], strict=True)
        wrong = sum(product.fused[row_class(rows)] != tiling for product, tiling in pairs)
        return 1.0 + wrong if fused else 0.9 if rows == 64 else 1.1

    known: dict = {}
    arguments = (lambda rows, fused: lambda: (rows, fused), seconds, choices, known)
    assert choose_fused(reading, adding, *arguments) == (True, True, True, False)
    assert Counter(timed) == {
        **{(rows, True): 6 for rows in (1, 8)},
        **{(rows, True): 4 for rows in (32, 64)},
        **{(rows, False): 1 for rows in best},
    }
    others = layers_of_products(kernel_device)
    again = (arguments[0], lambda run: pytest.fail("was timed before"), choices, known)
    assert choose_fused(*others, *again) == (True, True, True, False)
    for found in ((reading, adding), others):
        assert [p.fused for p in found[0]] == [(SMALL[2], SMALL[0], SMALL[1], None)] * 2
        assert [p.fused for p in found[1]] == [(SMALL[0], SMALL[1], SMALL[1], None)] * 2
    assert len(others[0][0].scratch.squares_N) >= 64 * 2


@pytest.mark.parametrize("wrong", ["split_product", "add_product"])
def test_a_kernel_beside_a_stream_that_is_wrong_is_never_chosen(kernel_device, monkeypatch, wrong) -> None:
    """Or one that does not fit on the device: a model stays without them then."""
    real = getattr(fast_linear, wrong)

    def forward(rows: int, fused: bool):
        return lambda: fused

    def seconds(run) -> float:
        return 1.0 if run() else 2.0

    choices = choices_of(layers_of_products(kernel_device)[0], tuple(SMALL[:1]))
    for raises in (False, True):

        def broken(*args, raises=raises, **options):
            out = real(*args, **options)
            if raises:
                raise fast_tilings.triton.OutOfResources(1, 0, "shared memory")
            (out.values_TE if wrong == "add_product" else out).mul_(1.001)
            return out

        reading, adding = layers_of_products(kernel_device)
        with monkeypatch.context() as patch:
            patch.setattr(fast_linear, wrong, broken)
            assert not any(choose_fused(reading, adding, forward, seconds, choices, {}))
        assert [p.fused for p in (*reading, *adding)] == [(None,) * 4] * 4
        assert choose_fused(reading, adding, forward, seconds, choices, {}) == (True, True, False, False)
