"""An example of vLLM's method "custom_class": drafts the tokens that followed the last two when they last occurred."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MATCH = 2


class RepeatProposer:
    """What vLLM expects of a class named in speculative_config: this constructor, load_model and propose."""

    def __init__(self, vllm_config: Any) -> None:
        self.length = int(vllm_config.speculative_config.num_speculative_tokens)
        self.limit = int(vllm_config.model_config.max_model_len)

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """For each of B requests up to `length` tokens. The arrays hold, [B] and [B, limit], each request's tokens so
        far; a request that sampled nothing in this step is still in its prompt."""
        return [
            self._continuation(token_ids_cpu[row, : num_tokens_no_spec[row]]) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _continuation(self, ids_T: NDArray[np.int32]) -> list[int]:
        room = min(self.length, self.limit - len(ids_T) - 1)
        if len(ids_T) <= MATCH or room <= 0:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(ids_T[:-1], MATCH)
        found = np.flatnonzero((windows == ids_T[-MATCH:]).all(1))
        if not len(found):
            return []
        after = int(found[-1]) + MATCH
        return [int(token) for token in ids_T[after : after + room]]
