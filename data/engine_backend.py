"""Traces made by our own engine without a draft: prompts by the chat template, completions to records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from data.common import Skipped, TraceRecord, encode_prompt, stable_seed, stop_ids_of
from pipeline.config import Config
from pipeline.models import load_target, load_tokenizer, revision
from pipeline.sources import Prompt
from specdec import Completion, Engine, Request, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion to make: the `completion`-th of `prompt` at this temperature."""

    prompt: Prompt
    prompt_ids: Sequence[int]
    completion: int
    params: SamplingParams


class Tracer:
    """The target in an engine that is large enough for every prompt that fits its context.

    Prompts that do not fit, or that the chat template refuses, are skipped by id. The cache is sized from all
    prompts of the config, not from those still to do, so that an interrupted run computes what a whole one
    does.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]) -> None:
        self.config, self.traces = config, config.traces
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = load_target(config.models, device)
        tokenizer = load_tokenizer(config.models)
        self.revision = revision(config.models.target)
        self.stop_ids = stop_ids_of(target, tokenizer)
        context = int(target.config.get_text_config().max_position_embeddings)
        self.prompt_ids: dict[str, list[int]] = {}
        self.problems: dict[str, str] = {}
        for prompt in prompts:
            self._encode(tokenizer, prompt, context - self.traces.max_tokens)
        longest = max((len(ids) for ids in self.prompt_ids.values()), default=1)
        self.engine = Engine(
            target,
            k=0,
            num_slots=self.traces.batch,
            capacity=longest + self.traces.max_tokens,
            top_logprobs=self.traces.top_logprobs,
        )

    def trace(
        self, prompts: Sequence[Prompt], check_stop: Callable[[], None]
    ) -> tuple[list[TraceRecord], list[Skipped]]:
        """All completions of these prompts, in order, and what gave none; `check_stop` may raise."""
        skipped = [
            Skipped(prompt_id=prompt.id, reason=self.problems[prompt.id])
            for prompt in prompts
            if prompt.id in self.problems
        ]
        samples = [sample for prompt in prompts if prompt.id in self.prompt_ids for sample in self._samples(prompt)]
        records = []
        for sample, completion in zip(samples, self._complete(samples, check_stop), strict=True):
            if completion.finish_reason == "error":
                where = f"completion {sample.completion} at temperature {sample.params.temperature}"
                skipped.append(Skipped(prompt_id=sample.prompt.id, reason=f"{where}: {completion.error}"))
            else:
                records.append(self._record(sample, completion))
        return records, skipped

    def _encode(self, tokenizer: Any, prompt: Prompt, room: int) -> None:
        try:
            ids = encode_prompt(tokenizer, prompt.messages)
        except TemplateError as error:
            self.problems[prompt.id] = f"the chat template refuses it: {error}"
            return
        if len(ids) > room:
            self.problems[prompt.id] = f"{len(ids)} prompt tokens, expected at most {room}: the context less max_tokens"
        else:
            self.prompt_ids[prompt.id] = ids

    def _samples(self, prompt: Prompt) -> Iterator[Sample]:
        """Completions by temperature; a greedy one only once, as all would be the same."""
        for temperature in self.traces.temperatures:
            for index in range(self.traces.completions_per_prompt if temperature > 0 else 1):
                params = SamplingParams(
                    temperature=temperature,
                    top_p=self.traces.top_p,
                    max_tokens=self.traces.max_tokens,
                    stop_ids=self.stop_ids,
                    seed=stable_seed(self.traces.seed, prompt.id, index, temperature),
                )
                yield Sample(prompt=prompt, prompt_ids=self.prompt_ids[prompt.id], completion=index, params=params)

    def _complete(self, samples: Sequence[Sample], check_stop: Callable[[], None]) -> list[Completion]:
        """The engine's completions in the order of `samples`."""
        assert not self.engine.has_work, "a shard starts with empty slots"
        tickets = [
            self.engine.submit(Request(prompt_ids=sample.prompt_ids, params=sample.params)) for sample in samples
        ]
        done: dict[int, Completion] = {}
        while self.engine.has_work:
            check_stop()
            done.update(self.engine.step())
        return [done[ticket] for ticket in tickets]

    def _record(self, sample: Sample, completion: Completion) -> TraceRecord:
        prompt, params, logprobs = sample.prompt, sample.params, completion.logprobs
        assert logprobs is not None
        return TraceRecord(
            prompt_id=prompt.id,
            source=prompt.source,
            messages=json.dumps(prompt.messages, ensure_ascii=False),
            reference=prompt.reference,
            verifier=None if prompt.verifier is None else json.dumps(prompt.verifier, ensure_ascii=False),
            prompt_ids=np.asarray(sample.prompt_ids, dtype=np.int32),
            completion=sample.completion,
            completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
            token_logprob=logprobs.token_logprob,
            top_ids=logprobs.top_ids,
            top_logprobs=logprobs.top_logprobs,
            tail_mass=logprobs.tail_mass,
            finish_reason=completion.finish_reason,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            seed=params.seed,
            teacher=self.config.models.target,
            teacher_revision=self.revision,
        )
