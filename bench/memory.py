"""What a variant of a bench costs in memory: weights, keys and values, and what its rounds need besides."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec import Engine
from specdec.drafter import ModelDrafter
from specdec.kv_size import kv_numbers
from specdec.model import CachedModel

GIB = 1 << 30
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
T = TypeVar("T")


def with_peak(run: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """What `run` returns, and the most bytes in use at any time in it beyond those before: on a GPU of its allocator,
    on a CPU of the process. None where the system does not tell."""
    before = _start(device)
    result = run()
    peak = _peak(device)
    return result, None if before is None or peak is None else max(0, peak - before)


def engine_memory(engine: Engine, extra: int | None) -> dict[str, Any]:
    """kv_tokens: what the caches hold, over all rows; kv_bytes_per_token: of target and draft together;
    peak_memory_gib: weights, caches and `extra`: what a process with this variant alone needs at least."""
    models = cached_models(engine)
    caches = sum(model.cache.nbytes for model in models)
    return {
        "kv_tokens": len(engine._slots) * engine.capacity,
        "kv_bytes_per_token": sum(kv_bytes_per_token(model) for model in models),
        "kv_gib": caches / GIB,
        "peak_memory_gib": peak_gib([model.module for model in models], caches, extra),
    }


def peak_gib(modules: Sequence[Any], caches: int, extra: int | None) -> float | None:
    """Weights that modules share count once."""
    weights = {tensor.data_ptr(): tensor.nbytes for module in modules for tensor in module.parameters()}
    return None if extra is None else (sum(weights.values()) + caches + extra) / GIB


def cached_models(engine: Engine) -> list[CachedModel]:
    """The target, and the draft where it is a model, with their caches."""
    drafter = engine._drafter
    return [engine._target, drafter.model] if isinstance(drafter, ModelDrafter) else [engine._target]


def kv_bytes_per_token(model: CachedModel) -> int:
    """Keys and values of one token in all layers."""
    return sum(t.nbytes // (t.shape[0] * t.shape[2]) for pair in model.cache.layers.values() for t in pair)


def kv_bytes_by_config(config: Any, dtype: torch.dtype) -> int:
    """The same for a model that is not loaded."""
    return kv_numbers(config) * dtype.itemsize


def _start(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        _RESET.write_text("5", encoding="ascii")  # the peak counts from here on (man 5 proc)
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def _status_bytes(name: str) -> int | None:
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None
