"""Whether a model folder's weight files are whole, read from their headers before anything heavy is imported."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20


def check_folder(folder: Path) -> None:
    """ValueError naming the file when config.json or a weight file is missing, truncated or not what it should be."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder}: no config.json in it; expected a model folder as transformers saves it")
    _read_json(config)
    for path in weight_files(folder):
        check_safetensors(path)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, those that its index lists if it has one. ValueError when one is missing."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder}: weight file {missing[0]} is missing ({len(missing)} of {len(names)}); copy the model again"
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(
            f"{folder}: no weight file; expected model.safetensors (or several with model.safetensors.index.json)"
        )
    return found


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or the headers."""
    if (folder / INDEX).is_file():
        return dict(_read_json(folder / INDEX)["weight_map"])
    headers = {path.name: json.loads(header_bytes(path)) for path in weight_files(folder)}
    return {tensor: name for name, header in headers.items() for tensor in header if tensor != "__metadata__"}


def check_safetensors(path: Path) -> None:
    """ValueError when the file's size is not what its header says. Reads the header only."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: got {size} bytes, too short for its header: truncated or not safetensors; copy it again"
            )
        header = _parse_header(path, stream.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(f"{path}: got {size} bytes, its header says {expected}: {what}; copy it again")


def header_bytes(path: Path) -> bytes:
    """A safetensors file's header: names, shapes and types of its tensors."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(LENGTH_BYTES))
        return stream.read(length)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
        assert isinstance(header, dict)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"{path}: its header is not JSON: damaged, or not a safetensors file; copy it again"
        ) from error
    return header


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); copy the model again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value
