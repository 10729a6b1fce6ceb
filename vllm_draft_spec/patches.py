"""Faults of vLLM that change the output's law, and their fixes. Each is looked for when the plugin starts, and fixed
only where it shows; docs/vllm.md has the list with versions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm_draft_spec.laws import certain
from vllm_draft_spec.versions import Anchor

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
SAMPLER = "vllm.v1.sample.rejection_sampler"
TOP_K = "vllm.v1.sample.ops.topk_topp_sampler"


@dataclass(frozen=True, kw_only=True)
class Fix:
    """`shows` runs the function at `anchor` and says whether the fault is there; `fixed` takes its place."""

    what: str
    anchor: Anchor
    shows: Callable[[Callable[..., Any]], bool]
    fixed: Callable[[Callable[..., Any]], Callable[..., Any]]


def expand_shows(expand: Callable[..., torch.Tensor]) -> bool:
    """Row values must come out once a token. On a CPU they came out as whatever the memory held."""
    for first in (0.25, 1.5, 3.75):
        values = torch.tensor([first, first + 1])
        expected = torch.tensor([first, first, first + 1])
        if not torch.equal(expand(values, torch.tensor([2, 3], dtype=torch.int32), 3), expected):
            return True
    return False


def expanding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        """x [B] repeated for each row's tokens, [N]; cu_num_tokens [B] are running sums."""
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return x.repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


def top_k_shows(apply: Callable[..., torch.Tensor]) -> bool:
    """No row at all is what a step without drafts gives it."""
    try:
        apply(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32))
    except (RuntimeError, IndexError):
        return True
    return False


def no_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(logits, k, *args, **kwargs) if len(logits) else logits

    return apply_top_k_only


def placeholder_shows(sample: Callable[..., torch.Tensor]) -> bool:
    """A draft of -1 must be rejected. On a CPU it was looked up before the row's start, and sometimes accepted."""
    # The entry before the second row is the first row's last: all of its mass, so that -1 is always accepted.
    logits = torch.tensor([[-30.0, 30.0], [30.0, -30.0]])
    greedy_free = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(2), generators={})
    drafts, ends = torch.tensor([1, -1], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    bonus = torch.zeros(2, 1, dtype=torch.int32)
    return bool(sample(drafts, [1, 1], 1, ends, None, logits, bonus, greedy_free)[1, 0] < 0)


def rejecting_placeholders(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """With a law of all zeros at a placeholder: there nothing is accepted, and what follows is the target's."""
        absent_N = draft_token_ids < 0
        if draft_token_ids.device.type == "cpu" and bool(absent_N.any()):
            if draft_probs is None:
                draft_probs = certain(draft_token_ids, target_logits.shape[-1])
            draft_probs = draft_probs.masked_fill(absent_N[:, None], 0.0)
            draft_token_ids = draft_token_ids.clamp(min=0)
        rest = (num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits)
        return original(draft_token_ids, *rest, *args, **kwargs)

    return rejection_sample


FIXES = (
    Fix(
        what="per-request temperature, top-k and top-p do not reach the draft tokens on a CPU",
        anchor=Anchor(module=SAMPLER, name="expand_batch_to_tokens", parameters=("x", "cu_num_tokens", "num_tokens")),
        shows=expand_shows,
        fixed=expanding,
    ),
    Fix(
        what="placeholders for drafts can be accepted on a CPU",
        anchor=Anchor(module=SAMPLER, name="rejection_sample", parameters=("draft_token_ids", "draft_probs")),
        shows=placeholder_shows,
        fixed=rejecting_placeholders,
    ),
    Fix(
        what="top-k without top-p fails in a step without drafts",
        anchor=Anchor(module=TOP_K, name="apply_top_k_only", parameters=("logits", "k")),
        shows=top_k_shows,
        fixed=no_rows,
    ),
)
ANCHORS = tuple(fix.anchor for fix in FIXES)
ORIGINALS: dict[str, Callable[..., Any]] = {}  # what vLLM had, by what was wrong with it


def repair(device: torch.device) -> None:
    """Look for each fault and fix it where it shows. For a process whose runner is on `device`: vLLM's CPU kernels
    are in place only once its worker has started, and without them nothing can be run."""
    for fix in FIXES if device.type == "cpu" else ():
        original = fix.anchor.value()
        if fix.shows(original):
            fix.anchor.replace(fix.fixed(original))
            ORIGINALS[fix.what] = original
            logger.info("vLLM's fault fixed: %s", fix.what)
