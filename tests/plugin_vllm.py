"""Real vLLM on a CPU with the plugin, for tests: tiny models, engines in this process, a scheduler whose k moves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from bench.tiny_models import tiny_model

ENVIRONMENT = {
    "SPECDEC_PLUGIN": "1",
    "VLLM_PLUGINS": "none-but-this",  # `installed` calls the plugin itself, whether pip installed it or not
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
BLOCK = 32  # the smallest block of vLLM's CPU attention
K_MAX = 4


@contextmanager
def installed() -> Iterator[None]:
    """The plugin in this process's vLLM; afterwards vLLM is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import vllm_draft_spec
        from vllm_draft_spec import install

        anchors = [anchor for part in install.parts() for anchor in part.ANCHORS]
        before = [(anchor, anchor.value()) for anchor in anchors]
        vllm_draft_spec.register()
        assert install._state["done"]
        try:
            yield
        finally:
            for anchor, value in before:
                anchor.replace(value)
            install._state["done"] = False


def make_model(vocab: int, *, seed: int = 1, layers: int = 2, max_positions: int = 512) -> PreTrainedModel:
    """vLLM's CPU attention takes no heads smaller than 32."""
    import torch

    return tiny_model(
        vocab=vocab,
        layers=layers,
        hidden=64,
        head_dim=32,
        seed=seed,
        dtype=torch.float32,
        logit_std=2.0,
        max_positions=max_positions,
    )


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def make_engine(target: str, draft: str | None = None, **options: Any) -> Any:
    """An LLM without tokenizer: prompts and completions are ids. All engines of a process share vLLM's process groups,
    which the first one that goes takes with it: a test that makes an engine of its own comes after those that use their
    module's."""
    from vllm import LLM

    gc.collect()  # engines that nobody holds any more, before there are groups to take

    speculative = {"model": draft, "method": "draft_model", "num_speculative_tokens": K_MAX}
    speculative |= options.pop("speculative", {})
    defaults = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": BLOCK,
        "max_num_seqs": 16,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    return LLM(target, speculative_config=speculative if draft else None, **(defaults | options))


def scheduler(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def runner(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class Cycle:
    """A scheduler's `dynamic_sd_lookup` that gives these lengths step after step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self.steps = lengths, 0

    def __getitem__(self, rows: int) -> int:
        self.steps += 1
        return self._lengths[(self.steps - 1) % len(self._lengths)]


def set_lengths(engine: Any, lengths: Sequence[int]) -> None:
    scheduler(engine).dynamic_sd_lookup = Cycle(lengths)


def generate(engine: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    """vLLM's outputs, prompt after prompt."""
    return engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.token_ids) for request in outputs for output in request.outputs]


@dataclass
class Counted:
    """What a scheduler did: rounds as (request, tokens out before it, drafts, accepted), and requests put back."""

    rounds: list[tuple[str, int, int, int]] = field(default_factory=list)
    preempted: int = 0

    @property
    def drafted(self) -> int:
        return sum(round[2] for round in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(round[3] for round in self.rounds)


@contextmanager
def counted(engine: Any) -> Iterator[Counted]:
    """Counted in the scheduler: vLLM's metrics are one set a process, and its newest engine's."""
    counts, owner = Counted(), scheduler(engine)

    def stats(original: Any) -> Any:
        def make_spec_decoding_stats(known: Any, **facts: Any) -> Any:
            before = owner.requests[facts["request_id"]].num_output_tokens
            one = (facts["request_id"], before, facts["num_draft_tokens"], facts["num_accepted_tokens"])
            counts.rounds.append(one)
            return original(known, **facts)

        return make_spec_decoding_stats

    def preempt(original: Any) -> Any:
        def preempt_request(*args: Any, **kwargs: Any) -> Any:
            counts.preempted += 1
            return original(*args, **kwargs)

        return preempt_request

    with swapped(owner, "make_spec_decoding_stats", stats), swapped(owner, "_preempt_request", preempt):
        yield counts


@contextmanager
def swapped(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`holder.name` replaced by make(what was there)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, make(getattr(holder, name)))
        yield
