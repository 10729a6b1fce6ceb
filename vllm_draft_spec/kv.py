"""How many tokens of the KV cache the draft takes."""

from __future__ import annotations

from typing import Any

HAS_KV = ("draft_model", "eagle", "eagle3", "mtp")


def draft_kv_tokens(kv_cache_config: Any, vllm_config: Any) -> int:
    """Tokens by which the cache would be larger without the draft, whose layers share each block's memory."""
    config, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if config.method not in HAS_KV or not groups:
        return 0
    held = kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size // len(groups)
    target, draft = (
        numbers_a_token(model, parallel) for model in (vllm_config.model_config, config.draft_model_config)
    )
    return round(held * draft / target)


def numbers_a_token(model_config: Any, parallel_config: Any) -> int:
    """Keys and values that a token takes in a model of vLLM, as numbers."""
    layers, heads = model_config.get_num_layers(parallel_config), model_config.get_num_kv_heads(parallel_config)
    return 2 * layers * heads * model_config.get_head_size()
