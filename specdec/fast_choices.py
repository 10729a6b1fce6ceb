"""What was fastest on this kind of GPU, kept between processes: timing the kernels takes longer than loading a model.

A JSON file in $XDG_CACHE_HOME/specdec (else ~/.cache/specdec) for each GPU, version of torch and Triton, and text of
the kernels and of the code that chooses them: when one of these changes, another file is begun. A file that cannot be
read or written costs the time that it would have saved, and nothing else.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SOURCES = ("fast_kernels", "fast_layers", "fast_linear", "fast_product", "fast_residual", "fast_tilings")


class KeptChoices:
    """JSON values by the text of a key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = self._read()

    def get(self, key: object) -> Any:
        """None where nothing is known."""
        return self._values.get(str(key))

    def put(self, key: object, value: Any) -> None:
        """Beside what other processes have put there meanwhile."""
        self._values = self._read() | self._values | {str(key): value}
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._values), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            logger.debug("what is fastest is not kept: %s", error)

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}


def kept_or_timed(
    kept: KeptChoices | None, key: object, timed: Callable[[], T], *, of: Callable[[Any], T], to: Callable[[T], Any]
) -> T:
    """What is kept under the key, read by `of`; else what is timed now, which `to` makes JSON of."""
    if kept is not None and (values := kept.get(key)):
        return of(values)
    found = timed()
    if kept is not None:
        kept.put(key, to(found))
    return found


def kept_for(device: torch.device) -> KeptChoices:
    """Of this device's kind."""
    text = "".join(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in _SOURCES)
    kind = torch.cuda.get_device_name(device), torch.__version__, triton.__version__, text
    return KeptChoices(_folder() / f"tilings-{_short(kind)}.json")


def _short(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _folder() -> Path:
    home = os.path.expanduser("~")  # stays as it is for a user without one
    cache = os.environ.get("XDG_CACHE_HOME") or (tempfile.gettempdir() if home == "~" else os.path.join(home, ".cache"))
    return Path(cache) / "specdec"
