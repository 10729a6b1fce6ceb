"""The plugin's settings: `--additional-config '{"specdec": {"controller": "adaptive", "k_max": 6}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from specdec.controller import Adaptive, Controller, FixedK, Geometric

SECTION = "specdec"
# Settings that only some controllers read: one that has no effect is a mistake.
ONLY_FOR = {"k": ("fixed",), "decay": ("geometric", "adaptive"), "exploration": ("adaptive",)}
OWN = "own"
DRAFTS = ("vllm", OWN)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """controller: fixed, geometric or adaptive (docs/controller.md). k_max: the longest draft; num_speculative_tokens
    unless given. k: the length of the fixed controller; k_max unless given. decay: tested tokens after which a count
    has faded to 1/e. exploration: share of the time that rounds beside the best length may lose. log_interval_s:
    seconds between two lines in the log, 0 for none. draft: who runs the draft model, vllm or own (docs/vllm.md).
    window: latest tokens that the own draft attends to; 0: all of them. sinks: first tokens that it attends to
    besides. fast: the own draft's forward by specdec.fast; None: on a GPU, where that can be used. verify_graphs: each
    of the target's steps in one CUDA graph whatever the draft length, where that can be."""

    controller: str = "adaptive"
    k_max: int
    k: int
    decay: float = 2000.0
    exploration: float = 0.001
    log_interval_s: float = 10.0
    draft: str = "vllm"
    window: int = 0
    sinks: int = 4
    fast: bool | None = None
    verify_graphs: bool = True

    def make_controller(self) -> Controller:
        if self.controller == "fixed":
            return FixedK(self.k)
        if self.controller == "geometric":
            return Geometric(self.k_max, decay_tokens=self.decay)
        return Adaptive(self.k_max, decay_tokens=self.decay, explore_share=self.exploration)


KEYS = tuple(field.name for field in fields(Settings))
CONTROLLERS = ("fixed", "geometric", "adaptive")


def read_settings(additional_config: object, num_speculative_tokens: int) -> Settings:
    """The settings in vLLM's additional_config; ValueError for what is unknown, out of range or without effect."""
    given = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{SECTION} is {given!r}; expected an object with some of: {', '.join(KEYS)}")
    for key in given:
        if key not in KEYS:
            raise ValueError(f"unknown key {SECTION}.{key}; {_nearest(str(key), KEYS)}")
    controller = given.get("controller", "adaptive")
    if controller not in CONTROLLERS:
        raise ValueError(f"{SECTION}.controller is {controller!r}; {_nearest(str(controller), CONTROLLERS)}")
    for key, users in ONLY_FOR.items():
        if key in given and controller not in users:
            raise ValueError(f"{SECTION}.{key} has no effect with controller {controller}, only with {_either(users)}")
    draft = given.get("draft", Settings.draft)
    if draft not in DRAFTS:
        raise ValueError(f"{SECTION}.draft is {draft!r}; {_nearest(str(draft), DRAFTS)}")
    _check_own(given, draft)
    k_max = _whole(given, "k_max", num_speculative_tokens, lowest=1, highest=num_speculative_tokens)
    return Settings(
        controller=controller,
        k_max=k_max,
        k=_whole(given, "k", k_max, lowest=0, highest=k_max),
        decay=_number(given, "decay", lowest=100.0),
        exploration=_number(given, "exploration", lowest=0.0, highest=0.2),
        log_interval_s=_number(given, "log_interval_s", lowest=0.0),
        draft=draft,
        window=_tokens(given, "window", lowest=1),
        sinks=_tokens(given, "sinks", lowest=0),
        fast=_flag(given, "fast") if "fast" in given else None,
        verify_graphs=_flag(given, "verify_graphs"),
    )


def _check_own(given: Mapping[str, Any], draft: str) -> None:
    own, window = draft == OWN, "window" in given
    for key, has_effect, needs in (
        ("window", own, "without draft: own"),
        ("sinks", window, "without window"),
        ("fast", own and not window, "with a window" if window else "without draft: own"),
    ):
        if key in given and not has_effect:
            raise ValueError(f"{SECTION}.{key} has no effect {needs}")


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, getattr(Settings, key))
    if not isinstance(value, bool):
        raise ValueError(f"{SECTION}.{key} is {value!r}; expected true or false")
    return value


def _whole(given: Mapping[str, Any], key: str, default: int, *, lowest: int, highest: int) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        hint = "; not to draft at all, use controller fixed with k 0" if (key, value) == ("k_max", 0) else ""
        limit = "num_speculative_tokens" if key == "k_max" else "k_max"
        raise ValueError(
            f"{SECTION}.{key} is {value!r}; expected a whole number from {lowest} to {limit} ({highest}){hint}"
        )
    return value


def _tokens(given: Mapping[str, Any], key: str, *, lowest: int) -> int:
    value = given.get(key, getattr(Settings, key))
    if not isinstance(value, int) or isinstance(value, bool) or (key in given and value < lowest):
        hint = "; leave it out for a draft that attends to the whole text" if key == "window" else ""
        raise ValueError(f"{SECTION}.{key} is {value!r}; expected a whole number from {lowest} on{hint}")
    return value


def _number(given: Mapping[str, Any], key: str, *, lowest: float, highest: float | None = None) -> float:
    value = given.get(key, getattr(Settings, key))
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or value < lowest or (highest is not None and value > highest):
        upwards = f"to {highest:g}" if highest is not None else "on"
        raise ValueError(f"{SECTION}.{key} is {value!r}; expected a number from {lowest:g} {upwards}")
    return float(value)


def _nearest(got: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(got, known, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of: {', '.join(known)}"


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(names)
