"""specdec: a batched draft/verify engine for speculative decoding that leaves the target's law unchanged.

    from specdec import Engine, Request, SamplingParams

    engine = Engine(target, draft, k=4)
    done = engine.generate([Request(prompt_ids=ids, params=SamplingParams(temperature=0.7, seed=1))])

Importing the package needs nothing but Python; the engine itself needs torch and transformers, which are not
installed with the package so that an existing environment keeps the versions it has.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Engine": "specdec.engine",
    "SpecDecoder": "specdec.decoder",
    "Generation": "specdec.stream",
    "Stream": "specdec.stream",
    "ModelDrafter": "specdec.drafter",
    "ParallelDrafter": "specdec.parallel",
    "NgramDrafter": "specdec.lookup",
    "SuffixDrafter": "specdec.suffix",
    "Request": "specdec.request",
    "Completion": "specdec.request",
    "TokenLogprobs": "specdec.request",
    "SamplingParams": "specdec.request",
    "AcceptanceStats": "specdec.stats",
    "RoundStats": "specdec.stats",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "numpy"):
            raise
        raise ImportError(
            f"specdec.{name} needs {error.name}, which is not installed; specdec leaves that choice to you: "
            f"pip install torch transformers (or pip install 'specdec[engine]')"
        ) from error
