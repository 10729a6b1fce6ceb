"""A method of the config as the command line and environment of one `vllm serve`."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.draft_model import draft_name
from bench.serving_drafts import NAMED_DRAFT, NAMED_MODEL, folder_of
from bench.serving_server import ServerCommand
from pipeline.config import Config
from pipeline.config_bench_vllm import BASELINE, MethodConfig

CHECKOUT = Path(__file__).resolve().parent.parent
SERVED_NAME = "target"
SWITCH = "SPECDEC_PLUGIN"
# What a site sets itself wins over these.
CPU_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
DRAFTERS = {"draft_model": "model", "custom_class": "custom"}  # other methods under vLLM's own name


def server_command(config: Config, method: MethodConfig, *, on_gpu: bool, folder: Path) -> ServerCommand:
    """How to serve the config's target with `method`; `folder` is where the plugin's record is written if needed.

    Prefix caching is off: requests repeat prompts, and a method must not gain from what another load left. ValueError
    where a model that the method names cannot be had.
    """
    bench = config.bench_vllm
    assert bench is not None
    arguments = [
        folder_of("$TARGET", config),
        *("--served-model-name", SERVED_NAME, "--dtype", config.models.dtype, "--seed", str(bench.seed)),
        *("--max-model-len", str(bench.max_model_len), "--no-enable-prefix-caching"),
        *("--tensor-parallel-size", str(bench.tensor_parallel)),
        *([] if on_gpu else ["--enforce-eager"]),
        *bench.arguments,
        *method.arguments,
    ]
    if method.speculative_config is not None:
        whole = (method.plugin or {}).get("draft") != "own"
        arguments += ["--speculative-config", json.dumps(with_folders(method.speculative_config, config, whole))]
    if method.plugin is not None:
        arguments += ["--additional-config", json.dumps({"specdec": method.plugin})]
    return ServerCommand(arguments=tuple(arguments), env=_environment(method, on_gpu, folder))


def with_folders(value: Any, config: Config, whole: bool = True) -> Any:
    """`value` with $TARGET, $DRAFT, $EAGLE and $EAGLE3 replaced (whole: folder_of), everything else untouched."""
    if isinstance(value, Mapping):
        return {key: with_folders(item, config, whole) for key, item in value.items()}
    if isinstance(value, list):
        return [with_folders(item, config, whole) for item in value]
    return folder_of(value, config, whole) if isinstance(value, str) else value


def describe(config: Config, method: MethodConfig) -> dict[str, Any]:
    """Row fields that say what served: target, draft, drafter, controller, k."""
    settings = method.speculative_config or {}
    kind = settings.get("method") or ("draft_model" if settings else BASELINE)
    return {
        "engine": "vllm",
        "target": config.models.target,
        "dtype": config.models.dtype,
        "method": method.name,
        "drafter": DRAFTERS.get(kind, kind),
        "draft": _draft_name(config, settings.get("model")),
        "controller": _controller(method),
        "k": int(settings.get("num_speculative_tokens", 0)),
        "plugin": method.plugin is not None,
        "speculative_config": json.dumps(settings) if settings else None,
        "tensor_parallel": config.bench_vllm.tensor_parallel if config.bench_vllm else 1,
    }


def _controller(method: MethodConfig) -> str:
    settings = method.speculative_config
    if method.plugin is not None:
        return str(method.plugin.get("controller", "adaptive"))
    if settings is None:
        return "none"
    return "schedule" if settings.get("num_speculative_tokens_per_batch_size") else "fixed"


def _draft_name(config: Config, model: str | None) -> str | None:
    """A draft by the name that the config knows it by; $EAGLE and $EAGLE3 are fabricated, and say so."""
    named = {
        "$DRAFT": draft_name(config),
        "$TARGET": config.models.target,
        "$EAGLE": "fabricated (random weights)",
        "$EAGLE3": "fabricated (random weights)",
    }
    return named.get(model, model.removeprefix(NAMED_DRAFT).removeprefix(NAMED_MODEL)) if model else None


def _environment(method: MethodConfig, on_gpu: bool, folder: Path) -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1", SWITCH: "0", "PYTHONPATH": str(CHECKOUT)}
    if not on_gpu:
        env |= {name: os.environ.get(name, value) for name, value in CPU_SETTINGS.items()}
    if method.plugin is not None:
        env[SWITCH] = "1"
        env["PYTHONPATH"] = f"{record_of_checkout(folder)}{os.pathsep}{CHECKOUT}"
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    return env | {name: str(value) for name, value in (method.env or {}).items()}


def record_of_checkout(folder: Path) -> Path:
    """A folder that makes this checkout's entry points known, as installing it would: vLLM finds plugins by them."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    record = folder.resolve() / "plugin" / "specdec-0.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (record / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec\nVersion: 0\n", encoding="utf-8")
    return record.parent
