"""Targets and drafts by name: a local folder, a hub id, a loaded model, or a drafter that needs no model."""

import logging
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.drafter import Drafter, ModelDrafter
from specdec.lookup import NgramDrafter
from specdec.pruned import is_pruned, load_pruned, refuse_missing
from specdec.suffix import SuffixDrafter
from specdec.vocab import intersection_map

logger = logging.getLogger(__name__)
Source: TypeAlias = str | PathLike[str]
DraftSource: TypeAlias = Source | PreTrainedModel | Drafter | None
_WITHOUT_MODEL = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def load_target(
    source: Source | PreTrainedModel, tokenizer: Any, *, dtype: Any, device: Any
) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer; a loaded model stays on its device unless another is named."""
    if isinstance(source, PreTrainedModel):
        if tokenizer is None:
            raise ValueError("the target is a loaded model, so its tokenizer is needed too: pass tokenizer=...")
        return (source if device is None else source.to(device)), tokenizer
    tokenizer = tokenizer if tokenizer is not None else tokenizer_of(source)
    if tokenizer is None:
        raise ValueError(f"{str(source)!r} holds no tokenizer; expected one beside the model, or pass tokenizer=...")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _model(source, dtype, device), tokenizer


def load_draft(
    source: DraftSource, draft_tokenizer: Any, *, target: PreTrainedModel, tokenizer: Any, dtype: Any
) -> Drafter | None:
    """What Engine takes as a draft. A model whose tokens have other ids than the target's proposes those that both
    have, which the log says."""
    if isinstance(source, str) and source in _WITHOUT_MODEL:
        return _WITHOUT_MODEL[source]()
    if isinstance(source, PreTrainedModel):
        return _model_drafter(source, draft_tokenizer, _size(target), tokenizer)
    if not isinstance(source, str | PathLike):
        return source
    return load_model_draft(
        source, draft_tokenizer, target_size=_size(target), tokenizer=tokenizer, dtype=dtype, device=target.device
    )


def load_model_draft(
    source: Source, draft_tokenizer: Any = None, *, target_size: int, tokenizer: Any, dtype: Any, device: Any
) -> ModelDrafter:
    """The drafter of a folder or hub id for a target with `target_size` output ids, which `tokenizer` made; None where
    nobody knows: as many ids then mean the same ones."""
    if is_pruned(source):
        return load_pruned(source, target_size=target_size, dtype=dtype, device=device)
    model = _model(source, dtype, device)
    return _model_drafter(model, draft_tokenizer or tokenizer_of(source), target_size, tokenizer)


def _model_drafter(model: PreTrainedModel, draft_tokenizer: Any, target_size: int, tokenizer: Any) -> ModelDrafter:
    draft_size = _size(model)
    known = draft_tokenizer is not None and tokenizer is not None
    if target_size == draft_size and not (known and draft_tokenizer.get_vocab() != tokenizer.get_vocab()):
        return ModelDrafter(model)
    if not known:
        raise ValueError(
            f"vocabularies differ (target {target_size} tokens, draft {draft_size}) and one of the two has no "
            f"tokenizer; expected both, to find the tokens that both have: put it beside the model, or pass "
            f"draft_tokenizer=..."
        )
    vocabulary = intersection_map(tokenizer, draft_tokenizer, target_size=target_size, draft_size=draft_size)
    message = "the draft has another vocabulary: it proposes the %d of the target's %d tokens that both have"
    logger.warning(message, vocabulary.shared, target_size)
    return ModelDrafter(model, vocabulary=vocabulary)


def _size(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _model(source: Source, dtype: Any, device: Any) -> PreTrainedModel:
    try:
        model, found = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except OSError as error:
        raise _not_loadable(source, error) from error
    refuse_missing(source, found["missing_keys"])
    return model.to(device).eval()


def tokenizer_of(source: Source) -> Any:
    """None where there is none: transformers then makes one with an empty vocabulary. ValueError without a model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _not_loadable(source, error) from error
    return tokenizer if len(tokenizer.get_vocab()) > 1 else None


def _not_loadable(source: Source, error: Exception) -> ValueError:
    return ValueError(f"cannot load {str(source)!r}: {why_not_loadable(str(source), error)}")


def why_not_loadable(source: str, error: Exception) -> str:
    """What transformers said of a model that is not there, and the way out."""
    reason = str(error).strip().split("\n")[0].rstrip(".:")
    if "gated" in str(error):
        return f"{reason}. Ask for access on the model's page of the hub, then log in (`hf auth login`, or HF_TOKEN)"
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_local and not Path(source).is_dir():
        return "no such folder; a path is seen from where the command is started"
    if looks_local:
        return (
            f"{reason}. Expected a model in that folder: config.json, weights and tokenizer as transformers saves them"
        )
    return f"{reason}. Expected a local folder with a model, or a hub id and a network (or the model in HF_HOME)"
