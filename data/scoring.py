"""The teacher's law at every token of texts that exist already, by one forward a text.

`score_completions` is for a user's logs and for a draft's own samples (on-policy distillation). Shapes: R rows of
a batch, S tokens of the longest, P completion tokens of the whole batch, H hidden size, C a slice of the
vocabulary, N top entries, T completion tokens of one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdec import TokenLogprobs

CHUNK_ELEMENTS = 1 << 26  # logits that exist at once: 256 MB in float32
_CHECKED_TOKENS = 8


def score_completions(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    top: int = 8,
    batch_tokens: int = 16384,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> list[TokenLogprobs]:
    """The raw law of `model` (a Hugging Face decoder in eval mode) at each completion token, in the order given.

    As an engine's `top_logprobs`: token_logprob [T], top_ids [T, top], top_logprobs [T, top], tail_mass [T] for each
    text. Forwards hold at most `batch_tokens` tokens, padding included (a longer text goes alone); texts of similar
    length go together. The head's product is made in the model's dtype, the softmax in float32 (float64 for a
    float64 model), over slices of the vocabulary: never more than `chunk_elements` logits at once.
    ValueError for an empty text, ids outside the vocabulary, a text longer than the model's context, NaN, or a model
    whose logits are more than its head's product.
    """
    head = _Head(model)
    texts = [_checked(index, pair, head) for index, pair in enumerate(zip(prompt_ids, completion_ids, strict=True))]
    if not 1 <= top <= head.vocab_size:
        raise ValueError(f"top is {top}; expected 1 to {head.vocab_size}, the vocabulary's size")
    results: list[TokenLogprobs | None] = [None] * len(texts)
    with torch.no_grad():
        head.check(model)
        for indices in _batches([len(prompt) + len(completion) for prompt, completion in texts], batch_tokens):
            law = _score_batch(model, head, [texts[index] for index in indices], top, chunk_elements)
            for index, result in zip(indices, law, strict=True):
                results[index] = _finite(result, index)
    return [result for result in results if result is not None]


class _Head:
    """The output layer apart from the decoder under it."""

    def __init__(self, model: Any) -> None:
        if model.training:
            raise ValueError("the model is in training mode, where dropout changes its law; call model.eval() first")
        layer = model.get_output_embeddings()
        self.weight_VH: Tensor = layer.weight
        self.bias_V: Tensor | None = getattr(layer, "bias", None)
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.vocab_size = len(self.weight_VH)
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.name = type(model).__name__

    def logits(self, hidden_PH: Tensor, start: int, end: int) -> Tensor:
        """Columns start to end of the logits [P, C], in float32 at least."""
        bias_C = None if self.bias_V is None else self.bias_V[start:end]
        logits_PC = nn.functional.linear(hidden_PH, self.weight_VH[start:end], bias_C)
        logits_PC = logits_PC.to(torch.promote_types(logits_PC.dtype, torch.float32))
        return logits_PC if self.softcap is None else (logits_PC / self.softcap).tanh() * self.softcap

    def check(self, model: Any) -> None:
        """Compare with the model's own forward on a few tokens: some scale their logits in ways of their own."""
        ids_1S = torch.arange(2, 2 + _CHECKED_TOKENS, device=self.weight_VH.device).unsqueeze(0) % self.vocab_size
        own_SV = model(input_ids=ids_1S, use_cache=False).logits[0].double()
        ours_SV = self.logits(_hidden(model, ids_1S)[0], 0, self.vocab_size).double()
        error = float((ours_SV - own_SV).norm() / own_SV.norm().clamp(min=1e-30))
        if error > 0.05:  # half precision rounds to about 0.01
            raise ValueError(
                f"{self.name} is not supported: its logits differ by {error:.2g} (relative) from its head's product; "
                "expected rounding only"
            )


def _hidden(model: Any, ids_RS: Tensor) -> Tensor:
    return model.get_decoder()(input_ids=ids_RS, use_cache=False).last_hidden_state


def _checked(index: int, text: tuple[Sequence[int], Sequence[int]], head: _Head) -> tuple[np.ndarray, np.ndarray]:
    prompt, completion = (np.asarray(ids, dtype=np.int64) for ids in text)
    if len(prompt) == 0 or len(completion) == 0:
        raise ValueError(f"text {index}: got {len(prompt)} prompt and {len(completion)} completion tokens")
    both = np.concatenate([prompt, completion])
    if both.min() < 0 or both.max() >= head.vocab_size:
        raise ValueError(f"text {index}: got ids {both.min()} to {both.max()}, expected 0 to {head.vocab_size - 1}")
    if len(both) > head.max_positions:
        raise ValueError(f"text {index}: got {len(both)} tokens, expected at most {head.max_positions}: the context")
    return prompt, completion


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of texts that go together, longest first: rows times the longest stay within `batch_tokens`."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        rows = max(1, batch_tokens // lengths[order[0]])
        yield order[:rows]
        order = order[rows:]


def _score_batch(
    model: Any, head: _Head, texts: Sequence[tuple[np.ndarray, np.ndarray]], top: int, chunk_elements: int
) -> list[TokenLogprobs]:
    """Padding stands on the right, where a causal model's real tokens do not see it: no mask is needed."""
    longest = max(len(prompt) + len(completion) for prompt, completion in texts)
    ids_RS = np.zeros((len(texts), longest), dtype=np.int64)
    places = []  # of the positions whose logits predict a completion token, in the flattened batch
    for row, (prompt, completion) in enumerate(texts):
        ids_RS[row, : len(prompt) + len(completion)] = np.concatenate([prompt, completion])
        places.append(row * longest + len(prompt) - 1 + np.arange(len(completion)))
    device = head.weight_VH.device
    hidden_RSH = _hidden(model, torch.from_numpy(ids_RS).to(device))
    hidden_PH = hidden_RSH.flatten(0, 1)[torch.from_numpy(np.concatenate(places)).to(device)]
    tokens_P = torch.from_numpy(np.concatenate([completion for _, completion in texts])).to(device)
    law = _law(head, hidden_PH, tokens_P, top, chunk_elements)
    ends = np.cumsum([len(completion) for _, completion in texts])[:-1]
    columns = [np.split(column.cpu().numpy(), ends) for column in law]
    names = ("token_logprob", "top_ids", "top_logprobs", "tail_mass")
    return [TokenLogprobs(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def _law(head: _Head, hidden_PH: Tensor, tokens_P: Tensor, top: int, chunk_elements: int) -> tuple[Tensor, ...]:
    """token_logprob [P], top_ids [P, N], top_logprobs [P, N], tail_mass [P], slice by slice of the vocabulary."""
    step = min(head.vocab_size, max(top, chunk_elements // len(hidden_PH)))
    norms, tops, ids, own = [], [], [], []
    for start in range(0, head.vocab_size, step):
        end = min(start + step, head.vocab_size)
        logits_PC = head.logits(hidden_PH, start, end)
        norms.append(logits_PC.logsumexp(1))
        top_Pn, ids_Pn = logits_PC.topk(min(top, end - start), dim=1)
        tops.append(top_Pn)
        ids.append(ids_Pn + start)
        within_P = (tokens_P - start).clamp(0, end - start - 1)
        own_P = logits_PC.gather(1, within_P.unsqueeze(1)).squeeze(1)
        own.append(own_P.masked_fill((tokens_P < start) | (tokens_P >= end), float("-inf")))
    norm_P = torch.stack(norms).double().logsumexp(0)
    top_PN, places_PN = torch.cat(tops, 1).topk(top, dim=1)
    ids_PN = torch.cat(ids, 1).gather(1, places_PN)
    token_P = torch.stack(own).amax(0).double() - norm_P
    top_PN = top_PN.double() - norm_P.unsqueeze(1)
    tail_P = (1.0 - top_PN.exp().sum(1)).clamp(min=0.0)
    return token_P.float(), ids_PN.int(), top_PN.float(), tail_P.float()


def _finite(result: TokenLogprobs, index: int) -> TokenLogprobs:
    if not np.isfinite(result.top_logprobs).all():
        raise ValueError(f"text {index}: the model's logits are NaN or infinite; check its weights and dtype")
    return result
