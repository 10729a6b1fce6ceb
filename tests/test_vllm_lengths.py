"""The ratios that bench.vllm_lengths prints; the bench itself is run by hand, since it measures a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.vllm_lengths import SHIFTING, loads, main, rows_of, variants
from pipeline.config import load_config
from specdec.controller import Adaptive

ROOT = Path(__file__).resolve().parent.parent


def test_ratios_are_of_the_same_turn() -> None:
    """The machine was half as fast in the second turn; the adaptive controller was 10 % behind in each."""
    one, two, adaptive = variants(1)
    assert isinstance(adaptive.controller, Adaptive)
    one.speeds, two.speeds, adaptive.speeds = [80, 40, 80], [100, 50, 100], [90, 45, 90]
    rows = rows_of([one, two, adaptive], {"batch": 1, "prompt_set": "a"})
    assert [(row["controller"], row["of_best_fixed"]) for row in rows] == [
        ("fixed 0", 0.8),
        ("fixed 1", 1.0),
        ("adaptive", 0.9),
    ]
    assert rows[2] == {
        "batch": 1, "prompt_set": "a", "controller": "adaptive", "tokens_per_s": 90, "of_best_fixed": 0.9
    }  # fmt: skip


def test_the_shifting_load_takes_one_set_after_the_other() -> None:
    sets = [
        '{name: a, source: "reasoning_gym:basic_arithmetic", limit: 3}',
        '{name: b, source: "reasoning_gym:gcd", limit: 5}',
    ]
    config = load_config(ROOT / "configs" / "tiny.yaml", [f"bench_vllm.prompts=[{', '.join(sets)}]"])
    found = loads(config, 2)
    assert [len(batch) for batch in found["a"]] == [2, 1]
    assert found[SHIFTING] == found["a"] + found["b"]
    assert SHIFTING not in loads(load_config(ROOT / "configs" / "tiny.yaml"), 2)


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    asked = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--out", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit):
        main([*asked, "--batch", "0"])
    assert "--batch is 0; expected a whole number from 1 on" in capsys.readouterr().err
    assert main([*asked, "--set", "bench_vllm.prompt=1"]) == 2
    assert "unknown key" in capsys.readouterr().err
