"""Completions made by our own engine, without a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from data.samples import Sample
from pipeline.config import Config
from pipeline.models import load_target
from specdec import Completion, Engine, Request, SamplingParams, __version__


class EngineBackend:
    """The target in an engine whose rows hold `capacity` tokens."""

    name = f"specdec {__version__}"

    def __init__(self, config: Config, stop_ids: Sequence[int], capacity: int) -> None:
        self.stop_ids = tuple(stop_ids)
        self.engine = Engine(
            load_target(config.models, "cuda" if torch.cuda.is_available() else "cpu"),
            k=0,
            num_slots=config.traces.batch,
            capacity=capacity,
            top_logprobs=config.traces.top_logprobs,
        )

    def complete(self, samples: Sequence[Sample], check_stop: Callable[[], None]) -> list[Completion]:
        """Completions in the order of `samples`; `check_stop` may raise between rounds."""
        assert not self.engine.has_work, "a shard starts with empty slots"
        tickets = [self.engine.submit(self.request(sample)) for sample in samples]
        done: dict[int, Completion] = {}
        while self.engine.has_work:
            check_stop()
            done.update(self.engine.step())
        return [done[ticket] for ticket in tickets]

    def request(self, sample: Sample) -> Request:
        """The engine's request for a sample."""
        params = SamplingParams(
            temperature=sample.temperature,
            top_p=sample.top_p,
            max_tokens=sample.max_tokens,
            stop_ids=self.stop_ids,
            seed=sample.seed,
        )
        return Request(prompt_ids=sample.prompt_ids, params=params)
