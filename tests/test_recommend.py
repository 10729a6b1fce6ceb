"""The recommendation: what it takes, and that it says no where the numbers do."""

from __future__ import annotations

from typing import Any

import pytest

from bench.recommend import recommend
from tests.toy_results import PROVEN, drafted, plain

FAILED = {"state": "fail", "value": 9, "limit": 4, "reason": "x"}


def advice(*rows: dict[str, Any], gates: Any = PROVEN) -> Any:
    return recommend(rows, gates)


def test_the_fastest_method_is_taken_at_each_load() -> None:
    rows = [plain(), drafted("ngram", 1.5), drafted("model", 2.0, draft="a/d"), plain(8), drafted("ngram", 1.8, 8)]
    found = advice(*rows, drafted("model", 1.2, 8, draft="a/d"))
    assert found.verdict == "use"
    assert [choice.method for choice in found.choices] == ["draft model (d), k = 2", "n-gram, k = 2"]
    assert found.headline == "Use draft model (d), k = 2: 2.00x at batch 1; use n-gram, k = 2: 1.80x at batch 8."


def test_no_speculation_where_nothing_pays() -> None:
    found = advice(plain(), drafted("ngram", 0.7), drafted("model", 0.95))
    assert found.verdict == "plain"
    assert found.headline.startswith("Do not speculate here")
    assert "plain decoding is fastest: the best method, draft model, k = 2, reaches 0.95x" in found.reasons[0]


def test_plain_decoding_at_one_load_and_a_method_at_another() -> None:
    found = advice(plain(), drafted("ngram", 0.9), plain(8), drafted("ngram", 1.7, 8))
    assert found.headline == "Use n-gram, k = 2: 1.70x at batch 8; decode plainly at batch 1."


@pytest.mark.parametrize(
    "speedup, interval, verdict",
    [
        (1.08, None, "unclear"),  # one run's noise
        (1.12, None, "pays"),
        (1.04, [1.02, 1.06], "pays"),
        (1.30, [0.95, 1.60], "unclear"),
        (0.99, None, "does not pay"),
    ],
)
def test_what_counts_as_faster(speedup: float, interval: Any, verdict: str) -> None:
    found = advice(plain(), drafted("ngram", speedup, speedup_ci=interval))
    assert found.choices[0].verdict == verdict
    assert (found.verdict == "use") == (verdict == "pays")


def test_adaptive_is_taken_when_it_is_as_good_as_the_best_fixed_length() -> None:
    fixed = drafted("ngram", 2.0)
    assert "adaptive" in advice(plain(), fixed, drafted("ngram", 1.95, controller="adaptive")).choices[0].method
    assert "k = 2" in advice(plain(), fixed, drafted("ngram", 1.9, controller="adaptive")).choices[0].method


@pytest.mark.parametrize("gates", [PROVEN | {"G1": FAILED}, {"G1": PROVEN["G1"]}, {}])
def test_a_fast_method_without_proof_is_not_recommended(gates: Any) -> None:
    found = advice(plain(), drafted("ngram", 3.0), gates=gates)
    assert found.verdict == "unproven"
    assert "not proven, so not yet" in found.headline
    assert any("not proven unchanged" in caution for caution in found.cautions)
    assert not found.proofs


def test_a_failed_gate_is_said_where_nothing_pays_too() -> None:
    found = advice(plain(), drafted("ngram", 0.5), gates=PROVEN | {"G1": FAILED})
    assert (found.verdict, found.proofs) == ("plain", [])
    assert "G1 failed or was not run" in found.cautions[0]


def test_a_method_measured_on_the_easy_prompts_alone_does_not_win() -> None:
    rows = [plain(), plain(prompt_set="chat"), drafted("ngram", 5.0)]
    found = advice(*rows, drafted("model", 1.5), drafted("model", 1.4, prompt_set="chat"))
    assert [score.method.drafter for score in found.choices[0].scores] == ["model"]


def test_a_mean_hides_no_set_that_gets_slower() -> None:
    rows = [plain(), plain(prompt_set="chat"), drafted("ngram", 4.0), drafted("ngram", 0.7, prompt_set="chat")]
    found = advice(*rows)
    assert found.choices[0].best.speedup == pytest.approx((4.0 * 0.7) ** 0.5)
    assert any("slower than plain decoding on chat (0.70x), at batch 1" in caution for caution in found.cautions)


def test_a_server_row_is_held_against_the_server_without_speculation() -> None:
    served = {"engine": "vllm", "load": "closed", "batch": 4, "speedup": None}
    rows = [plain() | served | {"tokens_per_s": 50.0}, drafted() | served | {"tokens_per_s": 80.0}, plain()]
    found = advice(*rows)
    assert [(choice.load.label, choice.best.speedup) for choice in found.choices] == [("4 at once", 1.6)]
    assert (
        found.headline
        == "vLLM's greedy texts not proven, so not yet: use n-gram, k = 2: 1.60x with 4 requests at once."
    )


@pytest.mark.parametrize("same, tied, taken", [(16, 0, "ngram"), (15, 1, "ngram"), (15, 0, "suffix")])
def test_a_server_method_that_changes_greedy_texts_is_not_taken(same: int, tied: int, taken: str) -> None:
    served = {"engine": "vllm", "load": "closed", "texts": 16, "texts_tied": 0, "texts_same": 16}
    fast = drafted("ngram", 3.0) | served | {"texts_same": same, "texts_tied": tied}
    found = advice(plain() | served, fast, drafted("suffix", 1.5) | served, gates={})
    assert found.verdict == "use"
    assert found.choices[0].best.method.drafter == taken
    assert any("changed greedy texts" in caution for caution in found.cautions) == (taken == "suffix")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [plain()],
        [drafted() | {"speedup": None}],  # without its plain row
        [plain(), drafted("ngram", 2.0, jobs=4)],  # measured side by side
        [plain() | {"tokens_per_s": None}, drafted(tokens_per_s=None)],
        [{"gate": "G1", "tokens_per_s": 5.0, "engine": "specdec"}],
    ],
)
def test_nothing_measured_is_said(rows: list[dict[str, Any]]) -> None:
    found = advice(*rows)
    assert found.verdict == "unknown"
    assert found.headline.startswith("Nothing to recommend yet")
