"""Gate G4: what it judges, and that it can fail."""

from typing import Any

import pytest

from bench import adaptive
from specdec.controller import FixedK
from specdec.simulate_costs import cost_models


def row(drafter: str, controller: str, tokens_per_s: float, **other: Any) -> dict[str, Any]:
    where = {"engine": "specdec", "prompt_set": "code", "temperature": 0.0, "batch": 1, "repeats": 3}
    return where | {"drafter": drafter, "controller": controller, "tokens_per_s": tokens_per_s} | other


def cell(plain: float, fixed: tuple[float, ...], adapted: float, **other: Any) -> list[dict[str, Any]]:
    return [
        row("none", "none", plain, **other),
        row("none", "none", 900.0, engine="transformers", **other),
        *(row("model", "fixed", speed, **other) for speed in fixed),
        row("ngram", "fixed", 800.0, **other),
        row("model", "adaptive", adapted, **other),
    ]


@pytest.mark.parametrize(
    ("plain", "fixed", "adapted", "share"),
    [
        (100.0, (150.0, 120.0), 146.0, 146 / 150),  # held against the best fixed length of the same drafter
        (100.0, (90.0, 60.0), 99.0, 0.99),  # ... and against not drafting
    ],
)
def test_a_cell_is_held_against_its_best_fixed_length(plain: float, fixed: Any, adapted: float, share: float) -> None:
    others = cell(500.0, (500.0,), 500.0, batch=8)
    shares = list(adaptive.engine_shares([*others, *cell(plain, fixed, adapted)]))
    assert shares[1]["of_best_fixed"] == pytest.approx(share)
    assert shares[1]["of_plain"] == pytest.approx(adapted / plain)
    assert adaptive.g4_gate(shares)["state"] == "pass"


@pytest.mark.parametrize(("fixed", "adapted"), [(150.0, 144.0), (90.0, 97.0)])
def test_a_slower_cell_fails_the_gate_once_it_is_measured_often_enough(fixed: float, adapted: float) -> None:
    for repeats, state in ((3, "fail"), (1, "pass")):
        rows = [*cell(100.0, (100.0,), 100.0, batch=8), *cell(100.0, (fixed,), adapted, repeats=repeats)]
        told = adaptive.g4_gate(list(adaptive.engine_shares(rows)))
        assert told["state"] == state
        assert "batch 1, model" in told["reason"]


def test_on_shifting_acceptance_the_controller_is_ahead_of_every_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = adaptive.g4([])
    assert (passed["gate"]["state"], len(passed["rows"])) == ("pass", len(adaptive.TABLES))
    monkeypatch.setattr(adaptive, "Adaptive", lambda k_max: FixedK(3))
    failed = adaptive.shifting_share(cost_models()["cpu"])
    assert adaptive.g4_gate([failed])["state"] == "fail"
