"""The split-K product against torch's, and how a product is chosen."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from specdec import fast_linear, fast_tilings
from specdec.fast_linear import MAX_ROWS, Product, Scratch, Tiling, split_product
from specdec.fast_tilings import candidates, choose_tilings

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
