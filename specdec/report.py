"""Reading the one packed tensor that a round sends to the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdec.request import TokenLogprobs
from specdec.stats import RoundStats, came_to

# Columns of the packed int64 report before the J committed tokens.
REPORT_COLUMNS = ("committed", "accepted", "reached", "lacking", "drafted", "stopped", "target_bad", "draft_bad")


class RowReport(NamedTuple):
    """What a round did to one row; `reached` and `accepted` count draft positions from the first on. lacking: 1 when
    the next position would have been reached too, had the drafter proposed a token there. (A tuple: one is made for
    every row of every round, while the device waits.)"""

    committed: int
    accepted: int
    reached: int
    lacking: int
    drafted: int
    stopped: bool
    target_bad: bool
    draft_bad: bool
    token_ids: list[int]
    logprobs: TokenLogprobs | None


def round_stats(
    reports: Sequence[RowReport],
    *,
    asked: int,
    k: int,
    caught_up: int,
    timed: bool = True,
    seconds: Mapping[str, float],
) -> RoundStats:
    """The round over all its rows; seconds: of its "draft", "verify" and in "total"."""
    return RoundStats(
        k=k,
        asked=asked,
        rows=len(reports),
        tokens=sum(r.committed for r in reports),
        drafted=sum(r.drafted for r in reports),
        reached=tuple(came_to([r.reached for r in reports], k)),
        accepted=tuple(came_to([r.accepted for r in reports], k)),
        lacking=tuple(_lacking(reports, k)),
        caught_up=caught_up,
        timed=timed,
        draft_s=seconds["draft"] if k > 0 else 0.0,
        verify_s=seconds["verify"],
        total_s=seconds["total"],
    )


def _lacking(reports: Sequence[RowReport], k: int) -> list[int]:
    lacking = [0] * (k + 1)
    for report in reports:
        lacking[report.reached] += report.lacking
    return lacking[:k]


def read_report(packed: Tensor, rows: Sequence[int], k: int, top_logprobs: int) -> list[RowReport]:
    """One RowReport for each of `rows` from the packed int64 [B, columns] tensor, already on the host."""
    table = packed.numpy()[list(rows)]
    head = len(REPORT_COLUMNS)
    values = table[:, : head + k + 1].tolist()
    return [
        RowReport._make(
            [
                *row[:head],
                row[head : head + row[0]],
                _read_logprobs(line[head + k + 1 :], row[0], k + 1, top_logprobs) if top_logprobs else None,
            ]
        )
        for row, line in zip(values, table, strict=True)
    ]


def _read_logprobs(line: np.ndarray, committed: int, J: int, n: int) -> TokenLogprobs:
    by_position = line.reshape(J, 2 + 2 * n)[:committed]
    ids = by_position[:, 2 : 2 + n]
    floats = np.concatenate([by_position[:, :2], by_position[:, 2 + n :]], 1).view(np.float64).astype(np.float32)
    return TokenLogprobs(
        token_logprob=floats[:, 0],
        tail_mass=floats[:, 1],
        top_ids=ids.astype(np.int32),
        top_logprobs=floats[:, 2:],
    )


def join_logprobs(parts: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    if not parts:
        return None
    names = ("token_logprob", "top_ids", "top_logprobs", "tail_mass")
    return TokenLogprobs(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})
