"""Whether a model can take the fast forward, and whether that then computes what the eager one does.

It is compared once, when it is made, over a prefill, single steps, verification of several tokens and a rollback, with
rows of different length: a feature that it lacks shows, wherever it is in the model, and the eager forward stays.
"""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.kernels import compiles_for
from specdec.kvcache import Plan, RaggedCache

if TYPE_CHECKING:
    from specdec.fast_layers import FastDecoder

logger = logging.getLogger(__name__)

# (where each of three rows starts, how many tokens it is fed): prefill by torch, then steps by the kernel: one token,
# five, none in a row, and again from further back.
_STEPS = (((0, 0, 0), (20, 7, 13)), ((20, 7, 13), (1, 1, 1)), ((21, 8, 14), (5, 0, 3)), ((19, 6, 15), (2, 9, 1)))
_CHECK_CAPACITY, _CHECK_ROWS = 32, 3
# Relative deviation of the logits; in half precision, where rounding grows with depth, of the states after two layers,
# and the logits only roughly (a factor that the head lacks).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_HALF_LOGITS_TOLERANCE = 0.5
_EARLY = 2


def fast_decoder(
    module: Any, shapes: dict[int, tuple[int, int]], cache: RaggedCache, *, asked: bool = True, tuned: bool = True
) -> "FastDecoder | None":
    """The fast forward of a model whose attention is the engine's, for that cache; or None after one line in the log
    that says why it stays with the eager one, a warning where it was asked for. shapes: of its layers (RaggedCache);
    tuned: time which kernels are best for a few rows."""
    try:
        if type(cache) is not RaggedCache:
            raise ValueError(f"its cache is a {type(cache).__name__}, which the kernels do not read")
        return _checked_decoder(module, shapes, cache, tuned)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        reason = "triton is not installed"
    except ValueError as error:
        reason = str(error)
    level = logging.WARNING if asked else logging.INFO
    logger.log(level, "fast forward off for %s: %s; the eager one is used", type(module).__name__, reason)
    return None


def _checked_decoder(module: Any, shapes: dict[int, tuple[int, int]], cache: RaggedCache, tuned: bool) -> "FastDecoder":
    from triton.errors import TritonError

    from specdec.fast_kernels import INTERPRETED
    from specdec.fast_layers import FastDecoder

    if module.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"it is on a {module.device.type}, and the kernels run on a CUDA device")
    if not INTERPRETED and not compiles_for(module.device):
        raise ValueError("Triton does not work here")
    windows = _windows(module, shapes)
    try:
        with torch.cuda.device_of(next(module.parameters())):  # Triton launches on the current device
            most = {
                "num_positions": max(cache.num_positions, _CHECK_CAPACITY),
                "num_rows": max(len(cache.lengths_B), _CHECK_ROWS),
            }
            decoder = FastDecoder(module, windows=windows, tuned=tuned, **most)
            _check_deviation(module, shapes, decoder)
    except TritonError as error:
        raise ValueError(f"a kernel cannot be built here ({type(error).__name__}: {error})") from error
    return decoder


@dataclass(kw_only=True)
class _WindowProbe(Plan):
    """Notes the window that each layer asks its mask for, in order of the layers."""

    windows: list[int | None] = field(default_factory=list)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor:
        self.windows.append(window)
        return super().mask(window, repeat, dtype)


@torch.inference_mode()
def _windows(module: Any, shapes: dict[int, tuple[int, int]]) -> list[int | None]:
    """How many positions each layer sees, as its attention is told (None: all)."""
    zero_11 = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    probe = _WindowProbe(positions_Bq=zero_11, slots_Bq=zero_11, rows=slice(0, 1), live=1)
    module(**_cache(module, shapes, num_rows=1).inputs(zero_11, probe))
    if len(probe.windows) != len(shapes):
        raise ValueError(f"{len(probe.windows)} of its {len(shapes)} layers use the engine's mask")
    return probe.windows


@torch.inference_mode()
def _check_deviation(module: Any, shapes: dict[int, tuple[int, int]], decoder: "FastDecoder") -> None:
    """ValueError when the two forwards differ by more than rounding where a row's tokens are real."""
    embedded = len(decoder.embedding_VE)
    eager_cache, fast_cache = (_cache(module, shapes, num_rows=_CHECK_ROWS) for _ in range(2))
    for starts, counts in _STEPS:
        q = max(counts)
        start_B, count_B = torch.tensor([starts, counts], device=module.device)
        column_q = torch.arange(q, device=module.device)
        tokens_Bq = (7 * start_B.unsqueeze(1) + 3 * column_q + 2) % embedded
        plans = [cache.plan(start_B, count_B, q, slice(0, _CHECK_ROWS), None) for cache in (eager_cache, fast_cache)]
        out = module(**eager_cache.inputs(tokens_Bq, plans[0]), output_hidden_states=True)
        if not torch.isfinite(out.logits).all():
            return  # NaN weights are reported by the request that meets them
        real_Bq = column_q < count_B.unsqueeze(1)
        half = module.dtype != torch.float32
        if half and out.hidden_states:
            states_NE = decoder.states(tokens_Bq, fast_cache, plans[1], q, min(_EARLY, len(decoder.layers)))
            states_BqE = out.hidden_states[: _EARLY + 1][-1]
            _compare("states", states_NE.view_as(states_BqE)[real_Bq], states_BqE[real_Bq], _TOLERANCE[module.dtype])
        logits_BqV = decoder.forward(tokens_Bq, fast_cache, plans[1], q)
        tolerance = _HALF_LOGITS_TOLERANCE if half else _TOLERANCE[module.dtype]
        _compare(f"logits of {q} tokens a row", logits_BqV[real_Bq], out.logits[real_Bq], tolerance)


def _compare(what: str, ours: Tensor, reference: Tensor, tolerance: float) -> None:
    error = float((ours.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30))
    if not error <= tolerance:
        raise ValueError(f"its {what} differ by {error:.2g} (relative) from the eager forward's")


def _cache(module: Any, shapes: dict[int, tuple[int, int]], *, num_rows: int) -> RaggedCache:
    return RaggedCache(shapes, num_rows=num_rows, capacity=_CHECK_CAPACITY, dtype=module.dtype, device=module.device)
