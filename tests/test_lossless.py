"""Gate G1 against the engine: its samples follow the enumerated law, whatever is drafted and whoever decodes beside.

`make test` takes a few thousand samples a case; the whole grid at 20,000 is marked slow.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.law import Oracle, enumerate_law
from bench.lossless import Suite, build_engine, decode, run_g1
from bench.lossless_report import format_table, g1_gate
from bench.lossless_suites import (
    deep_suite,
    demo_suites,
    ending_suite,
    full_suites,
    grid_cases,
    pairwise_cases,
    pairwise_suite,
    wide_suite,
)
from bench.tiny_models import FAMILIES, noisy_copy, tiny_model
from specdec import Completion, Engine, Request, SamplingParams


def _assert_lossless(suites: Sequence[Suite], samples: int, seed: int = 1) -> None:
    rows = run_g1(suites, samples=samples, seed=seed)
    print(format_table(rows))
    assert g1_gate(rows)["state"] == "pass", g1_gate(rows)["reason"]


# The law


@pytest.mark.parametrize("k", [1, 3])
def test_every_pair_of_settings_follows_the_law(k):
    """Temperature, top-k, top-p, min-p and penalties in pairs; 1,024 slots at most, each refilled several times."""
    _assert_lossless([pairwise_suite(k)], samples=1200)


def test_stops_limits_and_allowed_ids_under_a_changing_k():
    """Stop ids, min_tokens, max_tokens, allowed and banned ids, greedy rows beside sampled ones; k = 3, 0, 1, 2, ..."""
    _assert_lossless([ending_suite()], samples=1200)


def test_tokens_after_several_rounds_follow_the_law():
    _assert_lossless([deep_suite()], samples=1200)


def test_a_larger_vocabulary_follows_the_law():
    _assert_lossless([wide_suite("gemma3", 2)], samples=2000)


def test_plain_decoding_follows_the_law():
    """No drafter: k = 0 through the same machinery."""
    suite = replace(pairwise_suite(), name="plain", draft=None, ks=(0,), cases=pairwise_cases()[:4])
    _assert_lossless([suite], samples=1200)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_an_unrelated_draft(family):
    """Target and draft of different families, layers and shapes: acceptance is poor, the law is not."""
    target = tiny_model(family, vocab=6, layers=2, seed=21)
    other = FAMILIES[(FAMILIES.index(family) + 1) % len(FAMILIES)]
    draft = tiny_model(other, vocab=6, layers=1, hidden=32, seed=22)
    cases = tuple(replace(case, prompt=tuple(token % 6 for token in case.prompt)) for case in pairwise_cases()[3:5])
    _assert_lossless(
        [Suite(name=family, target=target, draft=draft, ks=(2,), cases=cases, num_slots=200)], samples=1000
    )


@pytest.mark.slow
def test_the_whole_grid():
    """Temperature x top-k x top-p x min-p x penalties (48 cases), every family, k up to 8; 5,000 samples each."""
    _assert_lossless(full_suites(), samples=5000)


@pytest.mark.slow
def test_the_demo_at_full_size():
    _assert_lossless(demo_suites(), samples=20_000, seed=2)


def test_no_case_lies_on_a_filters_edge():
    """Hugging Face's float32 softmax is off by about 1e-5: no case may have a filter whose decision that could turn."""
    cases = [(suite.target, case) for suite in demo_suites() for case in suite.cases]
    grid_target = tiny_model("qwen3", seed=1)
    cases += [(grid_target, case) for case in grid_cases()]
    oracles = {id(target): Oracle(target) for target, _ in cases}
    for target, case in cases:
        exact, nudged = oracles[id(target)], _Nudged(oracles[id(target)])
        shift = enumerate_law(exact, case.prompt, case.params, 3) - enumerate_law(nudged, case.prompt, case.params, 3)
        assert 0.5 * np.abs(shift).sum() < 1e-3, case.name


class _Nudged(Oracle):
    """The same logits with noise of 3e-5."""

    def __init__(self, oracle: Oracle):
        self._oracle, self.vocab = oracle, oracle.vocab

    def logits(self, contexts):
        rng = np.random.default_rng(0)
        return [row + 3e-5 * rng.standard_normal(len(row)) for row in self._oracle.logits(contexts)]


# A draft equal to the target


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ks", [(3,), (2, 0, 0, 4, 1)], ids=["fixed k", "changing k"])
def test_an_equal_draft_is_always_accepted(family, ks):
    """float64: p == q at every position, through refills, rounds without drafts and prompts of different length."""
    target = tiny_model(family, layers=2, seed=31)
    cases = tuple(replace(case, params=replace(case.params, max_tokens=12)) for case in pairwise_cases())
    suite = Suite(name="equal", target=target, draft=noisy_copy(target, noise=0.0, seed=0), ks=ks, cases=cases)
    engine = build_engine(replace(suite, num_slots=8), 60 * len(cases))
    decode(suite, samples=4, seed=1, engine_factory=lambda *_: engine)
    assert engine.stats.drafted > 100
    assert engine.stats.accepted == engine.stats.reached
    assert engine.stats.alpha == 1.0


# Beside whom a request decodes


def _mixed_requests() -> list[Request]:
    """Requests of every kind: parameters, prompt lengths, output lengths."""
    suite = ending_suite()
    cases = [*pairwise_cases(), *suite.cases]
    return [
        Request(
            prompt_ids=case.prompt,
            params=replace(case.params, max_tokens=4 + 3 * (index % 5), min_tokens=0, seed=index),
        )
        for index, case in enumerate(cases + cases[::-1])
    ]


def _texts(requests: list[Request], num_slots: int, k: int) -> list[list[int]]:
    target = tiny_model("qwen3", layers=2, seed=1)
    engine = Engine(
        target, noisy_copy(target, noise=0.3, seed=2), k=k, num_slots=num_slots, capacity=64, prefill_chunk=3
    )
    return [one.token_ids for one in engine.generate(requests)]


@pytest.mark.parametrize("k", [0, 3])
def test_text_does_not_depend_on_what_runs_beside_it(k):
    """float64, fixed k: alone, in another order, in 3 slots or in 16, a seed gives one text."""
    requests = _mixed_requests()
    together = _texts(requests, 16, k)
    assert _texts(requests, 3, k) == together
    assert _texts(requests[::-1], 5, k)[::-1] == together
    assert [_texts([request], 1, k)[0] for request in requests[:6]] == together[:6]


def test_equal_requests_with_other_seeds_differ_and_with_the_same_seed_agree():
    params = SamplingParams(temperature=1.0, max_tokens=16)
    requests = [Request(prompt_ids=(1, 2, 3), params=replace(params, seed=seed)) for seed in (7, 7, 8, 9)]
    texts = _texts(requests, 4, 3)
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


def _lengths(completions: list[Completion]) -> list[int]:
    return [len(one.token_ids) for one in completions]


def test_every_row_gets_its_own_length():
    """A fault that a first engine had: generation ended with the longest row, and rows that accepted less came back
    short. Here rows of one batch accept everything, something and hardly anything."""
    target = tiny_model("qwen3", layers=2, seed=1)
    engine = Engine(target, noisy_copy(target, noise=0.3, seed=2), k=4, num_slots=12, capacity=64)
    wanted = [1, 2, 3, 5, 8, 13, 21, 34, 34, 34, 34, 34]
    temperatures = [0.0, 0.2, 0.6, 1.0, 1.5, 4.0]
    requests = [
        Request(prompt_ids=(1, 2), params=SamplingParams(max_tokens=n, temperature=temperatures[i % 6], seed=i))
        for i, n in enumerate(wanted)
    ]
    done = engine.generate(requests)
    assert _lengths(done) == wanted
    assert {one.finish_reason for one in done} == {"length"}
    assert len({one.stats.rounds for one in done[-5:]}) > 1
