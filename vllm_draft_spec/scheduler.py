"""vLLM's scheduler with the draft length of each step chosen by specdec's controller.

vLLM asks `dynamic_sd_lookup[requests]` in every step for the number of drafts to make in it, and hands it to the worker
with the rest of the step. Here that is an object which asks the controller.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_draft_spec.kv import draft_kv_tokens
from vllm_draft_spec.metrics import with_report
from vllm_draft_spec.pilot import Pilot
from vllm_draft_spec.settings import OWN, SECTION, read_settings
from vllm_draft_spec.tally import Step
from vllm_draft_spec.timing import plain_k
from vllm_draft_spec.versions import Anchor

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")

MAKES_FEWER = ("draft_model", "eagle", "eagle3", "mtp", "ngram")  # the worker drafts as many as the step says
IS_CUT = ("custom_class", "suffix", "medusa", "ngram_gpu")  # it drafts as it likes; the scheduler takes the first k

SCHEDULER = "vllm.v1.core.sched.scheduler"
CHOICE = Anchor(module="vllm.config.scheduler", name="SchedulerConfig.get_scheduler_cls")
ANCHORS = (
    CHOICE,
    Anchor(
        module=SCHEDULER, name="Scheduler.update_from_output", parameters=("scheduler_output", "model_runner_output")
    ),
    Anchor(module=SCHEDULER, name="Scheduler.update_draft_token_ids", parameters=("draft_token_ids",)),
    Anchor(module=SCHEDULER, name="Scheduler._update_after_schedule", parameters=("scheduler_output",)),
    Anchor(module=SCHEDULER, name="Scheduler.make_stats"),
    Anchor(module="vllm.v1.core.sched.async_scheduler", name="AsyncScheduler"),
)


def install() -> None:
    """From now on vLLM's own scheduler classes are ours; one named by the user (scheduler_cls) stays."""
    CHOICE.wrap(get_scheduler_cls)


def get_scheduler_cls(original: Any, self: Any) -> type:
    chosen = original(self)
    if self.scheduler_cls is None:
        return adaptive_class(chosen)
    logger.warning("draft lengths stay as they are: scheduler_cls is %s", self.scheduler_cls)
    return chosen


class Lookup:
    """In place of vLLM's list from batch size to draft length."""

    def __init__(self, pilot: Pilot, always: int | None) -> None:
        self._pilot, self._always = pilot, always

    def __getitem__(self, batch: int) -> int:
        chosen = self._pilot.choose(batch)
        return chosen if self._always is None else self._always


STOCK: Any = object  # for the type checker: the class in front of which AdaptiveLength goes


class AdaptiveLength(STOCK):
    """Goes in front of vLLM's Scheduler or AsyncScheduler; without effect where `why_not` says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pilot: Pilot | None = None
        self._cut = False
        config = self.vllm_config.speculative_config
        if config is None:
            return
        settings = read_settings(self.vllm_config.additional_config, self.num_spec_tokens)
        reason = why_not(self.vllm_config)
        if reason is not None:
            logger.warning("draft lengths stay as they are (method %s): %s", config.method, reason)
            return
        lost = 0 if settings.draft == OWN else draft_kv_tokens(self.kv_cache_config, self.vllm_config)
        self._pilot = Pilot(
            settings.make_controller(),
            log_interval_s=settings.log_interval_s,
            draft_kv_tokens=lost,
        )
        self._cut = config.method in IS_CUT
        self.dynamic_sd_lookup = Lookup(self._pilot, self.num_spec_tokens if self._cut else None)
        logger.info(
            "method %s: draft length by controller %s, up to %d; the draft's KV takes %d tokens of the cache",
            config.method,
            settings.controller,
            settings.k_max,
            lost,
        )

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self._pilot is not None and not self._cut and not self._some_will_decode(scheduler_output):
            # Only parts of prompts: what is drafted now is thrown away, but the draft should read the prompt too.
            scheduler_output.num_spec_tokens_to_schedule = min(1, scheduler_output.num_spec_tokens_to_schedule)
        super()._update_after_schedule(scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if self._pilot is not None and self._cut:
            for row in draft_token_ids.draft_token_ids:
                del row[self._pilot.k :]
        super().update_draft_token_ids(draft_token_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._pilot is not None and scheduler_output.num_scheduled_tokens:
            drafts_next = self._pilot.k if self._cut else scheduler_output.num_spec_tokens_to_schedule
            self._pilot.observe(self._step(scheduler_output, model_runner_output, drafts_next))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._pilot is not None and not self.has_requests():
            self._pilot.rest()
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        return stats if stats is None or self._pilot is None else with_report(stats, self._pilot.report())

    def _some_will_decode(self, scheduler_output: Any) -> bool:
        return any(
            request.num_computed_tokens + tokens >= request.num_tokens + request.num_output_placeholders
            for request, tokens in self._scheduled(scheduler_output)
        )

    def _scheduled(self, scheduler_output: Any) -> list[tuple[Any, int]]:
        return [(self.requests[name], tokens) for name, tokens in scheduler_output.num_scheduled_tokens.items()]

    def _step(self, scheduler_output: Any, model_runner_output: Any, next_k: int) -> Step:
        """What the step did; requests that ended while it ran are left out, as vLLM leaves them out."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        tokens_by_row, places = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        rows, prefill, prompt_tokens = [], 0, 0
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request, drafted = self.requests.get(name), len(drafts.get(name, ()))
            sampled = tokens_by_row[places[name]] if tokens_by_row else ()
            # A prompt may have one token in this step: the rest is cached, or was read before.
            is_first = request is not None and request.num_output_tokens == 0
            is_prompt = tokens > 1 + drafted or not sampled or is_first
            prompt_tokens += tokens if is_prompt else 0
            if request is None or request.is_finished() or not sampled:
                continue
            if is_prompt:
                prefill += 1
            else:
                rows.append((drafted - invalid.get(name, 0), len(sampled) - 1))
        return Step(
            names=frozenset(scheduler_output.num_scheduled_tokens),
            prompt_tokens=prompt_tokens,
            rows=tuple(rows),
            prefill=prefill,
            plain_k=plain_k(scheduler_output),
            next_k=next_k,
            times=getattr(model_runner_output, "specdec_times", None),
        )


def why_not(vllm_config: Any) -> str | None:
    """Why the draft length cannot be chosen in this configuration, or None."""
    config, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if config.method not in (*MAKES_FEWER, *IS_CUT):
        return "this method drafts a fixed number of tokens"
    if config.method in IS_CUT and vllm_config.scheduler_config.async_scheduling:
        return "with asynchronous scheduling its drafts do not pass the scheduler; use --no-async-scheduling"
    if config.num_speculative_tokens_per_batch_size:
        return f"num_speculative_tokens_per_batch_size sets them; leave it out to use {SECTION}"
    if getattr(vllm_config, "use_v2_model_runner", False):
        return "model runner V2 drafts all of them whatever is asked; set VLLM_USE_V2_MODEL_RUNNER=0"
    if parallel.data_parallel_size > 1:
        return "data parallel engines must all draft alike"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallel stages hold several steps at once"
    return None


def adaptive_class(stock: type) -> type:
    """`stock`, vLLM's Scheduler or AsyncScheduler, with AdaptiveLength in front."""
    return type(f"Adaptive{stock.__name__}", (AdaptiveLength, stock), {"__module__": __name__})
