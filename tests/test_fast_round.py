"""The kernels of a round against the torch code that they stand in for, to the bit; whole engines with both."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.tiny_models import noisy_copy, tiny_model
from specdec import Engine, Request, SamplingParams, fast_round, kernels, rng
from specdec.drafter import ModelDrafter
from specdec.graph_draft import DraftBuffers, DraftSteps
from specdec.kvcache import RaggedCache
from specdec.report import REPORT_COLUMNS
from specdec.sampling import Features, constrain_logits
from specdec.state import RowState
from specdec.window import Window, WindowCache


@pytest.fixture
def used(kernel_device, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device on which the kernels are used, also under the interpreter."""
    kernels.round_kernels.cache_clear()
    monkeypatch.setattr(kernels, "compiles_for", lambda device: True)
    yield kernel_device
    kernels.round_kernels.cache_clear()


@contextmanager
def off(wanted: bool = True) -> Iterator[None]:
    """In the block the torch code runs, if that is wanted."""
    before = kernels.compiles_for
    if wanted:
        kernels.compiles_for = lambda device: False
        kernels.round_kernels.cache_clear()
    try:
        yield
    finally:
        kernels.compiles_for = before
        kernels.round_kernels.cache_clear()


def test_where_triton_does_not_work_torch_goes_on(monkeypatch, caplog) -> None:
    """As on a node without a C compiler."""

    def broken(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("specdec.fast_kernels.INTERPRETED", False)
    monkeypatch.setattr(fast_round, "uniforms", broken)
    caplog.set_level("INFO")
    assert not kernels.compiles_for.__wrapped__(torch.device("cuda"))
    assert "no Triton kernels on cuda" in caplog.text


def test_uniforms(used) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (7,), generator=generator).to(used)
    positions = torch.randint(0, 2**40, (7, 12), generator=generator).to(used)
    for purpose in rng.Purpose:
        for starts, asked in ((positions[:, 3], positions[:, 1:]), (positions[:, 0].contiguous(), positions[:, :0])):
            got = rng.uniforms(seeds, starts, asked, purpose)
            with off():
                assert torch.equal(got, rng.uniforms(seeds, starts, asked, purpose))
            assert got.dtype == torch.float64


def test_places_in_the_cache(used) -> None:
    """Padding, rows that are fed nothing, positions before the text and behind the model's last."""
    for q, rows in ((1, slice(0, 6)), (5, slice(2, 8)), (3, slice(1, 2))):
        plans, lengths = [], []
        for torch_code in (False, True):
            cache = RaggedCache(
                {0: (1, 2)}, num_rows=9, capacity=40, max_positions=30, dtype=torch.float32, device=used
            )
            cache.lengths_B += 7
            count = rows.stop - rows.start
            start = torch.tensor([-2, -1, 0, 12, 27, 29][:count], device=used)
            new = torch.tensor([q, q, 0, 1, q, q][:count], device=used)
            with off(torch_code):
                plans.append(cache.plan(start, new, q, rows, 33))
            lengths.append(cache.lengths_B)
        ours, reference = plans
        assert torch.equal(ours.positions_Bq, reference.positions_Bq)
        assert torch.equal(ours.slots_Bq, reference.slots_Bq)
        assert torch.equal(*lengths)
        assert ours.live == reference.live == 33


def test_a_ring_places_by_its_own_rule(used) -> None:
    cache = WindowCache(
        {0: (1, 2)},
        window=Window(recent=8, sinks=2, margin=4),
        max_positions=90,
        num_rows=2,
        dtype=torch.float32,
        device=used,
    )
    start = torch.tensor([70, 3], device=used)
    plan = cache.plan(start, torch.ones_like(start), 1, slice(0, 2), None)
    assert plan.positions_Bq.flatten().tolist() == [70, 3]
    assert int(plan.slots_Bq.max()) < cache.capacity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit(used, dtype) -> None:
    """The lowest id among equals; NaN and infinities are told."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3, 5003, generator=generator).to(dtype).to(used)
    logits[0, 0, 4000] = logits[0, 0, 17] = 9.0
    logits[0, 1, 900] = logits[0, 1, 100] = logits[0, 1, 901] = 9.0  # in one program's share
    logits[1, 0] = -torch.inf
    logits[1, 1, 4999] = torch.inf
    logits[1, 2, 0] = torch.nan
    logits[2, 0, :-1] = -torch.inf
    token, bad = fast_round.largest(logits)
    with off():
        _, expected_bad = constrain_logits(logits, None, None, None, Features(all_greedy=True))
    assert torch.equal(bad, expected_bad)
    assert bad.sum() == 3
    assert torch.equal(token[~bad], logits.argmax(-1)[~bad])
    assert token[0, :2].tolist() == [17, 100]
    assert token.min() >= 0
    assert token.max() < 5003


def engine_with(device: str, seen: list) -> Engine:
    target = tiny_model("qwen3", vocab=23, seed=1, dtype=torch.float32)
    draft = noisy_copy(target, noise=0.4, seed=2)
    return Engine(target.to(device), draft.to(device), k=3, num_slots=3, capacity=64, on_round=seen.append)


@pytest.mark.parametrize("sampled", [False, True])
def test_an_engine_gives_the_same_rounds(used, sampled, monkeypatch) -> None:
    """Greedy or sampled, stop ids, early ends by length, more requests than rows, positions that end in the text."""
    generator = torch.Generator().manual_seed(3)
    requests = [
        Request(
            prompt_ids=torch.randint(0, 23, (int(n),), generator=generator).tolist(),
            params=SamplingParams(
                max_tokens=int(m),
                temperature=0.9 if sampled and i % 3 else 0.0,
                seed=i,
                stop_ids=(i, 7) if i % 2 else (),
            ),
        )
        for i, (n, m) in enumerate(zip((1, 2, 9, 5, 30, 3, 4), (7, 1, 9, 5, 12, 2, 8), strict=True))
    ]
    found = []
    for torch_code in (False, True):
        seen: list = []
        with off(torch_code):
            outputs = engine_with(used, seen).generate(requests)
        rounds = [(stats.k, stats.tokens, stats.acceptance) for stats in seen]
        found.append(([(o.token_ids, o.finish_reason) for o in outputs], rounds))
    assert found[0] == found[1]


@pytest.mark.parametrize("min_confidence", [0.0, 0.35])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("spoilt", [False, True])
def test_draft_steps_leave_the_same_buffers(used, min_confidence, sampled, spoilt) -> None:
    """Also past the draft's last position, for rows without a text before the window, where a row is unsure, and where
    the draft's logits are NaN."""
    model = tiny_model("qwen3", vocab=23, seed=4, max_positions=14, dtype=torch.float32).to(used)
    if spoilt:  # row 2's last token but one; the head, were it the same tensor, would spoil every row
        with torch.no_grad():
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
            model.get_input_embeddings().weight[21] = torch.nan
    found = []
    for torch_code in (False, True):
        drafter = ModelDrafter(model, min_confidence=min_confidence)
        drafter.build(23, 5, 30)
        state = RowState.empty(5, 30, used)
        state.tokens_BT.copy_(torch.arange(155, device=used).view(5, 31) % 23)
        state.lengths_B.copy_(torch.tensor([1, 2, 7, 12, 13], device=used))
        state.active_B.fill_(True)
        state.law.temperature_B.fill_(0.8 if sampled else 0.0)
        buffers = DraftBuffers(5, 4, 23, torch.device(used))
        buffers.num_drafts_B.fill_(9)
        if sampled:
            buffers.need_law(torch.float32)
        features = Features(all_greedy=not sampled)
        steps = DraftSteps(drafter=drafter, buffers=buffers, state=state.head(4), features=features, live=None)
        with off(torch_code):
            run_steps(steps)
        found.append(buffers)
    ours, reference = found
    for name in ("drafts_BK", "num_drafts_B", "step_1", "bad_B", "law_BKV"):
        mine, expected = getattr(ours, name), getattr(reference, name)
        assert (mine is None) == (expected is None)
        assert mine is None or torch.equal(mine[:4], expected[:4]), name
    assert torch.equal(ours.alive_B[:4], reference.alive_B[:4])
    assert ours.num_drafts_B[3] == (0 if min_confidence else 2)
    assert ours.bad_B.any() == spoilt
    assert not (spoilt and ours.num_drafts_B[ours.bad_B].any())


def run_steps(steps: DraftSteps) -> None:
    with torch.inference_mode():
        steps.first()
        for _ in range(3):
            steps.next()


def test_what_is_verified(used) -> None:
    state = RowState.empty(3, 20, used)
    state.tokens_BT.copy_(torch.arange(63, device=used).view(3, 21))
    state.lengths_B.copy_(torch.tensor([1, 5, 9], device=used))
    state.active_B[1:] = True
    wide = torch.arange(100, 121, device=used).view(3, 7)
    for drafts in (wide[:, 2:5], wide[:, ::2], wide[:, :0], wide.view(7, 3).T[:, :4]):
        tokens, start, new = kernels.round_kernels(torch.device(used)).verify_inputs(state, drafts)
        assert torch.equal(tokens, torch.cat([torch.tensor([[0], [25], [50]], device=used), drafts], 1))
        assert start.tolist() == [0, 4, 8]
        assert new.tolist() == [0, drafts.shape[1] + 1, drafts.shape[1] + 1]


def test_every_outcome_of_a_round_is_committed_alike(used) -> None:
    """Random rows, fuzzed: inactive ones, no room, quotas, stops inside, bad positions of target and draft."""
    from specdec.drafter import Proposal
    from specdec.round import decide

    class Target:
        pass

    generator = torch.Generator().manual_seed(5)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(used)

    for case in range(10 if used == "cpu" else 60):
        B, k, V = 9, case % 5, 6
        state = RowState.empty(B, 40, used)
        state.tokens_BT[:, :12] = draw(V, B, 12)
        state.lengths_B += draw(10, B) + 2
        state.limit_B += state.lengths_B + draw(6, B)
        state.quota_B.copy_(draw(5, B))
        state.active_B |= draw(4, B) > 0
        state.law.stop_BS[:, 1] = draw(3 * V, B)
        logits = torch.randn(B, k + 1, V, generator=generator).to(used)
        logits[draw(B, 1), draw(k + 1, 1), draw(V, 1)] = torch.nan
        choices = logits.argmax(-1)
        drafts = torch.where(draw(3, B, k) > 0, choices[:, :k], draw(V, B, k))
        # Columns of larger tensors, as drafters that look things up hand them over.
        packed, bad = torch.stack([draw(k + 1, B), *drafts.unbind(1)], 1), draw(2, B, 2).bool()
        proposal = Proposal(
            drafts_BK=packed[:, 1:] if case % 2 else drafts.T.contiguous().T,
            draft_probs_BKV=None,
            num_drafts_B=packed[:, 0],
            bad_B=bad[:, 1],
        )
        results = []
        for torch_code in (False, True):
            copied = RowState(
                law=state.law,
                **{
                    name: getattr(state, name).clone()
                    for name in ("tokens_BT", "lengths_B", "limit_B", "quota_B", "active_B", "seeds_B")
                },
            )
            target = Target()
            target.cache = Target()
            target.cache.lengths_B = copied.lengths_B + k
            features = Features(all_greedy=True)
            with off(torch_code):
                report = decide(copied, target, proposal, logits.clone(), features)
            results.append((report, copied, target.cache.lengths_B))
        (ours, mine, cached), (reference, expected, expected_cached) = results
        good = reference[:, REPORT_COLUMNS.index("target_bad")] == 0
        # The tokens of a row whose logits were bad are not read, nor its counts.
        assert torch.equal(ours[good], reference[good])
        assert torch.equal(ours[:, [0, 6]], reference[:, [0, 6]])
        assert torch.equal(mine.tokens_BT[:, :-1], expected.tokens_BT[:, :-1])
        assert torch.equal(mine.lengths_B, expected.lengths_B)
        assert torch.equal(mine.active_B, expected.active_B)
        assert torch.equal(cached, expected_cached)
