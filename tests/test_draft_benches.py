"""Benches of drafts that are no stage: acceptance of a given draft, and the trainer's speed on given shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import acceptance, train_speed
from pipeline import tiny
from pipeline.results import read_result

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"


def test_stock_draft_gains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own first layers beside themselves: the same texts, a gain of exactly zero, and G3 fails."""
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))
    out = tmp_path / "acceptance.json"
    arguments = ["--config", str(TINY), "--set", "models.draft={keep_layers: 2}", "--out", str(out), "--k", "2",
                 "--max-tokens", "8", "--in-domain", "a", "reasoning_gym:number_sorting", "3",
                 "--out-of-domain", "b", "reasoning_gym:count_bits", "3"]  # fmt: skip
    assert acceptance.main(arguments) == 0
    result = read_result(out)
    assert [(row["loss"], row["domain"], row["in_domain"]) for row in result["rows"]] == [
        ("stock", "a", 1), ("draft", "a", 1), ("stock", "b", 0), ("draft", "b", 0)
    ]  # fmt: skip
    assert all(row["gain_t0"] == row["gain_t1"] == 0.0 for row in result["rows"])
    assert result["gates"]["G3"]["state"] == "fail"


def test_unknown_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(TINY), "--in-domain", "a", "reasoning_gym:no_task", "3", "--out", str(tmp_path / "x")]
    assert acceptance.main(arguments) == 2
    assert "no_task" in capsys.readouterr().err


def test_speed_of_the_trainer_and_where_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops after three of five steps and one that goes on have the losses of a whole one."""
    monkeypatch.setenv("SPEC_TRAIN_PROCESSES", "1")
    shapes = tmp_path / "shapes"
    shapes.mkdir()
    tiny.make("llama", shapes)
    common = ["--shapes", str(shapes), "--length", "32", "--sequences", "2", "--micro-batch", "1", "--steps", "5"]

    def row(name: str, *more: str) -> dict[str, object]:
        assert train_speed.main([*common, *more, "--out", str(tmp_path / name)]) == 0
        [found] = read_result(tmp_path / name)["rows"]
        return found

    checkpoints = ["--checkpoints", str(tmp_path / "checkpoints")]
    whole = row("whole")
    first, rest = row("first", "--stop-after", "3", *checkpoints), row("rest", *checkpoints)
    assert (first["first_step"], rest["first_step"]) == (0, 3)
    assert [*first["losses"], *rest["losses"]] == whole["losses"]  # type: ignore[misc]
    assert whole["tokens_per_s"] > 0  # type: ignore[operator]
    assert whole["sharding"] == "none"
