"""Drafts whose output head is pruned to the tokens they are likely to propose, as a folder.

Format: a Hugging Face folder (config.json, weights in safetensors) of the whole draft in which `lm_head.weight` has N
rows instead of vocab_size, untied from the embedding, and beside it `head_ids.json`, a JSON list of N different
target ids: row i of the head stands for target id head_ids[i]. The draft reads the target's ids: its embedding
(config.vocab_size) covers all of them.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from specdec.drafter import ModelDrafter
from specdec.vocab import pruned_head_map

HEAD_IDS = "head_ids.json"
_HEAD = "lm_head.weight"


def is_pruned(source: "str | PathLike[str]") -> bool:
    return (Path(source) / HEAD_IDS).is_file()


def prune_head(model: PreTrainedModel, head_ids: Sequence[int]) -> None:
    """Keep only the head's rows of `head_ids`, in their order; changes `model`."""
    weight_VD = model.get_output_embeddings().weight
    _set_head(model, weight_VD.detach()[list(head_ids)].clone())


def save_pruned(model: PreTrainedModel, head_ids: Sequence[int], folder: "str | PathLike[str]") -> None:
    """Write a model whose head is pruned already (`prune_head`) in this module's format."""
    rows = model.get_output_embeddings().weight.shape[0]
    if rows != len(head_ids):
        raise ValueError(f"the head has {rows} rows and head_ids {len(head_ids)} ids; expected one id a row")
    model.save_pretrained(folder)
    (Path(folder) / HEAD_IDS).write_text(json.dumps([int(token) for token in head_ids]), encoding="utf-8")


def load_pruned(folder: "str | PathLike[str]", *, target_size: int, dtype: Any, device: Any) -> ModelDrafter:
    """The drafter of such a folder for a target with `target_size` output ids. Raises ValueError when the folder is
    not in the format or does not fit."""
    model, head_ids = load_pruned_model(folder, dtype=dtype)
    embedded = model.get_input_embeddings().weight.shape[0]
    if embedded < target_size:
        raise ValueError(
            f"{folder}: the draft embeds {embedded} ids, the target has {target_size}; expected all of them"
        )
    return ModelDrafter(model.to(device), vocabulary=pruned_head_map(head_ids, target_size))


def load_pruned_model(folder: "str | PathLike[str]", *, dtype: Any) -> tuple[PreTrainedModel, list[int]]:
    """The model of such a folder, whose head has the pruned rows alone, and their ids. ValueError as `load_pruned`."""
    folder = Path(folder)
    head_ids = _read_head_ids(folder / HEAD_IDS)
    weight_ND = _read_head(folder)
    if len(weight_ND) != len(head_ids):
        raise ValueError(
            f"{folder}: {_HEAD} has {len(weight_ND)} rows, {HEAD_IDS} {len(head_ids)} ids; expected as many"
        )
    with _quiet():  # it would report that the head's shape is not the config's
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
    refuse_missing(folder, found["missing_keys"])
    _set_head(model, weight_ND.to(model.dtype))
    return model, head_ids


def refuse_missing(source: "str | PathLike[str]", names: Iterable[str]) -> None:
    """ValueError for a model whose files lack weights, which transformers would draw at random."""
    missing = sorted(names)
    if missing:
        raise ValueError(
            f"{source}: no weights for {missing[0]} ({len(missing)} missing in all); expected a whole model (a draft "
            f"stored without what it shares with its target has to be completed first)"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _set_head(model: PreTrainedModel, weight_ND: Tensor) -> None:
    head = nn.Linear(weight_ND.shape[1], weight_ND.shape[0], bias=False, dtype=weight_ND.dtype, device=weight_ND.device)
    head.weight = nn.Parameter(weight_ND, requires_grad=False)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False


def _read_head_ids(path: Path) -> list[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); expected a list of target ids") from error
    if not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise ValueError(f"{path}: expected a list of target ids, one for each row of {_HEAD}")
    return ids


def _read_head(folder: Path) -> Tensor:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            if _HEAD in weights.keys():  # noqa: SIM118 (not a dict)
                tensor: torch.Tensor = weights.get_tensor(_HEAD)
                return tensor
    raise ValueError(f"{folder}: no {_HEAD} in its safetensors files; expected the pruned head, untied")
