"""The steps of a round that read and write its buffers, one Triton kernel each.

The reference is the torch code of specdec.graph_draft and specdec.round, whose results these give to the bit (see
specdec.fast_round). Shapes: B rows, of which the engine has more, K columns of the draft buffers of which a round uses
the first k, J = k + 1 verified positions, T columns of tokens, S stop ids.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.fast_kernels import early, let_next_start, wait_for_last
from specdec.report import REPORT_COLUMNS


@triton.jit
def _begin_drafts(
    tokens_ptr,
    lengths_ptr,
    fed_ptr,
    start_ptr,
    step_ptr,
    alive_ptr,
    bad_ptr,
    drafted_ptr,
    B,
    width,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.arange(0, ROWS)
    inside = row < B
    tl.store(step_ptr + row, 0, mask=row == 0)
    tl.store(alive_ptr + row, 1, mask=inside)
    tl.store(bad_ptr + row, 0, mask=inside)
    tl.store(drafted_ptr + row, 0, mask=inside)
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    tl.store(start_ptr + row, length - WINDOW, mask=inside)
    for i in tl.static_range(WINDOW):
        token = tl.load(tokens_ptr + row * width + tl.maximum(length - WINDOW + i, 0), mask=inside, other=0)
        tl.store(fed_ptr + row * WINDOW + i, token, mask=inside)


def begin_drafts(state: Any, buffers: Any, window: int) -> tuple[Tensor, Tensor]:
    """Set a round's DraftBuffers for no draft yet; the last `window` committed tokens of each row [B, window] and where
    they begin [B]."""
    lengths_B = state.lengths_B
    B = len(lengths_B)
    fed_BW = torch.empty(B, window, dtype=torch.int64, device=lengths_B.device)
    start_B = torch.empty_like(lengths_B)
    _begin_drafts[(1,)](
        state.tokens_BT,
        lengths_B,
        fed_BW,
        start_B,
        buffers.step_1,
        buffers.alive_B,
        buffers.bad_B,
        buffers.num_drafts_B,
        B,
        state.tokens_BT.stride(0),
        WINDOW=window,
        ROWS=triton.next_power_of_2(B),
        **early(lengths_B.device),
    )
    return fed_BW, start_B


@triton.jit
def _next_draft(drafts_ptr, step_ptr, lengths_ptr, fed_ptr, start_ptr, B, K, ROWS: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.arange(0, ROWS)
    inside = row < B
    step = tl.load(step_ptr)
    tl.store(fed_ptr + row, tl.load(drafts_ptr + row * K + step, mask=inside, other=0), mask=inside)
    tl.store(start_ptr + row, tl.load(lengths_ptr + row, mask=inside, other=0) + step, mask=inside)
    tl.debug_barrier()  # every thread has read the step
    tl.store(step_ptr, step + 1)


def next_draft(state: Any, buffers: Any) -> tuple[Tensor, Tensor]:
    """The token drawn last [B, 1] and its position [B]; the step moves on."""
    lengths_B = state.lengths_B
    B = len(lengths_B)
    fed_B1, start_B = torch.empty_like(lengths_B).unsqueeze(1), torch.empty_like(lengths_B)
    options = {"ROWS": triton.next_power_of_2(B), **early(lengths_B.device)}
    drafts_BK = buffers.drafts_BK
    _next_draft[(1,)](drafts_BK, buffers.step_1, lengths_B, fed_B1, start_B, B, drafts_BK.shape[1], **options)
    return fed_B1, start_B


@triton.jit
def _note_draft(
    drawn_ptr,
    drawn_bad_ptr,
    usable_ptr,
    step_ptr,
    lengths_ptr,
    drafts_ptr,
    alive_ptr,
    bad_ptr,
    drafted_ptr,
    B,
    K,
    max_positions,
    ALL_USABLE: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.arange(0, ROWS)
    inside = row < B
    step = tl.load(step_ptr)
    tl.store(drafts_ptr + row * K + step, tl.load(drawn_ptr + row, mask=inside, other=0), mask=inside)
    bad = tl.load(bad_ptr + row, mask=inside, other=0) | tl.load(drawn_bad_ptr + row, mask=inside, other=0)
    tl.store(bad_ptr + row, bad, mask=inside)
    alive = tl.load(alive_ptr + row, mask=inside, other=0) & (bad == 0)
    position = tl.load(lengths_ptr + row, mask=inside, other=0) + step
    alive = alive & (position < max_positions)
    if not ALL_USABLE:
        alive = alive & tl.load(usable_ptr + row, mask=inside, other=0)
    tl.store(alive_ptr + row, alive, mask=inside)
    drafted = tl.load(drafted_ptr + row, mask=inside, other=0)
    tl.store(drafted_ptr + row, drafted + alive.to(tl.int64), mask=inside)


def note_draft(
    state: Any, buffers: Any, drawn_B: Tensor, bad_B: Tensor, usable_B: Tensor | None, max_positions: int
) -> None:
    """Take one drawn token a row over into the buffers, as DraftSteps does. usable_B: None where all are whose logits
    are finite."""
    B, K = len(state.lengths_B), buffers.drafts_BK.shape[1]
    _note_draft[(1,)](
        drawn_B.contiguous(),
        bad_B.contiguous(),
        bad_B if usable_B is None else usable_B.contiguous(),
        buffers.step_1,
        state.lengths_B,
        buffers.drafts_BK,
        buffers.alive_B,
        buffers.bad_B,
        buffers.num_drafts_B,
        B,
        K,
        max_positions,
        ALL_USABLE=usable_B is None,
        ROWS=triton.next_power_of_2(B),
        **early(drawn_B.device),
    )


@triton.jit
def _verify_inputs(
    tokens_ptr,
    lengths_ptr,
    active_ptr,
    drafts_ptr,
    fed_ptr,
    start_ptr,
    new_ptr,
    width,
    drafts_stride,
    column_stride,
    J,
    BLOCK_J: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, j = tl.program_id(0), tl.arange(0, BLOCK_J)
    length = tl.load(lengths_ptr + row)
    last = tl.load(tokens_ptr + row * width + tl.maximum(length - 1, 0))
    here = drafts_ptr + row * drafts_stride + (j - 1) * column_stride
    draft = tl.load(here, mask=(j > 0) & (j < J), other=0)
    tl.store(fed_ptr + row * J + j, tl.where(j == 0, last, draft), mask=j < J)
    tl.store(start_ptr + row, length - 1)
    tl.store(new_ptr + row, tl.load(active_ptr + row).to(tl.int64) * J)


def verify_inputs(state: Any, drafts_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[pending, d1 .. dk] of each row [B, J], where they begin [B], and how many are fed (none of an inactive row)."""
    lengths_B = state.lengths_B
    B, J = len(lengths_B), drafts_BK.shape[1] + 1
    fed_BJ = torch.empty(B, J, dtype=torch.int64, device=lengths_B.device)
    start_B, new_B = torch.empty_like(lengths_B), torch.empty_like(lengths_B)
    _verify_inputs[(B,)](
        state.tokens_BT,
        lengths_B,
        state.active_B,
        drafts_BK,
        fed_BJ,
        start_B,
        new_B,
        state.tokens_BT.stride(0),
        *drafts_BK.stride(),
        J,
        BLOCK_J=triton.next_power_of_2(J),
        num_warps=1,
        **early(lengths_B.device),
    )
    return fed_BJ, start_B, new_B


@triton.jit
def _commit(
    drafts_ptr,
    num_drafts_ptr,
    draft_bad_ptr,
    choice_ptr,
    accepted_ptr,
    target_bad_ptr,
    lengths_ptr,
    limit_ptr,
    quota_ptr,
    active_ptr,
    stop_ptr,
    tokens_ptr,
    cached_ptr,
    report_ptr,
    drafts_stride,
    column_stride,
    width,
    K,
    GREEDY: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, j, J = tl.program_id(0), tl.arange(0, BLOCK_J), K + 1
    length, active = tl.load(lengths_ptr + row), tl.load(active_ptr + row) != 0
    limit = tl.load(limit_ptr + row)
    wanted = tl.minimum(tl.maximum(tl.minimum(limit - length - 1, tl.load(quota_ptr + row)), 0), K)
    num_drafts = tl.maximum(tl.minimum(tl.load(num_drafts_ptr + row), wanted), 0)
    draft = tl.load(drafts_ptr + row * drafts_stride + j * column_stride, mask=j < K, other=0)
    if GREEDY:
        choice = tl.load(choice_ptr + row * J + j, mask=j < J, other=0)
        accepted = tl.min(tl.where((draft == choice) & (j < num_drafts), BLOCK_J, j), 0).to(tl.int64)
        added = tl.sum(tl.where(j == accepted, choice, 0), 0)
    else:
        accepted, added = tl.load(accepted_ptr + row), tl.load(choice_ptr + row)
    out = tl.where((j == accepted) | (j >= K), added, draft)
    bad = tl.load(target_bad_ptr + row * J + j, mask=j < J, other=0) != 0
    target_bad = tl.max((bad & (j <= accepted)).to(tl.int32), 0) > 0
    is_stop = j < 0
    for s in tl.static_range(S):
        is_stop = is_stop | (out == tl.load(stop_ptr + row * S + s))
    stop_at = tl.min(tl.where(is_stop & (j < J), j, J), 0).to(tl.int64)
    stopped = stop_at <= accepted
    tested = tl.minimum(accepted, stop_at) + 1
    committed = tl.where(active & (target_bad == 0), tested, 0)
    tl.store(tokens_ptr + row * width + length + j, out, mask=j < committed)
    tl.store(lengths_ptr + row, length + committed)
    cached = tl.load(cached_ptr + row)
    tl.store(cached_ptr + row, cached - tl.where(active, J - committed, 0))
    reached = tl.minimum(num_drafts, tested)
    here = report_ptr + row * (COLUMNS + J)
    tl.store(here, committed)
    tl.store(here + 1, tl.minimum(accepted, reached))
    tl.store(here + 2, reached)
    tl.store(here + 3, tl.minimum(wanted, tested) - reached)
    tl.store(here + 4, num_drafts)
    tl.store(here + 5, stopped.to(tl.int64))
    tl.store(here + 6, target_bad.to(tl.int64))
    tl.store(here + 7, tl.load(draft_bad_ptr + row).to(tl.int64))
    tl.store(here + COLUMNS + j, out, mask=j < J)
    goes_on = active & (stopped == 0) & (target_bad == 0) & (length + committed < limit)
    tl.store(active_ptr + row, goes_on)


def commit(
    state: Any, cached_B: Tensor, proposal: Any, bad_BJ: Tensor, *, chosen: Tensor, accepted_B: Tensor | None = None
) -> Tensor:
    """Commit, end rows and roll the target's cache lengths `cached_B` back, as specdec.round does; the packed report
    (REPORT_COLUMNS, then the tokens), int64 [B, 8 + J]. chosen: the target's largest logits' ids [B, J] of a greedy
    round, which decide how many drafts are accepted; else the added tokens [B] after accepted_B."""
    B, J = bad_BJ.shape
    columns = len(REPORT_COLUMNS)
    stop_BS = state.law.stop_BS
    report = torch.empty(B, columns + J, dtype=torch.int64, device=bad_BJ.device)
    _commit[(B,)](
        proposal.drafts_BK,
        proposal.num_drafts_B.contiguous(),
        proposal.bad_B.contiguous(),
        chosen,
        chosen if accepted_B is None else accepted_B,
        bad_BJ,
        state.lengths_B,
        state.limit_B,
        state.quota_B,
        state.active_B,
        stop_BS,
        state.tokens_BT,
        cached_B,
        report,
        *proposal.drafts_BK.stride(),
        state.tokens_BT.stride(0),
        J - 1,
        GREEDY=accepted_B is None,
        S=stop_BS.shape[1],
        COLUMNS=columns,
        BLOCK_J=triton.next_power_of_2(J),
        num_warps=1,
        **early(bad_BJ.device),
    )
    return report
