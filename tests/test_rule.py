"""The rule at the points that samples do not show: u = 0, u -> 1, p == q, an all-zero residual, NaN rows.

Worked with laws over four tokens, one or two rows, and the coin passed in.
"""

import pytest
import torch
from torch import Tensor

from specdec.sampling import Features, LawParams, constrain_logits, law_of, sample, verify_drafts, verify_drafts_greedy

ALMOST_ONE = 1.0 - 2.0**-53


def _laws(*rows: list[float]) -> Tensor:
    """[1, len(rows), V] float64."""
    return torch.tensor([rows], dtype=torch.float64)


def _verify(
    draft: int, q: list[float] | None, p: list[float], after: list[float], *, coin: float, draw: float
) -> tuple[int, int]:
    """One row with one draft: (how many accepted, the token added)."""
    accepted_B, next_B = verify_drafts(
        torch.tensor([[draft]]),
        None if q is None else _laws(q),
        _laws(p, after),
        torch.tensor([1]),
        torch.tensor([[coin]], dtype=torch.float64),
        torch.full((1, 2), draw, dtype=torch.float64),
    )
    return int(accepted_B), int(next_B)


def _plain_law(num_rows: int = 1) -> LawParams:
    def full(value: float) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64)

    whole = torch.zeros(num_rows, dtype=torch.int64)
    return LawParams(
        temperature_B=full(1.0),
        top_k_B=whole,
        top_p_B=full(1.0),
        min_p_B=full(0.0),
        repetition_B=full(1.0),
        presence_B=full(0.0),
        frequency_B=full(0.0),
        min_length_B=whole,
        stop_BS=torch.full((num_rows, 1), -1),
    )


FLAT = [0.25, 0.25, 0.25, 0.25]


def test_a_coin_of_zero_does_not_accept_what_the_target_excludes():
    """u < p / q, not u <= p / q: with u = 0 a token of target probability 0 must be rejected."""
    assert _verify(2, FLAT, [0.5, 0.5, 0.0, 0.0], FLAT, coin=0.0, draw=0.0) == (0, 0)


def test_a_coin_of_zero_accepts_what_the_target_barely_allows():
    assert _verify(2, FLAT, [0.5, 0.5 - 1e-300, 1e-300, 0.0], FLAT, coin=0.0, draw=0.5)[0] == 1


def test_a_coin_near_one_accepts_where_p_is_at_least_q():
    assert _verify(1, FLAT, FLAT, [0.0, 0.0, 0.0, 1.0], coin=ALMOST_ONE, draw=0.5) == (1, 3)
    assert _verify(1, FLAT, [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], coin=ALMOST_ONE, draw=0.5) == (1, 3)


def test_a_coin_near_one_rejects_where_p_is_just_below_q():
    p = [0.25, 0.25 - 1e-9, 0.25, 0.25 + 1e-9]
    assert _verify(1, FLAT, p, FLAT, coin=ALMOST_ONE, draw=0.5) == (0, 3)


def test_equal_laws_accept_at_every_coin():
    law = [0.1, 0.2, 0.3, 0.4]
    for coin in (0.0, 0.25, 0.5, 0.75, ALMOST_ONE):
        for draft in range(4):
            assert _verify(draft, law, law, [1.0, 0.0, 0.0, 0.0], coin=coin, draw=0.3) == (1, 0)


def test_a_residual_without_mass_falls_back_to_the_target():
    """q rounded up everywhere it counts: the draft is rejected and max(p - q, 0) is all zero. Never token 0 by
    default."""
    p, q = [0.0, 0.5, 0.5, 0.0], [0.0, 0.5 + 1e-16, 0.5 + 2e-16, 0.0]
    q[2] = 0.5000001
    assert _verify(2, q, p, FLAT, coin=ALMOST_ONE, draw=0.7) == (0, 2)
    assert _verify(2, q, p, FLAT, coin=ALMOST_ONE, draw=0.2) == (0, 1)


def test_the_residual_leaves_out_the_rejected_token():
    """p = q except for a one-hot draft: the rejected token has no mass left, whatever is drawn."""
    for draw in (0.0, 0.3, 0.6, ALMOST_ONE):
        accepted, token = _verify(1, None, FLAT, FLAT, coin=0.9, draw=draw)
        assert accepted == 0
        assert token != 1


def test_sampling_at_the_ends_of_the_coin_takes_only_tokens_of_positive_weight():
    weights_BV = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    assert int(sample(weights_BV, torch.tensor([0.0], dtype=torch.float64))) == 2
    assert int(sample(weights_BV, torch.tensor([0.5], dtype=torch.float64))) == 4
    assert int(sample(weights_BV, torch.tensor([ALMOST_ONE], dtype=torch.float64))) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampling_a_large_vocabulary_never_leaves_the_support(dtype):
    """50,000 tokens, every second one excluded, coins at the ends and between."""
    weights_BV = torch.rand(1, 50_000, generator=torch.Generator().manual_seed(1), dtype=dtype)
    weights_BV[:, ::2] = 0
    coins_B = torch.tensor([0.0, 1e-18, 0.3, 0.999999, ALMOST_ONE], dtype=torch.float64)
    drawn_B = sample(weights_BV.expand(len(coins_B), -1), coins_B)
    assert (drawn_B % 2 == 1).all()


def test_a_nan_or_infinite_row_is_marked_and_flattened():
    nan, inf = float("nan"), float("inf")
    rows = [[0.0, nan, 1.0, 2.0], [0.0, inf, 1.0, 2.0], [-inf] * 4, [0.0, 1.0, -inf, 2.0]]
    logits_BJV = torch.tensor([rows], dtype=torch.float64)
    positions_BJ = torch.arange(4).unsqueeze(0)
    clean_BJV, bad_BJ = constrain_logits(logits_BJV, _plain_law(), positions_BJ, None, Features())
    assert bad_BJ.tolist() == [[True, True, True, False]]
    law_BJV = law_of(clean_BJV, _plain_law(), Features())
    assert torch.isfinite(law_BJV).all()
    assert torch.allclose(law_BJV.sum(-1), torch.ones(1, 4, dtype=torch.float64))
    assert law_BJV[0, 3, 2] == 0


def test_a_nan_row_harms_no_other_row():
    healthy = [0.0, 1.0, 2.0, 3.0]
    logits_BJV = torch.tensor([[[float("nan")] * 4], [healthy]], dtype=torch.float64)
    clean_BJV, bad_BJ = constrain_logits(logits_BJV, _plain_law(2), torch.zeros(2, 1).long(), None, Features())
    assert bad_BJ.tolist() == [[True], [False]]
    expected_V = torch.tensor(healthy, dtype=torch.float64).softmax(-1)
    assert torch.equal(law_of(clean_BJV, _plain_law(2), Features())[1, 0], expected_V)


def test_rows_accept_their_own_number_of_drafts():
    """Three rows accept 0, 1 and 2 of two drafts, and each adds a token from its own law."""
    sure = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    accepted_B, next_B = verify_drafts(
        torch.tensor([[0, 2], [1, 0], [1, 2]]),
        torch.full((3, 2, 4), 0.25, dtype=torch.float64),
        torch.tensor([sure, sure, sure], dtype=torch.float64),
        torch.tensor([2, 2, 2]),
        torch.full((3, 2), 0.5, dtype=torch.float64),
        torch.full((3, 3), 0.5, dtype=torch.float64),
    )
    assert accepted_B.tolist() == [0, 1, 2]
    assert next_B.tolist() == [1, 2, 3]


def test_drafts_beyond_a_rows_number_are_not_read():
    """A row with one real draft of two: the second is never accepted, and the added token follows p, not a residual."""
    p = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], FLAT]
    accepted_B, next_B = verify_drafts(
        torch.tensor([[1, 2]]),
        torch.tensor([[FLAT, [0.0, 0.0, 1.0, 0.0]]], dtype=torch.float64),
        torch.tensor([p], dtype=torch.float64),
        torch.tensor([1]),
        torch.zeros(1, 2, dtype=torch.float64),
        torch.full((1, 3), 0.1, dtype=torch.float64),
    )
    assert (int(accepted_B), int(next_B)) == (1, 2)


def test_the_greedy_rule_is_the_rule_with_one_hot_laws():
    generator = torch.Generator().manual_seed(3)
    drafts_BK = torch.randint(0, 3, (200, 4), generator=generator)
    argmax_BJ = torch.randint(0, 3, (200, 5), generator=generator)
    num_drafts_B = torch.randint(0, 5, (200,), generator=generator)
    one_hot_BJV = torch.nn.functional.one_hot(argmax_BJ, 3).double()
    coins_BJ = torch.rand(200, 5, generator=generator, dtype=torch.float64)
    short = verify_drafts_greedy(drafts_BK, argmax_BJ, num_drafts_B)
    full = verify_drafts(drafts_BK, None, one_hot_BJV, num_drafts_B, coins_BJ[:, :4], coins_BJ)
    assert torch.equal(short[0], full[0])
    assert torch.equal(short[1], full[1])


EDGE_CHECKS = (
    test_a_coin_of_zero_does_not_accept_what_the_target_excludes,
    test_a_coin_near_one_rejects_where_p_is_just_below_q,
    test_a_residual_without_mass_falls_back_to_the_target,
    test_sampling_at_the_ends_of_the_coin_takes_only_tokens_of_positive_weight,
    test_a_nan_or_infinite_row_is_marked_and_flattened,
    test_a_nan_row_harms_no_other_row,
)
