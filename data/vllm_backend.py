"""Completions made by vLLM's offline engine, with raw log-probabilities, and always without speculation.

There is no setting for speculation here: on a CPU build its rejection sampler breaks the law of sampled text, and
traces need nothing that it would give. T is a completion's length, N the number of top entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.samples import Sample
from pipeline.config import Config
from specdec import Completion, TokenLogprobs
from specdec.kv_size import kv_numbers

CPU_BLOCK = 128  # tokens a cache block of the CPU build holds

# What vLLM reads from the environment when it is imported; a site's own values win.
PROCESS_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: killed with it, started in a third of the time
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers side by side would be bound to the same cores
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmBackend:
    """The model folder in one engine: rows of `capacity` tokens, `batch` of them at once."""

    def __init__(self, config: Config, folder: Path, model_config: Any, stop_ids: Sequence[int], capacity: int) -> None:
        for name, value in PROCESS_SETTINGS.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm.platforms import current_platform

        self.vllm, self.stop_ids, self.top = vllm, list(stop_ids), config.traces.top_logprobs
        self.name = f"vllm {vllm.__version__}"
        options = engine_options(config, capacity)
        if current_platform.is_cpu():
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": cpu_cache_bytes(config, model_config, capacity)}
        self.llm = vllm.LLM(str(folder), **options)
        self.engine = self.llm.llm_engine
        self.count = 0

    def complete(self, samples: Sequence[Sample], check_stop: Callable[[], None]) -> list[Completion]:
        """Completions in the order of `samples`; `check_stop` may raise between steps."""
        assert not self.engine.has_unfinished_requests(), "a shard starts with an empty engine"
        names = [self._submit(sample) for sample in samples]
        done: dict[str, Completion] = {}
        while self.engine.has_unfinished_requests():
            check_stop()
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = to_completion(output.outputs[0], self.top)
        return [done[name] for name in names]

    def _submit(self, sample: Sample) -> str:
        self.count += 1
        name = str(self.count)
        self.engine.add_request(name, {"prompt_token_ids": list(sample.prompt_ids)}, self.params(sample))
        return name

    def params(self, sample: Sample) -> Any:
        """vLLM's sampling parameters of a sample."""
        from vllm.sampling_params import RequestOutputKind

        return self.vllm.SamplingParams(
            temperature=sample.temperature,
            top_p=sample.top_p,
            max_tokens=sample.max_tokens,
            seed=sample.seed,
            stop_token_ids=self.stop_ids,
            logprobs=self.top,
            flat_logprobs=True,  # a Python object a token and entry would cost more than the forward
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def engine_options(config: Config, capacity: int) -> dict[str, Any]:
    """The arguments of vllm.LLM that decide what is computed. Prefix caching is off: a completion would depend, by
    rounding, on the shards before it."""
    return {
        "dtype": config.models.dtype,
        "seed": config.traces.seed,
        "max_model_len": capacity,
        "max_num_seqs": config.traces.batch,
        "tensor_parallel_size": config.traces.tensor_parallel,
        "enable_prefix_caching": False,
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": config.traces.top_logprobs,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }


def cpu_cache_bytes(config: Config, model_config: Any, capacity: int) -> int:
    """Keys and values of `batch` full rows in whole blocks, and one block to spare for each; by default vLLM would
    take half of the machine's memory."""
    tokens = config.traces.batch * CPU_BLOCK * (-(-capacity // CPU_BLOCK) + 1)
    return tokens * kv_numbers(model_config.get_text_config()) * (8 if config.models.dtype == "float64" else 4)


def to_completion(output: Any, top: int) -> Completion:
    """A finished vLLM output as our engine would report it: the stop id is its last token.

    vLLM gives 1 + N log-probabilities a token, the sampled token's first; the tail is what they leave of one.
    """
    token_ids = list(output.token_ids)
    flat = output.logprobs
    ids_Tn = np.asarray(flat.token_ids, dtype=np.int32).reshape(len(token_ids), 1 + top)
    logprobs_Tn = np.asarray(flat.logprobs, dtype=np.float64).reshape(len(token_ids), 1 + top)
    assert ids_Tn[:, 0].tolist() == token_ids, "vLLM puts the sampled token first"
    top_TN = logprobs_Tn[:, 1:]
    logprobs = TokenLogprobs(
        token_logprob=logprobs_Tn[:, 0].astype(np.float32),
        top_ids=ids_Tn[:, 1:],
        top_logprobs=top_TN.astype(np.float32),
        tail_mass=np.clip(1.0 - np.exp(top_TN).sum(1), 0.0, 1.0).astype(np.float32),
    )
    reason = output.finish_reason if output.finish_reason in ("stop", "length") else "error"
    error = None if reason != "error" else f"vLLM ended it with {output.finish_reason!r}"
    return Completion(id=None, token_ids=token_ids, finish_reason=reason, error=error, logprobs=logprobs)
