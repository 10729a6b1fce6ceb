"""All layers in one launch against the eager forward. Interpreted, each phase of each layer is a launch of the same
kernel, so that nothing waits at a barrier; on a GPU it is one launch."""

import logging
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from test_fast_layers import CAPACITY, ROWS, VOCAB, largest_errors, pair, tiny

from bench.tiny_models import tiny_model
from specdec import fast, fast_stack_choice
from specdec.fast_stack import Choices, LayerStack
from specdec.fast_stack_choice import choose_stack
from specdec.model import CachedModel


def stack_of(model: CachedModel, **choices: int) -> LayerStack:
    layers, angles_CD = model._fast.layers, model._fast.angles_CD
    stack = LayerStack.on(model.device, layers, angles_CD)
    stack.choices = Choices(**choices)
    return stack


def stacked(model: CachedModel, monkeypatch: pytest.MonkeyPatch, **choices: int) -> list[int]:
    """From now on the model's layers are one launch; the result fills with how many tokens it got."""
    counts: list[int] = []
    stack = stack_of(model, **choices)
    model._fast.stack = stack
    real = LayerStack.__call__

    def noted(self: LayerStack, residual_TE: Tensor, *rest: object) -> Tensor:
        counts.append(len(residual_TE))
        return real(self, residual_TE, *rest)

    monkeypatch.setattr(LayerStack, "__call__", noted)
    return counts


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family, dtype, choices",
    [
        pytest.param("qwen3", torch.float32, {"splits": 2, "out_parts": 2}, marks=SLOW),
        pytest.param("llama", torch.float32, {"tensor_cores": False}, marks=SLOW),
        pytest.param("qwen3", torch.bfloat16, {"splits": 4, "block_s": 16}, marks=SLOW),
        pytest.param("llama", torch.float16, {"splits": 2, "block_s": 16, "out_parts": 2}, marks=SLOW),
    ],
)
def test_equals_the_eager_forward(kernel_device, monkeypatch, family, dtype, choices) -> None:
    """One token a row, several with a row left out, a roll-back; more than 16 tokens go layer by layer."""
    eager, quick = pair(tiny(family, dtype), kernel_device)
    counts = stacked(quick, monkeypatch, **choices)
    errors = largest_errors(eager, quick)
    assert counts == [3, 15, 12]
    assert max(errors) < (5e-5 if dtype == torch.float32 else 0.03), errors


@pytest.mark.parametrize(
    "rows, q", [([2, 0], 2), pytest.param([1], 5, marks=SLOW), pytest.param([0, 1], 8, marks=SLOW)]
)
def test_any_rows_any_lengths(kernel_device, monkeypatch, rows, q) -> None:
    """Rows given by their index, padding in front, fewer tokens than columns, and NaN in all slots that must not be
    read: behind the lengths, the last one, the rows that take no part."""
    eager, quick = pair(tiny("qwen3"), kernel_device)
    counts = stacked(quick, monkeypatch, splits=2, out_parts=2, block_s=16)
    generator = torch.Generator().manual_seed(q)
    lengths = [int(x) for x in torch.randint(1, CAPACITY - q, (ROWS,), generator=generator)]
    for layer in eager.cache.layers:
        for ours, theirs in zip(quick.cache.layers[layer], eager.cache.layers[layer], strict=True):
            values = torch.randn(theirs.shape, generator=generator).to(kernel_device)
            theirs.copy_(values)
            ours.fill_(math.nan)
            for row in rows:
                ours[row, :, : lengths[row]] = values[row, :, : lengths[row]]
    index = torch.tensor(rows, device=kernel_device)
    start_B = torch.tensor([lengths[row] for row in rows], device=kernel_device)
    count_B = torch.tensor([q - i for i in range(len(rows))], device=kernel_device)
    start_B[-1] -= min(lengths[rows[-1]], 2) + 1  # one column before the text begins, or a rewrite
    tokens_Bq = torch.randint(VOCAB, (len(rows), q), generator=generator).to(kernel_device)
    with torch.inference_mode():
        plans = [m.cache.plan(start_B, count_B, q, index, None) for m in (eager, quick)]
        out = [m.forward(tokens_Bq, plan, q) for m, plan in zip((eager, quick), plans, strict=True)]
    assert counts == [len(rows) * q]
    real_Bq = plans[0].slots_Bq < CAPACITY
    torch.testing.assert_close(out[1][real_Bq], out[0][real_Bq], rtol=1e-4, atol=1e-4)
    for layer in eager.cache.layers:
        for ours, theirs in zip(quick.cache.layers[layer], eager.cache.layers[layer], strict=True):
            for b, row in enumerate(rows):
                written = plans[0].slots_Bq[b][real_Bq[b]]
                torch.testing.assert_close(ours[row, :, written], theirs[row, :, written], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_the_same_bits_again_and_again(tokens) -> None:
    """The programs of one launch race for nothing; replays of a graph find the barrier as it was."""
    eager, quick = pair(tiny("qwen3", torch.bfloat16, layers=8), "cuda")
    del eager
    quick._fast.stack = stack = stack_of(quick)
    start_B = torch.full((1,), 20, device="cuda")
    cache = quick.cache
    with torch.inference_mode():
        plan = cache.plan(start_B, torch.full_like(start_B, tokens), tokens, slice(0, 1), None)
        tokens_Bq = torch.arange(tokens, device="cuda").unsqueeze(0)
        first = quick.forward(tokens_Bq, plan, tokens).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = quick.forward(tokens_Bq, plan, tokens)
        for _ in range(200):
            graph.replay()
            assert torch.equal(out, first)
    assert int(stack._sync[64]) == 0


def test_what_one_launch_does_not_compute_is_refused(kernel_device) -> None:
    biased = tiny_model("qwen2", vocab=VOCAB, layers=1, hidden=32, head_dim=16, dtype=torch.float32)
    model = CachedModel(biased.to(kernel_device), num_rows=1, capacity=16, fast=True)
    with pytest.raises(ValueError, match="bias"):
        stack_of(model)


def test_it_is_used_for_as_many_tokens_as_it_is_faster_for(kernel_device, monkeypatch, caplog) -> None:
    _, quick = pair(tiny("llama", layers=1), kernel_device)
    decoder = quick._fast
    assert choose_stack(decoder, lambda run: pytest.fail("too few layers")) is None
    monkeypatch.setattr(fast_stack_choice, "_LEAST_LAYERS", 1)
    times = iter([2.0, 1.0, 2.0, 1.5, 2.0, 2.5])  # alone and together for 1, 2 and 4 tokens
    with caplog.at_level(logging.INFO, logger="specdec"):
        stack = choose_stack(decoder, lambda run: next(times))
    assert stack is not None
    assert stack.max_tokens == 2
    assert "up to 2 tokens" in caplog.text
    assert decoder.stack is None


def wrong_scale(stack: LayerStack) -> LayerStack:
    real = stack._fixed
    stack._fixed = lambda cache: real(cache)._replace(scale=2.0)
    return stack


def test_a_wrong_launch_is_never_used(kernel_device, monkeypatch, caplog) -> None:
    """Neither when the layers are timed nor when the model is checked against the eager forward."""
    _, quick = pair(tiny("qwen3", layers=1), kernel_device)
    decoder = quick._fast
    monkeypatch.setattr(fast_stack_choice, "_LEAST_LAYERS", 1)
    monkeypatch.setattr(LayerStack, "_launch", lambda *args: None)  # leaves whatever the memory held
    with caplog.at_level(logging.INFO, logger="specdec"):
        assert choose_stack(decoder, lambda run: 1.0) is None
    assert "differ by" in caplog.text
    monkeypatch.undo()
    decoder.stack = wrong_scale(stack_of(quick))
    shapes = {index: (buffers[0].shape[1], buffers[0].shape[3]) for index, buffers in quick.cache.layers.items()}
    fast._check_stack(quick.module, shapes, decoder)
    assert decoder.stack is None
    assert "in one launch" in caplog.text
