"""Greedy texts with the plugin against those without, by a stand-in for the engines; in a slow test real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import serving_report, vllm_identity, vllm_turns
from bench.tiny_models import tiny_model
from bench.vllm_identity import identity_gate, main, prompts_of, replay
from pipeline.results import read_result

STAND_IN = """
import json, os, sys
job = json.loads(sys.stdin.readline())
plugin = job["llm"].get("additional_config", {}).get("specdec")
print(json.dumps({"ready": {}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    texts = [{"ids": [n, 1, 2]} for n in range(len(asked["prompts"]))]
    if plugin is None:
        for text in texts:
            text["top"] = [{str(id): -0.5, "9": -0.6} for id in text["ids"]]
    elif plugin.get("fast") and os.environ["APART"] == "1":
        texts[3]["ids"][1] = 9
    print(json.dumps({"texts": texts, "counts": {"drafted": 9, "accepted": 4}}), flush=True)
"""


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that name a pair; the engines are a stand-in, in which one text may part."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(vllm_turns, "PROGRAM", (str(tmp_path / "stand_in.py"),))
    monkeypatch.setenv("APART", "0")
    tiny_model(vocab=64, dtype=torch.float32).save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    return ["--target", folder, "--draft", folder, "--out", str(tmp_path / "out.json")]


def test_a_text_that_parts_is_shown_with_its_gap(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(pair) == 0
    assert read_result(tmp_path / "out.json")["gates"]["G6 greedy"]["value"] == 96
    monkeypatch.setenv("APART", "1")
    logits_V = torch.zeros(64)
    for near, code, state in ((0.5, 1, "fail"), (0.0005, 0, "pass")):
        logits_V[1], logits_V[9] = 3.0, 3.0 - near
        monkeypatch.setattr(vllm_identity, "replay", lambda *_: logits_V)
        assert main(pair) == code
        result = read_result(tmp_path / "out.json")
        assert result["gates"]["G6 greedy"]["state"] == state
        apart = [row for row in result["rows"] if "position" in row]
        assert [(row["method"], row["text"], row["position"]) for row in apart] == [("plugin-own-fast", 3, 1)] * 2
        assert [row["gap_float32"] for row in apart] == pytest.approx([near, near], rel=1e-2)
        assert {row["tie"] for row in apart} == {code == 0}
    assert "94 of 96 texts token for token, 2 part at a tie" in serving_report.render({"results/x.json": result})


def test_a_replay_is_the_targets_own_law(tmp_path: Path) -> None:
    """Also where the weights are served in bfloat16: then of the rounded ones."""
    model = tiny_model(vocab=64, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        ids = [1, 2, 3]
        for weight in model.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)).float())
        logits_V = model(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(replay(tmp_path, ids, dtype, False), logits_V, atol=1e-5)


def test_an_engine_that_is_not_there_leaves_the_gate_open() -> None:
    row: dict[str, Any] = {"method": "plugin", "dtype": "float32", "texts": 16, "texts_same": 16, "tied_in_float32": 0}
    assert identity_gate([row])["state"] == "pass"
    assert identity_gate([row, {"method": "own", "dtype": "float32", "not_run": "no memory"}])["state"] == "not run"
    assert identity_gate([row | {"texts_same": 15}])["state"] == "fail"
    assert identity_gate([])["state"] == "not run"


def test_prompts_of_a_target_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 40}))
    prompts = prompts_of(tmp_path)
    assert len(prompts) == 16
    assert len({len(prompt) for prompt in prompts}) == 16
    assert max(map(max, prompts)) < 40


def test_arguments(tmp_path: Path) -> None:
    for wrong in (["--target", "x"], ["--new-tokens", "0"]):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / "x.json"), *wrong])


def test_a_folder_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--target", str(tmp_path), "--draft", str(tmp_path), "--out", str(tmp_path / "out.json")])
    assert f"{tmp_path} holds no config.json; expected a model's folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_vllm_writes_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # on a CPU the fast forward falls back instead
    assert main(["--out", str(tmp_path / "out.json"), "--new-tokens", "24"]) == 0
    rows = read_result(tmp_path / "out.json")["rows"]
    assert len([row for row in rows if "texts" in row]) == 6
    assert all(0 < row["accepted"] < row["drafted"] for row in rows)
