"""Installs the plugin's parts in one process, all of them or none, but those that are OPTIONAL."""

from __future__ import annotations

import logging
from types import ModuleType

from vllm_draft_spec.versions import problems

# Below vLLM's own logger, so that its level and format hold for our lines too.
logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
_state = {"done": False}


def parts() -> tuple[ModuleType, ...]:
    """The modules with something to install: each has ANCHORS, checked first, and install(), called in this order."""
    from vllm_draft_spec import config, drafter, metrics, runner, scheduler, verify_graphs

    return config, drafter, runner, scheduler, metrics, verify_graphs


def install() -> bool:
    """Whether the plugin is installed. It is not, and nothing is replaced, where vLLM is not as expected."""
    if _state["done"]:
        return True
    import vllm

    modules = parts()
    optional = [module for module in modules if getattr(module, "OPTIONAL", False)]
    anchors = [anchor for module in modules if module not in optional for anchor in module.ANCHORS]
    found = problems(vllm.__version__, anchors)
    if found:
        logger.error("vllm_draft_spec is off, vLLM is left as it is: %s", "; ".join(found))
        return False
    missing = {module.__name__: problems(vllm.__version__, module.ANCHORS) for module in optional}
    for module in modules:
        if module in optional and missing[module.__name__]:
            logger.warning("%s is left out: %s", module.__name__, "; ".join(missing[module.__name__]))
        else:
            module.install()
    _state["done"] = True
    return True
