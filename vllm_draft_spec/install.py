"""Installs the plugin's parts in one process, all of them or none."""

from __future__ import annotations

import logging
from types import ModuleType

from vllm_draft_spec.versions import problems

# Below vLLM's own logger, so that its level and format hold for our lines too.
logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
_state = {"done": False}


def parts() -> tuple[ModuleType, ...]:
    """The modules with something to install: each has ANCHORS, checked first, and install(), called in this order."""
    from vllm_draft_spec import config, drafter, metrics, runner, scheduler

    return config, drafter, runner, scheduler, metrics


def install() -> bool:
    """Whether the plugin is installed. It is not, and nothing is replaced, where vLLM is not as expected."""
    if _state["done"]:
        return True
    import vllm

    modules = parts()
    anchors = [anchor for module in modules for anchor in module.ANCHORS]
    found = problems(vllm.__version__, anchors)
    if found:
        logger.error("vllm_draft_spec is off, vLLM is left as it is: %s", "; ".join(found))
        return False
    for module in modules:
        module.install()
    _state["done"] = True
    return True
