"""The exact autoregressive law of a tiny model, enumerated without a cache: the oracle of gate G1.

Nothing here is shared with the engine. Logits come from plain Hugging Face forwards over whole contexts
(eager attention, no cache), the processing of logits is written a second time, in numpy float64, one row at a
time. Hugging Face's eager softmax runs in float32, so these laws are off by up to about 1e-5; at 20,000
samples of a 512-cell law the noise floor E0 is about 5e-2, more than a thousand times larger.

A completion of up to `depth` tokens over a vocabulary of V is a cell of an array of shape (V + 1,) * depth;
index V means "already ended".
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec import SamplingParams

Tokens = tuple[int, ...]


class Oracle:
    """Raw next-token logits of `model` by context, each from a forward over the whole context. Results are
    kept by context."""

    def __init__(self, model: PreTrainedModel):
        self._model = copy.deepcopy(model).eval()
        self._model.set_attn_implementation("eager")
        self._known: dict[Tokens, np.ndarray] = {}
        self.vocab: int = model.config.vocab_size
        self.max_positions: int = model.config.max_position_embeddings

    def logits(self, contexts: Sequence[Tokens]) -> list[np.ndarray]:
        """float64 [V] for every context (non-empty token tuples of any length)."""
        missing = [context for context in dict.fromkeys(contexts) if context not in self._known]
        for length in sorted({len(context) for context in missing}):
            self._forward([context for context in missing if len(context) == length])
        return [self._known[context] for context in contexts]

    @torch.no_grad()
    def _forward(self, contexts: list[Tokens], chunk: int = 2048) -> None:
        for start in range(0, len(contexts), chunk):
            part = contexts[start : start + chunk]
            logits_BV = self._model(input_ids=torch.tensor(part), use_cache=False).logits[:, -1]
            self._known.update(zip(part, logits_BV.double().numpy(), strict=True))


def processed_law(
    logits_V: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The law of the next token, float64 [V], after every processor in order. Zero means: can never be
    drawn."""
    logits = _restricted(logits_V, params, len(output))
    logits = _penalised(logits, params, prompt, output)
    if params.temperature == 0.0:
        law = np.zeros(len(logits))
        law[int(np.argmax(logits))] = 1.0  # numpy takes the lowest index at a tie
        return law
    return _softmax(_filtered(logits / params.temperature, params))


def enumerate_law(oracle: Oracle, prompt: Sequence[int], params: SamplingParams, depth: int) -> np.ndarray:
    """The joint law of the first `depth` tokens of a completion, float64 of shape (V + 1,) * depth, ends by
    stop id or max_tokens included."""
    ended = oracle.vocab
    law = np.zeros((ended + 1,) * depth)
    mass: dict[Tokens, float] = {(): 1.0}
    for _ in range(depth):
        grown: dict[Tokens, float] = {}
        for output, step in next_laws(oracle, prompt, params, mass).items():
            for token in np.flatnonzero(step):
                grown[(*output, int(token))] = mass[output] * step[token]
        mass = {}
        for output, probability in grown.items():
            if has_ended(output, params) or len(output) == depth:
                law[output + (ended,) * (depth - len(output))] += probability
            else:
                mass[output] = probability
    return law


def next_laws(
    oracle: Oracle, prompt: Sequence[int], params: SamplingParams, outputs: Iterable[Tokens]
) -> dict[Tokens, np.ndarray]:
    """processed_law after every output, by output."""
    outputs = list(outputs)
    rows = oracle.logits([(*prompt, *output) for output in outputs])
    return {output: processed_law(row, params, prompt, output) for output, row in zip(outputs, rows, strict=True)}


def has_ended(output: Sequence[int], params: SamplingParams) -> bool:
    """True when no token may follow `output`."""
    return len(output) >= params.max_tokens or (len(output) > 0 and output[-1] in params.stop_ids)


def count_cells(completions: Iterable[Sequence[int]], vocab: int, depth: int) -> np.ndarray:
    """How often each cell was seen, int64 of shape (V + 1,) * depth; tokens past `depth` are not looked
    at."""
    counts = np.zeros((vocab + 1,) * depth, dtype=np.int64)
    for tokens in completions:
        head = tuple(tokens[:depth])
        counts[head + (vocab,) * (depth - len(head))] += 1
    return counts


def _restricted(logits_V: np.ndarray, params: SamplingParams, generated: int) -> np.ndarray:
    if np.isnan(logits_V).any():
        raise ValueError("logits hold NaN: there is no law to enumerate")
    logits = logits_V.astype(np.float64).copy()
    for token in range(len(logits)):
        not_allowed = params.allowed_ids is not None and token not in params.allowed_ids
        too_early = token in params.stop_ids and generated < params.min_tokens
        if not_allowed or token in params.banned_ids or too_early:
            logits[token] = -np.inf
    return logits


def _penalised(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    logits = logits.copy()
    for token in set(prompt) | set(output):
        if logits[token] > 0:
            logits[token] /= params.repetition_penalty
        else:
            logits[token] *= params.repetition_penalty
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
    return logits


def _filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """min_p, then top_k, then top_p; what is dropped becomes -inf."""
    law = _softmax(logits)
    logits = np.where(law >= params.min_p * law.max(), logits, -np.inf)
    if params.top_k > 0:
        kth = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        logits = np.where(logits >= kth, logits, -np.inf)
    if params.top_p < 1.0:
        law, before = _softmax(logits), 0.0
        for token in np.argsort(-logits, kind="stable"):
            if before >= params.top_p:
                logits[token] = -np.inf
            before += law[token]
    return logits


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
