"""Timed runs of one workload by the engine or by `transformers`, and what they come to.

Throughput is measured with full slots. A pass submits more requests than the batch has slots, so that a
finished row is replaced at once; only rounds in which every slot is active count, so that neither the tail of
the pass (slots that nobody fills) nor a prompt's prefill enters:

    tokens_per_s = tokens committed in full rounds / wall time of those rounds

`tokens_per_s_wall` is the plain quotient of a whole pass, prefill and tail included; for `transformers`,
which tells no rounds apart, it is the only one. Tokens are the ids that the engine returned, never text
tokenised again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Protocol

import torch

from bench.memory import engine_memory, peak_gib, with_peak
from data.common import stable_seed
from specdec import AcceptanceStats, Completion, Engine, Request, RoundStats, SamplingParams

WAVES = 2  # requests a slot in one pass, at least: the second wave keeps slots full while the first finishes


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every variant of one comparison decodes: the same prompts, slots and sampling."""

    prompts: Sequence[Sequence[int]]
    batch: int
    temperature: float
    max_tokens: int
    stop_ids: Sequence[int]
    seed: int
    min_tokens: int = 0
    waves: int = WAVES

    @property
    def longest(self) -> int:
        """Tokens of the longest row: prompt and completion."""
        return max(len(prompt) for prompt in self.prompts) + self.max_tokens

    def requests(self, repeat: int, half: int) -> list[Request]:
        """The requests of one pass, ids are prompt indices; a repeat's two halves share out the prompts.

        Seeds differ by repeat and request, not by variant.
        """
        num_requests = max(-(-len(self.prompts) // 2), self.waves * self.batch)
        first = half * num_requests
        return [self.request(index, repeat) for index in range(first, first + num_requests)]

    def request(self, index: int, repeat: int) -> Request:
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_ids=self.stop_ids,
            seed=stable_seed(self.seed, repeat, index),
        )
        prompt = index % len(self.prompts)
        return Request(prompt_ids=self.prompts[prompt], params=params, id=prompt)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One timed pass: `texts` are the completions' ids; `rounds` are the full ones; `acceptance` is (prompt index,
    statistics) a request; `memory` as in bench.memory."""

    texts: Sequence[list[int]]
    wall_s: float
    rounds: Sequence[RoundStats] = ()
    acceptance: Sequence[tuple[int, AcceptanceStats]] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            texts=[*self.texts, *other.texts],
            wall_s=self.wall_s + other.wall_s,
            rounds=[*self.rounds, *other.rounds],
            acceptance=[*self.acceptance, *other.acceptance],
            memory=_larger(self.memory, other.memory),
        )


class Variant(Protocol):
    """Something that decodes requests and is timed doing so."""

    def run(self, requests: Sequence[Request]) -> Pass:
        """Decode all requests. ValueError when one of them fails."""


class EngineVariant:
    """Our engine with one drafter and one draft length or controller; no drafter: k = 0 on the same machinery."""

    def __init__(self, target: Any, draft: Any, *, k: Any, batch: int, capacity: int) -> None:
        self.batch = batch
        self.seen: list[RoundStats] = []
        self.engine = Engine(target, draft, k=k, num_slots=batch, capacity=capacity, on_round=self.seen.append)
        self.engine.calibrate(repeats=2, batches=[batch])

    def run(self, requests: Sequence[Request]) -> Pass:
        self.seen.clear()
        start = time.perf_counter()
        completions, extra = with_peak(lambda: self.engine.generate(requests), self.engine._target.device)
        wall_s = time.perf_counter() - start
        _raise_if_failed(completions)
        return Pass(
            texts=[completion.token_ids for completion in completions],
            wall_s=wall_s,
            rounds=[stats for stats in self.seen if stats.rows == self.batch],
            acceptance=[(int(completion.id or 0), completion.stats) for completion in completions],
            memory=engine_memory(self.engine, extra),
        )


class TransformersVariant:
    """`generate` of transformers on left-padded batches, with further `options` of it: decoding without an engine."""

    def __init__(self, target: Any, *, batch: int, options: Mapping[str, Any] | None = None) -> None:
        self.target, self.batch, self.options = target, batch, dict(options or {})

    def run(self, requests: Sequence[Request]) -> Pass:
        batches = [requests[i : i + self.batch] for i in range(0, len(requests), self.batch)]
        start = time.perf_counter()
        texts, extra = with_peak(lambda: [text for each in batches for text in self._batch(each)], self.target.device)
        wall_s = time.perf_counter() - start
        return Pass(texts=texts, wall_s=wall_s, memory={"peak_memory_gib": peak_gib([self.target], 0, extra)})

    @torch.inference_mode()
    def _batch(self, requests: Sequence[Request]) -> list[list[int]]:
        """Decode one batch; each row's tokens up to and including its stop id."""
        params, length = requests[0].params, max(len(request.prompt_ids) for request in requests)
        pad = params.stop_ids[0] if params.stop_ids else 0
        rows = [[pad] * (length - len(request.prompt_ids)) + list(request.prompt_ids) for request in requests]
        mask = [[0] * (length - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in requests]
        device = self.target.device
        torch.manual_seed(params.seed % 2**63)
        output = self.target.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            eos_token_id=list(params.stop_ids) or None,
            pad_token_id=pad,
            **_hf_sampling(params.temperature),
            **self.options,
        )
        return [row[: _length(row, params.stop_ids)] for row in output[:, length:].tolist()]


def warm_up(variants: Sequence[Variant], workload: Workload, check_stop: Callable[[], None]) -> None:
    """Run each variant once over one wave of short requests: allocation, code caches, weights' pages."""
    params = SamplingParams(temperature=workload.temperature, max_tokens=4)
    prompts = [workload.prompts[slot % len(workload.prompts)] for slot in range(workload.batch)]
    for variant in variants:
        check_stop()
        variant.run([Request(prompt_ids=prompt, params=params, id=0) for prompt in prompts])


def interleave(
    variants: Sequence[Variant], workload: Workload, repeats: int, check_stop: Callable[[], None]
) -> list[list[Pass]]:
    """`repeats` measurements of each variant, [variant][repeat]; `check_stop` may raise before any pass.

    Each repeat has two halves, the second in reversed order (A B C, C B A): a machine that slows down or
    speeds up steadily during a repeat does so equally for every variant, so their ratios within a repeat
    hold.
    """
    measured: list[list[Pass]] = [[] for _ in variants]
    for repeat in range(repeats):
        halves: list[list[Pass]] = [[] for _ in variants]
        order = list(range(len(variants)))
        for half, indices in enumerate((order, order[::-1])):
            for index in indices:
                check_stop()
                halves[index].append(variants[index].run(workload.requests(repeat, half)))
        for passes, (first, second) in zip(measured, halves, strict=True):
            passes.append(first + second)
    return measured


def tokens_per_s(measured: Pass) -> float:
    """Tokens a second in full rounds; over the whole pass when it tells no rounds apart."""
    if not measured.rounds:
        return tokens_per_s_wall(measured)
    return sum(stats.tokens for stats in measured.rounds) / sum(stats.total_s for stats in measured.rounds)


def tokens_per_s_wall(measured: Pass) -> float:
    """Tokens a second over the whole pass, prefill and tail included."""
    return measured.tokens / measured.wall_s


def round_times_ms(measured: Pass) -> dict[str, float]:
    """Medians over full rounds, in ms: verify_ms, draft_step_ms (one of k steps; absent at k = 0),
    overhead_ms, round_ms."""
    times = {
        "verify_ms": [stats.verify_s for stats in measured.rounds],
        "draft_step_ms": [stats.draft_s / stats.k for stats in measured.rounds if stats.k],
        "overhead_ms": [stats.overhead_s for stats in measured.rounds],
        "round_ms": [stats.total_s for stats in measured.rounds],
    }
    return {name: 1e3 * median(values) for name, values in times.items() if values}


def mean_context(workload: Workload, measured: Pass) -> float:
    """Tokens in a row's cache half way through its completion, mean over requests."""
    return mean(len(prompt) for prompt in workload.prompts) + measured.tokens / len(measured.texts) / 2


def _larger(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of two passes of one variant: the larger peak, where it is known."""
    merged = {**one, **other}
    peaks = [each["peak_memory_gib"] for each in (one, other) if each.get("peak_memory_gib") is not None]
    return merged | ({"peak_memory_gib": max(peaks)} if peaks else {})


def _raise_if_failed(completions: Sequence[Completion]) -> None:
    for completion in completions:
        if completion.finish_reason == "error":
            raise ValueError(f"benchmark prompt {completion.id}: {completion.error}")


def _hf_sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}


def _length(row: Sequence[int], stop_ids: Sequence[int]) -> int:
    """Tokens of a padded row up to and including its first stop id."""
    ends = [row.index(stop) for stop in stop_ids if stop in row]
    return min(ends) + 1 if ends else len(row)
