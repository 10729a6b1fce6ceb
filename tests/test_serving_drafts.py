"""Folders for vLLM: a pruned head made whole, fabricated EAGLE heads, kept layers; and an example of a custom class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draft_folders import HEAD_IDS, load, pruned_draft
from safetensors.torch import load_file

from bench.repeat_proposer import RepeatProposer
from bench.serving_drafts import LOW, aux_layers, folder_of, missing_row, whole_head
from pipeline import models
from pipeline.config import Config, DraftConfig, load_config
from specdec.pruned import load_pruned_model

ROOT = Path(__file__).resolve().parent.parent


def config_with(draft: DraftConfig) -> Config:
    config = load_config(ROOT / "configs" / "tiny.yaml")
    return replace(config, models=replace(config.models, draft=draft))


def test_a_pruned_head_made_whole_proposes_the_same(tmp_path: Path, data_root: Path) -> None:
    """The same logits for the head's tokens, and next to no probability for the others."""
    folder = pruned_draft(tmp_path / "pruned")
    pruned, _ = load_pruned_model(folder, dtype=torch.float32)
    made = load(whole_head(folder))
    ids_BT = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits_BTN, logits_BTV = pruned(ids_BT).logits, made(ids_BT).logits
    assert logits_BTV.shape == (2, 40, made.config.vocab_size)
    torch.testing.assert_close(logits_BTV[..., HEAD_IDS], logits_BTN)
    law_BTV = logits_BTV.softmax(-1)
    assert float(law_BTV[..., HEAD_IDS].sum(-1).min()) > 1 - 1e-6
    assert whole_head(folder) == whole_head(folder)


def test_missing_rows_are_low_on_every_state_that_was_looked_at() -> None:
    states_ND = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) + 5
    assert float((states_ND @ missing_row(states_ND)).max()) == pytest.approx(LOW, rel=1e-4)
    assert float((states_ND @ missing_row(states_ND)).min()) < LOW


def test_states_without_a_common_direction_are_refused() -> None:
    states_ND = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="head_tokens null"):
        missing_row(states_ND)


def test_kept_layers_become_a_folder(data_root: Path) -> None:
    made = load(folder_of("$DRAFT", config_with(DraftConfig(keep_layers=2))))
    target = load(models.resolve("tiny:qwen3"))
    assert made.config.num_hidden_layers == 2
    assert torch.equal(made.get_input_embeddings().weight, target.get_input_embeddings().weight)


@pytest.mark.parametrize("name, width", [("$EAGLE", 2), ("$EAGLE3", 3)])
def test_fabricated_heads_have_the_targets_shapes(data_root: Path, name: str, width: int) -> None:
    config = config_with(DraftConfig(keep_layers=2))
    folder = Path(folder_of(name, config))
    weights = load_file(folder / "model.safetensors")
    assert weights["fc.weight"].shape == (64, 64 * width)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert (folder / "tokenizer.json").is_file()
    assert folder_of(name, config) == str(folder)


@pytest.mark.parametrize("layers", [3, 4, 7, 8, 36])
def test_a_head_reads_three_different_layers(layers: int) -> None:
    """Of four layers vLLM itself would take the second twice, and the head's first matrix would not fit."""
    read = aux_layers(layers)
    assert len(set(read)) == 3
    assert all(0 <= layer < layers for layer in read)


def test_other_names(data_root: Path) -> None:
    config = config_with(DraftConfig(keep_layers=2))
    assert folder_of("Qwen/Qwen3-0.6B", config) == "Qwen/Qwen3-0.6B"
    assert Path(folder_of("$MODEL:tiny:llama", config)).name.startswith("tiny-llama")
    stock = folder_of("$DRAFT:stock", config)
    assert load(stock).config.num_hidden_layers == config.train.start.first_layers
    with pytest.raises(ValueError, match="03_train_draft"):
        folder_of("$DRAFT:sft", config)


def proposer(length: int = 3, limit: int = 20) -> RepeatProposer:
    settings: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=SimpleNamespace(max_model_len=limit),
    )
    return RepeatProposer(settings)


def test_the_example_class_drafts_what_followed_last_time() -> None:
    ids = np.zeros((4, 20), dtype=np.int32)
    ids[0, :7] = [1, 2, 3, 4, 9, 1, 2]  # after 1 2 came 3 4 9
    ids[1, :5] = [1, 2, 3, 4, 5]  # 4 5 is new
    ids[2, :7] = [1, 2, 3, 4, 9, 1, 2]  # nothing was sampled: still in its prompt
    ids[3, :8] = [1, 2, 3, 1, 2, 4, 1, 2]  # the later of two counts
    drafts = proposer().propose([[2], [5], [], [2]], np.array([7, 5, 7, 8], dtype=np.int32), ids)
    assert drafts == [[3, 4, 9], [], [], [4, 1, 2]]


def test_the_example_class_stays_inside_the_context() -> None:
    ids = np.array([[1, 2, 3, 4, 9, 1, 2, 0]], dtype=np.int32)
    assert proposer(limit=9).propose([[2]], np.array([7], dtype=np.int32), ids) == [[3]]
    assert proposer(limit=8).propose([[2]], np.array([7], dtype=np.int32), ids) == [[]]
