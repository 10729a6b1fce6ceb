"""Gate G2: greedy text equals transformers' and the engine's own at k = 0, at every draft length."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.greedy import MIN_EVENTS, config_case, g2_gate, run_g2, tiny_case, transformers_greedy
from bench.tiny_models import FAMILIES
from pipeline.config import load_config
from specdec import ModelDrafter, sampling
from tests.faults import Fault, planted


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_decode_greedily_as_transformers_does(family):
    rows = run_g2([tiny_case(family)], ks=(1, 3))
    assert g2_gate(rows)["state"] == "pass", g2_gate(rows)["reason"]
    assert [row["k"] for row in rows] == ["1", "3", "4,0,1,3"]


def test_a_drafter_serves_every_draft_length():
    """It belongs to the engine that it drafted for: each length has an engine, and so a drafter, of its own."""
    case = tiny_case("qwen3", prompts=4)
    rows = run_g2([replace(case, draft=ModelDrafter(case.draft))], ks=(1, 2))
    assert all(row["same_as_plain"] == row["texts"] for row in rows)


@pytest.mark.slow
def test_tiny_models_at_every_draft_length():
    rows = run_g2([tiny_case(family) for family in FAMILIES], ks=range(1, 9))
    assert g2_gate(rows)["state"] == "pass", g2_gate(rows)["reason"]


def test_a_wrong_token_or_too_few_events_fail_the_gate():
    accept_all = Fault(
        name="drafts accepted unseen",
        symptom="the draft's text comes out",
        edits=(
            (
                sampling.verify_drafts_greedy,
                "drafts_BK == target_argmax_BJ[:, :K]",
                "(drafts_BK == target_argmax_BJ[:, :K]) | (drafts_BK == drafts_BK)",
            ),
        ),
    )
    case = tiny_case("qwen3", prompts=8, max_tokens=12)
    with planted(accept_all):
        broken = run_g2([case], ks=(3,))
    assert g2_gate(broken)["state"] == "fail"
    assert broken[0]["same_as_transformers"] < 8
    short = run_g2([tiny_case("qwen3", prompts=2, max_tokens=4)], ks=(3,))
    assert short[0]["same_as_transformers"] == 2
    assert short[0]["accepts"] < MIN_EVENTS
    assert g2_gate(short)["state"] == "fail"
    assert g2_gate([])["state"] == "not run"


def test_the_reference_does_not_depend_on_padding():
    """Batched, left-padded generate gives what one prompt at a time gives."""
    case = tiny_case("gemma3", prompts=6, max_tokens=10)
    assert transformers_greedy(case, batch=1) == transformers_greedy(case, batch=6)


@pytest.mark.slow
def test_a_real_model_decodes_greedily_as_transformers_does():
    """SmolLM2-135M-Instruct and its distilled draft with a pruned head."""
    sets = {"sums": "reasoning_gym:basic_arithmetic,gcd", "code": "human_eval:0-99"}
    prompts = [f"{{name: {name}, source: '{source}', limit: 6}}" for name, source in sets.items()]
    demo = Path(__file__).parents[1] / "configs" / "demo.yaml"
    config = load_config(demo, [f"bench_engine.prompts=[{', '.join(prompts)}]"])
    rows = run_g2([config_case(config, prompts=12)], ks=(1, 2, 5, 8))
    for row in rows:
        print(row)
    assert g2_gate(rows)["state"] == "pass", g2_gate(rows)["reason"]
