"""Where every draft of the stage starts: weights, output head, written once as a folder that all processes read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from data.common import stop_ids
from pipeline import models
from pipeline.config import Config
from specdec.pruned import is_pruned, prune_head
from train.corpus import Corpus
from train.student import HeadChoice, export, first_layers, freeze_embedding, frequent_tokens, load_exported


def target_stop_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end the target's completions, without loading it."""
    from transformers import GenerationConfig

    folder = models.resolve(config.models.target)
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    return stop_ids(generation or SimpleNamespace(eos_token_id=None), tokenizer)


def choose_head(config: Config, corpus: Corpus, tokenizer: Any) -> HeadChoice | None:
    """The pruned head that the config asks for, None for the whole one. ValueError when it asks for too many ids."""
    if config.train.head_tokens is None:
        return None
    vocab_size = _config_of(models.resolve(config.models.target)).vocab_size
    stops = target_stop_ids(config, tokenizer)
    return frequent_tokens(corpus.token_mass(vocab_size), config.train.head_tokens, stops)


def write_start(config: Config, head: HeadChoice | None, tokenizer: Any, folder: Path) -> None:
    """The starting draft in float32. ValueError when it does not fit the target, or its head is pruned already and the
    config asks for another."""
    train = config.train
    head_ids: Sequence[int] | None = None if head is None else head.ids
    if train.start.first_layers is not None:
        target = models.load_target(config.models, "cpu")
        model = first_layers(target, train.start.first_layers, head_ids)
    else:
        model, head_ids = _from_model(config, head_ids)
    if train.freeze_embedding:
        freeze_embedding(model)
    export(model, tokenizer, folder, {}, head_ids, torch.float32)


def _from_model(config: Config, head_ids: Sequence[int] | None) -> tuple[Any, Sequence[int] | None]:
    assert config.train.start.model is not None
    source = models.resolve(config.train.start.model)
    models.check_draft_folder(config.models, source)
    if not is_pruned(source):
        model, _ = load_exported(source)
        if head_ids is not None:
            prune_head(model, head_ids)
            model.requires_grad_(True)
        return model, head_ids
    if head_ids is not None:
        raise ValueError(
            f"train.start.model {config.train.start.model} has a pruned head already, and train.head_tokens asks for "
            "another; leave train.head_tokens out"
        )
    return load_exported(source)


def _config_of(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
