"""Whether the target and draft of a config are here and fit each other. Loads no weights and downloads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import models
from pipeline.config import DraftConfig, ModelsConfig
from pipeline.findings import Finding, error, note, ok, warning


def check_pair(config: ModelsConfig) -> list[Finding]:
    """One finding for the target, one for the draft."""
    target = describe("target", config.target)
    if config.draft.model is None:
        return [target, check_kept_layers(config.target, config.draft)]
    draft = describe("draft", config.draft.model)
    return [target, draft if draft.level != "ok" else compare(config.target, config.draft.model, draft.found)]


def describe(role: str, name: str) -> Finding:
    """Whether the model is on this machine, and what it is."""
    try:
        folder = models.find(name)
    except ValueError as problem:
        return error(role, str(problem), "no stage that runs a model can run")
    if folder is None:
        return note(role, f"{name}, not on this machine yet", "downloaded or made by the first stage that loads it")
    settings = read_settings(folder)
    if settings is None:
        return error(role, f"{name}: no config.json in {folder}", "no stage that runs a model can run")
    sizes = f"{settings.get('num_hidden_layers')} layers, vocabulary {settings.get('vocab_size')}"
    return ok(role, f"{name}: {settings.get('model_type')}, {sizes}")


def check_kept_layers(target: str, draft: DraftConfig) -> Finding:
    """A draft of the target's own layers fits by construction, if the target has those layers."""
    kept = draft.keep_layers
    assert kept is not None
    layers = tuple(range(kept)) if isinstance(kept, int) else kept
    settings = _settings_of(target)
    found = f"the target's layers {', '.join(map(str, layers))}"
    if settings is not None and max(layers) >= settings["num_hidden_layers"]:
        problem = f"{found}, but it has {settings['num_hidden_layers']} layers, counted from 0"
        return error("draft", problem, "the draft cannot be made: mend models.draft.keep_layers")
    return ok("draft", f"{found}; same vocabulary and tokenizer")


def compare(target: str, draft: str, found: str) -> Finding:
    """Vocabulary sizes and tokenizers of two models; the draft's finding."""
    ours, theirs = _settings_of(target), _settings_of(draft)
    if ours is None or theirs is None:
        return note("draft", found, "not compared with the target, which is not on this machine yet")
    if ours["vocab_size"] != theirs["vocab_size"]:
        sizes = f"vocabulary {theirs['vocab_size']}, the target's {ours['vocab_size']}"
        return error("draft", f"{draft}: {sizes}", "the engine needs one vocabulary: take a draft of the target's family")
    ids = read_token_ids(models.find(target)), read_token_ids(models.find(draft))
    if None in ids:
        return note("draft", found, "tokenizers not compared: no tokenizer.json in one of the two folders")
    if ids[0] != ids[1]:
        cost = "output stays exact, but the draft reads other text than the target wrote: few tokens are accepted"
        return warning("draft", f"{found}; its tokenizer differs from the target's", cost)
    return ok("draft", f"{found}; same vocabulary and tokenizer")


def read_settings(folder: Path) -> Mapping[str, Any] | None:
    """The language model's part of config.json; None without a readable one."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("text_config", settings)


def read_token_ids(folder: Path | None) -> dict[str, int] | None:
    """Token -> id of tokenizer.json, added tokens included; None without a readable one."""
    if folder is None:
        return None
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # unigram models list [token, score] in the order of ids
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}}


def _settings_of(name: str) -> Mapping[str, Any] | None:
    folder = models.find(name)
    return read_settings(folder) if folder is not None else None
