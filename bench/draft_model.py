"""The draft of a config: kept layers, a model's name, a folder with a pruned head, or a trained draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import models
from pipeline.config import Config, DraftConfig
from pipeline.config_train import STOCK
from pipeline.stage import data_root


def as_draft(config: Config, name: str | None) -> Config:
    """The config with one of bench_engine.drafts as its draft: "stock" is the draft that stage 03 starts from, before
    any training and with its whole head; another name one that the stage trained. None: models.draft as it is."""
    if name is None:
        return config
    start = config.train.start
    stock = DraftConfig(keep_layers=start.first_layers, model=start.model)
    draft = stock if name == STOCK else DraftConfig(trained=name)
    return replace(config, models=replace(config.models, draft=draft))


def load_draft(config: Config, target: Any, device: str, dtype: str | None = None) -> Any:
    """What Engine takes as its draft: a model in eval mode, or a ModelDrafter where the head is pruned.

    ValueError when the draft is not there, or its vocabulary or tokenizer is not the target's.
    """
    from train.evaluation import drafter_of  # with what reads traces, which a machine that only serves may lack

    draft = config.models.draft
    if draft.keep_layers is not None:
        return models.kept_layers_draft(config.models, target, device, dtype)
    folder = trained_folder(config) if draft.trained is not None else models.draft_folder(config.models)
    models.check_draft_folder(config.models, folder)
    return drafter_of(folder, target, device, dtype or config.models.dtype)


def draft_name(config: Config) -> str:
    """The config's draft as result rows name it."""
    draft = config.models.draft
    return draft.model or draft.trained or f"keep_layers={draft.keep_layers}"


def trained_folder(config: Config) -> Path:
    """Where stage 03 of the config's run puts its draft. ValueError when it is not there."""
    assert config.models.draft.trained is not None
    folder = data_root() / config.run / "03_train_draft" / config.models.draft.trained
    if not folder.is_dir():
        raise ValueError(f"{folder}: no trained draft there; run 03_train_draft first")
    return folder
