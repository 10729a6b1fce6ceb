"""The engine's own promises: invariants between rounds, bookkeeping, bad input, numbers it reports."""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from bench.tiny_models import FAMILIES, noisy_copy, tiny_config, tiny_model
from specdec import (
    Completion,
    Engine,
    ModelDrafter,
    NgramDrafter,
    Request,
    RoundStats,
    SamplingParams,
    SuffixDrafter,
)
from specdec import engine as engine_module
from specdec import round as round_module

VOCAB = 32


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab=VOCAB, layers=2)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target, noise=0.15, seed=3)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + 11 * salt + 3) % VOCAB for i in range(length)]


def greedy_reference(model: PreTrainedModel, prompt_ids: Sequence[int], count: int) -> list[int]:
    """Argmax decoding without any cache."""
    ids = list(prompt_ids)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


def texts(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@settings(max_examples=25, deadline=None)
@given(
    ks=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    budgets=st.lists(st.integers(1, 14), min_size=9, max_size=9),
    chunk=st.integers(1, 8),
    slots=st.integers(1, 4),
    sampled=st.booleans(),
)
def test_caches_hold_exactly_the_committed_tokens(ks, lengths, budgets, chunk, slots, sampled) -> None:
    """After every step: the target's cache covers all committed tokens but the pending one, the draft's the same or
    fewer, and what they hold is what a cache-free forward of the committed text would hold."""
    target = tiny_model(vocab=VOCAB, layers=1)
    lengths_of_draft = itertools.cycle(ks)
    engine = Engine(
        target,
        noisy_copy(target, noise=0.15, seed=3),
        k=lambda last: next(lengths_of_draft),
        k_max=5,
        num_slots=slots,
        capacity=64,
        prefill_chunk=chunk,
    )
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=budgets[i], temperature=float(sampled), seed=i, stop_ids=[i % VOCAB])
        engine.submit(Request(prompt_ids=prompt(length, i), params=params))
    while engine.has_work:
        engine.step()
        _assert_caches_right(engine)


def _assert_caches_right(engine: Engine) -> None:
    for slot in engine._slots:
        if slot is None or not slot.decoding:
            continue
        row = slot.row
        assert engine._state.tokens_BT[row, : slot.length].tolist() == slot.tokens
        assert int(engine._state.lengths_B[row]) == slot.length
        assert int(engine._target.cache.lengths_B[row]) == slot.length - 1 == slot.target_len
        assert int(engine._drafter.model.cache.lengths_B[row]) == engine._drafter._held[row] <= slot.length - 1
        for model, held in ((engine._target, slot.target_len), (engine._drafter.model, engine._drafter._held[row])):
            if held:
                _assert_cache_equals_fresh_forward(model, row, slot.tokens[:held])


def _assert_cache_equals_fresh_forward(model, row: int, tokens: list[int]) -> None:
    fresh = type(model.cache)(
        {i: (k.shape[1], k.shape[3]) for i, (k, _) in model.cache.layers.items()},
        num_rows=1,
        capacity=len(tokens),
        dtype=model.dtype,
    )
    zero = torch.zeros(1, dtype=torch.int64)
    plan = fresh.plan(zero, zero + len(tokens), len(tokens), slice(0, 1), None)
    with torch.inference_mode():
        model.module(**fresh.inputs(torch.tensor([tokens]), plan))
    for layer, pair in model.cache.layers.items():
        for held, expected in zip(pair, fresh.layers[layer], strict=True):
            difference = held[row, :, : len(tokens)] - expected[0, :, : len(tokens)]
            assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_what_a_cache_free_forward_decodes(family: str) -> None:
    model = tiny_model(family, vocab=VOCAB, layers=3)
    engine = Engine(model, noisy_copy(model, noise=0.1, seed=1), k=3, num_slots=2, capacity=64, prefill_chunk=5)
    prompts = [prompt(n, n) for n in (1, 4, 13)]
    got = engine.generate([Request(prompt_ids=p, params=SamplingParams(max_tokens=12)) for p in prompts])
    assert texts(got) == [greedy_reference(model, p, 12) for p in prompts]
    assert sum(engine.stats.accepted) > 0


def test_the_callers_models_stay_as_they_were(target: PreTrainedModel) -> None:
    shared = copy.deepcopy(target)
    before = (shared.config._attn_implementation, len(list(shared.parameters())))
    ids = torch.tensor([prompt(6)])
    logits = shared(input_ids=ids).logits
    engine = Engine(shared, shared, k=2, num_slots=1, capacity=32)  # one object in both roles
    engine.generate([Request(prompt_ids=prompt(3), params=SamplingParams(max_tokens=4))])
    assert (shared.config._attn_implementation, len(list(shared.parameters()))) == before
    assert torch.equal(shared(input_ids=ids).logits, logits)
    weights = {p.data_ptr() for p in shared.parameters()}
    assert {p.data_ptr() for p in engine._target.module.parameters()} == weights  # shared, not copied


def test_draft_equal_to_target_accepts_everything(target: PreTrainedModel) -> None:
    engine = Engine(target, target, k=4, num_slots=3, capacity=64)
    params = [SamplingParams(max_tokens=21, temperature=t, seed=i) for i, t in enumerate((0.0, 0.7, 1.3, 1.0))]
    done = engine.generate([Request(prompt_ids=prompt(i + 1, i), params=p) for i, p in enumerate(params)])
    assert engine.stats.accepted == engine.stats.reached
    for completion in done:
        assert completion.stats.rounds == 5  # 4 rounds of 5 tokens, then one of 1: it drafts nothing it cannot use
        assert completion.stats.drafted == 16
        assert completion.stats.tokens == len(completion.token_ids) == 21


def test_rows_that_accept_less_are_not_cut_short(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A first engine ended all rows when the longest was done."""
    prompts = [prompt(n, n) for n in (2, 9, 5, 7, 3)]
    engine = Engine(target, draft, k=5, num_slots=5, capacity=64)
    done = engine.generate([Request(prompt_ids=p, params=SamplingParams(max_tokens=25)) for p in prompts])
    assert len({c.stats.rounds for c in done}) > 1  # they did take different numbers of rounds
    assert [len(c.token_ids) for c in done] == [25] * 5


def test_statistics_add_up_by_row_round_and_request(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Accepted length is per row: a first engine reported tokens a round too high by the batch size."""
    rounds: list[RoundStats] = []
    ks = itertools.cycle([3, 0, 1, 5])
    engine = Engine(target, draft, k=lambda last: next(ks), k_max=5, num_slots=3, capacity=64, on_round=rounds.append)
    params = [SamplingParams(max_tokens=9 + i, temperature=1.0, seed=i, stop_ids=[4]) for i in range(7)]
    done = engine.generate([Request(prompt_ids=prompt(2 + i, i), params=p) for i, p in enumerate(params)])
    total = engine.stats
    assert total.tokens == sum(len(c.token_ids) for c in done) == sum(r.tokens for r in rounds)
    assert total.rounds == sum(r.rows for r in rounds) == sum(c.stats.rounds for c in done)
    assert total.drafted == sum(r.drafted for r in rounds) == sum(c.stats.drafted for c in done)
    for field in ("reached", "accepted"):
        by_round = [sum(getattr(r, field)[i] for r in rounds if r.k > i) for i in range(5)]
        by_request = [
            sum(getattr(c.stats, field)[i] for c in done if len(getattr(c.stats, field)) > i) for i in range(5)
        ]
        assert getattr(total, field) == by_round == by_request
    assert 1.0 <= total.tokens_per_round <= 6.0
    assert total.tokens <= sum(total.accepted) + total.rounds  # a stop inside a round drops the added token
    assert all(total.reached[i + 1] <= total.accepted[i] for i in range(4))
    for r in rounds:
        assert r.total_s >= r.draft_s + r.verify_s > 0
        assert r.overhead_s == pytest.approx(r.total_s - r.draft_s - r.verify_s)
        assert (r.draft_s > 0) == (r.k > 0)


def test_a_stop_inside_a_round_ends_there_and_counts_no_phantom_drafts(target: PreTrainedModel) -> None:
    text = greedy_reference(target, prompt(5), 16)
    stop = next(t for t in text[2:] if t not in text[:2])
    end = text.index(stop) + 1
    engine = Engine(target, target, k=7, num_slots=1, capacity=64)
    (done,) = engine.generate(
        [Request(prompt_ids=prompt(5), params=SamplingParams(max_tokens=16, stop_ids=[stop, VOCAB - 1]))]
    )
    assert done.token_ids == text[:end]
    assert done.finish_reason == "stop"
    assert sum(done.stats.reached) == sum(done.stats.accepted) <= end


def test_min_tokens_bans_the_stop_ids_until_then(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    stops = list(range(0, VOCAB, 2))  # half of the vocabulary: ends within a few tokens otherwise
    engine = Engine(target, draft, k=3, num_slots=8, capacity=64)
    params = [
        SamplingParams(max_tokens=20, min_tokens=m, stop_ids=stops, temperature=1.0, seed=s)
        for m in (0, 7)
        for s in range(40)
    ]
    done = engine.generate([Request(prompt_ids=prompt(3), params=p) for p in params])
    lengths = [len(c.token_ids) for c in done]
    assert min(lengths[:40]) == 1
    assert min(lengths[40:]) == 8  # seven tokens without a stop, then a stop is possible again
    assert all(t % 2 == 1 for c in done[40:] for t in c.token_ids[:7])


def test_allowed_and_banned_ids_hold_for_every_token(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    engine = Engine(target, draft, k=3, num_slots=3, capacity=64)
    limits = [{"allowed_ids": [3, 4, 5, 6]}, {"banned_ids": range(8)}, {"allowed_ids": [1, 2, 3], "banned_ids": [2]}]
    params = [SamplingParams(max_tokens=20, temperature=t, seed=7, **limit) for t in (0.0, 1.5) for limit in limits]
    done = engine.generate([Request(prompt_ids=prompt(3), params=p) for p in params])
    for completion, allowed in zip(done, [{3, 4, 5, 6}, set(range(8, VOCAB)), {1, 3}] * 2, strict=True):
        assert len(completion.token_ids) == 20
        assert set(completion.token_ids) <= allowed


@pytest.mark.parametrize("penalty", [{}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.4}])
def test_refilled_slots_keep_nothing_of_the_former_request(
    target: PreTrainedModel, draft: PreTrainedModel, penalty: dict
) -> None:
    """Same request alone in a fresh engine, and after a dozen others of every kind went through its slot."""
    odd = [
        SamplingParams(max_tokens=9, temperature=1.4, seed=5, repetition_penalty=1.5, stop_ids=[1, 2, 3]),
        SamplingParams(max_tokens=5, temperature=0.7, allowed_ids=[4, 5, 6], seed=-3),
        SamplingParams(max_tokens=7, temperature=1.0, top_k=3, min_tokens=4, stop_ids=[9]),
        SamplingParams(max_tokens=6, temperature=1.0, frequency_penalty=1.0, banned_ids=[7], min_p=0.2),
    ]
    last = Request(prompt_ids=prompt(6), params=SamplingParams(max_tokens=12, temperature=1.0, seed=42, **penalty))
    before = [Request(prompt_ids=prompt(3 + i, i), params=odd[i % 4]) for i in range(12)]
    (alone,) = Engine(target, draft, k=3, num_slots=1, capacity=64).generate([last])
    after = Engine(target, draft, k=3, num_slots=1, capacity=64).generate([*before, last])[-1]
    assert after.token_ids == alone.token_ids


def test_reported_logprobs_are_the_raw_law_of_the_target(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    engine = Engine(target, draft, k=3, num_slots=2, capacity=64, top_logprobs=5)
    params = [
        SamplingParams(max_tokens=11, temperature=1.4, seed=1, banned_ids=[3]),  # raw: the filters must not show
        SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.3),
        SamplingParams(max_tokens=6, temperature=0.8, top_p=0.5, seed=2),
    ]
    requests = [Request(prompt_ids=prompt(4 + i, i), params=p) for i, p in enumerate(params)]
    for request, done in zip(requests, engine.generate(requests), strict=True):
        ids = [*request.prompt_ids, *done.token_ids]
        logits = target(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        law = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        top = law.topk(5, dim=-1)
        chosen = law.gather(1, torch.tensor(done.token_ids).unsqueeze(1)).squeeze(1)
        assert done.logprobs is not None
        assert done.logprobs.token_logprob == pytest.approx(chosen.numpy(), abs=1e-4)
        assert done.logprobs.top_logprobs == pytest.approx(top.values.numpy(), abs=1e-4)
        assert done.logprobs.top_ids.tolist() == top.indices.tolist()
        assert done.logprobs.tail_mass == pytest.approx(1 - top.values.exp().sum(-1).numpy(), abs=1e-4)


def test_an_iterator_is_read_as_slots_become_free(target: PreTrainedModel) -> None:
    read = 0

    def source():
        nonlocal read
        for i in range(10):
            read += 1
            assert read <= finished + 4, "read far ahead of the free slots"
            yield Request(prompt_ids=prompt(2, i), params=SamplingParams(max_tokens=3), id=f"r{i}")

    finished = 0

    def count(stats: RoundStats) -> None:
        nonlocal finished
        finished = engine._tickets - len(engine._queue) - sum(s is not None for s in engine._slots)

    engine = Engine(target, None, num_slots=2, capacity=16, on_round=count)
    done = engine.generate(source())
    assert [c.id for c in done] == [f"r{i}" for i in range(10)]
    assert not engine.has_work


# ---- bad input ----


def test_one_bad_request_fails_alone(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    good = Request(prompt_ids=prompt(4), params=SamplingParams(max_tokens=6))
    bad = {
        "empty": Request(prompt_ids=[]),
        "prompt_ids holds 99": Request(prompt_ids=[1, 99]),
        "prompt_ids holds -1": Request(prompt_ids=[-1]),
        "prompt_ids holds 1.5": Request(prompt_ids=[1.5]),  # type: ignore[list-item]
        "capacity is 32": Request(prompt_ids=prompt(30), params=SamplingParams(max_tokens=3)),
        "temperature is -1": Request(prompt_ids=[1], params=SamplingParams(temperature=-1)),
        "temperature is nan": Request(prompt_ids=[1], params=SamplingParams(temperature=math.nan)),
        "top_p is 0.0": Request(prompt_ids=[1], params=SamplingParams(top_p=0.0)),
        "temperature is 1e-40": Request(prompt_ids=[1], params=SamplingParams(temperature=1e-40)),
        "repetition_penalty is 1e-46": Request(prompt_ids=[1], params=SamplingParams(repetition_penalty=1e-46)),
        "top_k is 2.0": Request(prompt_ids=[1], params=SamplingParams(temperature=1.0, top_k=2.0)),  # type: ignore[arg-type]
        "stop_ids is a NoneType": Request(prompt_ids=[1], params=SamplingParams(stop_ids=None)),  # type: ignore[arg-type]
        "prompt_ids is a set": Request(prompt_ids={1, 2}),  # type: ignore[arg-type]
        "params is a dict": Request(prompt_ids=[1], params={}),  # type: ignore[arg-type]
        "top_k is -1": Request(prompt_ids=[1], params=SamplingParams(top_k=-1)),
        "max_tokens is 0": Request(prompt_ids=[1], params=SamplingParams(max_tokens=0)),
        "max_tokens is 2.5": Request(prompt_ids=[1], params=SamplingParams(max_tokens=2.5)),  # type: ignore[arg-type]
        "stop_ids holds 32": Request(prompt_ids=[1], params=SamplingParams(stop_ids=[VOCAB])),
        "min_tokens 9": Request(prompt_ids=[1], params=SamplingParams(min_tokens=9, max_tokens=8)),
        "no token could be": Request(prompt_ids=[1], params=SamplingParams(allowed_ids=[])),
        "no other token": Request(
            prompt_ids=[1], params=SamplingParams(allowed_ids=[5], stop_ids=[5], min_tokens=1, max_tokens=4)
        ),
    }
    engine = Engine(target, draft, k=2, num_slots=3, capacity=32)
    done = engine.generate([good, *bad.values(), None, good])  # type: ignore[list-item]
    assert "got a NoneType; expected a Request" in str(done.pop(-2).error)
    assert done[0].token_ids == done[-1].token_ids == greedy_reference(target, prompt(4), 6)
    for completion, words in zip(done[1:-1], bad, strict=True):
        assert completion.finish_reason == "error"
        assert words in str(completion.error)


@pytest.mark.parametrize("k", [0, 3])
def test_nan_logits_fail_the_request_that_meets_them_and_no_other(target: PreTrainedModel, k: int) -> None:
    broken = copy.deepcopy(target)
    with torch.no_grad():
        broken.model.embed_tokens.weight[9] = float("nan")  # poisons every text that contains token 9
    avoid = SamplingParams(max_tokens=8, temperature=1.0, banned_ids=[9], seed=1)
    healthy = Request(prompt_ids=[1, 2, 3], params=avoid)
    poisoned = Request(prompt_ids=[1, 9, 3], params=avoid)
    engine = Engine(broken, target, k=k, num_slots=2, capacity=32)
    done = engine.generate([healthy, poisoned, healthy, healthy, healthy])
    expected = Engine(target, target, k=k, num_slots=1, capacity=32).generate([healthy])[0].token_ids
    assert done[1].finish_reason == "error"
    assert "target produced NaN" in str(done[1].error)
    # The last ones run in the slot that held the NaN: nothing of it may leak through the masked tail.
    assert [c.token_ids for c in done if c.error is None] == [expected] * 4


def test_constructor_refuses_what_cannot_work(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="vocabularies differ: target 32 tokens, draft 40"):
        Engine(target, tiny_model(vocab=40), k=2)
    with pytest.raises(ValueError, match="k_max is needed"):
        Engine(target, target, k=lambda last: 1)
    bad_settings = ({"k": -1}, {"k": 3, "k_max": 2}, {"k": 2.0}, {"k": None}, {"num_slots": 0}, {"num_slots": True})
    for bad in (*bad_settings, {"capacity": 0}, {"top_logprobs": 33}, {"top_logprobs": 2.0}, {"draft": "ngram"}):
        with pytest.raises(ValueError, match="expected"):
            Engine(target, **{"draft": target, "k": 1, **bad})
    with pytest.raises(ValueError, match="k is -5; expected a whole number from 0 on"):
        Engine(target, None, k=-5)


@pytest.mark.parametrize("bad", [6, -1, 1.0, None])
def test_a_callable_that_returns_a_bad_k_is_named_and_loses_nothing(target: PreTrainedModel, bad: object) -> None:
    answers = iter([2, bad, 2, 2, 2, 2, 2, 2])
    engine = Engine(target, target, k=lambda last: next(answers), k_max=5, num_slots=1, capacity=32)  # type: ignore[arg-type,return-value]
    ticket = engine.submit(Request(prompt_ids=prompt(3), params=SamplingParams(max_tokens=9)))
    engine.step()
    with pytest.raises(ValueError, match="from 0 to k_max = 5"):
        engine.step()
    done = {}
    while engine.has_work:
        done.update(engine.step())
    assert done[ticket].token_ids == greedy_reference(target, prompt(3), 9)


def test_positions_beyond_the_models_are_refused_for_the_target_and_not_drafted_by_the_draft() -> None:
    target = tiny_model(vocab=VOCAB, max_positions=24)
    short = tiny_model(vocab=VOCAB, max_positions=16)
    engine = Engine(target, short, k=4, num_slots=1, capacity=64)
    ok = Request(prompt_ids=prompt(10), params=SamplingParams(max_tokens=14))
    done = engine.generate([ok, Request(prompt_ids=prompt(11), params=SamplingParams(max_tokens=14))])
    assert done[0].token_ids == greedy_reference(target, prompt(10), 14)
    assert "target's max positions is 24" in str(done[1].error)
    late = Engine(target, short, k=4, num_slots=1, capacity=64)
    late.generate([Request(prompt_ids=prompt(17), params=SamplingParams(max_tokens=6))])
    assert late.stats.drafted == 0


def test_unsupported_architectures_are_named() -> None:
    from transformers import BloomConfig, MambaConfig, T5Config, T5ForConditionalGeneration

    mamba = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    bloom = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)  # position bias inside attention
    models = [AutoModelForCausalLM.from_config(config).eval() for config in (mamba, bloom)]
    models.append(
        T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2))
    )
    for model in models:
        with pytest.raises(ValueError, match=type(model).__name__):
            Engine(model, None, num_slots=1, capacity=16)


@pytest.mark.parametrize("callback", ["on_round", "on_tokens"])
def test_a_callback_that_raises_loses_nothing(target: PreTrainedModel, draft: PreTrainedModel, callback: str) -> None:
    calls = itertools.count()

    def raise_now_and_then(*_: object) -> None:
        if next(calls) % 3 == 1:
            raise RuntimeError("listener failed")

    engine = Engine(target, draft, k=3, num_slots=3, capacity=64, **{callback: raise_now_and_then})
    prompts = [prompt(n, n) for n in (2, 9, 5, 7)]
    tickets = [engine.submit(Request(prompt_ids=p, params=SamplingParams(max_tokens=12))) for p in prompts]
    done: dict[int, Completion] = {}
    failures = 0
    while engine.has_work:
        try:
            done.update(engine.step())
        except RuntimeError:
            failures += 1
    assert failures > 1
    assert [done[t].token_ids for t in tickets] == [greedy_reference(target, p, 12) for p in prompts]


def test_generate_leaves_other_requests_to_step(target: PreTrainedModel) -> None:
    engine = Engine(target, None, num_slots=2, capacity=32)
    first = engine.submit(Request(prompt_ids=prompt(3), params=SamplingParams(max_tokens=4)))
    (own,) = engine.generate([Request(prompt_ids=prompt(5), params=SamplingParams(max_tokens=6))])
    assert own.token_ids == greedy_reference(target, prompt(5), 6)
    done = dict(engine.step())
    assert done[first].token_ids == greedy_reference(target, prompt(3), 4)
    assert not engine.has_work


def test_a_source_that_fails_ends_its_own_requests_alone(target: PreTrainedModel) -> None:
    """They would run on unseen in the next call, and take its places."""
    engine = Engine(target, None, num_slots=3, capacity=64)
    first = engine.submit(Request(prompt_ids=prompt(3), params=SamplingParams(max_tokens=9)))

    def failing() -> Iterator[Request]:
        yield Request(prompt_ids=prompt(5), params=SamplingParams(max_tokens=1))
        yield Request(prompt_ids=prompt(6), params=SamplingParams(max_tokens=40))
        yield Request(prompt_ids=prompt(7), params=SamplingParams(max_tokens=40))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        engine.generate(failing())
    done: dict[int, Completion] = {}
    for _ in range(12):
        done.update(engine.step())
    assert list(done) == [first]
    assert done[first].token_ids == greedy_reference(target, prompt(3), 9)
    assert not engine.has_work
    (own,) = engine.generate([Request(prompt_ids=prompt(5), params=SamplingParams(max_tokens=6))])
    assert own.token_ids == greedy_reference(target, prompt(5), 6)


def test_cancel_returns_what_there_is_and_frees_the_slot(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    engine = Engine(target, draft, k=2, num_slots=1, capacity=64, prefill_chunk=4)
    running, waiting, after = (
        engine.submit(Request(prompt_ids=prompt(n, n), params=SamplingParams(max_tokens=20))) for n in (9, 3, 6)
    )
    for _ in range(4):
        engine.step()
    assert engine.cancel(running)
    assert engine.cancel(waiting)
    assert not engine.cancel(running)
    done: dict[int, Completion] = {}
    while engine.has_work:
        done.update(engine.step())
    assert {done[t].finish_reason for t in (running, waiting)} == {"cancelled"}
    got = done[running].token_ids
    assert 0 < len(got) < 20
    assert got == greedy_reference(target, prompt(9, 9), len(got))
    assert done[after].token_ids == greedy_reference(target, prompt(6, 6), 20)


def test_numpy_and_torch_numbers_are_numbers(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    plain = Request(prompt_ids=[3, 4], params=SamplingParams(temperature=0.5, max_tokens=6, stop_ids=[9], seed=3))
    same = SamplingParams(
        temperature=np.float64(0.5),
        max_tokens=np.int64(6),  # type: ignore[arg-type]
        stop_ids=np.array([9]),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
    )
    requests = [plain] + [Request(prompt_ids=ids, params=same) for ids in (np.array([3, 4]), torch.tensor([3, 4]))]
    assert (
        len({tuple(c.token_ids) for c in Engine(target, draft, k=2, num_slots=3, capacity=16).generate(requests)}) == 1
    )


@pytest.mark.parametrize("family", ["longrope", "dynamic"])
def test_a_rope_that_looks_at_the_whole_batch_is_kept_from_switching(family: str) -> None:
    """transformers picks these frequencies by the batch's largest position: a neighbour, or the row's own drafts past
    the switch, once changed the text."""
    original = {"original_max_position_embeddings": 16}
    scaling = {
        "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, **original},
        "dynamic": {"rope_type": "dynamic"},
    }[family]
    config = tiny_config("llama", vocab=16, layers=2, max_positions=64 if family == "longrope" else 20)
    config.rope_parameters = {"rope_theta": 1e4, "factor": 4.0, **scaling}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.load_state_dict(tiny_model("llama", vocab=16, layers=2).state_dict())
    limit = 16 if family == "longrope" else 20
    requests = [
        Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=limit - 3)),
        Request(prompt_ids=list(range(limit - 2)), params=SamplingParams(max_tokens=2)),
        Request(prompt_ids=list(range(14)), params=SamplingParams(max_tokens=limit)),
    ]
    for draft, k in ((None, 0), (model, 8)):
        done = Engine(model, draft, k=k, num_slots=2, capacity=64).generate(requests)
        assert done[0].token_ids == greedy_reference(model, [1, 2, 3], limit - 3)
        assert f"max positions is {limit}" in str(done[2].error)


def test_learned_positions_are_never_exceeded() -> None:
    """Verification and short drafts feed columns past the last position; they must not be looked up."""

    def gpt2(positions: int) -> PreTrainedModel:
        config = GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=positions, vocab_size=16, bos_token_id=None, eos_token_id=None
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()

    model = gpt2(20)
    request = Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=17))
    (done,) = Engine(model, model, k=4, num_slots=1, capacity=64).generate([request])
    assert done.token_ids == greedy_reference(model, [1, 2, 3], 17)
    long = Request(prompt_ids=[1, 2, 3] * 9, params=SamplingParams(max_tokens=20))
    (done,) = Engine(gpt2(64), model, k=4, num_slots=1, capacity=64).generate([long])
    assert done.token_ids == greedy_reference(gpt2(64), [1, 2, 3] * 9, 20)


def test_a_cancelled_request_leaves_no_nan_behind(target: PreTrainedModel) -> None:
    broken = copy.deepcopy(target)
    with torch.no_grad():
        broken.model.embed_tokens.weight[9] = float("nan")
    clean = {"banned_ids": [9]}
    engine = Engine(broken, None, num_slots=2, capacity=64, prefill_chunk=2)
    engine.submit(Request(prompt_ids=[1, 2, 3, 4, 5] * 2, params=SamplingParams(max_tokens=30, **clean)))
    poisoned = engine.submit(Request(prompt_ids=[1] + [9] * 9, params=SamplingParams(max_tokens=3)))
    for _ in range(3):
        engine.step()
    engine.cancel(poisoned)
    (after,) = engine.generate([Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=12, **clean))])
    assert after.error is None


def test_allowed_ids_that_the_model_rules_out_fail_the_request(target: PreTrainedModel) -> None:
    closed = copy.deepcopy(target)
    closed.lm_head = torch.nn.Linear(closed.config.hidden_size, VOCAB, bias=True, dtype=torch.float64)
    with torch.no_grad():
        closed.lm_head.weight.copy_(target.lm_head.weight)
        closed.lm_head.bias.zero_()
        closed.lm_head.bias[[5, 6]] = float("-inf")
    engine = Engine(closed, target, k=2, num_slots=2, capacity=32)
    bad, good = engine.generate(
        [Request(prompt_ids=[1, 2], params=SamplingParams(max_tokens=5, allowed_ids=ids)) for ids in ([5, 6], [5, 7])]
    )
    assert bad.finish_reason == "error"
    assert "-inf for every allowed id" in str(bad.error)
    assert good.token_ids == [7] * 5


def test_a_drafter_serves_one_engine(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    for drafter in (NgramDrafter(), SuffixDrafter(), ModelDrafter(draft)):
        Engine(target, drafter, k=2, num_slots=1, capacity=16)
        with pytest.raises(ValueError, match="belongs to another engine"):
            Engine(target, drafter, k=2, num_slots=1, capacity=16)


def test_listeners_all_hear_of_a_round_and_of_a_bad_draft_once(target: PreTrainedModel) -> None:
    heard: list[int] = []

    def listen(ticket: int, ids: list[int], accepted: int) -> None:
        heard.append(ticket)
        raise RuntimeError("listener failed")

    engine = Engine(target, target, k=2, num_slots=3, capacity=32, on_tokens=listen)
    for i in range(3):
        engine.submit(Request(prompt_ids=[i + 1], params=SamplingParams(max_tokens=9)))
    with pytest.raises(RuntimeError):
        engine.step()
    assert heard == [0, 1, 2]


@pytest.mark.parametrize("where", ["decide", "read_report"])
def test_an_interrupt_between_device_and_host_leaves_no_row_behind(monkeypatch, where: str) -> None:
    """Ctrl-C while the host waits for the device: a row that goes on without those tokens would never end."""
    target = tiny_model(vocab=8)
    requests = [Request(prompt_ids=[i + 1], params=SamplingParams(max_tokens=12)) for i in range(3)]
    expected = [c.token_ids for c in Engine(target, None, capacity=16).generate(requests)]
    engine = Engine(target, noisy_copy(target, noise=0.1, seed=1), k=2, num_slots=2, capacity=16)
    module = engine_module if where == "read_report" else round_module
    whole = getattr(module, where)
    calls = itertools.count()

    def interrupted(*args: object) -> object:
        result = whole(*args)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(module, where, interrupted)
    tickets = [engine.submit(request) for request in requests]
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    done: dict[int, Completion] = {}
    for _ in range(50):
        done.update(engine.step())
    assert [done[ticket].finish_reason for ticket in tickets] == ["cancelled", "cancelled", "length"]
    assert all(done[t].token_ids == text[: len(done[t].token_ids)] for t, text in zip(tickets, expected, strict=True))
    assert not engine.has_work
    assert [c.token_ids for c in engine.generate(requests)] == expected
