"""Loading the own draft, and the memory that there is for it."""

from __future__ import annotations

from typing import Any

import torch


def room_on(device: torch.device, cache_config: Any) -> int:
    """Bytes that vLLM may still take there: of its share of a GPU, or of all that is free where its pool has a size of
    its own, which is then not the share's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        pool = cache_config.kv_cache_memory_bytes
        return int(free - (1 - cache_config.gpu_memory_utilization) * total if pool is None else free - pool)
    import psutil  # which vLLM needs

    return int(psutil.virtual_memory().available)


def load_drafter(vllm_config: Any, device: torch.device) -> Any:
    """specdec's ModelDrafter for the draft that vLLM's speculative config names. ValueError when it does not go with
    the target."""
    from transformers import AutoModelForCausalLM

    from specdec.drafter import ModelDrafter
    from specdec.loading import load_model_draft

    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    if vllm_config.load_config.load_format == "dummy":
        model = AutoModelForCausalLM.from_config(draft.hf_config, dtype=target.dtype)
        return ModelDrafter(model.to(device).eval())
    return load_model_draft(
        draft.model,
        target_size=target.get_vocab_size(),
        tokenizer=_target_tokenizer(target),
        dtype=target.dtype,
        device=device,
    )


def _target_tokenizer(model_config: Any) -> Any:
    from specdec.loading import tokenizer_of

    try:
        return tokenizer_of(model_config.tokenizer)
    except ValueError:
        return None
