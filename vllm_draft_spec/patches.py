"""Faults of vLLM that change the output's law, and their fixes. Each is looked for when the plugin starts, and fixed
only where it shows; docs/vllm.md has the list with versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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


FIXES = (
    Fix(
        what="per-request temperature, top-k and top-p do not reach the draft tokens on a CPU",
        anchor=Anchor(module=SAMPLER, name="expand_batch_to_tokens", parameters=("x", "cu_num_tokens", "num_tokens")),
        shows=expand_shows,
        fixed=expanding,
    ),
    Fix(
        what="top-k without top-p fails in a step without drafts",
        anchor=Anchor(module=TOP_K, name="apply_top_k_only", parameters=("logits", "k")),
        shows=top_k_shows,
        fixed=no_rows,
    ),
)
ANCHORS = tuple(fix.anchor for fix in FIXES)


def repair(device: torch.device) -> list[str]:
    """Look for each fault and fix it where it shows; the fixes made now. For a process whose runner is on `device`:
    vLLM's CPU kernels are in place only once its worker has started, and without them nothing can be run."""
    made = []
    for fix in FIXES if device.type == "cpu" else ():
        original = fix.anchor.value()
        if fix.shows(original):
            fix.anchor.replace(fix.fixed(original))
            logger.warning("vLLM's fault fixed: %s", fix.what)
            made.append(fix.what)
    return made
