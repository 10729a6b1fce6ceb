"""The processed law against an independent implementation, ties included, and the draw from it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.law import processed_law
from specdec import SamplingParams
from specdec.sampling import _keep_top_p, constrain_logits, law_of, sample
from specdec.state import RowState, features_of

VOCAB = 17

# Penalties are sums of powers of two: exact, so that ties of rounded logits are ties in either implementation.
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 16, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.75, -0.25]),
    allowed_ids=st.sampled_from([None, (1, 2, 3, 5, 8), (16,)]),
    banned_ids=st.sampled_from([(), (2, 3)]),
    stop_ids=st.sampled_from([(), (5,), (1, 8)]),
    min_tokens=st.sampled_from([0, 2]),
    max_tokens=st.just(8),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(params_strategy, min_size=1, max_size=4),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=4, max_size=4),
    outputs=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=4, max_size=4),
    coarse=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_processed_law_equals_the_oracles(rows, prompts, outputs, coarse, seed) -> None:
    """Rows of every kind side by side: each must get the law that the oracle computes for it alone."""
    from specdec import Request

    state = RowState.empty(len(rows), 16, "cpu")
    requests = [Request(prompt_ids=p, params=r) for p, r in zip(prompts, rows, strict=False)]
    state.write_rows(range(len(rows)), requests, VOCAB)
    generator = torch.Generator().manual_seed(seed)
    logits_B1V = 2 * torch.randn(len(rows), 1, VOCAB, generator=generator, dtype=torch.float64)
    if coarse:
        logits_B1V = logits_B1V.round()  # many ties
    counts_BV = torch.stack([torch.bincount(torch.tensor(o, dtype=torch.int64), minlength=VOCAB) for o in outputs])
    positions_B1 = torch.tensor([[len(p) + len(o)] for p, o in zip(prompts, outputs, strict=True)])[: len(rows)]
    features = features_of(rows)
    constrained, bad = constrain_logits(
        logits_B1V, state.law, positions_B1, counts_BV[: len(rows)].unsqueeze(1).int(), features
    )
    assert not bad.any()
    got = law_of(constrained, state.law, features)[:, 0]
    for row, params in enumerate(rows):
        wanted = processed_law(logits_B1V[row, 0].numpy(), params, prompts[row], outputs[row])
        if not np.isfinite(wanted).all():
            continue  # min_tokens bans the only allowed token: refused when the request is submitted
        assert got[row].numpy() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_by_threshold_equals_the_stable_sort(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        logits = torch.randint(-4, 4, (3, 2, VOCAB), generator=generator).to(dtype) * 0.5
        if trial % 5 == 0:
            logits[..., ::4] = float("-inf")
        top_p = torch.tensor([0.1 + 0.9 * trial / 200, 1.0, 0.5], dtype=torch.float64)
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1, dtype=torch.float64)
        keep_sorted = (probs.cumsum(-1) - probs < top_p.view(-1, 1, 1)) | (top_p.view(-1, 1, 1) >= 1)
        keep = torch.zeros_like(keep_sorted).scatter_(-1, order, keep_sorted)
        assert torch.equal(_keep_top_p(logits, top_p), logits.masked_fill(~keep, float("-inf")))


def test_a_draw_is_the_inverse_cdf_and_never_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]])
    for u, token in ((0.0, 1), (0.499, 1), (0.5, 3), (0.74, 3), (0.75, 4), (1 - 2**-53, 4)):
        assert sample(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [token]
    many = torch.rand(2000, 50).masked_fill(torch.rand(2000, 50) < 0.7, 0.0)
    many[:, 7] = 1e-30
    u = torch.rand(2000, dtype=torch.float64)
    u[:200], u[200:400] = 0.0, 1 - 2**-53
    drawn = sample(many, u)
    assert (many.gather(1, drawn.unsqueeze(1)) > 0).all()
