"""The tensors that a round works on: one row a slot, everything a round must know on the device.

B slots, T tokens a row (with one trash column at the end), V vocabulary, S stop ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.request import Request, SamplingParams
from specdec.sampling import Features, LawParams

_STOP_IDS = 4  # of a row, until a request has more: widening makes a new tensor, and with it new graphs
_FLOATS = {
    "temperature_B": "temperature",
    "top_p_B": "top_p",
    "min_p_B": "min_p",
    "repetition_B": "repetition_penalty",
    "presence_B": "presence_penalty",
    "frequency_B": "frequency_penalty",
}


@dataclass(kw_only=True)
class RowState:
    """tokens_BT: prompt and output; lengths_B: how many are committed, the pending last one (not yet fed to the
    target) included; limit_B: the length at which the row is done; quota_B: the most drafts that count in the next
    round; law: sampling parameters."""

    tokens_BT: Tensor
    lengths_B: Tensor
    limit_B: Tensor
    quota_B: Tensor
    active_B: Tensor
    seeds_B: Tensor
    law: LawParams

    @classmethod
    def empty(cls, num_slots: int, capacity: int, device: torch.device | str) -> "RowState":
        def zeros(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=device)

        law = {name: zeros(torch.float64) for name in _FLOATS}
        no_stop = torch.full((num_slots, _STOP_IDS), -1, dtype=torch.int64, device=device)
        return cls(
            tokens_BT=torch.zeros(num_slots, capacity + 1, dtype=torch.int64, device=device),
            lengths_B=zeros(),
            limit_B=zeros(),
            quota_B=zeros() + capacity,
            active_B=zeros(torch.bool),
            seeds_B=zeros(),
            law=LawParams(**law, top_k_B=zeros(), min_length_B=zeros(), stop_BS=no_stop),
        )

    @property
    def drafting_B(self) -> Tensor:
        """Rows whose drafts count in this round."""
        return self.active_B & (self.quota_B > 0)

    def head(self, num_rows: int) -> "RowState":
        """The first rows, as views that write through."""
        if num_rows == len(self.lengths_B):
            return self
        cut = {f.name: getattr(self, f.name) for f in fields(self)}
        law = cut.pop("law").head(num_rows)
        return RowState(law=law, **{name: t[:num_rows] for name, t in cut.items()})

    def write_rows(self, rows: Sequence[int], requests: Sequence[Request], vocab_size: int) -> None:
        """Set everything of these slots for new requests; nothing of the former request stays."""
        device = self.lengths_B.device
        index = torch.tensor(rows, device=device)
        params = [request.params for request in requests]
        lengths = [len(request.prompt_ids) for request in requests]

        def put(target: Tensor, values: list) -> None:
            target[index] = torch.tensor(values, dtype=target.dtype, device=device)

        width = max(lengths)
        put(self.tokens_BT[:, :width], [_padded(request.prompt_ids, width, 0) for request in requests])
        put(self.lengths_B, lengths)
        put(self.limit_B, [n + p.max_tokens for n, p in zip(lengths, params, strict=True)])
        put(self.seeds_B, [p.seed for p in params])
        put(self.law.top_k_B, [p.top_k for p in params])
        put(self.law.min_length_B, [n + p.min_tokens for n, p in zip(lengths, params, strict=True)])
        for name, attribute in _FLOATS.items():
            put(getattr(self.law, name), [getattr(p, attribute) for p in params])
        self._write_optional(index, requests, vocab_size)

    def _write_optional(self, index: Tensor, requests: Sequence[Request], vocab_size: int) -> None:
        """Stop ids, allowed ids and penalty counts; their buffers are made by the first request that needs them."""
        params = [request.params for request in requests]
        num_slots, device = len(self.lengths_B), index.device
        law = self.law
        most_stops = max(len(p.stop_ids) for p in params)
        if most_stops > law.stop_BS.shape[1]:
            wider = torch.full((num_slots, most_stops), -1, dtype=torch.int64, device=device)
            wider[:, : law.stop_BS.shape[1]] = law.stop_BS
            self._set_law(stop_BS=wider)
        width = self.law.stop_BS.shape[1]
        stops = [_padded(p.stop_ids, width, -1) for p in params]
        self.law.stop_BS[index] = torch.tensor(stops, dtype=torch.int64, device=device)
        shape = (num_slots, vocab_size)
        if law.allowed_BV is None and any(p.has_allowed_mask for p in params):
            self._set_law(allowed_BV=torch.ones(shape, dtype=torch.bool, device=device))
        if law.counts_BV is None and any(p.has_penalties for p in params):
            self._set_law(
                counts_BV=torch.zeros(shape, dtype=torch.int32, device=device),
                in_prompt_BV=torch.zeros(shape, dtype=torch.bool, device=device),
            )
        for row, request in zip(index.tolist(), requests, strict=True):
            self._write_masks(row, request)

    def _write_masks(self, row: int, request: Request) -> None:
        law, params = self.law, request.params
        if law.allowed_BV is not None:
            law.allowed_BV[row] = params.allowed_ids is None
            law.allowed_BV[row, list(params.allowed_ids or ())] = True
            law.allowed_BV[row, list(params.banned_ids)] = False
        if law.counts_BV is not None and law.in_prompt_BV is not None:
            law.counts_BV[row] = 0
            law.in_prompt_BV[row] = False
            if params.has_penalties:
                law.in_prompt_BV[row, list(request.prompt_ids)] = True

    def _set_law(self, **tensors: Tensor) -> None:
        law = {f.name: getattr(self.law, f.name) for f in fields(self.law)}
        self.law = LawParams(**(law | tensors))


def _padded(ids: Sequence[int], width: int, fill: int) -> list[int]:
    return [int(i) for i in ids] + [fill] * (width - len(ids))


def features_of(params: Sequence[SamplingParams]) -> Features:
    """What the processing must do for a batch of these requests."""
    sampled = [p for p in params if p.temperature > 0]
    return Features(
        all_greedy=not sampled,
        any_greedy=len(sampled) < len(params),
        penalties=any(p.has_penalties for p in params),
        allowed=any(p.has_allowed_mask for p in params),
        min_tokens=any(p.min_tokens > 0 and len(p.stop_ids) > 0 for p in params),
        min_p=any(p.min_p > 0 for p in sampled),
        top_p=any(p.top_p < 1 for p in sampled),
        max_top_k=max((p.top_k for p in sampled), default=0),
    )
