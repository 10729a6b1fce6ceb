"""The test of laws in vLLM: its gate, its law, and in a slow test real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import serving_report, vllm_law
from bench.law_stats import check_law
from bench.vllm_law import CONTROL, FAMILIES, law_gate, main
from pipeline.results import read_result

ROW: dict[str, Any] = {
    "method": "plugin", "dtype": "float32", "settings": "top-k", "samples": 9, "p_value": 0.5, "drafted": 9,
    "accepted": 4, "as_expected": True,
}  # fmt: skip


def test_the_gate_asks_every_case() -> None:
    assert law_gate([ROW])["state"] == "pass"
    assert law_gate([ROW, ROW | {"settings": CONTROL, "p_value": 0.0}]) == law_gate([ROW, ROW])
    assert law_gate([ROW, ROW | {"as_expected": False}])["state"] == "fail"
    assert law_gate([ROW | {"accepted": 9}])["state"] == "fail"  # nothing was rejected: the rule was not tried
    assert law_gate([ROW, {"method": "own", "dtype": "float32", "not_run": "no memory"}])["state"] == "not run"
    assert law_gate([])["state"] == "not run"
    assert law_gate([ROW | {"method": "none", "drafted": 0, "accepted": 0}])["state"] == "pass"


def test_the_law_is_of_the_weights_as_served(tmp_path: Path) -> None:
    """And so many samples tell temperature 0.9 from 0.8."""
    torch.manual_seed(0)
    target, _ = vllm_law.pair(tmp_path, "bfloat16")
    law, other = (vllm_law.law_of(target, {"temperature": t}) for t in (0.8, 0.9))
    assert law.sum() == pytest.approx(1)
    rng = np.random.default_rng(0)
    mine, others = (
        rng.multinomial(vllm_law.SAMPLES, each.ravel() / each.sum()).reshape(law.shape) for each in (law, other)
    )
    assert vllm_law.follows(check_law(mine, law, seed=0))
    assert not vllm_law.follows(check_law(others, law, seed=0))


def test_text_of_another_law_is_not_as_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for vLLM, with and without one that hands out text at 0.8 whatever it is asked for."""
    monkeypatch.setattr(vllm_law, "FAMILIES", {"temperature": {"temperature": 0.8}})
    target, _ = vllm_law.pair(tmp_path, "float32")
    laws = {t: vllm_law.law_of(target, {"temperature": t}) for t in (0.8, 0.9)}
    rng = np.random.default_rng(0)

    class Worker:
        def __init__(self, obeys: bool) -> None:
            self.obeys = obeys

        def ask(self, asked: Any, key: str) -> dict[str, Any]:
            law = laws[asked["sampling"]["temperature"] if self.obeys else 0.8]
            cells = rng.choice(law.size, size=len(asked["prompts"]), p=law.ravel() / law.sum())
            ids = np.stack(np.unravel_index(cells, law.shape), axis=1).tolist()
            return {key: [{"ids": row} for row in ids], "counts": {"drafted": 2, "accepted": 1}}

    for obeys in (True, False):
        found = list(vllm_law.drawn(Worker(obeys), {"temperature": laws[0.8]}, vllm_law.SAMPLES))  # type: ignore[arg-type]
        assert [row["settings"] for row in found] == ["temperature", CONTROL]
        assert [row["as_expected"] for row in found] == [True, obeys]
    swapped = list(vllm_law.drawn(Worker(True), {"temperature": laws[0.9]}, vllm_law.SAMPLES))  # type: ignore[arg-type]
    assert not swapped[0]["as_expected"]


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "x.json"), "--samples", "0"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_vllm_follows_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with CUDA graphs and the Triton forward, on a CPU with neither."""
    pytest.importorskip("vllm")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["--out", str(tmp_path / "out.json"), "--samples", "3000", "--dtypes", "float32"]) == 0
    result = read_result(tmp_path / "out.json")
    assert len(result["rows"]) == 3 * (len(FAMILIES) + 1)
    assert "Sampled text with the plugin" in serving_report.render({"results/vllm_law.json": result})
