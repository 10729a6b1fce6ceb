"""Where the Triton kernels of a round can be used."""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch


@lru_cache
def round_kernels(device: torch.device) -> Any:
    """The functions of specdec.fast_round and fast_steps for tensors on this device; None where it is no GPU or triton
    is not installed: torch's operations then give the same, in more launches."""
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


def compiles_for(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        from specdec.fast_kernels import INTERPRETED
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return False
    return not INTERPRETED
