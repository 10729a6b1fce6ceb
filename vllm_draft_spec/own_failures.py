"""Rows of the own draft whose logits were not finite: the host learns of them without waiting for the device.

No draft of such a row counts from there on (specdec), so that the text is the target's. What the row's cache holds may
be the cause: it is cleared and the draft reads the text again, once. A row in which that does not help is left alone.
Which rows it was comes by a copy that is looked at in a later step; as long as the cause is there every step shows it,
so that not every step needs a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from vllm_draft_spec.own_rows import Row

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
EVERY = 8  # steps with drafts from one look to the next


class Failures:
    """`note` after a step with drafts, `found` before the next one. met: whether there was ever one."""

    def __init__(self) -> None:
        self.met = False
        self._steps = 0
        self._names: Sequence[str] = ()
        self._bad_B = torch.empty(0, dtype=torch.bool)
        self._copied: torch.cuda.Event | None = None

    def note(self, rows: Sequence[Row], bad_B: torch.Tensor) -> None:
        """bad_B: of these rows, bool [B] on the device."""
        self._steps += 1
        if self._names or self._steps % EVERY:
            return
        self._names = [row.name for row in rows]
        if bad_B.device.type != "cuda":
            self._bad_B = bad_B.clone()
            return
        self._bad_B = torch.empty(len(bad_B), dtype=torch.bool, pin_memory=True).copy_(bad_B, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def found(self) -> set[str]:
        """The names of rows that failed when they were looked at last; none while that is not known yet."""
        if self._copied is not None and not self._copied.query():
            return set()
        failed = {name for name, bad in zip(self._names, self._bad_B.tolist(), strict=True) if bad}
        self._names, self._copied, self._bad_B = (), None, self._bad_B[:0]
        if failed and not self.met:
            self.met = True
            logger.warning("the draft gave NaN or infinite logits; it reads such a text again once, then is left out")
        return failed
