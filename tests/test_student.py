"""The draft to train: its start, its pruned head, and that the exported folder is the same model to every loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_corpus import VOCAB, make_corpus, student, target
from toy_text import byte_tokenizer
from transformers import AutoModelForCausalLM

from bench.tiny_models import tiny_model
from specdec import Engine, Request, SamplingParams
from specdec.pruned import load_pruned
from train.packing import pack
from train.student import (
    Student,
    export,
    first_layers,
    freeze_embedding,
    frequent_tokens,
    from_checkpoint,
    read_head_ids,
)


def test_frequent_tokens_are_those_of_most_mass_and_the_ones_to_keep() -> None:
    mass = np.array([0.0, 5, 1, 1, 3, 0])
    choice = frequent_tokens(mass, 3, keep=[5])
    assert choice.ids == (1, 4, 5)
    assert choice.coverage == pytest.approx(0.8)
    assert frequent_tokens(mass, 3).ids == (1, 2, 4), "a tie goes to the smaller id"
    with pytest.raises(ValueError, match="at most the vocabulary's 6"):
        frequent_tokens(mass, 7)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_first_layers_are_the_targets_on_weights_of_their_own(family: str) -> None:
    model = target(family)
    draft = first_layers(model, 2)
    assert draft.training
    assert len(draft.get_decoder().layers) == 2
    ids = torch.arange(6)[None]
    before = model(ids).logits.detach().clone()
    with torch.no_grad():
        for parameter in draft.parameters():
            assert parameter.requires_grad
            parameter.add_(1.0)
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)


def test_pruned_head_gives_the_full_heads_logits_at_its_ids() -> None:
    head_ids = [3, 5, 40, 41]
    ids = torch.arange(6)[None]
    full, pruned = first_layers(target(), 2).eval(), first_layers(target(), 2, head_ids).eval()
    torch.testing.assert_close(pruned(ids).logits, full(ids).logits[..., head_ids])
    assert pruned.get_output_embeddings().weight.requires_grad


@pytest.mark.parametrize("head_ids", [None, tuple(range(0, VOCAB, 2))])
def test_frozen_embedding_stays_and_the_head_learns(head_ids: tuple[int, ...] | None) -> None:
    model = student(head_ids=head_ids)
    freeze_embedding(model.model)
    embedding = model.model.get_input_embeddings().weight
    head = model.model.get_output_embeddings().weight
    loss, _ = model(pack(make_corpus([(3, 5), (2, 6)]), [[0, 1]], 16))
    loss.backward()
    assert embedding.grad is None
    assert head.grad is not None
    assert head.grad.abs().max() > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_students_logits_are_the_models(family: str) -> None:
    """gemma2 caps its logits; the student computes its head apart from the model."""
    model = first_layers(target(family), 2).eval()
    batch = pack(make_corpus([(3, 7)]), [[0]], 9)
    draft = Student(model, [])
    logits = draft.head(draft.hidden(batch))
    torch.testing.assert_close(logits, model(batch.input_ids_SL).logits[0, 2:])


def greedy(model: Any, draft: Any) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    [completion] = Engine(model, draft, k=3).generate([Request(prompt_ids=[1, 2, 3], params=params)])
    return completion


def test_export_is_read_by_transformers_and_resumes_training(tmp_path: Path) -> None:
    model = first_layers(target(), 2)
    export(model, byte_tokenizer(), tmp_path / "draft", {"loss": "kl"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    ids = torch.arange(6)[None]
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)
    assert loaded.config.use_cache
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text()) == {"loss": "kl"}
    assert read_head_ids(tmp_path / "draft") is None
    again = from_checkpoint(tmp_path / "draft", head_ids=[1, 2])
    assert again.get_output_embeddings().weight.shape[0] == 2
    with pytest.raises(ValueError, match="exists already"):
        export(model, byte_tokenizer(), tmp_path / "draft", {})


def test_frozen_tied_embedding_is_exported_beside_its_head(tmp_path: Path) -> None:
    """The head was tied before training: loaded as tied again, the draft would lose what it learnt."""
    model = first_layers(tiny_model("llama", vocab=VOCAB, layers=2, tied=True), 1)
    freeze_embedding(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    export(model, byte_tokenizer(), tmp_path / "draft", {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert not loaded.config.tie_word_embeddings, "vLLM ties by the config"
    ids = torch.arange(6)[None]
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)


def test_export_with_a_pruned_head_is_read_by_the_engine(tmp_path: Path) -> None:
    head_ids = list(range(0, VOCAB, 2))
    full = target()
    draft = first_layers(full, 3, head_ids)
    export(draft, byte_tokenizer(), tmp_path / "draft", {}, head_ids, torch.bfloat16)
    assert read_head_ids(tmp_path / "draft") == head_ids
    drafter = load_pruned(tmp_path / "draft", target_size=VOCAB, dtype=torch.float32, device="cpu")
    completion = greedy(full, drafter)
    assert completion.token_ids == greedy(full, None).token_ids
    assert draft.lm_head.weight.dtype == torch.float32, "the model in training keeps its precision"
