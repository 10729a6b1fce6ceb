"""The small kernels against the modules of transformers and the eager cache."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

pytest.importorskip("triton", reason="triton is not installed")

from specdec.fast_kernels import add_norm, rotate_and_store, silu_mul
from specdec.kvcache import RaggedCache

EPSILON = 1e-5
# Numbers of size 1: float32 sums in another order, and a GPU's approximate roots; in half precision the same roundings,
# so a last bit here and there.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
DTYPES = list(TOLERANCE)


def drawn(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def norm_of(width: int, dtype: torch.dtype, device: str, seed: int) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width, eps=EPSILON)
    norm.weight.data = 1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return norm.to(dtype).to(device).requires_grad_(False)


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    # Triton's interpreter cuts bfloat16 off where a GPU rounds.
    if got.dtype == torch.float16 or (got.dtype == torch.bfloat16 and got.is_cuda):
        assert (got != expected).float().mean() < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 64])
def test_add_norm(kernel_device, dtype, width) -> None:
    x, residual = (drawn(6, width, seed=s, dtype=dtype, device=kernel_device) for s in (1, 2))
    norm = norm_of(width, dtype, kernel_device, 3)
    summed = residual + x
    assert_close(add_norm(None, residual, norm.weight, EPSILON), norm(residual))
    assert_close(add_norm(x, residual, norm.weight, EPSILON), norm(summed))
    assert_close(residual, summed)


def test_add_norm_of_the_last_columns(kernel_device) -> None:
    x, residual = (drawn(15, 32, seed=s, dtype=torch.float32, device=kernel_device) for s in (1, 2))
    norm = norm_of(32, torch.float32, kernel_device, 3)
    expected = norm((residual + x).view(3, 5, 32)[:, -2:].reshape(6, 32))
    assert_close(add_norm(x, residual, norm.weight, EPSILON, q=5, keep=2), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernel_device, dtype) -> None:
    gate_up = 3 * drawn(5, 2 * 600, seed=1, dtype=dtype, device=kernel_device)
    gate_up[0, 0] = -200.0  # exp overflows
    gate, up = gate_up.chunk(2, 1)
    assert_close(silu_mul(gate_up) / 8, functional.silu(gate) * up / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rows", [slice(1, 4), [3, 0, 2]])
def test_rotate_and_store(kernel_device, dtype, normed, rows) -> None:
    """Query heads come back rotated, keys and values lie where the eager cache writes them, and nothing else moved."""
    B, q, heads, kv_heads, dim, capacity = 3, 4, 6, 2, 32, 20
    caches = [
        RaggedCache({0: (kv_heads, dim)}, num_rows=4, capacity=capacity, dtype=dtype, device=kernel_device)
        for _ in range(2)
    ]
    index = rows if isinstance(rows, slice) else torch.tensor(rows, device=kernel_device)
    start_B, new_B = torch.tensor([[3, 0, 16], [4, 2, 4]], device=kernel_device)
    eager_plan, plan = (cache.plan(start_B, new_B, q, index, None) for cache in caches)
    qkv = drawn(B * q, (heads + 2 * kv_heads) * dim, seed=1, dtype=dtype, device=kernel_device)
    norms = [norm_of(dim, dtype, kernel_device, seed) for seed in (2, 3)]
    angle = torch.arange(capacity).unsqueeze(1) / 10000 ** (torch.arange(dim // 2) / (dim // 2))
    cosine, sine = (f(angle.repeat(1, 2)).to(dtype).to(kernel_device) for f in (torch.cos, torch.sin))

    by_head = qkv.view(B, q, -1, dim)
    query, key, value = (part.transpose(1, 2) for part in by_head.split([heads, kv_heads, kv_heads], 2))
    if normed:
        query, key = norms[0](query), norms[1](key)
    at = eager_plan.positions_Bq
    query, key = apply_rotary_pos_emb(query, key, cosine[at], sine[at])
    caches[0].bind(eager_plan).update(key, value, 0)

    weights = (norms[0].weight, norms[1].weight) if normed else None
    rotate_and_store(qkv, weights, EPSILON, (cosine, sine), caches[1].layers[0], plan)
    assert_close(qkv.view(B, q, -1, dim)[:, :, :heads].transpose(1, 2), query)
    for eager, ours in zip(caches[0].layers[0], caches[1].layers[0], strict=True):
        assert_close(ours[:, :, :-1], eager[:, :, :-1])
