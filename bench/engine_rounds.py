"""Tokens a second of the engine in one variant, at one batch, with imposed acceptance.

A pass: `batch` requests of equal prompts are submitted together and fed; what counts are the rounds after the first,
as long as all rows decode, from the clock before them to the clock after: everything that the host does between two
rounds is in it, no prefill and no half-empty round is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from bench.cells import summarise
from bench.engine_cells import Cell, Sizes
from bench.memory import GIB, engine_memory
from bench.shapes import Pair
from bench.synthetic import ImposedAcceptance, label
from specdec import Engine, Request, RoundStats, SamplingParams
from specdec.controller import Adaptive, Controller, FixedK
from specdec.drafter import ModelDrafter
from specdec.lengths import Lengths
from specdec.model import CachedModel


def engine_options(variant: str) -> dict[str, Any]:
    """What Engine is told for a variant."""
    return {name: name in variant.split("+") for name in ("fast", "graphs")}


def engine_of(pair: Pair, variant: str, **settings: Any) -> Engine:
    """The engine of a variant. ValueError where its fast forward is off (the log says why): its times would go under a
    wrong name."""
    options = engine_options(variant)
    engine = Engine(pair.target, pair.draft, **settings, **options)
    if options["fast"] and not all(model.reads_live_only for model in models_of(engine).values()):
        raise ValueError("the fast forward is off; the log says why")
    return engine


def models_of(engine: Engine) -> dict[str, CachedModel]:
    """The target's and the draft's, by role."""
    assert isinstance(engine._drafter, ModelDrafter)
    return {"target": engine._target, "draft": engine._drafter.model}


def check_captured(engine: Engine) -> None:
    """ValueError where an engine with graphs goes on without them."""
    if engine.captured is not None and engine.captured.failed is not None:
        raise ValueError(f"no graphs: {engine.captured.failed}")


def random_requests(vocab: int, count: int, prompt_tokens: int, new_tokens: int, seed: int) -> list[Request]:
    """Greedy requests with random prompts that end at their length only."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(vocab, (count, prompt_tokens), generator=generator).tolist()
    return [
        Request(prompt_ids=prompt, params=SamplingParams(max_tokens=new_tokens, seed=1000 * seed + row))
        for row, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True, kw_only=True)
class FullRounds:
    """Rounds of one pass in which every row decoded, and the wall time they took together."""

    rounds: Sequence[RoundStats]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(stats.tokens for stats in self.rounds) / self.wall_s


class SpeedEngine:
    """One engine for all lengths and acceptances of a variant and a batch."""

    def __init__(self, pair: Pair, cell: Cell, sizes: Sizes) -> None:
        self.variant, self.batch, self.sizes = cell.variant, cell.batch, sizes
        self._seen: list[RoundStats] = []
        capacity = sizes.prompt_tokens + sizes.new_tokens
        self.engine = engine_of(
            pair,
            cell.variant,
            k=FixedK(sizes.k_max),
            num_slots=cell.batch,
            capacity=capacity,
            on_round=self._seen.append,
        )
        self.acceptance = ImposedAcceptance(self.engine, 1.0)
        for k in (0, *sorted(sizes.ks)):  # every graph that a pass replays, and every kernel
            self._pass(FixedK(k), seed=k, most_rounds=sizes.warm_rounds)
        check_captured(self.engine)

    def is_for(self, cell: Cell) -> bool:
        """Whether the cell can be measured on this engine."""
        return (cell.what, cell.variant, cell.batch) == ("speed", self.variant, self.batch)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The row of a "speed" cell. The passes of every cell have the same requests and seeds."""
        self.acceptance.set(0.0 if cell.alpha is None else cell.alpha)
        controller = self._controller(cell)
        number = self.sizes.passes_of_few if self.batch < 4 else self.sizes.passes
        passes = [self._pass(controller, seed=seed) for seed in range(number)]
        check_captured(self.engine)
        rounds = [stats for each in passes for stats in each.rounds]
        total = sum((stats.acceptance for stats in rounds[1:]), rounds[0].acceptance)
        times = {
            "round_ms": [stats.total_s for stats in rounds],
            "verify_ms": [stats.verify_s for stats in rounds],
            "draft_step_ms": [stats.draft_s / stats.k for stats in rounds if stats.k],
            "host_ms": [stats.overhead_s for stats in rounds],
        }
        return {
            **self._where(cell),
            **summarise("tokens_per_s", [each.tokens_per_s for each in passes]),
            "alpha": total.alpha,
            "tokens_per_round": total.tokens_per_round,
            "mean_k": mean(stats.k for stats in rounds),
            **{name: 1e3 * median(values) for name, values in times.items() if values},
            "rounds": len(rounds),
            **self._costs(),
        }

    def _where(self, cell: Cell) -> dict[str, Any]:
        return {
            "engine": "specdec",
            "drafter": "none" if cell.alpha is None else "model",
            "controller": cell.controller,
            "k": cell.k,
            "variant": self.variant,
            "batch": self.batch,
            "prompt_set": "random",
            "prompt_tokens": self.sizes.prompt_tokens,
            "new_tokens": self.sizes.new_tokens,
            "temperature": 0.0,
            "acceptance": None if cell.alpha is None else label(cell.alpha),
        }

    def _costs(self) -> dict[str, Any]:
        captured = self.engine.captured
        made: dict[str, Any] = {}
        if captured is not None:
            made = {"graphs": captured.held, "capture_s": captured.seconds, "capture_mib": captured.mebibytes}
        memory = engine_memory(self.engine, None)
        return {**made, "kv_gib": memory["kv_gib"], "memory_gib": _allocated_gib(self.engine._target.device)}

    def _controller(self, cell: Cell) -> Controller:
        if cell.controller != "adaptive":
            return FixedK(cell.k)
        controller = Adaptive(cell.k)
        self.engine._lengths = Lengths(controller, self.engine.k_max)
        self.engine.calibrate(batches=[self.batch])
        return controller

    def _pass(self, controller: Controller, *, seed: int, most_rounds: int | None = None) -> FullRounds:
        engine, sizes = self.engine, self.sizes
        engine._lengths = Lengths(controller, engine.k_max)
        requests = random_requests(engine.vocab_size, self.batch, sizes.prompt_tokens, sizes.new_tokens, seed)
        tickets = [engine.submit(request) for request in requests]
        finished: list[Any] = []
        while not finished and not all(slot is not None and slot.decoding for slot in engine._slots):
            finished = engine.step()
        self._seen.clear()
        start = end = time.perf_counter()
        while not finished and (most_rounds is None or len(self._seen) < most_rounds):
            finished = engine.step()
            end = time.perf_counter()
        full = FullRounds(rounds=list(self._seen), wall_s=end - start)
        for ticket in tickets:
            engine.cancel(ticket)
        while engine.has_work:
            engine.step()
        if bad := [done.error for _, done in finished if done.error]:
            raise ValueError(f"a request of the bench failed: {bad[0]}")
        return full


def _allocated_gib(device: torch.device) -> float | None:
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else None
