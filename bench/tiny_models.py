"""Tiny random Hugging Face decoders, deterministic by seed, whose laws are worth testing.

A freshly initialised model is nearly flat and nearly ignores its context, so a wrong cache or a wrong filter
would hardly move its output. Here weights are drawn so that the logits have a standard deviation of
`logit_std`, attention is peaked, and its output outweighs the residual stream: one token more or less in the
cache changes the law visibly. Soft caps and sliding windows are small enough to bite.
"""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("qwen3", "qwen2", "llama", "gemma2", "gemma3")
_SLIDING_WINDOW = 4


def tiny_config(
    family: str,
    *,
    vocab: int = 8,
    layers: int = 1,
    hidden: int = 16,
    tied: bool = False,
    max_positions: int = 512,
    head_dim: int = 8,
) -> PreTrainedConfig:
    """A config of `family` with two query heads per KV head, and eager attention. Raises ValueError on an unknown
    family."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}, expected one of {', '.join(FAMILIES)}")
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": hidden // (2 * head_dim),
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen2":
        del shape["head_dim"]
    mixed = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    gemma = {"sliding_window": _SLIDING_WINDOW, "layer_types": mixed, "query_pre_attn_scalar": 8}
    match family:
        case "qwen3":
            return Qwen3Config(**shape)
        case "qwen2":
            return Qwen2Config(**shape)
        case "llama":
            return LlamaConfig(**shape)
        case "gemma2":
            return Gemma2Config(**shape, **gemma, attn_logit_softcapping=2.0, final_logit_softcapping=4.0)
        case _:
            return Gemma3TextConfig(**shape, **gemma)


def tiny_model(
    family: str = "qwen3",
    *,
    vocab: int = 8,
    layers: int = 1,
    hidden: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    logit_std: float = 1.5,
    tied: bool = False,
    max_positions: int = 512,
    head_dim: int = 8,
) -> PreTrainedModel:
    """A random model in eval mode. The same arguments give the same weights.

    `logit_std` is the spread of the raw logits: 1.5 with 8 tokens gives a largest probability of about one
    half.
    """
    config = tiny_config(
        family, vocab=vocab, layers=layers, hidden=hidden, tied=tied, max_positions=max_positions, head_dim=head_dim
    )
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(_shaped(name, noise, family=family, tied=tied, logit_std=logit_std))
    return model.requires_grad_(False)


def noisy_copy(model: PreTrainedModel, *, noise: float, seed: int) -> PreTrainedModel:
    """A draft that resembles `model`: every weight matrix plus `noise` times its own standard deviation of
    Gaussian noise.

    noise = 0 is an equal model. The copy shares neither weights nor config with the original.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim == 2:
                step = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * weight.double().std()
                weight.add_((noise * step).to(weight.dtype))
    return draft


def _shaped(name: str, noise: torch.Tensor, *, family: str, tied: bool, logit_std: float) -> torch.Tensor:
    """Standard normal `noise` turned into the parameter `name`."""
    if noise.ndim == 1:
        centre = (
            1.0 if "norm" in name and not family.startswith("gemma") else 0.0
        )  # Gemma's norms multiply by 1 + weight
        peaked = 1.0 if "q_norm" in name else 0.0
        return centre + peaked + 0.2 * noise
    fan_in = noise.shape[1]
    if "embed_tokens" in name:
        return noise * (logit_std / fan_in**0.5 if tied else 1.0)
    gain = (
        logit_std if "lm_head" in name else 1.6 if any(part in name for part in ("q_proj", "k_proj", "o_proj")) else 1.0
    )
    return noise * gain / fan_in**0.5
