"""Gate G1: the engine's samples against the exactly enumerated law of its target.

A suite is one engine (target, draft, draft lengths, slots) with many cases (a prompt and sampling
parameters) that are decoded side by side in one batch: rows of different length and parameters, more
requests than slots, so that every slot is refilled again and again. Each request has its own seed, so a
case's requests are independent samples of its law. Everything runs in float64.

A fault of the draft leaves the text exact. It shows in acceptance by position, which is compared with the
enumerated sum over x of min(p(x), q(x)) wherever the draft length is fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from bench.law import Oracle, Tokens, count_cells, enumerate_law
from bench.law_acceptance import Setting, acceptance_z, enumerate_acceptance
from bench.law_stats import LawCheck, check_law, holm
from specdec import AcceptanceStats, Completion, Engine, Request, RoundStats, SamplingParams

Z_LIMIT = 5.0  # two-sided 6e-7 for each position of each case


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt and its parameters (seeds are set per request). Compared are the first token's law and
    the joint law of the last `window` of the first `depth` tokens."""

    name: str
    prompt: Tokens
    params: SamplingParams
    depth: int = 3
    window: int = 3


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One engine and the cases that share its batch. ks: one draft length, or several that the rounds
    cycle through.

    in_step: every request has a slot and starts in round 0, so that a changing k is the same function of a
    request's round for all of them, and acceptance can be enumerated.
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | None
    ks: tuple[int, ...]
    cases: tuple[Case, ...]
    num_slots: int = 1024
    in_step: bool = False
    draft_changes: dict[str, Any] = field(default_factory=dict)
    spare_capacity: int = 0

    @property
    def k_label(self) -> str:
        return ",".join(map(str, self.ks))


@dataclass(frozen=True, kw_only=True)
class LawFinding:
    """One case's samples against one law. `malformed` completions failed, or ended where they should not
    have."""

    suite: Suite
    case: Case
    statistic: str
    check: LawCheck
    malformed: int


@dataclass(frozen=True, kw_only=True)
class AcceptanceFinding:
    """Acceptance by draft position, conditional on reaching it, against its enumerated value; z: standard
    scores."""

    suite: Suite
    case: Case
    observed: list[float]
    expected: list[float]
    z: list[float]
    samples: int

    @property
    def passed(self) -> bool:
        return all(abs(score) <= Z_LIMIT for score in self.z)


EngineFactory = Callable[[Suite, int], Engine]


def build_engine(suite: Suite, num_requests: int, **options: Any) -> Engine:
    """The engine under test, with draft lengths that cycle through suite.ks; options: Engine's."""
    longest = max(len(case.prompt) + case.params.max_tokens for case in suite.cases)
    return Engine(
        suite.target,
        suite.draft,
        k=suite.ks[0] if len(suite.ks) == 1 else cycling(suite.ks),
        k_max=max(suite.ks),
        num_slots=num_requests if suite.in_step else min(suite.num_slots, max(1, num_requests // 3)),
        capacity=longest + suite.spare_capacity,
        prefill_chunk=longest if suite.in_step else 4,
        **options,
    )


def cycling(ks: Sequence[int]) -> Callable[[RoundStats | None], int]:
    """A draft length for each round, whatever happened in the last one."""
    endless = itertools.cycle(ks)
    return lambda last: next(endless)


def decode(
    suite: Suite, *, samples: int, seed: int, engine_factory: EngineFactory = build_engine
) -> list[list[Completion]]:
    """`samples` completions of every case, by case, decoded interleaved."""
    engine = engine_factory(suite, samples * len(suite.cases))
    completions = engine.generate(_requests(suite, samples, seed))
    return [completions[index :: len(suite.cases)] for index in range(len(suite.cases))]


def _requests(suite: Suite, samples: int, seed: int) -> Iterator[Request]:
    for sample in range(samples):
        for index, case in enumerate(suite.cases):
            own_seed = seed + sample * len(suite.cases) + index
            yield Request(prompt_ids=case.prompt, params=replace(case.params, seed=own_seed))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one case's samples are compared with: laws by the name of the statistic, and acceptance by position (None
    where nothing is drafted, or k changes and the rows are not in step)."""

    laws: dict[str, np.ndarray]
    alpha: np.ndarray | None


def expect(suite: Suite) -> list[Expected]:
    """Enumerate every case of the suite."""
    target = Oracle(suite.target)
    draft = Oracle(suite.draft) if suite.draft is not None and _acceptance_is_known(suite) else None
    return [
        Expected(
            laws=_windows(case, enumerate_law(target, case.prompt, case.params, case.depth)),
            alpha=None if draft is None else _expected_alpha(suite, case, target, draft),
        )
        for case in suite.cases
    ]


def _acceptance_is_known(suite: Suite) -> bool:
    return max(suite.ks) > 0 and (len(suite.ks) == 1 or suite.in_step)


def _expected_alpha(suite: Suite, case: Case, target: Oracle, draft: Oracle) -> np.ndarray:
    setting = Setting(
        target=target,
        draft=draft,
        prompt=case.prompt,
        params=case.params,
        draft_params=replace(case.params, **suite.draft_changes),
        k_of_round=lambda n: suite.ks[n % len(suite.ks)],
        draft_max_positions=draft.max_positions,
    )
    return enumerate_acceptance(setting, k_max=max(suite.ks)).alpha


def _windows(case: Case, cells: np.ndarray) -> dict[str, np.ndarray]:
    """A law, or counts, over the first `depth` tokens, reduced to the first token and to the two windows."""
    before = case.depth - case.window
    return {
        "token 1": cells.sum(axis=tuple(range(1, case.depth))),
        f"tokens 1-{case.window}": cells.sum(axis=tuple(range(case.window, case.depth))),
        f"tokens {before + 1}-{case.depth}": cells.sum(axis=tuple(range(before))),
    }


def check_laws(
    suite: Suite, decoded: Sequence[Sequence[Completion]], expected: Sequence[Expected], *, seed: int
) -> list[LawFinding]:
    """Every case's first token and joint law."""
    findings = []
    for case, completions, known in zip(suite.cases, decoded, expected, strict=True):
        malformed = sum(not _well_formed(one, case.params) for one in completions)
        tokens = [one.token_ids for one in completions]
        counts = _windows(case, count_cells(tokens, suite.target.config.vocab_size, case.depth))
        for statistic, law in known.laws.items():
            check = check_law(counts[statistic], law, seed=seed)
            finding = LawFinding(suite=suite, case=case, statistic=statistic, check=check, malformed=malformed)
            findings.append(finding)
    return findings


def _well_formed(completion: Completion, params: SamplingParams) -> bool:
    """It ends with its first stop id or with its last allowed token, and says which."""
    tokens = completion.token_ids
    stops = [index for index, token in enumerate(tokens) if token in params.stop_ids]
    if stops:
        return completion.finish_reason == "stop" and stops == [len(tokens) - 1] and len(tokens) <= params.max_tokens
    return completion.finish_reason == "length" and len(tokens) == params.max_tokens


def check_acceptance(
    suite: Suite, decoded: Sequence[Sequence[Completion]], expected: Sequence[Expected]
) -> list[AcceptanceFinding]:
    """Acceptance by position of every case for which it is known."""
    return [
        AcceptanceFinding(
            suite=suite,
            case=case,
            observed=sum((one.stats for one in completions), AcceptanceStats()).alpha_by_position,
            expected=known.alpha.tolist(),
            z=acceptance_z([one.stats for one in completions], known.alpha).tolist(),
            samples=len(completions),
        )
        for case, completions, known in zip(suite.cases, decoded, expected, strict=True)
        if known.alpha is not None
    ]


def run_g1(
    suites: Sequence[Suite], *, samples: int, seed: int, engine_factory: EngineFactory = build_engine
) -> list[dict[str, Any]]:
    """All suites, one flat row a comparison. Chi-squared is judged over the whole family of laws (Holm)."""
    laws: list[LawFinding] = []
    acceptance: list[AcceptanceFinding] = []
    for index, suite in enumerate(suites):
        suite_seed = seed + index * 10**9
        decoded = decode(suite, samples=samples, seed=suite_seed, engine_factory=engine_factory)
        expected = expect(suite)
        laws += check_laws(suite, decoded, expected, seed=suite_seed)
        acceptance += check_acceptance(suite, decoded, expected)
    return rows_of(laws, acceptance)


def rows_of(laws: Sequence[LawFinding], acceptance: Sequence[AcceptanceFinding]) -> list[dict[str, Any]]:
    """Flat rows with a verdict each; the laws are one family for chi-squared."""
    stands = holm([finding.check.p_value for finding in laws])
    rows = [_law_row(finding, chi2_ok) for finding, chi2_ok in zip(laws, stands, strict=True)]
    return rows + [_acceptance_row(finding) for finding in acceptance]


def _common(suite: Suite, case: Case, samples: int) -> dict[str, Any]:
    return {
        "gate": "G1",
        "suite": suite.name,
        "k": suite.k_label,
        "case": case.name,
        "temperature": case.params.temperature,
        "samples": samples,
    }


def _law_row(finding: LawFinding, chi2_ok: bool) -> dict[str, Any]:
    check = finding.check
    return _common(finding.suite, finding.case, check.samples) | {
        "statistic": finding.statistic,
        "e0": check.e0,
        "tv": check.tv,
        "tv_sd": check.tv_sd,
        "tv_limit": check.tv_limit,
        "tv_sigmas": min(check.tv_sigmas, 1e9),
        "chi2": check.chi2,
        "dof": check.dof,
        "p_value": check.p_value,
        "impossible": check.impossible,
        "malformed": finding.malformed,
        "passed": check.tv_ok and chi2_ok and finding.malformed == 0,
    }


def _acceptance_row(finding: AcceptanceFinding) -> dict[str, Any]:
    return _common(finding.suite, finding.case, finding.samples) | {
        "statistic": "acceptance",
        "alpha_by_position": finding.observed,
        "alpha_expected": finding.expected,
        "z": [max(-1e9, min(1e9, score)) for score in finding.z],
        "passed": finding.passed,
    }
