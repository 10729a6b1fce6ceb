"""vLLM's real scheduler, driven without a model: a stand-in for the worker accepts drafts by a known rate and says how
long each round took on a clock of its own, so that speeds are exact and the same on every machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline import tiny
from vllm_draft_spec.timing import plain_k

PROMPT_TOKENS, BLOCK = 8, 16


@dataclass
class Worker:
    """alpha: chance that a draft is accepted once those before it were, by the tokens decoded so far. Which tokens of a
    row are easy does not depend on the draft length, so lengths are compared on the same luck. Seconds: `step_s` a
    target step, `token_s` more for each token in it, `draft_s` a draft step, `between_s` the rest."""

    alpha: Callable[[float], float]
    step_s: float = 10e-3
    token_s: float = 0.1e-3
    draft_s: float = 1e-3
    between_s: float = 0.5e-3
    tells: bool = True  # its times
    now: float = 0.0
    decoded: int = 0
    coins: Any = field(default_factory=lambda: np.random.default_rng(0).random(1 << 16))
    places: dict[str, int] = field(default_factory=dict)  # of each row's next token among the coins
    drafted: Any = None  # (rows, k) of the last step, if it can begin a timed round

    def run(self, output: Any, in_prompt: Callable[[str], bool]) -> Any:
        """The step's output; takes its time."""
        spec = output.scheduled_spec_decode_tokens
        names = list(output.num_scheduled_tokens)
        sampled = [[] if in_prompt(name) else self._tokens(name, len(spec.get(name, ()))) for name in names]
        self.decoded += sum(map(len, sampled))
        verify_s = self.step_s + self.token_s * output.total_num_scheduled_tokens
        k = output.num_spec_tokens_to_schedule
        self.now += verify_s + k * self.draft_s + self.between_s
        made = SimpleNamespace(req_ids=names, sampled_token_ids=sampled)
        k_now = plain_k(output)
        made.times = self._round(names, k_now, verify_s)
        self.drafted = (frozenset(names), k) if k_now is not None else None
        return made

    def _tokens(self, name: str, drafts: int) -> list[int]:
        place = self.places.setdefault(name, 9973 * len(self.places))
        alpha, accepted = self.alpha(self.decoded), 0
        while accepted < drafts and self.coins[(place + accepted) % len(self.coins)] < alpha:
            accepted += 1
        self.places[name] = place + accepted + 1
        return [7] * (accepted + 1)

    def _round(self, names: list[str], k: int | None, verify_s: float) -> Any:
        """The round that this step ends, where the plugin's worker would have timed it."""
        if k is None or self.drafted != (frozenset(names), k):
            return None
        return SimpleNamespace(draft_s=k * self.draft_s, verify_s=verify_s, batch=len(names), k=k, caught_up=0)


@dataclass
class Engine:
    """The loop of vLLM's engine: one step at a time, or (`ahead`) the next scheduled before the last has come back."""

    scheduler: Any
    worker: Worker
    ahead: bool = False
    lengths: list[int] = field(default_factory=list)  # drafts asked for in each step
    waiting: Any = field(default_factory=deque)

    def step(self) -> None:
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            if output.total_num_scheduled_tokens:
                self.lengths.append(output.num_spec_tokens_to_schedule)
                in_prompt = {name: scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
                self.waiting.append((output, self.worker.run(output, in_prompt.__getitem__)))
            if self.ahead and output.total_num_scheduled_tokens and len(self.waiting) < 2:
                return
        if self.waiting:
            self.finish(*self.waiting.popleft())

    def finish(self, output: Any, made: Any) -> None:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        result = ModelRunnerOutput(
            req_ids=made.req_ids,
            req_id_to_index={name: i for i, name in enumerate(made.req_ids)},
            sampled_token_ids=made.sampled_token_ids,
        )
        if self.worker.tells:
            result.specdec_times = made.times  # type: ignore[attr-defined]
        self.scheduler.update_from_output(output, result)
        if not self.ahead:
            k = output.num_spec_tokens_to_schedule
            self.scheduler.update_draft_token_ids(DraftTokenIds(made.req_ids, [[7] * k for _ in made.req_ids]))

    def add(self, name: str, tokens: int, prompt: int = PROMPT_TOKENS) -> None:
        """A request for so many tokens."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        seed = sum(map(ord, name))
        ids = [(seed * 31 + i * i) % 250 for i in range(prompt)]
        self.scheduler.add_request(
            Request(request_id=name, prompt_token_ids=ids, sampling_params=params, pooling_params=None)
        )

    def drain(self, most: int = 100_000) -> None:
        """Until no request is left."""
        while (self.scheduler.has_requests() or self.waiting) and most:
            self.step()
            most -= 1
        assert most, "requests were left over"

    def speed(self, rows: int, tokens: int) -> float:
        """Tokens a second of `rows` requests for `tokens` tokens each."""
        for row in range(rows):
            self.add(f"row{row}", tokens)
        self.drain()
        return rows * tokens / self.worker.now


def save_pair(folder: Path, noise: float = 0.01) -> tuple[str, str]:
    """Folders of a tiny target and of a draft that agrees with it often. Heads of 32: vLLM takes no smaller ones on a
    CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = tiny.byte_tokenizer()
    shape = tiny.tiny_config("qwen3", tokenizer)
    shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim = 2, 1, 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape)
        for name in ("target", "draft"):
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
            for weight in model.parameters():
                weight.data += noise * torch.randn_like(weight)
    return str(folder / "target"), str(folder / "draft")


def make_config(target: str, draft: str) -> Any:
    """vLLM's own configuration of a target with a draft of up to 6 tokens; steps of up to 1,024 tokens."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=target,
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 6},
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
    ).create_engine_config()


def make_scheduler(config: Any, clock: Callable[[], float], blocks: int = 4096) -> Any:
    """The scheduler that vLLM would make for this configuration with the plugin on."""
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_draft_spec.scheduler import adaptive_class

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = blocks
    scheduler = adaptive_class(AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    if scheduler._pilot is not None:
        scheduler._pilot._clock = clock
    return scheduler
