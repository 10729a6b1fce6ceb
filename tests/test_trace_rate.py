"""The bench of stage 01: both arms make the same tokens, and the gate is the worst backend's median."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.trace_rate import main, measure, rate_gate
from pipeline.config import load_config
from pipeline.results import read_result

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"


def test_stage_and_raw_loop_make_the_same_tokens(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More prompts than a shard or the batch holds, of different length."""
    rows = measure(load_config(CONFIG, ["traces.shard_size=4"]), repeats=2)
    assert [row["engine"] for row in rows] == ["specdec"] * 2
    assert all(row["tokens"] == row["raw_tokens"] > 6 for row in rows)
    assert all(row["ratio"] == pytest.approx(row["stage_tokens_per_s"] / row["raw_tokens_per_s"], 1e-2) for row in rows)
    assert all(0 < row["outside_share"] < 1 for row in rows)
    assert not list(data_root.glob("trace-rate-*")), "each run is removed when it has been timed"


def test_the_gate_is_the_worst_backends_median() -> None:
    rows = [{"engine": "a", "ratio": ratio} for ratio in (0.5, 0.96, 1.2)] + [{"engine": "b", "ratio": 1.0}]
    assert (rate_gate(rows)["state"], rate_gate(rows)["value"]) == ("pass", 0.96)
    assert rate_gate([*rows, {"engine": "c", "ratio": 0.94}])["state"] == "fail"


def test_the_command_writes_a_result(data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rate.json"
    code = main(["--config", str(CONFIG), "--backends", "specdec", "--repeats", "1", "--out", str(out)])
    result = read_result(out)
    assert code == (0 if result["gates"]["trace_rate"]["state"] == "pass" else 1)
    assert len(result["rows"]) == 1
