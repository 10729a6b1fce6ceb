"""From prompts to the completions to be made, and from what a backend made to records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from data.common import Skipped, TraceRecord, encode_prompt, stable_seed
from pipeline.config import TracesConfig
from pipeline.sources import Prompt

if TYPE_CHECKING:
    from data.teacher import Teacher
    from specdec import Completion


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion to make: the `completion`-th of `prompt` at this temperature."""

    prompt: Prompt
    prompt_ids: Sequence[int]
    completion: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


class SamplePlan:
    """The completions to make of all prompts of the config.

    Prompts that do not fit the context, or that the chat template refuses, are skipped by id. `longest` is the
    longest of all prompts, not of those still to do, so that an interrupted run computes what a whole one does.
    """

    def __init__(self, traces: TracesConfig, teacher: Teacher, prompts: Sequence[Prompt]) -> None:
        self.traces = traces
        self.prompt_ids: dict[str, list[int]] = {}
        self.problems: dict[str, str] = {}
        for prompt in prompts:
            self._encode(teacher, prompt)
        self.longest = max((len(ids) for ids in self.prompt_ids.values()), default=1)

    def samples(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Every completion of these prompts, prompt by prompt."""
        return [sample for prompt in prompts if prompt.id in self.prompt_ids for sample in self._of(prompt)]

    def skipped(self, prompts: Sequence[Prompt]) -> list[Skipped]:
        """Those of these prompts that give no completion, and why."""
        return [
            Skipped(prompt_id=prompt.id, reason=self.problems[prompt.id])
            for prompt in prompts
            if prompt.id in self.problems
        ]

    def _encode(self, teacher: Teacher, prompt: Prompt) -> None:
        room = teacher.context - self.traces.max_tokens
        if room < 1:
            raise ValueError(
                f"traces.max_tokens: got {self.traces.max_tokens}, expected less than the {teacher.context} tokens of "
                "the target's context, which hold the prompt too"
            )
        try:
            ids = encode_prompt(teacher.tokenizer, prompt.messages, self.traces.thinking)
        except TemplateError as error:
            self.problems[prompt.id] = f"the chat template refuses it: {error}"
            return
        if len(ids) > room:
            self.problems[prompt.id] = f"{len(ids)} prompt tokens, expected at most {room}: the context less max_tokens"
        else:
            self.prompt_ids[prompt.id] = ids

    def _of(self, prompt: Prompt) -> Iterator[Sample]:
        """Completions by temperature; a greedy one only once, as all would be the same."""
        for temperature in self.traces.temperatures:
            for index in range(self.traces.completions_per_prompt if temperature > 0 else 1):
                yield Sample(
                    prompt=prompt,
                    prompt_ids=self.prompt_ids[prompt.id],
                    completion=index,
                    temperature=temperature,
                    top_p=self.traces.top_p,
                    max_tokens=self.traces.max_tokens,
                    seed=stable_seed(self.traces.seed, prompt.id, index, temperature),
                )


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What all records of a run have in common."""

    teacher: Teacher
    backend: str
    thinking: bool | None


def make_record(sample: Sample, made: Completion, labels: Labels) -> TraceRecord:
    """The record of a sample that a backend has made."""
    logprobs = made.logprobs
    assert logprobs is not None, "traces are made with log-probabilities"
    prompt = sample.prompt
    return TraceRecord(
        prompt_id=prompt.id,
        source=prompt.source,
        messages=json.dumps(prompt.messages, ensure_ascii=False),
        reference=prompt.reference,
        verifier=None if prompt.verifier is None else json.dumps(prompt.verifier, ensure_ascii=False),
        prompt_ids=np.asarray(sample.prompt_ids, dtype=np.int32),
        completion=sample.completion,
        completion_ids=np.asarray(made.token_ids, dtype=np.int32),
        token_logprob=logprobs.token_logprob,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
        tail_mass=logprobs.tail_mass,
        finish_reason=made.finish_reason,
        temperature=sample.temperature,
        top_p=sample.top_p,
        max_tokens=sample.max_tokens,
        seed=sample.seed,
        teacher=labels.teacher.name,
        teacher_revision=labels.teacher.revision,
        backend=labels.backend,
        thinking=labels.thinking,
    )
