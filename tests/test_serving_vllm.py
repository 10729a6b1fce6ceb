"""Stage 05 with real vLLM on a tiny model: the servers, the load generator, the counters and the checkpoints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.bench_serving import STAGE, body
from bench.serving_checks import CHECKPOINTS
from bench.serving_grid import vllm_version
from pipeline.config import load_config
from pipeline.results import read_result
from pipeline.stage import run_stage

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),  # four servers, which take minutes each on a busy machine
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]
METHODS: list[dict[str, Any]] = [
    {"name": "none"},
    {
        "name": "ours",
        "plugin": {"controller": "adaptive"},
        "speculative_config": {"method": "draft_model", "model": "$DRAFT", "num_speculative_tokens": 2},
    },
    {
        "name": "eagle3",
        "speculative_config": {"method": "eagle3", "model": "$EAGLE3", "num_speculative_tokens": 2},
    },
    {"name": "mtp", "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
]


def test_real_servers_give_rows_checkpoints_and_reasons(tmp_path: Path, data_root: Path) -> None:
    content = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    content["bench_vllm"] |= {"methods": METHODS, "concurrencies": [4], "rate_shares": [0.5]}
    path = tmp_path / "serving.yaml"
    path.write_text(yaml.safe_dump(content))
    folder = run_stage(STAGE, load_config(path), body)
    result = read_result(folder / "result.json")
    rows = [row for row in result["rows"] if "gate" not in row]
    by_method = {name: [row for row in rows if row["method"] == name] for name in ("none", "ours", "eagle3", "mtp")}
    for name in ("none", "ours", "eagle3"):
        for row in by_method[name]:
            assert row["not_run"] is None, row["not_run"]
            assert row["tokens_per_s"] > 0
            assert row["output_tokens"] > 0
            assert row["ttft_ms"] > 0
            assert (row["texts_same"], row["texts"]) == (16, 16)
    assert by_method["none"][0]["drafted_tokens"] == 0
    assert 0 < by_method["ours"][0]["kv_tokens"] < by_method["none"][0]["kv_tokens"]
    assert by_method["eagle3"][0]["drafted_tokens"] > 0
    for row in by_method["mtp"]:
        assert "Error" in row["not_run"]
        assert row["last_lines"]
    points = {row["check"]: row for row in result["rows"] if "gate" in row}
    assert list(points) == list(CHECKPOINTS)
    # the fourth may fail: a random draft of a random target is seldom right in so few tokens
    others = [points[name] for name in CHECKPOINTS if name != "first draft accepted"]
    assert {point["state"] for point in others} == {"pass"}, json.dumps(others, indent=1)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(data_root) not in left
