"""The bench of drafts with a window: laws as a forward without a cache gives them, and what is left of a KV cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import draft_window, serving_report
from bench.tiny_models import noisy_copy, tiny_model
from pipeline.results import read_result
from specdec.drafter import ModelDrafter
from specdec.window import Window

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"
LENGTH = 300


@pytest.fixture(scope="module")
def models() -> SimpleNamespace:
    target = tiny_model(max_positions=LENGTH, dtype=torch.float32, logit_std=2.0)
    text_T = torch.randint(target.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(target=target, draft=noisy_copy(target, noise=0.3, seed=1), text_T=text_T)


def law_of(models: SimpleNamespace, window: Window | None) -> torch.Tensor:
    draft = ModelDrafter(models.draft)
    draft.build(models.target.config.vocab_size, 1, LENGTH, window)
    return draft_window.draft_law(draft, models.text_T, 40)


def test_the_draft_sees_what_its_window_leaves(models: SimpleNamespace) -> None:
    """All of the text, or 50 tokens and two sinks: against one forward without a cache under that mask."""
    margin = draft_window.CHUNK + draft_window.DRAFTED
    for window in (None, Window(recent=50, sinks=2, margin=margin)):
        position_T = torch.arange(LENGTH)
        back_TT = position_T[:, None] - position_T[None, :]
        seen_TT = back_TT >= 0
        if window is not None:
            seen_TT &= (back_TT < window.recent) | (position_T < window.sinks)
        mask_11TT = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~seen_TT, float("-inf"))
        with torch.inference_mode():
            logits = models.draft(models.text_T[None], attention_mask=mask_11TT).logits[0, -40:]
        torch.testing.assert_close(law_of(models, window), logits.softmax(-1), rtol=1e-3, atol=1e-5)


def test_share_of_the_pool() -> None:
    shapes = draft_window.Shapes(target=9, draft=7)
    assert shapes.lost(4096, 4096) == pytest.approx(7 / 16)
    assert shapes.lost(0, 4096) == 0.0


def test_a_window_costs_acceptance_and_saves_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))
    out = tmp_path / "window.json"
    arguments = ["--config", str(TINY), "--set", "models.draft={keep_layers: 2}", "--out", str(out),
                 "--texts", "reasoning_gym:number_sorting", "--context", "64", "--measured", "16",
                 "--limit", "3"]  # fmt: skip
    assert draft_window.main([*arguments, "--windows", "8", "64"]) == 0
    whole, narrow, wide = (result := read_result(out))["rows"]
    assert [row["window"] for row in (whole, narrow, wide)] == ["full", 8, 64]
    assert wide["alpha_t1"] == pytest.approx(whole["alpha_t1"], abs=1e-6)  # nothing is out of sight
    assert narrow["alpha_t1"] != pytest.approx(whole["alpha_t1"], abs=1e-6)
    assert narrow["pool_lost"] < wide["pool_lost"]
    assert "pool_lost" in serving_report.render({"window.json": result})
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "one"}\n')
    assert draft_window.main([*arguments, "--texts", f"jsonl:{short}"]) == 2


def test_wrong_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(TINY), "--texts", "human_eval", "--out", "x"]
    for wrong, told in ((["--measured", "0"], "--measured is 0"), (["--windows", "0"], "--windows holds 0"),
                        (["--context", "10"], "at most --context")):  # fmt: skip
        with pytest.raises(SystemExit):
            draft_window.main([*given, *wrong])
        assert told in capsys.readouterr().err
