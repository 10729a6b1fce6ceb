"""The oracle and the statistics of gate G1, tested on their own: no engine here.

Laws are small and seeds fixed, so each test gives the same numbers on every run.
"""

import numpy as np
import pytest
import torch

from bench.law import Oracle, count_cells, enumerate_law, has_ended, next_laws, processed_law
from bench.law_acceptance import Setting, acceptance_z, enumerate_acceptance
from bench.law_stats import (
    bootstrap_tv_sd,
    check_law,
    chi_squared,
    chi_squared_tail,
    expected_tv,
    holm,
    total_variation,
)
from bench.tiny_models import FAMILIES, noisy_copy, tiny_model
from specdec import AcceptanceStats, SamplingParams

SAMPLED = SamplingParams(temperature=1.0, max_tokens=6)


def _random_law(cells: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(cells, 0.5))


def _shifted(law: np.ndarray, distance: float) -> np.ndarray:
    """`law` with `distance` of its mass moved from the larger half of the cells to the smaller half: TV(law,
    result) = distance."""
    order = np.argsort(law)
    small, large = order[: len(law) // 2], order[len(law) // 2 :]
    moved = law.copy()
    moved[large] -= distance * law[large] / law[large].sum()
    moved[small] += distance / len(small)
    return moved


# Statistics


def test_expected_tv_is_what_simulation_gives():
    law = _random_law(8, seed=1)
    draws = np.random.default_rng(2).multinomial(20_000, law, size=4000)
    simulated = np.mean([total_variation(counts, law) for counts in draws])
    assert simulated == pytest.approx(expected_tv(law, 20_000), rel=0.02)
    assert bootstrap_tv_sd(law, 20_000, seed=3) == pytest.approx(
        np.std([total_variation(c, law) for c in draws]), rel=0.2
    )


def test_expected_tv_is_an_upper_bound_when_cells_are_rare():
    law = _random_law(512, seed=1)
    draws = np.random.default_rng(2).multinomial(2000, law, size=500)
    assert np.mean([total_variation(counts, law) for counts in draws]) < expected_tv(law, 2000)


@pytest.mark.parametrize("cells", [8, 512])
def test_false_alarms_are_as_rare_as_stated(cells):
    """20,000 data sets from the law itself: TV above E0 + 4 sd in under 1 of 1,000, chi-squared p-values
    uniform.

    (TV is skewed: the rate is 6e-4 at 8 cells, 1e-4 at 512 and 2e-3 at two, not the 3e-5 of a normal
    variable.)
    """
    law = _random_law(cells, seed=4)
    draws = np.random.default_rng(5).multinomial(5000, law, size=20_000)
    limit = check_law(draws[0], law, seed=0).tv_limit
    assert np.mean(0.5 * np.abs(draws / 5000 - law).sum(axis=1) > limit) < 1e-3
    p_values = np.array([chi_squared_tail(*chi_squared(counts, law * 5000)) for counts in draws[:2000]])
    for level in (0.01, 0.1, 0.5):
        assert np.mean(p_values < level) == pytest.approx(level, abs=5 * np.sqrt(level * (1 - level) / 2000))


@pytest.mark.parametrize(("cells", "distance"), [(8, 0.03), (512, 0.12)])
def test_a_shift_of_known_size_is_caught(cells, distance):
    """Power at N = 20,000: a law off by a TV of 0.03 (8 cells) or 0.12 (512 cells) is caught in every one of
    200 data sets by TV alone."""
    law = _random_law(cells, seed=6)
    wrong = _shifted(law, distance)
    assert 0.5 * np.abs(wrong - law).sum() == pytest.approx(distance)
    draws = np.random.default_rng(7).multinomial(20_000, wrong, size=200)
    checks = [check_law(counts, law, seed=index) for index, counts in enumerate(draws)]
    assert not any(check.tv_ok for check in checks)
    assert all(check.p_value < 1e-6 for check in checks)


def test_chi_squared_sees_a_shift_that_tv_cannot():
    """A rare cell hit ten times as often as it should be moves TV by little, chi-squared by much."""
    law = np.array([0.5, 0.499, 0.001])
    check = check_law(np.array([9_950, 9_850, 200]), law, seed=0)
    assert check.p_value < 1e-10


def test_one_observation_of_an_impossible_cell_fails():
    check = check_law(np.array([50, 49, 1]), np.array([0.5, 0.5, 0.0]), seed=0)
    assert check.impossible == 1
    assert not check.tv_ok


def test_a_law_without_noise_allows_no_deviation():
    certain = np.array([0.0, 1.0])
    assert check_law(np.array([0, 100]), certain, seed=0).tv_ok
    assert not check_law(np.array([1, 99]), certain, seed=0).tv_ok


def test_chi_squared_pools_rare_cells():
    counts, expected = np.array([3, 2, 45, 50]), np.array([2.0, 3.5, 44.5, 50.0])
    chi2, dof = chi_squared(counts, expected)
    assert dof == 2
    assert chi2 == pytest.approx((5 - 5.5) ** 2 / 5.5 + 0.5**2 / 44.5)


def test_a_pool_that_stays_rare_takes_the_smallest_other_cell():
    _, dof = chi_squared(np.array([1, 9, 90]), np.array([1.0, 9.0, 90.0]))
    assert dof == 1


def test_chi_squared_tail_has_textbook_values():
    assert chi_squared_tail(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert chi_squared_tail(18.307038, 10) == pytest.approx(0.05, rel=1e-5)
    assert chi_squared_tail(0.0, 0) == 1.0


def test_holm_rejects_step_by_step():
    assert holm([0.03, 0.0001, 0.02], family_error=0.05) == [False, False, False]
    assert holm([0.03, 0.0001, 0.03], family_error=0.05) == [True, False, True]
    assert holm([0.02, 0.5], family_error=0.05) == [False, True]


# Processing of logits, against laws worked out by hand


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, [8, 4, 2, 1]),
        ({"temperature": 0.5}, [64, 16, 4, 1]),
        ({"top_k": 2}, [8, 4, 0, 0]),
        ({"top_p": 0.53}, [8, 0, 0, 0]),  # 8/15 = 0.533 reaches 0.53 alone
        ({"top_p": 0.54}, [8, 4, 0, 0]),
        ({"min_p": 0.25}, [8, 4, 2, 0]),
        ({"top_k": 3, "top_p": 0.58}, [8, 4, 0, 0]),  # renormalised: 8/14 = 0.571 < 0.58
        ({"top_k": 2, "top_p": 0.66}, [8, 0, 0, 0]),  # renormalised: 8/12 = 0.667
        ({"min_p": 0.3, "top_p": 0.66}, [8, 0, 0, 0]),  # min_p first leaves 8 and 4
        ({"allowed_ids": (1, 2)}, [0, 4, 2, 0]),
        ({"banned_ids": (0,)}, [0, 4, 2, 1]),
        ({"stop_ids": (0,), "min_tokens": 4}, [0, 4, 2, 1]),
        ({"stop_ids": (0,), "min_tokens": 3}, [8, 4, 2, 1]),
        ({"presence_penalty": float(np.log(2))}, [8, 2, 1, 1]),
        ({"frequency_penalty": float(np.log(2))}, [8, 1, 1, 1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.0, "banned_ids": (0,)}, [0, 1, 0, 0]),
    ],
)
def test_processed_law_by_hand(changes, weights):
    """Weights 8:4:2:1; the prompt was token 3, the output 1, 1, 2."""
    params = SamplingParams(**{"temperature": 1.0, **changes})
    law = processed_law(np.log([8.0, 4.0, 2.0, 1.0]), params, prompt=[3], output=[1, 1, 2])
    np.testing.assert_allclose(law, np.array(weights) / sum(weights), atol=1e-12)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    law = processed_law(np.array([1.0, -1.0, 0.5, 1.0]), params, prompt=[0], output=[1])
    expected = np.exp([0.5, -2.0, 0.5, 1.0])
    np.testing.assert_allclose(law, expected / expected.sum())


def test_top_k_keeps_ties_and_greedy_takes_the_lowest_index():
    logits = np.array([0.0, 1.0, 1.0, 2.0])
    assert (processed_law(logits, SamplingParams(temperature=1.0, top_k=2), [0], []) > 0).tolist() == [
        False,
        True,
        True,
        True,
    ]
    assert processed_law(np.array([0.0, 1.0, 1.0]), SamplingParams(), [0], []).tolist() == [0.0, 1.0, 0.0]


# The enumerated law


def test_enumerated_law_is_the_product_of_teacher_forced_softmaxes():
    model = tiny_model("qwen3", vocab=4, layers=2, seed=3)
    law = enumerate_law(Oracle(model), (1, 2), SAMPLED, depth=3)
    for tokens in [(0, 1, 2), (3, 3, 0), (2, 0, 2)]:
        with torch.no_grad():
            logits_SV = model(input_ids=torch.tensor([(1, 2, *tokens)]), use_cache=False).logits[0, 1:4]
        forced = torch.softmax(logits_SV, -1)[range(3), list(tokens)].prod()
        assert law[tokens] == pytest.approx(float(forced), abs=1e-5)


def test_enumerated_law_sums_to_one_and_holds_early_ends():
    params = SamplingParams(temperature=1.0, max_tokens=2, stop_ids=(1,))
    law = enumerate_law(Oracle(tiny_model(vocab=4, seed=3)), (1, 2), params, depth=3)
    assert law.sum() == pytest.approx(1.0)
    assert law[1, 4, 4] > 0
    assert law[0, 1, 4] > 0
    assert law[:, :, :4].sum() == 0
    assert law[1, :4].sum() == 0


def test_count_cells_ends_short_completions_and_cuts_long_ones():
    counts = count_cells([[1], [0, 2, 1, 1], [0, 2, 1]], vocab=3, depth=3)
    assert counts[1, 3, 3] == 1
    assert counts[0, 2, 1] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_have_laws_worth_testing(family):
    """Not flat, not one-hot, and one token missing from the context moves the law: a wrong cache can be
    seen."""
    model = tiny_model(family, layers=2, seed=1)
    oracle = Oracle(model)
    contexts = [(1, 2, 3, *pair) for pair in np.ndindex(8, 8)]
    laws = np.stack([processed_law(row, SAMPLED, (), ()) for row in oracle.logits(contexts)])
    holed = np.stack(
        [processed_law(row, SAMPLED, (), ()) for row in oracle.logits([(1, *context[2:]) for context in contexts])]
    )
    assert 0.3 < laws.max(axis=1).mean() < 0.8
    assert 0.5 * np.abs(laws - holed).sum(axis=1).mean() > 0.05
    draft = Oracle(noisy_copy(model, noise=0.3, seed=2))
    draft_laws = np.stack([processed_law(row, SAMPLED, (), ()) for row in draft.logits(contexts)])
    assert 0.3 < np.minimum(laws, draft_laws).sum(axis=1).mean() < 0.9


def test_tiny_models_repeat_by_seed_and_share_nothing():
    one, again = tiny_model(seed=5), tiny_model(seed=5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    copy = noisy_copy(one, noise=0.0, seed=1)
    assert copy.config is not one.config
    assert all(torch.equal(a, b) and a is not b for a, b in zip(one.parameters(), copy.parameters(), strict=True))


# Acceptance by position


def _speculate(setting: Setting, rng: np.random.Generator) -> tuple[list[int], AcceptanceStats]:
    """One request decoded by the textbook loop, from the oracles' laws. Returns its tokens and counts."""
    output: tuple[int, ...] = ()
    k_max = 4
    reached, accepted, round_index = [0] * k_max, [0] * k_max, 0
    while not has_ended(output, setting.params):
        k = min(setting.k_of_round(round_index), setting.params.max_tokens - len(output) - 1)
        for position in range(k + 1):
            p = _law(setting.target, setting, output)
            if position == k:
                output = (*output, int(rng.choice(len(p), p=p)))
                break
            q = _law(setting.draft, setting, output)
            token = int(rng.choice(len(q), p=q))
            reached[position] += 1
            if rng.random() < p[token] / q[token]:
                accepted[position] += 1
                output = (*output, token)
                if has_ended(output, setting.params):
                    break
                continue
            rest = np.maximum(p - q, 0)
            output = (*output, int(rng.choice(len(p), p=rest / rest.sum())))
            break
        round_index += 1
    return list(output), AcceptanceStats(reached=reached, accepted=accepted)


def _law(oracle: Oracle, setting: Setting, output: tuple[int, ...]) -> np.ndarray:
    params = setting.params if oracle is setting.target else setting.draft_params
    return next_laws(oracle, setting.prompt, params, [output])[output]


def _setting(k_of_round, *, noise: float = 0.4) -> Setting:
    target = tiny_model(vocab=4, seed=3)
    params = SamplingParams(temperature=1.0, max_tokens=6, stop_ids=(2,), min_tokens=2)
    draft = Oracle(noisy_copy(target, noise=noise, seed=9))
    draft_params = SamplingParams(temperature=1.3, max_tokens=6, stop_ids=(2,), min_tokens=2)
    if noise == 0.0:
        draft_params = params
    return Setting(
        target=Oracle(target),
        draft=draft,
        prompt=(1, 0, 3),
        params=params,
        draft_params=draft_params,
        k_of_round=k_of_round,
    )


@pytest.mark.parametrize("k_of_round", [lambda n: 3, lambda n: (2, 0, 4)[n % 3]], ids=["fixed", "changing"])
def test_enumerated_acceptance_and_law_match_the_textbook_loop(k_of_round):
    """Both oracles at once: 4,000 textbook runs have the enumerated acceptance at every position, and the
    enumerated law."""
    setting = _setting(k_of_round)
    expected = enumerate_acceptance(setting, k_max=4)
    rng = np.random.default_rng(11)
    runs = [_speculate(setting, rng) for _ in range(4000)]
    reached = np.mean([stats.reached for _, stats in runs], axis=0)
    np.testing.assert_allclose(reached, expected.reached, rtol=0.1, atol=0.01)
    assert np.abs(acceptance_z([stats for _, stats in runs], expected.alpha)).max() < 4
    law = enumerate_law(setting.target, setting.prompt, setting.params, depth=3)
    check = check_law(count_cells([tokens for tokens, _ in runs], 4, 3), law, seed=1)
    assert check.tv_ok
    assert check.p_value > 1e-4


def test_acceptance_z_sees_a_worse_draft():
    setting = _setting(lambda n: 3)
    expected = enumerate_acceptance(setting, k_max=3)
    worse = _setting(lambda n: 3, noise=0.8)
    rng = np.random.default_rng(12)
    stats = [_speculate(worse, rng)[1] for _ in range(2000)]
    assert np.abs(acceptance_z(stats, expected.alpha)).max() > 6


def test_an_equal_draft_is_always_accepted():
    setting = _setting(lambda n: 3, noise=0.0)
    expected = enumerate_acceptance(setting, k_max=3)
    np.testing.assert_allclose(expected.alpha, 1.0)
    perfect = [AcceptanceStats(reached=[2, 1, 1], accepted=[2, 1, 1])] * 10
    assert acceptance_z(perfect, expected.alpha).tolist() == [0.0, 0.0, 0.0]
    flawed = [*perfect, AcceptanceStats(reached=[1, 1, 1], accepted=[1, 1, 0])]
    assert acceptance_z(flawed, expected.alpha)[2] == -np.inf
