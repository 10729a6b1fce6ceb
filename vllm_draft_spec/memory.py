"""The memory that the own draft takes, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.kv_size import kv_numbers
from vllm_draft_spec.own_rows import MISSED_AFTER_DRAFTS
from vllm_draft_spec.settings import SECTION, Settings

GIB = 2**30
WINDOW_CHUNK = 128  # most tokens a row that a draft with a window reads in one forward: each is a slot in every row


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What the own draft's rows take: `num_rows` of `slots` tokens, `kv_bytes` each, and the texts of up to
    `max_tokens` tokens."""

    num_rows: int
    slots: int
    max_tokens: int
    kv_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_rows * ((self.slots + 1) * self.kv_bytes + (self.max_tokens + 2) * 8)


def cache_size(settings: Settings, draft_config: Any, *, itemsize: int, num_rows: int, max_tokens: int) -> CacheSize:
    """draft_config: transformers' (a text model's). itemsize: bytes of a number in the cache."""
    window = settings.window
    slots = window + settings.sinks + window_margin(settings.k_max) if window else max_tokens
    kv_bytes = kv_numbers(draft_config) * itemsize
    return CacheSize(num_rows=num_rows, slots=slots, max_tokens=max_tokens, kv_bytes=kv_bytes)


def window_margin(k_max: int) -> int:
    """How much longer than the window its ring is: a chunk, drafts that were rolled back, and what `Row.missed` may be
    too large by."""
    return WINDOW_CHUNK + k_max + MISSED_AFTER_DRAFTS


def check_room(size: CacheSize, room: int) -> None:
    """ValueError where the cache does not fit into `room` bytes."""
    if size.nbytes > room:
        raise ValueError(
            f"the own draft's cache takes {size.nbytes / GIB:.2f} GiB ({size.num_rows} rows of {size.slots} tokens), "
            f"there are {room / GIB:.2f}: lower max_num_seqs ({size.num_rows}) or max_model_len ({size.max_tokens}), "
            f"or set {SECTION}.window, the number of latest tokens that the draft attends to"
        )
