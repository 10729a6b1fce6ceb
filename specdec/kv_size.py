"""How much a token takes in a KV cache, by a model's config. Plain Python: tools ask before torch is there."""

from typing import Any


def kv_numbers(config: Any) -> int:
    """Keys and values of one token in all layers, as numbers. config: transformers' (a text model's). One that names no
    key heads has as many as query heads; one that names no size of a head divides the hidden size among those."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size)
