"""Turning a function of fixed shapes into something that is replayed: a CUDA graph."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
_WARM_UPS = 2  # calls before a capture: libraries load, kernels are compiled and chosen
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CaptureStats:
    """made: graphs captured so far; held: those that can be replayed now; seconds and mebibytes: what making them took
    and holds (of the device's memory, as the driver counts it); failed: why no more are made, None while they are."""

    made: int = 0
    held: int = 0
    seconds: float = 0.0
    mebibytes: float = 0.0
    failed: str | None = None


class Capture(Protocol):
    """Records what `run` does on the device; calling what it returns does the same again on the same memory, and gives
    the result of the recorded call, overwritten. Nothing that Python decides is decided again."""

    def __call__(self, run: Callable[[], T], before: Callable[[], object]) -> Callable[[], T]:
        """before: called ahead of every call of `run` that is made to warm up."""

    def used_bytes(self) -> int:
        """Memory in use on the device."""


class CudaCapture:
    """Captures on a stream of its own; all graphs take their memory from one pool, so that it is as large as the
    largest of them needs. A graph's result is therefore good until another graph is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], T], before: Callable[[], object]) -> Callable[[], T]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(_WARM_UPS):
                        before()
                        run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = run()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind
            current.wait_stream(self._stream)

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def used_bytes(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def capture_for(device: torch.device) -> Capture:
    """ValueError where nothing can be captured."""
    if device.type != "cuda":
        raise ValueError(
            f"graphs is True and the target is on {device}; CUDA graphs need an NVIDIA GPU: move both models there, or "
            "leave graphs out (on a CPU a round waits for no launches, so nothing is lost)"
        )
    return CudaCapture(device)


def timed_capture(
    capture: Capture, run: Callable[[], T], before: Callable[[], object]
) -> tuple[Callable[[], T], float, float]:
    """(the replay, seconds it took to make, mebibytes it holds)."""
    used, start = capture.used_bytes(), time.perf_counter()
    replay = capture(run, before)
    seconds = time.perf_counter() - start
    return replay, seconds, max(0, capture.used_bytes() - used) / _MIB
