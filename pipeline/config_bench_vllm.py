"""The config section of stage 05: what vLLM serves, with which speculation, under which loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.fields import count, name, positive, temperature
from pipeline.prompt_sets import PromptSource, check_prompts, not_empty
from pipeline.schema import setting

BASELINE = "none"


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """One way to serve the target, a row of the results.

    `speculative_config` is vLLM's --speculative-config, passed on as it is but for texts such as $DRAFT that stand for
    folders (bench/serving_drafts.py lists them). `plugin`: serve with our plugin switched on and these settings of it
    ({}: its defaults). `env` and `arguments` go to `vllm serve` of this method.
    """

    name: str = name()
    speculative_config: dict[str, Any] | None = None
    plugin: dict[str, Any] | None = None
    env: dict[str, Any] | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name == BASELINE and (self.speculative_config or self.plugin is not None):
            raise ValueError(f"methods: got {BASELINE!r} with speculation, expected another name for it")


@dataclass(frozen=True, kw_only=True)
class SloConfig:
    """What a request must meet to count as good, in milliseconds: time to its first token, time for each other one."""

    name: str = name(default="chat")
    ttft_ms: float = positive(default=2000.0)
    tpot_ms: float = positive(default=100.0)


@dataclass(frozen=True, kw_only=True)
class BenchVllmConfig:
    """Stage 05: every method under every load.

    A load is closed (`concurrencies`: so many requests are always under way) or open: Poisson arrivals at
    `rate_shares` of the request rate that the method "none" reached under its best closed load in this run. It has
    `requests` requests, and at least `requests_per_slot` for each of a closed load's. `tensor_parallel`: GPUs that one
    server spreads over. `arguments` go to every `vllm serve`. `price_per_hour` is an assumption: US dollars for one
    GPU, or for the whole machine where there is none. `check_tokens`: length of the 16 greedy texts that every
    method is compared with "none" on.
    """

    prompts: tuple[PromptSource, ...]
    methods: tuple[MethodConfig, ...] = (MethodConfig(name=BASELINE),)
    concurrencies: tuple[int, ...] = count(default=(1, 4))
    rate_shares: tuple[float, ...] = positive(default=())
    requests: int = count(default=32)
    requests_per_slot: int = count(default=4)
    max_tokens: int = count(2, default=128)
    check_tokens: int = count(2, default=32)
    temperature: float = temperature(default=0.0)
    seed: int = count(0, default=0)
    max_model_len: int = count(default=2048)
    tensor_parallel: int = count(default=1)
    slo: SloConfig = SloConfig()
    price_per_hour: float = setting("a number of at least 0", lambda value: value >= 0, default=2.0)
    start_minutes: int = count(default=30)
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_prompts(self.prompts)
        not_empty(concurrencies=self.concurrencies)
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names) or names[:1] != [BASELINE]:
            raise ValueError(f"methods: got the names {names}, expected {BASELINE!r} first, and each once")
