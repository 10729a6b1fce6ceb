"""One call under torch.profiler: what it spent its time on, and a Chrome trace of it (chrome://tracing, Perfetto).

The parts of each model are marked in the trace (bench.kernel_groups.PARTS), by hooks on its modules and around the
engine's attention and cache, and only while it is profiled.
"""

import gzip
import shutil
import warnings
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AttentionInterface

from bench.kernel_groups import RANGE, Work
from specdec.attention import NAME, ragged_attention
from specdec.model import CachedModel

CALLS = 2
PHASE = f"{RANGE}phase"


def traced(run: Callable[[], Any], models: Sequence[CachedModel], trace: Path | None = None) -> list[Work]:
    """Run CALLS times under the profiler; the work of the shortest call, which the fewest other processes disturbed.

    On a GPU that of kernels, on the device's clock; on a CPU that of operators and of what is between them. `trace`:
    where the Chrome trace of all calls goes, compressed (.json.gz).
    """
    on_gpu = models[0].device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with warnings.catch_warnings(), marked(models), profile(activities=activities) as profiler:
        warnings.simplefilter("ignore")  # torch warns of its own profiler
        for _ in range(CALLS):
            with record_function(PHASE):
                run()
            if on_gpu:
                torch.cuda.synchronize()
    if trace is not None:
        _export(profiler, trace)
    events: list[Any] = list(profiler.events() or ())
    calls = kernel_work(events) if on_gpu else operator_work(events)
    return min(calls, key=lambda work: sum(each.ms for each in work))


def _export(profiler: Any, trace: Path) -> None:
    """torch would compress line by line, at its slowest level, which takes longer than what was profiled."""
    plain = trace.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(trace, "wb", compresslevel=4) as packed:
        shutil.copyfileobj(source, packed)
    plain.unlink()


def operator_work(events: Sequence[Any]) -> list[list[Work]]:
    """By call: each CPU event in it with the time that is its own, of no event inside it."""
    calls: dict[int, list[Work]] = {}
    for event in events:
        outer = enclosing(event)
        top = outer[0] if outer else event
        if top.name == PHASE and _is_on_host(event):
            around = [each.name for each in outer]
            work = Work(name=event.name, around=around, ms=event.self_cpu_time_total / 1e3)
            calls.setdefault(top.id, []).append(work)
    return list(calls.values())


def kernel_work(events: Sequence[Any]) -> list[list[Work]]:
    """By call: each kernel that began in it, with the operator that launched it and what is around that. A kernel of a
    replayed graph was launched by no operator: nothing is around it."""
    calls = sorted((e for e in events if e.name == PHASE and _is_on_host(e)), key=lambda e: e.time_range.start)
    begins, around = [call.time_range.start for call in calls], _launched(events)
    work: list[list[Work]] = [[] for _ in calls]
    for event in sorted((e for e in events if not _is_on_host(e)), key=lambda e: e.time_range.start):
        call = bisect(begins, event.time_range.start) - 1
        if call < 0 or event.name.startswith(RANGE):
            continue
        start, end = event.time_range.start, event.time_range.end
        launched = around.get((event.name, end - start), [])
        names = launched.pop(0) if launched else ()
        work[call].append(Work(name=event.name, around=names, ms=(end - start) / 1e3, start_ms=start / 1e3))
    return work


def _launched(events: Sequence[Any]) -> dict[tuple[str, float], list[Sequence[str]]]:
    """What is around each kernel that an operator launched, by its name and duration, in the order of launching: the
    profiler tells a kernel's place in time and what launched it apart."""
    found: dict[tuple[str, float], list[Sequence[str]]] = {}
    for event in sorted(filter(_is_on_host, events), key=lambda e: e.time_range.start):
        chain = [each.name for each in (*enclosing(event), event)]
        for kernel in event.kernels:
            found.setdefault((kernel.name, kernel.duration), []).append(chain)
    return found


def enclosing(event: Any) -> list[Any]:
    """The events that an event is in, from the outside in."""
    outer: list[Any] = []
    while (event := event.cpu_parent) is not None:
        outer.append(event)
    return outer[::-1]


def _is_on_host(event: Any) -> bool:
    return event.device_type == DeviceType.CPU


@contextmanager
def marked(models: Sequence[CachedModel]) -> Iterator[None]:
    """While entered, the parts of these models' forwards are ranges of the profiler."""
    with ExitStack() as stack:
        stack.callback(AttentionInterface.register, NAME, ragged_attention)
        AttentionInterface.register(NAME, _ranged("attention", ragged_attention))
        for model in models:
            stack.callback(model.cache.__dict__.pop, "update")
            model.cache.update = _ranged("cache", model.cache.update)  # type: ignore[method-assign]
            for module in model.module.modules():
                part = "model" if module is model.module else part_of_module(module)
                if part is not None:
                    for handle in _mark(module, part):
                        stack.callback(handle.remove)
        yield


def part_of_module(module: nn.Module) -> str | None:
    """Which part of a decoder a module is, by its type; None for one that is only made of others."""
    name = type(module).__name__.lower()
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding) or "wordembedding" in name:
        return "embedding"
    words = {"norm": "norm", "rotary": "rotary", "attention": "attention layer", "mlp": "mlp", "moe": "mlp"}
    return next((part for word, part in words.items() if word in name), None)


def _mark(module: nn.Module, part: str) -> Iterator[Any]:
    open_ranges: list[Any] = []

    def begin(*_: Any) -> None:
        open_ranges.append(record_function(f"{RANGE}{part}").__enter__())

    def end(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end, always_call=True)


def _ranged(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{RANGE}{part}"):
            return call(*args, **kwargs)

    return ranged
