"""Where the Triton kernels of a round can be used."""

import logging
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger(__name__)


@lru_cache
def round_kernels(device: torch.device) -> Any:
    """The functions of specdec.fast_round and fast_steps for tensors on this device; None where it is no GPU, or Triton
    is not installed or does not work: torch's operations then give the same, in more launches."""
    if not compiles_for(device):
        return None
    from specdec import fast_round, fast_steps

    return SimpleNamespace(
        uniforms=fast_round.uniforms,
        place=fast_round.place,
        largest=fast_round.largest,
        begin_drafts=fast_steps.begin_drafts,
        next_draft=fast_steps.next_draft,
        note_draft=fast_steps.note_draft,
        verify_inputs=fast_steps.verify_inputs,
        commit=fast_steps.commit,
    )


@lru_cache
def compiles_for(device: torch.device) -> bool:
    """Whether Triton's kernels run there. It needs a C compiler too, which a cluster's nodes may lack."""
    if device.type != "cuda":
        return False
    try:
        from specdec import fast_kernels, fast_round
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return False
    if fast_kernels.INTERPRETED:
        return False
    try:
        zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.cuda.device_of(zero_1):
            fast_round.uniforms(zero_1, zero_1, zero_1.unsqueeze(1), 0)
    except Exception as error:  # of a compiler, its absence, or a GPU that Triton does not know
        logger.info("no Triton kernels on %s: %s: %s", device, type(error).__name__, error)
        return False
    return True
