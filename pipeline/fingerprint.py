"""What a stage's result is a function of, and how two of these differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import config as configs
from pipeline import sources
from pipeline.config import Config, PromptSource


def fingerprint(
    name: str, version: int, sections: tuple[str, ...], config: Config, inputs: Mapping[str, str]
) -> dict[str, Any]:
    """Plain data: stage, code version, config sections, hashes of input stages, state of the prompt sources."""
    prompts = {
        f"{section.removesuffix('.prompts')}.{source.name}": sources.state(source.source)
        for section in sections
        for source in _prompt_sources(config, section)
    }
    return {
        "stage": name,
        "version": version,
        "config": configs.section_values(config, sections),
        "inputs": dict(inputs),
        "prompts": prompts,
    }


def _prompt_sources(config: Config, section: str) -> tuple[PromptSource, ...]:
    """The prompt sources that a section holds, or that the part of it named "<section>.prompts" is."""
    value = configs.part(config, section)
    return (value or ()) if section.endswith(".prompts") else getattr(value, "prompts", ())


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line a changed value, such as "config.traces.batch: 8 -> 4"."""
    before, after = dict(flat("", old)), dict(flat("", new))
    return [
        f"{key}: {before.get(key, '(absent)')} -> {after.get(key, '(absent)')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def changed_settings(content: Mapping[str, Any], config: Config) -> list[str]:
    """What differs between the settings that a manifest's stage was made from and the config's, one line each."""
    made_from = content["fingerprint"]["config"]
    return differences({"config": made_from}, {"config": configs.section_values(config, made_from)})


def flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON) of every leaf, under the key `path`."""
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list) and any(isinstance(element, Mapping) for element in value):
        children = enumerate(value)
    elif path:
        yield path, json.dumps(value)
    for key, child in children:
        yield from flat(f"{path}.{key}" if path else str(key), child)
