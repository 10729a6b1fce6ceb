"""Times of single forwards and whole rounds at one context, and the floor that memory bandwidth sets them.

The caches hold random keys and values for every row's context; nothing is prefilled, so that a long context costs only
the memory it needs. In a variant with graphs each forward is a graph of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.engine_cells import Cell, Sizes
from bench.engine_rounds import check_captured, engine_of, models_of, random_requests
from bench.memory import GIB, kv_bytes_by_config, kv_bytes_per_token
from bench.profile_cell import weight_bytes
from bench.shapes import Pair
from specdec import Engine, RoundStats
from specdec.controller import FixedK
from specdec.drafter import ModelDrafter
from specdec.graphs import GraphRounds
from specdec.lengths import Lengths
from specdec.model import CachedModel

_WARM = 3
_SHARE = 0.9  # of the device's memory that a cell may fill
_ROUND_K = 4


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians in milliseconds. verify_ms: of 2, 3, ... tokens a row; draft_first_ms: of a round's first draft step."""

    target_step_ms: float
    verify_ms: Sequence[float]
    draft_step_ms: float
    draft_first_ms: float


def measure_steps(pair: Pair, cell: Cell, sizes: Sizes, copy_gb_per_s: float) -> dict[str, Any]:
    """The row of a "steps" cell. ValueError where the caches do not fit."""
    capacity = cell.context + (sizes.repeats + _WARM) * (_ROUND_K + 1)
    check_room(pair, cell.batch, capacity)
    engine = engine_of(pair, cell.variant, k=FixedK(sizes.k_max), num_slots=cell.batch, capacity=capacity)
    fill_rows(engine, cell.context, capacity - cell.context)
    times = step_times(engine, cell, sizes)
    rounds = round_times(engine, sizes)
    check_captured(engine)
    forwards_ms = times.draft_first_ms + (_ROUND_K - 1) * times.draft_step_ms + times.verify_ms[_ROUND_K - 1]
    floors = {f"{role}_floor_ms": floor_ms(model, cell, copy_gb_per_s) for role, model in models_of(engine).items()}
    return {
        "engine": "specdec",
        "variant": cell.variant,
        "batch": cell.batch,
        "context": cell.context,
        "target_step_ms": times.target_step_ms,
        "verify_ms": list(times.verify_ms),
        "draft_step_ms": times.draft_step_ms,
        "draft_first_ms": times.draft_first_ms,
        "k": _ROUND_K,
        "round_ms": 1e3 * median(stats.total_s for stats in rounds),
        "host_ms": 1e3 * median(stats.overhead_s for stats in rounds),
        "overhead_ms": 1e3 * median(stats.total_s for stats in rounds) - forwards_ms,
        **floors,
        "copy_gb_per_s": copy_gb_per_s,
    }


def check_room(pair: Pair, batch: int, capacity: int) -> None:
    """ValueError when both caches and weights are more than the device's memory holds."""
    per_token = sum(kv_bytes_by_config(model.config, model.dtype) for model in (pair.target, pair.draft))
    weights = sum(p.nbytes for model in (pair.target, pair.draft) for p in model.parameters())
    needed = batch * capacity * per_token + weights
    if pair.device.type == "cuda":
        total = torch.cuda.get_device_properties(pair.device).total_memory
        if needed > _SHARE * total:
            raise ValueError(f"caches and weights take {needed / GIB:.0f} GiB of {total / GIB:.0f}")
    if capacity > pair.target.config.max_position_embeddings:
        raise ValueError(f"the target is built for {pair.target.config.max_position_embeddings} tokens")


@torch.inference_mode()
def fill_rows(engine: Engine, context: int, new_tokens: int) -> None:
    """Every slot decodes a request of `context` tokens whose keys and values are random numbers."""
    for request in random_requests(engine.vocab_size, len(engine._slots), context, new_tokens, seed=0):
        engine.submit(request)
    engine._admit()
    drafter = engine._drafter
    assert isinstance(drafter, ModelDrafter)
    for model in (engine._target, drafter.model):
        model.cache.lengths_B.fill_(context - 1)
        for keys_and_values in model.cache.layers.values():
            for tensor in keys_and_values:
                tensor.normal_()
    for slot in engine._slots:
        assert slot is not None
        slot.target_len, slot.decoding = context - 1, True
        drafter._held[slot.row] = context - 1
    engine._state.active_B.fill_(True)


@torch.inference_mode()
def step_times(engine: Engine, cell: Cell, sizes: Sizes) -> StepTimes:
    """Each forward alone, at the rows' context."""
    target, draft = models_of(engine).values()

    def timed(model: CachedModel, q: int, keep: int) -> float:
        run = forward_of(engine, model, cell, q, keep)
        if isinstance(engine._rounds, GraphRounds):
            run = engine._rounds._capture(run, lambda: None)
        return median_ms(run, engine._target.device, sizes.repeats)

    return StepTimes(
        target_step_ms=timed(target, 1, 1),
        verify_ms=[timed(target, q, q) for q in range(2, sizes.k_max + 2)],
        draft_step_ms=timed(draft, 1, 1),
        draft_first_ms=timed(draft, 2, 1),
    )


def forward_of(engine: Engine, model: CachedModel, cell: Cell, q: int, keep: int) -> Callable[[], Any]:
    """A forward of q random tokens a row at the end of its context; rows are left as long as they were."""
    device, B = engine._target.device, cell.batch
    tokens_Bq = torch.randint(engine.vocab_size, (B, q), device=device)
    start_B = torch.full((B,), cell.context - q, device=device)
    live = cell.context
    slots = engine._rounds._live(model, live) if isinstance(engine._rounds, GraphRounds) else live

    def run() -> Any:
        plan = model.cache.plan(start_B, torch.full_like(start_B, q), q, slice(0, B), slots)
        return model.forward(tokens_Bq, plan, keep=keep)

    return run


def round_times(engine: Engine, sizes: Sizes) -> list[RoundStats]:
    """Rounds of the engine with four drafts, after some that do not count."""
    for model in models_of(engine).values():
        model.cache.lengths_B.copy_(engine._state.lengths_B - 1)
    seen: list[RoundStats] = []
    engine._listeners = type(engine._listeners)(on_round=seen.append)
    engine._lengths = Lengths(FixedK(min(_ROUND_K, engine.k_max)), engine.k_max)
    while len(seen) < _WARM + sizes.repeats:
        engine.step()
    return seen[_WARM:]


def floor_ms(model: CachedModel, cell: Cell, copy_gb_per_s: float) -> float:
    """The time in which a copy moves the bytes that a step has to read: each weight once, and every row's context."""
    read = weight_bytes(model.module) + cell.batch * cell.context * kv_bytes_per_token(model)
    return 1e3 * read / (copy_gb_per_s * 1e9)


def median_ms(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """On a GPU between two events around one call, on a CPU by the clock; the first calls do not count."""
    times = []
    for index in range(_WARM + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            run()
            elapsed = 1e3 * (time.perf_counter() - start)
        if index >= _WARM:
            times.append(elapsed)
    return median(times)
