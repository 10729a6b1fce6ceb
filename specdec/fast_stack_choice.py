"""Whether a decoder's layers run in one launch or in launches of their own: what is faster, timed when it is loaded."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.errors import TritonError

from specdec.fast_stack import MAX_TOKENS, LayerStack
from specdec.kvcache import RaggedCache

if TYPE_CHECKING:
    from specdec.fast_layers import FastDecoder

logger = logging.getLogger(__name__)

# Below these many layers there is nothing to gain that is worth the time of building and timing the kernel.
_LEAST_LAYERS = 8
_TIMED_POSITION, _AGREE = 200, 0.05


@torch.inference_mode()
def choose_stack(decoder: "FastDecoder", seconds: Callable[[Callable[[], object]], float]) -> LayerStack | None:
    """The decoder's layers as one launch, for as many tokens as that is faster than its own launches and gives the same
    up to rounding; None, and a line in the log, where it never is. seconds: how long a call takes."""
    if len(decoder.layers) < _LEAST_LAYERS:
        return None
    found: list[str] = []
    stack = None
    try:
        stack = LayerStack.on(decoder.embedding_VE.device, decoder.layers, decoder.angles_CD)
        stack.max_tokens = 0
        for tokens in (1, 2, 4, 8, MAX_TOKENS):
            alone_s, together_s = _times_of(decoder, stack, tokens, seconds)
            found.append(f"{tokens}: {1e3 * together_s:.2f} ms against {1e3 * alone_s:.2f}")
            if together_s >= alone_s:
                break
            stack.max_tokens = tokens
    except (ValueError, RuntimeError, TritonError) as error:
        found.append(str(error))
    use = stack.max_tokens if stack is not None else 0
    logger.info("layers in one launch for up to %d tokens (%s)", use, "; ".join(found))
    return stack if use else None


def _times_of(
    decoder: "FastDecoder", stack: LayerStack, tokens: int, seconds: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """Of all layers in launches of their own, and in one. ValueError where the states differ by more than rounding."""
    shapes = {layer.index: stack.kv_shape for layer in decoder.layers}
    weight, position = decoder.embedding_VE, min(_TIMED_POSITION, len(decoder.angles_CD[0]) - 2)
    cache = RaggedCache(shapes, num_rows=tokens, capacity=position + 1, dtype=weight.dtype, device=weight.device)
    start_B = torch.full((tokens,), position, device=weight.device)
    plan = cache.plan(start_B, torch.ones_like(start_B), 1, slice(0, tokens), None)
    tokens_B1 = (7 * torch.arange(tokens, device=weight.device).unsqueeze(1) + 3) % len(weight)

    def run(used: LayerStack | None, num_layers: int) -> Tensor:
        decoder.stack = used
        try:
            return decoder.states(tokens_B1, cache, plan, 1, num_layers)
        finally:
            decoder.stack = None

    stack.max_tokens, before = tokens, stack.max_tokens
    alone, together = (run(used, min(2, len(decoder.layers))).double() for used in (None, stack))
    error = float((together - alone).norm() / alone.norm())
    if not error <= _AGREE:
        stack.max_tokens = before
        raise ValueError(f"{tokens} tokens differ by {error:.2g} (relative)")
    times = [seconds(partial(run, used, len(decoder.layers))) for used in (None, stack)]
    stack.max_tokens = before
    return times[0], times[1]
