"""Each fault, planted in the engine, is seen: by the law (G1), by acceptance, by the rule's unit tests, or by
logprobs.

A fault of the draft must leave the law intact, and show in acceptance by position against the enumerated sum of
min(p, q) and in a draft equal to the target that is not always accepted. Margins are wide: the limits of G1 are 4
standard deviations and a family-wise chi-squared error of 1e-4; a fault has to miss them by far (`_is_glaring`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from bench.law import Oracle
from bench.lossless import Case, Expected, Suite, build_engine, check_acceptance, check_laws, decode, expect, rows_of
from bench.lossless_suites import make_case
from bench.tiny_models import noisy_copy, tiny_model
from specdec import Completion, Engine, Request, SamplingParams
from tests import test_rule
from tests.faults import DRAFT, HONEST, LAW, LOGPROBS, MEAN_OF_A_SUM, PRECISION, RULE, SHORT_ROPE, Fault, planted

_SEED = 5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The worst of a suite's rows: laws (in standard deviations, chi-squared p, observations that cannot be), and
    acceptance (standard score)."""

    laws_pass: bool
    tv_sigmas: float
    p_value: float
    impossible: int
    acceptance_passes: bool
    z: float

    @property
    def is_glaring(self) -> bool:
        """Fails G1 far beyond its limits."""
        return not self.laws_pass and (self.impossible >= 5 or self.tv_sigmas > 8 or self.p_value < 1e-9)


def _judge(suite: Suite, expected: list[Expected], samples: int, fault: AbstractContextManager[None]) -> Verdict:
    """Decode with the fault planted; the engine is built before, as its constructor checks itself."""
    longest = max(len(case.prompt) + case.params.max_tokens for case in suite.cases)
    engine = build_engine(replace(suite, spare_capacity=4 * longest), samples * len(suite.cases))
    with fault:
        decoded = decode(suite, samples=samples, seed=_SEED, engine_factory=lambda *_: engine)
    laws = rows_of(check_laws(suite, decoded, expected, seed=_SEED), [])
    acceptance = rows_of([], check_acceptance(suite, decoded, expected))
    return Verdict(
        laws_pass=all(row["passed"] for row in laws),
        tv_sigmas=max((row["tv"] - row["e0"]) / max(row["tv_sd"], 1e-3) for row in laws),
        p_value=min(row["p_value"] for row in laws),
        impossible=max(row["impossible"] + row["malformed"] for row in laws),
        acceptance_passes=all(row["passed"] for row in acceptance),
        z=max((abs(z) for row in acceptance for z in row["z"]), default=0.0),
    )


def _cases() -> tuple[Case, ...]:
    shape = {"vocab": 6, "max_tokens": 5, "depth": 5}
    shorter = shape | {"max_tokens": 4}
    penalties = {"repetition_penalty": 1.8, "frequency_penalty": 2.0, "presence_penalty": 0.4}
    return (
        make_case(0, temperature=0.5, **shape),
        make_case(1, temperature=1.4, **penalties, **shape),
        make_case(3, temperature=1.3, stop_ids=(2, 5), min_tokens=1, allowed_ids=(0, 1, 2, 3, 5), **shorter),
        make_case(2, min_p=0.15, repetition_penalty=2.0, **shape),
        make_case(5, temperature=1.2, top_p=0.6, **shape),
        make_case(4, top_k=2, **shape),
    )


@cache
def _far() -> tuple[Suite, list[Expected]]:
    """A draft that is often wrong (acceptance about 0.4): what happens at rejections shows."""
    target = tiny_model("qwen3", vocab=6, seed=1)
    draft = noisy_copy(target, noise=0.6, seed=2)
    suite = Suite(name="far", target=target, draft=draft, ks=(3,), cases=_cases(), num_slots=600)
    return suite, expect(suite)


@cache
def _near() -> tuple[Suite, list[Expected]]:
    """A draft that is often right (about 0.75) under strong penalties: what happens within and after long rounds
    shows."""
    shape = {"vocab": 6, "max_tokens": 5, "depth": 5}
    target = tiny_model("qwen3", vocab=6, seed=1)
    draft = noisy_copy(target, noise=0.3, seed=2)
    cases = (
        make_case(1, temperature=1.4, repetition_penalty=2.0, frequency_penalty=4.0, **shape),
        make_case(4, temperature=1.0, **shape),
        make_case(2, repetition_penalty=4.0, **shape),
    )
    suite = Suite(name="near", target=target, draft=draft, ks=(2,), cases=cases, num_slots=600)
    return suite, expect(suite)


@cache
def _large_vocabulary() -> tuple[Suite, list[Expected]]:
    """256 nearly equally likely tokens, only the first compared."""
    target = tiny_model("qwen3", vocab=256, seed=1, logit_std=0.7)
    draft = noisy_copy(target, noise=0.3, seed=2)
    cases = (make_case(1, max_tokens=2, depth=1, window=1),)
    suite = Suite(name="large", target=target, draft=draft, ks=(1,), cases=cases, num_slots=500)
    return suite, expect(suite)


@cache
def _in_step(ks: tuple[int, ...]) -> tuple[Suite, list[Expected]]:
    """A good draft (acceptance about 0.95) and a law that depends strongly on its context; long outputs over four
    tokens. With several `ks` the draft length changes every round, rounds without drafts included."""
    shape = {"vocab": 4, "max_tokens": 7, "depth": 3}
    target = tiny_model("qwen3", vocab=4, seed=1, logit_std=3.0)
    draft = noisy_copy(target, noise=0.05, seed=2)
    cases = (make_case(1, **shape), make_case(5, frequency_penalty=1.5, **shape))
    suite = Suite(name="in step", target=target, draft=draft, ks=ks, cases=cases, in_step=True)
    return suite, expect(suite)


_FIXED, _CHANGING, _SINGLE = (3,), (0, 0, 0, 3, 2), (1,)


def _ks_for(fault: Fault) -> tuple[int, ...]:
    """Draft lengths under which the fault shows most: rounds without drafts first, or fully accepted rounds often."""
    if "k = 0" in fault.name:
        return _CHANGING
    return _SINGLE if fault.name.startswith("no draft KV") else _FIXED


# The law


def test_without_a_fault_the_fault_suites_pass():
    for suite, expected in (_far(), _near()):
        verdict = _judge(suite, expected, 600, nullcontext())
        assert verdict.laws_pass
        assert verdict.acceptance_passes


@pytest.mark.parametrize("fault", LAW, ids=str)
def test_a_fault_of_the_law_fails_g1(fault):
    """One of two suites sees it glaringly; most are seen by the first at few samples."""
    verdicts: list[Verdict] = []
    for (suite, expected), samples in ((_far(), 300), (_near(), 1200), (_far(), 2000), (_near(), 3000)):
        verdicts.append(_judge(suite, expected, samples, planted(fault)))
        if verdicts[-1].is_glaring:
            break
    print(fault.name, verdicts[-1])
    assert verdicts[-1].is_glaring, verdicts


def test_sampling_the_draft_in_low_precision_fails_g1():
    suite, expected = _large_vocabulary()
    assert _judge(suite, expected, 3000, nullcontext()).laws_pass
    assert _judge(suite, expected, 3000, planted(PRECISION)).is_glaring


@pytest.mark.parametrize(("fault", "changes"), HONEST, ids=[fault.name for fault, _ in HONEST])
def test_a_draft_that_honestly_differs_passes(fault, changes):
    """q may be any law as long as it is the one sampled from: text exact, acceptance the enumerated one of that q."""
    suite, _ = _far()
    cases = tuple(case for case in suite.cases if case.params.temperature == 1.2)
    factor = {name: 1.2 * value if name == "temperature" else value for name, value in changes.items()}
    honest = replace(suite, cases=cases, draft_changes=factor)
    verdict = _judge(honest, expect(honest), 2000, planted(fault))
    assert verdict.laws_pass
    assert verdict.acceptance_passes
    pretended = replace(honest, draft_changes={})
    assert not _judge(pretended, expect(pretended), 2000, planted(fault)).acceptance_passes


# The draft


@pytest.mark.parametrize("ks", [_FIXED, _CHANGING], ids=["fixed k", "changing k"])
def test_without_a_fault_acceptance_is_the_enumerated_one(ks):
    suite, expected = _in_step(ks)
    verdict = _judge(suite, expected, 1000, nullcontext())
    assert verdict.laws_pass
    assert verdict.acceptance_passes


@pytest.mark.parametrize("fault", DRAFT, ids=str)
def test_a_fault_of_the_draft_leaves_the_law_and_shows_in_acceptance(fault):
    suite, expected = _in_step(_ks_for(fault))
    verdict = _judge(suite, expected, 3000 if suite.ks == _SINGLE else 1000, planted(fault))
    print(fault.name, verdict)
    assert verdict.laws_pass
    assert verdict.z > 8


_MISCOUNTS = ("reached counts all drafts", "bonus token counts as accepted")
_SHOWS_WITH_AN_EQUAL_DRAFT = [fault for fault in DRAFT if fault.name not in _MISCOUNTS]


@pytest.mark.parametrize("fault", _SHOWS_WITH_AN_EQUAL_DRAFT, ids=str)
def test_a_fault_of_the_draft_rejects_drafts_of_an_equal_model(fault):
    suite, _ = _in_step(_ks_for(fault))
    equal = replace(suite, draft=noisy_copy(suite.target, noise=0.0, seed=0))
    assert _alpha(equal, nullcontext()) == 1.0
    assert _alpha(equal, planted(fault)) < 0.99


def _alpha(suite: Suite, fault: AbstractContextManager[None]) -> float:
    engine = build_engine(replace(suite, spare_capacity=50), 200 * len(suite.cases))
    with fault:
        decode(suite, samples=200, seed=_SEED, engine_factory=lambda *_: engine)
    return engine.stats.alpha


def _short_draft_suite() -> Suite:
    """The draft was built for 6 positions; requests reach 10."""
    target = tiny_model("llama", vocab=4, seed=4)
    draft = noisy_copy(target, noise=0.2, seed=2)
    draft.config.max_position_embeddings = 6
    cases = (make_case(4, vocab=4, max_tokens=7, depth=3),)
    return Suite(name="short", target=target, draft=draft, ks=(3,), cases=cases, in_step=True)


def test_no_drafts_past_the_drafts_positions():
    suite = _short_draft_suite()
    expected = expect(suite)
    clean = _judge(suite, expected, 1000, nullcontext())
    assert clean.laws_pass
    assert clean.acceptance_passes
    faulty = _judge(suite, expected, 2000, planted(SHORT_ROPE))
    assert faulty.laws_pass
    assert faulty.z > 8


# The rule, log-probabilities, statistics


@pytest.mark.parametrize("fault", RULE, ids=str)
def test_a_fault_of_the_rule_fails_its_unit_tests(fault):
    """Statistics cannot see these; at least one of the rule's unit tests does."""
    with planted(fault):
        failed = [check.__name__ for check in test_rule.EDGE_CHECKS if _fails(check)]
    assert failed
    assert not [check.__name__ for check in test_rule.EDGE_CHECKS if _fails(check)]


def _fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False


def _logprob_error(fault: AbstractContextManager[None]) -> float:
    """Largest difference between reported log-probabilities and the model's own raw law."""
    target = tiny_model("qwen3", seed=1)
    engine = Engine(target, noisy_copy(target, noise=0.5, seed=2), k=3, num_slots=4, capacity=32, top_logprobs=2)
    params = SamplingParams(temperature=1.0, max_tokens=9, banned_ids=(6,))
    requests = [Request(prompt_ids=(1, 2, n % 8), params=replace(params, seed=n)) for n in range(12)]
    with fault:
        completions = engine.generate(requests)
    oracle = Oracle(target)
    return max(_row_error(oracle, request, one) for request, one in zip(requests, completions, strict=True))


def _row_error(oracle: Oracle, request: Request, completion: Completion) -> float:
    tokens = completion.token_ids
    contexts = [(*request.prompt_ids, *tokens[:index]) for index in range(len(tokens))]
    logits = np.stack(oracle.logits(contexts))
    law = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert completion.logprobs is not None
    top = -np.sort(-law, axis=1)[:, :2]
    token_error = np.abs(completion.logprobs.token_logprob - law[range(len(tokens)), tokens]).max()
    tail_error = np.abs(completion.logprobs.tail_mass - (1 - np.exp(top).sum(axis=1))).max()
    return float(max(token_error, tail_error, np.abs(completion.logprobs.top_logprobs - top).max()))


@pytest.mark.parametrize("fault", LOGPROBS, ids=str)
def test_wrong_logprobs_are_seen(fault):
    assert _logprob_error(nullcontext()) < 1e-4
    assert not _logprob_error(planted(fault)) < 0.1


def _tokens_per_round(fault: AbstractContextManager[None]) -> tuple[float, float]:
    """As the engine reports it, and as its completions have it."""
    target = tiny_model(seed=1)
    engine = Engine(target, noisy_copy(target, noise=0.3, seed=2), k=3, num_slots=16, capacity=32)
    params = SamplingParams(temperature=1.0, max_tokens=12)
    with fault:
        done = engine.generate(Request(prompt_ids=(1, 2), params=replace(params, seed=n)) for n in range(40))
    rounds = sum(one.stats.rounds for one in done)
    return engine.stats.tokens_per_round, sum(len(one.token_ids) for one in done) / rounds


def test_tokens_a_round_are_divided_by_the_rows():
    """A fault that a first engine had: the accepted length of the whole batch counted as one row's."""
    reported, real = _tokens_per_round(nullcontext())
    assert reported == pytest.approx(real)
    assert 1.0 < reported <= 4.0
    reported, real = _tokens_per_round(planted(MEAN_OF_A_SUM))
    assert reported > 4.0


def test_planting_restores_the_engine_and_refuses_text_that_is_gone():
    fault = LAW[0]
    before = fault.edits[0][0].__code__
    with planted(fault):
        assert fault.edits[0][0].__code__ is not before
    assert fault.edits[0][0].__code__ is before
    gone = replace(fault, edits=((fault.edits[0][0], "no such text", ""),))
    with pytest.raises(ValueError, match="adapt the fault"), planted(gone):
        pass
