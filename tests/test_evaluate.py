"""Acceptance of a draft by the engine: the numbers of a row, gate G3, intervals over prompts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from bench.tiny_models import noisy_copy, tiny_model
from specdec import AcceptanceStats
from train import evaluate
from train.evaluate import Setting, break_even, compare, g3_gate, tokens_by_k
from train.intervals import gain_interval, ratio_interval

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 1, 2], [3, 3]]


def pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    target = tiny_model("qwen3", vocab=8, dtype=torch.float64)
    return target, noisy_copy(target, noise=0.5, seed=1)


def test_tokens_by_k_multiplies_conditional_acceptance() -> None:
    assert tokens_by_k([0.5, 0.4, 0.0]) == pytest.approx([1.5, 1.7, 1.7])
    assert tokens_by_k([0.5, float("nan")]) == pytest.approx([1.5, 1.5])
    # k = 1: (1.5 - 1) / 1; longer drafts pay only below that
    assert break_even([1.5, 1.7]) == pytest.approx(0.5)


def test_expected_tokens_agree_with_the_engines_count() -> None:
    """With a fixed k the engine's own tokens a round are what the product of its positions says, but for text ends."""
    target, draft = pair()
    setting = Setting(k=3, batch=4, max_tokens=200)
    total = sum(evaluate.measure(target, draft, PROMPTS * 4, 1.0, setting), AcceptanceStats())
    assert tokens_by_k(total.alpha_by_position)[-1] == pytest.approx(total.tokens_per_round, rel=0.02)


def test_results_come_in_the_order_of_the_prompts() -> None:
    target, draft = pair()
    alone = [
        evaluate.measure(target, draft, [prompt], 0.0, Setting(k=2, batch=1, max_tokens=12))[0] for prompt in PROMPTS
    ]
    together = evaluate.measure(target, draft, PROMPTS, 0.0, Setting(k=2, batch=3, max_tokens=12))
    assert together == alone


def test_bad_prompt_is_an_error() -> None:
    target, draft = pair()
    with pytest.raises(ValueError, match=r"prompt 1: .*max positions"):
        evaluate.measure(target, draft, [[1], [1] * 600], 0.0, Setting(k=1, max_tokens=4))


def test_row_of_a_perfect_draft_and_gate() -> None:
    """The target as its own draft is always accepted; against a noisy stock draft G3 passes."""
    target, noisy = pair()
    drafts = {"stock": partial(lambda model: model, noisy), "own": partial(lambda model: model, target)}
    rows = [row | {"in_domain": 1} for row in compare(target, drafts, {"all": PROMPTS}, Setting(k=2, max_tokens=24))]
    own = rows[1]
    assert own["alpha_t0"] == own["alpha_t1"] == 1.0
    assert own["tokens_by_k_t1"] == [2.0, 3.0]
    assert own["break_even_c_t0"] == 1.0
    assert own["gain_t1"] == pytest.approx(1 - rows[0]["alpha_t1"])
    low, high = own["gain_t1_ci"]
    assert low <= own["gain_t1"] <= high
    assert g3_gate(rows)["state"] == "pass"
    worse = [rows[1] | {"loss": "stock"}, rows[0] | {"loss": "own", "gain_t0": -0.2, "gain_t1": -0.2}]
    assert g3_gate(worse)["state"] == "fail"
    assert g3_gate([row | {"in_domain": 0} for row in rows])["state"] == "not run"


@pytest.mark.parametrize("broken", [{"gain_t0": 0.04}, {"gain_t1_ci": [-0.01, 0.3]}, {"gain_t0_ci": None}])
def test_gate_needs_both_temperatures_and_the_interval(broken: dict[str, object]) -> None:
    good = {"loss": "kd", "domain": "d", "in_domain": 1, "gain_t0": 0.2, "gain_t1": 0.1, "alpha_t0": 0.5,
            "alpha_t1": 0.4, "gain_t0_ci": [0.1, 0.3], "gain_t1_ci": [0.05, 0.2]}  # fmt: skip
    assert g3_gate([good])["state"] == "pass"
    assert g3_gate([good | broken])["state"] == "fail"


def test_interval_counts_prompts_not_tokens() -> None:
    """A thousand tokens of two prompts that disagree say little: the interval is wide, as of two observations."""
    low, high = ratio_interval(np.array([[0.0, 1000.0], [1000.0, 1000.0]])) or [0.5, 0.5]
    assert (low, high) == (0.0, 1.0)
    rng = np.random.default_rng(0)
    many = np.stack([rng.binomial(10, 0.5, 400), np.full(400, 10)], 1).astype(float)
    low, high = ratio_interval(many) or [0.0, 1.0]
    assert 0.46 < low < 0.5 < high < 0.54
    assert ratio_interval(many[:1]) is None


def test_gain_is_paired() -> None:
    """Prompts differ more than drafts do: resampled together, the interval of the gain is narrow."""
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 90, 50).astype(float)
    base, better = (np.stack([accepted + extra, np.full(50, 100.0)], 1) for extra in (0, 10))
    low, high = gain_interval(better, base) or [0.0, 0.0]
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
