"""On-policy texts: written by the draft, judged by the target."""

from __future__ import annotations

import numpy as np
import torch
from toy_corpus import VOCAB, random_corpus, target

from pipeline.config_train import OnPolicyConfig
from train.on_policy import chosen_prompts, full_head, own_completions
from train.student import first_layers

HEAD_IDS = list(range(0, VOCAB, 2))
SETTINGS = OnPolicyConfig(rounds=1, prompts=6, max_tokens=8, batch=4)


def test_texts_are_the_drafts_and_the_law_at_each_token_is_the_targets() -> None:
    model = target().eval()
    draft = first_layers(model, 2, HEAD_IDS).eval()
    corpus = random_corpus(20)
    own = own_completions(draft, HEAD_IDS, model, corpus, SETTINGS, stop_ids=(), seed=1)
    assert len(own) == 6
    prompts = {tuple(corpus.document(number)[0][: corpus.document(number)[1]]) for number in range(len(corpus))}
    for number in range(len(own)):
        ids, first, rows = own.document(number)
        assert tuple(ids[:first]) in prompts
        assert len(rows) == 8
        assert set(ids[first:].tolist()) <= set(HEAD_IDS), "a token that the draft cannot say"
        with torch.no_grad():
            law = model(torch.tensor(ids[None].tolist())).logits[0, first - 1 : -1].log_softmax(-1)
        top = law.gather(1, torch.tensor(own.top_ids[rows].tolist()))
        np.testing.assert_allclose(own.top_logprobs[rows], top.numpy(), atol=1e-4)
        np.testing.assert_allclose(own.tail_mass[rows], 1 - top.exp().sum(-1).numpy(), atol=1e-4)


def test_the_seed_decides_prompts_and_texts() -> None:
    model = target().eval()
    corpus = random_corpus(20)
    first, again, other = (
        own_completions(first_layers(model, 2).eval(), None, model, corpus, SETTINGS, stop_ids=(), seed=seed)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert first.tokens.tolist() != other.tokens.tolist()


def test_prompts_are_different_ones() -> None:
    corpus = random_corpus(5)
    twice = type(corpus).join([corpus, corpus])
    chosen = [tuple(prompt) for prompt in chosen_prompts(twice, 100, seed=0)]
    assert len(set(chosen)) == len(chosen) <= 5


def test_full_head_has_the_pruned_heads_law() -> None:
    draft = first_layers(target(), 2, HEAD_IDS).eval()
    ids = torch.arange(6)[None]
    pruned, whole = draft(ids).logits.softmax(-1), full_head(draft, HEAD_IDS, VOCAB)(ids).logits.softmax(-1)
    torch.testing.assert_close(whole[..., HEAD_IDS], pruned)
    assert whole.sum() - whole[..., HEAD_IDS].sum() < 1e-6
