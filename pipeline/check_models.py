"""Whether the target and draft of a config are here and fit each other. Loads no weights and downloads nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pipeline import drafts, models, weights
from pipeline.config import DraftConfig, ModelsConfig
from pipeline.findings import Finding, error, note, ok, package_version, warning

NO_STAGE = "no stage that runs a model can run"


def check_pair(config: ModelsConfig) -> list[Finding]:
    """One finding for the target, one for the draft."""
    if package_version("transformers") is None:
        return [error("target", f"{config.target}: not looked at without transformers", NO_STAGE)]
    target = describe("target", config.target)
    if target.level == "error":
        return [target]
    if config.draft.trained is not None:
        return [target, ok("draft", f"{config.draft.trained}, which stage 03 trains")]
    if config.draft.model is None:
        return [target, check_kept_layers(config.target, config.draft)]
    draft = describe("draft", config.draft.model)
    both_here = target.level == draft.level == "ok"
    return [target, compare(config.target, config.draft.model, draft.found) if both_here else draft]


def describe(role: str, name: str) -> Finding:
    """Whether the model is on this machine, whole, and what it is."""
    try:
        folder = models.find(name)
        if folder is None:
            return note(role, f"{name}, not on this machine yet", "fetched or made by the first stage that loads it")
        weights.check_folder(folder)
        settings = text_config(folder)
    except (ValueError, OSError) as problem:
        return error(role, str(problem), NO_STAGE)
    sizes = f"{settings.num_hidden_layers} layers, vocabulary {settings.vocab_size}"
    return ok(role, f"{name}: {settings.model_type}, {sizes}")


def check_kept_layers(target: str, draft: DraftConfig) -> Finding:
    """A draft of the target's own layers fits by construction, if the target has those layers."""
    kept = draft.keep_layers
    assert kept is not None
    layers = tuple(range(kept)) if isinstance(kept, int) else kept
    folder = models.find(target)
    found = f"the target's layers {', '.join(map(str, layers))}"
    if folder is not None and max(layers) >= (count := text_config(folder).num_hidden_layers):
        found = f"{found}, but it has the layers 0 to {count - 1}"
        return error("draft", found, "the draft cannot be made: correct models.draft.keep_layers")
    return ok("draft", f"{found}; same vocabulary and tokenizer")


def compare(target: str, draft: str, found: str) -> Finding:
    """Vocabulary sizes and tokenizers of two models that are here, by the rule that loading the draft holds to."""
    from transformers import AutoTokenizer

    folders = [models.find(target), models.find(draft)]
    assert None not in folders
    configs = [text_config(folder) for folder in folders if folder]
    try:
        tokenizers = [AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            drafts.check_pair(*configs, *tokenizers)
    except (ValueError, OSError) as problem:
        return error("draft", str(problem), "the draft cannot be loaded")
    if caught:
        return warning("draft", found, str(caught[0].message))
    return ok("draft", f"{found}; same vocabulary and tokenizer")


def text_config(folder: Path) -> Any:
    """The language model's settings. ValueError or OSError when transformers does not know them."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
