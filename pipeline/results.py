"""Result files: one measurement is one JSON file, checked when it is written and again when it is read.

    {"schema": 1, "stage": "04_bench_engine", "run": "demo", "command": "python -m ...", "git": "<revision>",
     "versions": {"torch": "..."}, "device": {"name": "...", "kind": "cpu" | "gpu", "count": 2},
     "started": "2026-01-01T00:00:00+00:00", "rows": [flat records], "gates": {"G1": {"state": "pass", ...}}}

A value that does not exist (acceptance where nothing was drafted) is null, never NaN: files are strict JSON.
"""

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline import files, manifest

SCHEMA = 1
GATE_STATES = ("pass", "fail", "not run")
_KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "stage": str,
    "run": str,
    "command": str,
    "git": str,
    "versions": dict,
    "device": dict,
    "started": str,
    "rows": list,
    "gates": dict,
}
_DEVICE_KEYS = ("name", "kind", "count")
_GATE_KEYS = ("state", "value", "limit", "reason")


def gate(state: str, *, value: Any = None, limit: Any = None, reason: str = "") -> dict[str, Any]:
    """One gate's record. `reason` says what was measured, or why it failed or did not run."""
    return {"state": state, "value": value, "limit": limit, "reason": reason}


def write_result(
    path: Path | str,
    *,
    stage: str,
    run: str,
    rows: Sequence[Mapping[str, Any]],
    gates: Mapping[str, Mapping[str, Any]],
    started: str,
    command: str | None = None,
    device: Mapping[str, Any] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Write a result atomically and return it; device: where it was measured when not by this process; note: a line
    under the report's heading. ValueError, and no file, when a value is not of the schema."""
    result = {
        "schema": SCHEMA,
        "stage": stage,
        "run": run,
        "command": command_line() if command is None else command,
        "git": git_revision(),
        "versions": manifest.package_versions(),
        "device": dict(device or manifest.device()),
        "started": started,
        "rows": [without_nan(dict(row)) for row in rows],
        "gates": {name: without_nan(dict(record)) for name, record in gates.items()},
    }
    if note:
        result["note"] = note
    check_result(result, str(path))
    files.write_atomic(Path(path), json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def read_result(path: Path | str) -> dict[str, Any]:
    """Read and check one result file. ValueError naming the file and what is wrong with it."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such result file; a stage writes it as its last step") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a result file ({error}); expected strict JSON") from None
    check_result(result, str(path))
    return result


def stage_files(run: Path, name: str) -> list[Path]:
    """The file of that name of each stage of a run's folder, in the stages' order, without those moved aside."""
    return [path for path in sorted(run.glob(f"*/{name}")) if files.ASIDE not in path.parent.name]


def check_result(result: Any, where: str) -> None:
    """ValueError unless `result` follows the schema above; `where` names it in the message."""
    if not isinstance(result, dict):
        raise ValueError(f"{where}: got {type(result).__name__}, expected an object with the keys {list(_KEYS)}")
    _check_keys(result, _KEYS, where)
    if result["schema"] != SCHEMA:
        raise ValueError(f"{where}: schema {result['schema']!r}, this code reads {SCHEMA}; measure again")
    for key, kind in _KEYS.items():
        if not isinstance(result[key], kind):
            raise ValueError(f"{where}: {key} is {result[key]!r}, expected {kind}")
    _check_keys(result["device"], _DEVICE_KEYS, f"{where}: device")
    if result["device"]["kind"] not in ("cpu", "gpu"):
        raise ValueError(f"{where}: device kind {result['device']['kind']!r}, expected 'cpu' or 'gpu'")
    for index, row in enumerate(result["rows"]):
        _check_row(row, f"{where}: rows[{index}]")
    for name, record in result["gates"].items():
        _check_gate(record, f"{where}: gate {name}")


def to_frame(paths: Iterable[Path | str]) -> pd.DataFrame:
    """The rows of many result files in one frame, with file, run, stage and device columns in front."""
    frames = []
    for path in paths:
        result = read_result(path)
        frame = pd.DataFrame(result["rows"])
        origin = {"file": Path(path).name, "run": result["run"], "stage": result["stage"]}
        for column, value in reversed((origin | {"device": result["device"]["name"]}).items()):
            frame.insert(0, column, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def without_nan(value: Any) -> Any:
    """Lists for tuples and None for NaN, all the way down; infinities stay, and json refuses them."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def command_line() -> str:
    """The command that started this process, as one would type it (`python -m module ...`)."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", Path(sys.argv[0]).name]
    return shlex.join([*start, *sys.argv[1:]])


def git_revision() -> str:
    """The checkout's commit, with `-dirty` when it has changes; "unknown" outside a checkout."""
    state = manifest.git_state()
    return f"{state['revision'] or 'unknown'}{'-dirty' if state['dirty'] else ''}"


def _check_keys(record: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"{where}: missing {missing}; got {sorted(record)}")


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: got {type(row).__name__}, expected a flat record")
    for key, value in row.items():
        cells = value if isinstance(value, list) else [value]
        if not all(cell is None or isinstance(cell, str | int | float) for cell in cells):
            raise ValueError(f"{where}: {key} is {value!r}; expected a number, text, null, or a list of these")


def _check_gate(record: Any, where: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: got {record!r}, expected an object with the keys {list(_GATE_KEYS)}")
    _check_keys(record, _GATE_KEYS, where)
    if record["state"] not in GATE_STATES:
        raise ValueError(f"{where}: state {record['state']!r}, expected one of {list(GATE_STATES)}")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"holds {text}")
