"""Attention over a ragged cache, plugged into unmodified transformers decoders.

transformers looks the function up by name (`AttentionInterface`); the forward's `ragged=plan` argument reaches it
as a keyword. Masks come from the plan, so the model builds none.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specdec.kvcache import Plan

NAME = "specdec_ragged"


def ragged_attention(
    module: torch.nn.Module,
    query_BHqD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged: Plan | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls: returns ([B, q, H, D], None)."""
    assert ragged is not None, "this attention needs the engine's plan (ragged=...)"
    scale = query_BHqD.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_live(
        query_BHqD, key_BGSD, value_BGSD, ragged, scale=scale, window=sliding_window, softcap=softcap
    ), None


def attend_live(
    query_BHqD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    plan: Plan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of q new tokens a row to the row's live cache [B, q, H, D]; G key heads, H = G * repeat query
    heads."""
    B, H, q, D = query_BHqD.shape
    num_kv_heads = key_BGSD.shape[1]
    repeat = H // num_kv_heads
    # Query heads that share a key head become extra query rows: one product a key head, no repeated keys.
    query_BGrD = query_BHqD.reshape(B, num_kv_heads, repeat * q, D)
    mask = plan.mask(window, repeat, query_BHqD.dtype)
    if softcap is None:
        out_BGrD = scaled_dot_product_attention(query_BGrD, key_BGSD, value_BGSD, mask, scale=scale)
    else:
        out_BGrD = _softcapped(query_BGrD, key_BGSD, value_BGSD, mask, scale, softcap)
    return out_BGrD.reshape(B, H, q, value_BGSD.shape[-1]).transpose(1, 2).contiguous()


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """softmax(cap * tanh(scores / cap)) V, Gemma 2 (arXiv 2408.00118), section 2."""
    scores = query @ key.transpose(-1, -2) * scale
    scores = (scores / softcap).tanh() * softcap + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(value.dtype) @ value


AttentionInterface.register(NAME, ragged_attention)
