"""Completions of the draft itself with the target's law at each token: what it will meet when it drafts.

Zhou et al., DistillSpec (arXiv 2310.08461), section 4, and Agarwal et al., GKD (arXiv 2306.13649): training on the
draft's own texts lowers the gap between what it is trained on and what it is used on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from data.common import stable_seed
from data.scoring import score_completions
from pipeline.config import ModelsConfig
from pipeline.config_train import OnPolicyConfig
from pipeline.models import load_target
from specdec import Completion, Engine, Request, SamplingParams
from train.corpus import Corpus
from train.student import load_exported

NOWHERE = -1e4  # a logit whose probability is zero in every precision


def own_completions(
    draft: Any,
    head_ids: Sequence[int] | None,
    target: Any,
    corpus: Corpus,
    settings: OnPolicyConfig,
    *,
    stop_ids: Sequence[int],
    seed: int,
    check_stop: Callable[[], None] = lambda: None,
) -> Corpus:
    """`settings.prompts` different prompts of `corpus`, completed by `draft` and scored by `target`, both in eval mode
    on one device. The same seed gives the same texts."""
    prompts = chosen_prompts(corpus, settings.prompts, seed)
    engine = Engine(
        full_head(draft, head_ids, target.get_input_embeddings().weight.shape[0]),
        k=0,
        num_slots=settings.batch,
        capacity=max(map(len, prompts)) + settings.max_tokens,
    )
    params = [
        SamplingParams(
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            stop_ids=tuple(stop_ids),
            seed=stable_seed(seed, number),
        )
        for number in range(len(prompts))
    ]
    requests = [Request(prompt_ids=prompt, params=each) for prompt, each in zip(prompts, params, strict=True)]
    completions = [completion.token_ids for completion in _complete(engine, requests, check_stop)]
    check_stop()
    scores = score_completions(target, prompts, completions, top=corpus.top_ids.shape[1])
    return Corpus.from_records(
        SimpleNamespace(
            prompt_id=f"own-{seed}-{number}",
            completion=0,
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            completion_ids=np.asarray(completion, dtype=np.int32),
            top_ids=score.top_ids,
            top_logprobs=score.top_logprobs,
            tail_mass=score.tail_mass,
        )
        for number, (prompt, completion, score) in enumerate(zip(prompts, completions, scores, strict=True))
    )


def load_pair(config: ModelsConfig, draft: Path) -> tuple[Any, Any, list[int] | None]:
    """The target, the exported draft in eval mode in float32, and the ids of its head, on this machine's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, head_ids = load_exported(draft)
    model.config.use_cache = True
    return load_target(config, device), model.to(device).eval().requires_grad_(False), head_ids


def chosen_prompts(corpus: Corpus, count: int, seed: int) -> list[list[int]]:
    """At most `count` different prompts, drawn by the seed."""
    different: dict[bytes, list[int]] = {}
    for number in np.random.default_rng(seed).permutation(len(corpus)):
        ids, first, _ = corpus.document(int(number))
        different.setdefault(ids[:first].tobytes(), ids[:first].tolist())
        if len(different) == count:
            break
    return list(different.values())


def full_head(draft: Any, head_ids: Sequence[int] | None, vocab_size: int) -> Any:
    """The draft with a head over all V ids, the missing ones without probability, so that an engine can sample it."""
    if head_ids is None:
        return draft
    pruned = draft.get_output_embeddings()
    head = nn.Linear(pruned.in_features, vocab_size, dtype=pruned.weight.dtype, device=pruned.weight.device)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[list(head_ids)] = pruned.weight
        head.bias.fill_(NOWHERE)
        head.bias[list(head_ids)] = 0
    whole = copy.deepcopy(draft)
    whole.set_output_embeddings(head)
    return whole.eval().requires_grad_(False)


def _complete(engine: Engine, requests: Sequence[Request], check_stop: Callable[[], None]) -> list[Completion]:
    tickets = [engine.submit(request) for request in requests]
    done: dict[int, Completion] = {}
    while engine.has_work:
        check_stop()
        done.update(engine.step())
    return [done[ticket] for ticket in tickets]
