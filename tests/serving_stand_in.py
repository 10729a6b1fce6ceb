"""Stage 05 without vLLM: the stand-in of tests/fake_vllm.py in its place, and configs and rows of such runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import serving_checks, serving_grid, serving_load, serving_server
from pipeline.config import Config, load_config
from pipeline.results import read_result

ROOT = Path(__file__).resolve().parent.parent
DRAFT = {"method": "draft_model", "model": "$DRAFT", "num_speculative_tokens": 2}
SERVER, CLIENT = ("-m", "tests.fake_vllm", "serve"), ("-m", "tests.fake_vllm", "client")
# What processes other than the tests' own import at their start, from their checkout: those that drive or serve.
SITE_CUSTOMIZE = f"""\
import sys

if any("submitit" in word or "bench.bench_serving" in word for word in sys.orig_argv):
    from bench import serving_grid, serving_load, serving_server

    serving_server.PROGRAM, serving_load.PROGRAM = {SERVER}, {CLIENT}
    serving_grid.vllm_version = lambda: "vllm 0"
    serving_grid.Grid.on_gpu = False
"""


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process."""
    monkeypatch.setattr(serving_server, "PROGRAM", SERVER)
    monkeypatch.setattr(serving_server, "POLL_S", 0.02)
    monkeypatch.setattr(serving_checks, "SETTLE_S", 1.0)
    monkeypatch.setattr(serving_load, "PROGRAM", CLIENT)
    monkeypatch.setattr(serving_grid, "vllm_version", lambda: "vllm 0")
    monkeypatch.setattr(serving_grid.Grid, "on_gpu", False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("FAKE", raising=False)


def config_with(tmp_path: Path, methods: list[dict[str, Any]], *overrides: str, **settings: Any) -> Config:
    """configs/tiny.yaml with these methods after "none"."""
    content = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    content["bench_vllm"] |= {"methods": [{"name": "none"}, *methods]} | settings
    path = tmp_path / "serving.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(path, overrides)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_result(folder / "result.json")["rows"] if "gate" not in row]
