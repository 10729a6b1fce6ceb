"""Attention of packed documents that computes no other document's scores, by the flash kernels that torch brings.

transformers' sdpa builds a mask of whole sequences, with which torch neither skips other documents nor what lies behind
a token, nor takes its flash kernel. Here the kernel is told where documents end. On a CPU, and in float32, the same is
computed with a mask. Shapes: S sequences of L tokens, H query heads, G key heads, D head dimension, E documents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "varlen"
_HALF = (torch.bfloat16, torch.float16)


def varlen_attention(
    module: torch.nn.Module,
    query_SHLD: Tensor,
    key_SGLD: Tensor,
    value_SGLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ends_E: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls: ([S, L, H, D], None). ends_E: int32 [E + 1], where documents end in the S * L tokens
    laid side by side, 0 first; no document goes from one sequence into the next.

    ValueError for an attention with a feature that is not computed here.
    """
    assert ends_E is not None, "this attention needs the documents' ends (ends_E=...)"
    if softcap is not None or sliding_window is not None or dropout:
        raise ValueError(
            f"train.recipe.attention: {NAME} computes plain causal attention, and {type(module).__name__} has "
            f"softcap={softcap}, sliding_window={sliding_window}, dropout={dropout}; use sdpa"
        )
    scale = query_SHLD.shape[-1] ** -0.5 if scaling is None else scaling
    if value_SGLD.is_cuda and value_SGLD.dtype in _HALF:
        return _by_kernel(query_SHLD, key_SGLD, value_SGLD, ends_E, scale), None
    mask_S1LL = same_document(ends_E, query_SHLD.shape[0], query_SHLD.shape[2])
    out_SHLD = scaled_dot_product_attention(
        query_SHLD, key_SGLD, value_SGLD, mask_S1LL, scale=scale, enable_gqa=key_SGLD.shape[1] != query_SHLD.shape[1]
    )
    return out_SHLD.transpose(1, 2).contiguous(), None


def _by_kernel(query_SHLD: Tensor, key_SGLD: Tensor, value_SGLD: Tensor, ends_E: Tensor, scale: float) -> Tensor:
    S, _, L, _ = query_SHLD.shape
    # Norms with float32 weights leave float32 queries and keys beside the values of a product in bfloat16
    flat = [x.transpose(1, 2).flatten(0, 1).to(value_SGLD.dtype) for x in (query_SHLD, key_SGLD, value_SGLD)]
    # torch.nn.attention.varlen calls the same operation, by a signature that changes from release to release
    out_THD = torch.ops.aten._flash_attention_forward(*flat, ends_E, ends_E, L, L, 0.0, True, False, scale=scale)[0]
    return out_THD.unflatten(0, (S, L))


def same_document(ends_E: Tensor, num_sequences: int, length: int) -> Tensor:
    """bool [S, 1, L, L]: the column's token is of the row's document, and not behind it."""
    place_T = torch.arange(num_sequences * length, device=ends_E.device, dtype=ends_E.dtype)
    document_SL = torch.searchsorted(ends_E, place_T, right=True).view(num_sequences, length)
    same_SLL = document_SL.unsqueeze(2) == document_SL.unsqueeze(1)
    return same_SLL.tril().unsqueeze(1)


AttentionInterface.register(NAME, varlen_attention)
