"""What stage 01 knows of the target before any weight is loaded: tokenizer, stop ids, context, revision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.common import stop_ids
from pipeline.config import Config
from pipeline.models import check_draft, resolve, revision


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """`folder` as transformers saves a model; `context` is the most tokens of prompt and completion together."""

    name: str
    revision: str
    folder: Path
    tokenizer: Any
    config: Any
    stop_ids: tuple[int, ...]
    context: int


def find_teacher(config: Config) -> Teacher:
    """The config's target. ValueError as pipeline.models.resolve, and when a draft model numbers tokens otherwise:
    it could not learn from these traces."""
    from transformers import AutoConfig, AutoTokenizer

    check_draft(config.models)
    folder = resolve(config.models.target)
    model_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Teacher(
        name=config.models.target,
        revision=revision(config.models.target),
        folder=folder,
        tokenizer=tokenizer,
        config=model_config,
        stop_ids=stop_ids(_generation_config(folder, model_config), tokenizer),
        context=int(model_config.get_text_config().max_position_embeddings),
    )


def _generation_config(folder: Path, model_config: Any) -> Any:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_model_config(model_config)
