"""A draft made of some of the target's layers; a draft stored without what it shares with its target; whether a draft
fits a target.

A stored draft may leave out tensors that are its target's own, such as the embedding, which is most of a small draft.
Its folder then holds BORROWS: {"model": a name as in pipeline.models, "tensors": [names]}.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline import files, local_models, weights

BORROWS = "borrows.json"
BORROWED_WEIGHTS, OWN_WEIGHTS, SINGLE = "borrowed.safetensors", "own.safetensors", "model.safetensors"
PER_LAYER_KEYS = ("layer_types", "no_rope_layers", "mlp_layer_types")


def keep_layers(target: Any, keep: int | Sequence[int]) -> Any:
    """A model of the target's first `keep` layers, or of the listed ones in that order.

    Embeddings, layers and head are the target's own tensors (no copy of the weights), under parameters of the draft's
    own, so that moving or casting the draft leaves the target as it was; training it in place would not: copy it first.
    ValueError for layers the target lacks, or an architecture whose layers cannot be cut.
    """
    indices = _indices(keep, len(_decoder(target).layers))
    if getattr(target.config.get_text_config(), "num_kv_shared_layers", 0):
        raise ValueError(
            f"keep_layers: {type(target).__name__} shares keys and values between layers; name a model instead"
        )
    draft = _sharing_copy(target)
    _cut_config(draft.config.get_text_config(), indices)
    decoder = _decoder(draft)
    decoder.layers = type(decoder.layers)([decoder.layers[index] for index in indices])
    for number, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    return draft.eval()


def save_draft(draft: Any, tokenizer: Any, folder: Path) -> None:
    """Write a draft as a plain model folder, whole or not at all. ValueError when the folder exists."""
    if folder.exists():
        raise ValueError(f"{folder}: exists already; move it aside first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = folder.with_name(files.TMP_PREFIX + folder.name)
    shutil.rmtree(tmp, ignore_errors=True)
    draft.save_pretrained(tmp)
    tokenizer.save_pretrained(tmp)
    files.publish(tmp, folder)


def completed(folder: Path, resolve: Callable[[str], Path]) -> Path:
    """The folder itself, or when it borrows tensors a whole copy of it, made once under models_root(), with those
    tensors and the tokenizer of the model that lends them.

    `resolve` gives a model's folder by name. ValueError when BORROWS is not in its format or the lender lacks a tensor.
    """
    if not (folder / BORROWS).is_file():
        return folder
    lender, names = _read_borrows(folder / BORROWS)
    return local_models.make_once(_made_name(folder), lambda tmp: _complete(folder, resolve(lender), names, tmp))


def find_completed(folder: Path) -> Path | None:
    """What `completed` gives, if it need not be made first; else None."""
    if not (folder / BORROWS).is_file():
        return folder
    made = local_models.models_root(create=False) / _made_name(folder)
    return made if made.is_dir() else None


def _made_name(folder: Path) -> str:
    state = {path.name: files.sha256_file(path) for path in [*weights.weight_files(folder), folder / BORROWS]}
    return f"{folder.resolve().name}-{files.sha256_json(state)[:12]}"


def _read_borrows(path: Path) -> tuple[str, list[str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["model"]), [str(name) for name in content["tensors"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{path}: not in its format ({error!r}); expected {{"model": NAME, "tensors": [NAMES]}}'
        ) from error


def _complete(folder: Path, lender: Path, names: Sequence[str], tmp: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    borrowed: dict[str, Any] = {}
    for path in weights.weight_files(lender):
        with safe_open(path, framework="pt") as tensors:
            borrowed |= {name: tensors.get_tensor(name) for name in names if name in set(tensors.keys())}
    if len(borrowed) < len(names):
        missing = sorted(set(names) - borrowed.keys())
        raise ValueError(f"{folder}: borrows {missing[0]} of {lender.name}, which has no such tensor")
    for path in sorted(lender.glob("*token*")) + sorted(lender.glob("*.jinja")):
        shutil.copyfile(path, tmp / path.name)
    shutil.copytree(folder, tmp, dirs_exist_ok=True, ignore=shutil.ignore_patterns(BORROWS))
    save_file(borrowed, tmp / BORROWED_WEIGHTS, metadata={"format": "pt"})
    index = weights.weight_map(folder) | dict.fromkeys(names, BORROWED_WEIGHTS)
    if SINGLE in index.values():  # under this name it would be taken for the whole model, the index unread
        (tmp / SINGLE).rename(tmp / OWN_WEIGHTS)
        index = {name: OWN_WEIGHTS if file == SINGLE else file for name, file in index.items()}
    text = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    (tmp / weights.INDEX).write_text(text + "\n", encoding="utf-8")


def check_pair(
    target_config: Any, draft_config: Any, target_tokenizer: Any = None, draft_tokenizer: Any = None
) -> None:
    """ValueError unless both number the same tokens: equal (padded) vocabulary sizes, equal tokenizers if given.

    A draft with a shorter context than the target's gives a warning: it must not be run past it.
    """
    target, draft = target_config.get_text_config(), draft_config.get_text_config()
    if target_tokenizer is not None and draft_tokenizer is not None:
        _check_tokenizers(target_tokenizer.get_vocab(), draft_tokenizer.get_vocab())
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"target and draft have vocabularies of different size (padding included): {target.vocab_size} and "
            f"{draft.vocab_size}; expected a draft of the target's family, or keep_layers"
        )
    if draft.max_position_embeddings < target.max_position_embeddings:
        warnings.warn(
            f"the draft's context ({draft.max_position_embeddings} positions) is shorter than the target's "
            f"({target.max_position_embeddings}); past it its proposals are poor",
            stacklevel=2,
        )


def _check_tokenizers(target: dict[str, int], draft: dict[str, int]) -> None:
    if target == draft:
        return
    differing = sorted(token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token))
    example = differing[0]
    raise ValueError(
        f"target and draft have different tokenizers: {len(target)} and {len(draft)} tokens, {len(differing)} "
        f"differ, such as {example!r}: id {target.get(example)} and {draft.get(example)}; "
        "expected a draft of the target's family, or keep_layers"
    )


def _indices(keep: int | Sequence[int], count: int) -> list[int]:
    indices = list(range(keep)) if isinstance(keep, int) else list(keep)
    wrong = [index for index in indices if not 0 <= index < count]
    if not indices or wrong:
        got = wrong[0] if wrong else "none"
        raise ValueError(
            f"keep_layers: got {keep!r} (layer {got}), expected layers 0 to {count - 1}: the target has {count}"
        )
    if len(set(indices)) < len(indices):
        raise ValueError(f"keep_layers: got {keep!r}, expected each layer at most once")
    return indices


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
    if not hasattr(decoder, "layers"):
        raise ValueError(
            f"keep_layers: {type(model).__name__} has no decoder with a list of layers; name a draft model instead"
        )
    return decoder


def _sharing_copy(model: Any) -> Any:
    """A copy of the module tree and its config whose tensors are the model's own memory."""
    from torch import nn

    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _cut_config(config: Any, indices: Sequence[int]) -> None:
    count = config.num_hidden_layers
    for key in PER_LAYER_KEYS:
        values = getattr(config, key, None)
        if isinstance(values, list) and len(values) == count:
            setattr(config, key, [values[index] for index in indices])
    config.num_hidden_layers = len(indices)
