"""Small corpora and students for the tests of training: random tokens of a tiny model's vocabulary, random teacher."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.tiny_models import tiny_model
from pipeline.config_train import LossTerm
from train.corpus import Corpus
from train.student import Student, first_layers

VOCAB = 64


def make_record(prompt: int, completion: int, *, seed: int, kept: int = 8) -> Any:
    """A completion of random tokens whose random teacher prefers token (previous + 1) % VOCAB."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, size=prompt + completion)
    logits = rng.normal(size=(completion, VOCAB))
    logits[np.arange(completion), (ids[prompt - 1 : -1] + 1) % VOCAB] += 6
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    top_ids = np.argsort(-logprobs, axis=-1)[:, :kept]
    top_logprobs = np.take_along_axis(logprobs, top_ids, -1)
    return SimpleNamespace(
        prompt_id=f"prompt-{seed}",
        completion=0,
        prompt_ids=ids[:prompt].astype(np.int32),
        completion_ids=ids[prompt:].astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_logprobs.astype(np.float32),
        tail_mass=(1 - np.exp(top_logprobs).sum(-1)).astype(np.float32),
    )


def make_corpus(sizes: Sequence[tuple[int, int]]) -> Corpus:
    """Documents of (prompt, completion) tokens."""
    return Corpus.from_records([make_record(*size, seed=number) for number, size in enumerate(sizes)])


def random_corpus(documents: int, seed: int = 0) -> Corpus:
    """Documents of 2 to 5 prompt and 2 to 12 completion tokens."""
    rng = np.random.default_rng(seed)
    return make_corpus([(int(rng.integers(2, 6)), int(rng.integers(2, 13))) for _ in range(documents)])


def target(family: str = "llama", tied: bool = False) -> Any:
    return tiny_model(family, vocab=VOCAB, layers=3, seed=0, tied=tied)


def student(
    terms: Sequence[LossTerm] = (LossTerm(name="kl"),), head_ids: Sequence[int] | None = None, tied: bool = False
) -> Student:
    torch.manual_seed(0)
    model = first_layers(target(tied=tied), 2, head_ids)
    model.set_attn_implementation("sdpa")
    return Student(model, terms, head_ids)
