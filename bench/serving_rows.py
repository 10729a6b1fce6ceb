"""Result rows of stage 05 from its units."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bench.serving_checks import checkpoints, compare, smoke_method
from bench.serving_grid import load_unit, texts_unit
from bench.serving_load import load_fields, loads
from bench.serving_methods import describe
from pipeline.config import Config
from pipeline.config_bench_vllm import MethodConfig

Reader = Callable[[str], Mapping[str, Any]]
MEMORY = ("kv_tokens", "context_limit", "max_concurrency")
REASON_LENGTH = 300  # characters
FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+~-]+/)+")  # of an absolute path, all but its last part


def load_rows(config: Config, read: Reader) -> list[dict[str, Any]]:
    """One row a method and load, measured or not; speedups are against "none" under the same closed load."""
    bench = config.bench_vllm
    assert bench is not None
    plain = {load.name: read(load_unit(bench.methods[0], load)).get("row") for load in loads(bench)}
    rows = []
    for method in bench.methods:
        about = describe(config, method) | _about_server(config, method, read)
        for load in loads(bench):
            unit = read(load_unit(method, load))
            measured, base = unit.get("row"), plain[load.name]
            row = about | (measured or load_fields(config, load, None))
            row["speedup"] = None
            if measured and base and load.concurrency is not None:
                row["speedup"] = measured["tokens_per_s"] / base["tokens_per_s"]
            row["not_run"] = _short(unit.get("not_run"))
            row["last_lines"] = [_short(line) for line in unit.get("last_lines", [])]
            rows.append(row | {"on_gpu": unit["device"]["kind"] == "gpu"})
    return rows


def checkpoint_rows(config: Config, read: Reader) -> list[dict[str, Any]]:
    """The bring-up checkpoints of the method that they are about; none when no method speculates."""
    bench = config.bench_vllm
    assert bench is not None
    method = smoke_method(bench.methods)
    if method is None:
        return []
    points = checkpoints(config, method, read(texts_unit(method)), read(texts_unit(bench.methods[0])))
    return [
        {"gate": "G6", "method": method.name, "check": name, "state": state, "reason": _short(reason)}
        for name, state, reason in points
    ]


def _about_server(config: Config, method: MethodConfig, read: Reader) -> dict[str, Any]:
    """Memory by the server's log, and how its greedy texts compare."""
    bench = config.bench_vllm
    assert bench is not None
    seen, plain = read(texts_unit(method)), read(texts_unit(bench.methods[0]))
    about: dict[str, Any] = {name: seen.get(name) for name in MEMORY}
    if "texts" in seen and "texts" in plain:
        return about | compare(seen["texts"], plain["texts"], config.models.dtype)
    return about | dict.fromkeys(("texts", "texts_same", "texts_tied", "texts_gap"))


def _short(text: str | None) -> str | None:
    """A server's words for a page: at most REASON_LENGTH of them, without the folders of this machine."""
    if text is None:
        return None
    text = FOLDERS.sub(".../", text)
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."
