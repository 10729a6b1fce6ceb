"""Rounds that are replayed: the texts and reports of eager ones, whatever happens between rounds.

On a CPU a tape stands in for the CUDA graph (tests/tape.py); the same tests run on a GPU with the real one.
"""

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench.graph_round import requests_of, state_tensors
from bench.tiny_models import noisy_copy, tiny_model
from specdec import (
    Completion,
    Engine,
    ModelDrafter,
    NgramDrafter,
    ParallelDrafter,
    Request,
    RoundStats,
    SamplingParams,
    sampling,
)
from specdec import engine as engine_module
from specdec import graphs as graphs_module
from specdec.capture import capture_for
from specdec.controller import Adaptive
from specdec.controller_rows import RowRound
from specdec.graphs import GraphRounds, row_counts
from specdec.state import RowState
from specdec.vocab import pruned_head_map
from tests.tape import Tape, storage

VOCAB, K_MAX = 32, 5
Make = Callable[..., Engine]


class Pair:
    """Engines on one device that differ in `graphs` only."""

    def __init__(self, device: str, tape: Tape | None) -> None:
        self.device, self.tape = device, tape
        self.target = tiny_model(vocab=VOCAB).to(device)
        self.draft = self.noisy(0.15, seed=3)

    def noisy(self, noise: float, seed: int) -> PreTrainedModel:
        """A draft that resembles the target (its noise is drawn on the CPU)."""
        return noisy_copy(tiny_model(vocab=VOCAB), noise=noise, seed=seed).to(self.device)

    def engines(self, make_draft: Callable[[], Any] | None = None, **options: Any) -> tuple[Engine, Engine]:
        """(eager, replayed); make_draft: the draft for one engine, by default the noisy copy."""
        make = (lambda: self.draft) if make_draft is None else make_draft
        options = {"k": 3, "num_slots": 3, "capacity": 80, **options}
        return Engine(self.target, make(), graphs=False, **options), Engine(self.target, make(), graphs=True, **options)


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param == "cuda":
        return Pair("cuda", None)
    tape = Tape()
    monkeypatch.setattr(graphs_module, "capture_for", lambda device: tape)
    # As on a GPU; the CPU's goes through numpy, which no tape sees.
    monkeypatch.setattr(sampling, "_sorted_descending", lambda x: x.sort(dim=-1, descending=True).values)
    return Pair("cpu", tape)


def mixed_requests(count: int) -> list[Request]:
    """Prompts and parameters of every kind, some ended by stop ids."""
    kinds = requests_of(VOCAB)
    return [Request(prompt_ids=kinds[i % 8].prompt_ids, params=kinds[(3 * i) % 8].params) for i in range(count)]


def greedy_requests(count: int) -> list[Request]:
    return [
        Request(
            prompt_ids=[(5 * i + 11 * row + 3) % VOCAB for i in range(1 + row)], params=SamplingParams(max_tokens=17)
        )
        for row in range(count)
    ]


def cycling(ks: Sequence[int]) -> Callable[[RoundStats | None], int]:
    lengths = itertools.cycle(ks)
    return lambda last: next(lengths)


def facts(stats: RoundStats) -> tuple[Any, ...]:
    """All of a round but its times."""
    names = ("k", "asked", "rows", "tokens", "drafted", "reached", "accepted", "lacking", "caught_up")
    return tuple(getattr(stats, name) for name in names)


def outcome(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.finish_reason, completion.stats


def assert_same(engines: Sequence[Engine], requests: Sequence[Request]) -> None:
    """Both engines decode the requests with equal completions and rounds, the second one by replays."""
    rounds: list[list[tuple[Any, ...]]] = []
    texts = []
    for engine in engines:
        rounds.append([])
        engine._listeners = type(engine._listeners)(on_round=lambda stats: rounds[-1].append(facts(stats)))
        texts.append([outcome(done) for done in engine.generate(requests)])
    assert texts[0] == texts[1]
    assert rounds[0] == rounds[1]
    captured = engines[1].captured
    assert captured is not None
    assert captured.failed is None
    assert 0 < captured.held <= captured.made
    assert sum(engines[1].stats.accepted) > 0


@pytest.mark.parametrize("requests", [greedy_requests(9), mixed_requests(9)], ids=["greedy", "mixed"])
@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_replays_decode_what_eager_rounds_decode(pair: Pair, requests: list[Request], rule: str) -> None:
    """Slots are refilled, rows end within rounds, prompts are fed in chunks, and k changes from round to round."""
    ks = [3, 0, 1, 5, 2, 5, 0, 0, 4]
    engines = [
        Engine(
            pair.target, pair.draft, k=cycling(ks), k_max=K_MAX, num_slots=3, capacity=80, rule=rule, prefill_chunk=6,
            graphs=graphs,
        )
        for graphs in (False, True)
    ]  # fmt: skip
    assert_same(engines, requests)


def lookup_draft(pair: Pair) -> Any:
    return NgramDrafter(min_n=1, max_n=2)


def parallel_draft(pair: Pair) -> Any:
    return ParallelDrafter(pair.draft, k_max=3, mask_id=1)


def unsure_draft(pair: Pair) -> Any:
    return ModelDrafter(pair.draft, min_confidence=0.25)


def pruned_draft(pair: Pair) -> Any:
    """A head of every third token, in another order."""
    model = pair.noisy(0.1, seed=5)
    kept = [*range(0, VOCAB, 3), *range(1, VOCAB, 3)]
    head = torch.nn.Linear(model.config.hidden_size, len(kept), bias=False, dtype=model.dtype, device=model.device)
    head.weight.data = model.lm_head.weight.data[kept].clone()
    model.lm_head = head
    return ModelDrafter(model.requires_grad_(False), vocabulary=pruned_head_map(kept, VOCAB))


@pytest.mark.parametrize(
    "draft", [lookup_draft, parallel_draft, unsure_draft, pytest.param(pruned_draft, marks=pytest.mark.slow)]
)
def test_every_drafter_is_replayed_as_far_as_it_can_be(pair: Pair, draft: Callable[[Pair], Any]) -> None:
    assert_same(pair.engines(lambda: draft(pair)), [*greedy_requests(3), *mixed_requests(5)])


class Counting(NgramDrafter):
    """Counts what it is told."""

    rolled_back = 0

    def roll_back(self, state: RowState) -> None:
        self.rolled_back += 1


def test_a_drafter_of_another_kind_is_rolled_back_after_every_replay(pair: Pair) -> None:
    drafter = Counting(min_n=1, max_n=2)
    engine = Engine(pair.target, drafter, k=2, num_slots=1, capacity=80, graphs=True)
    engine.generate(greedy_requests(1))
    assert drafter.rolled_back == engine.stats.rounds > 0


@pytest.mark.gpu
def test_the_fast_forward_is_replayed_too() -> None:
    target = tiny_model(vocab=VOCAB, layers=2, hidden=64, head_dim=16, dtype=torch.float32)
    draft, target = noisy_copy(target, noise=0.15, seed=3).to("cuda"), target.to("cuda")
    engines = [
        Engine(target, draft, k=3, num_slots=3, capacity=80, fast=True, graphs=graphs) for graphs in (False, True)
    ]
    assert engines[1]._target.reads_live_only
    assert_same(engines, [*greedy_requests(4), *mixed_requests(5)])


def test_plain_decoding_is_replayed_too(pair: Pair) -> None:
    engines = [Engine(pair.target, None, num_slots=3, capacity=80, graphs=graphs) for graphs in (False, True)]
    texts = [[outcome(done) for done in engine.generate(mixed_requests(9))] for engine in engines]
    assert texts[0] == texts[1]
    assert engines[1].captured.made > 0


def test_two_drafts_at_most_fit_into_two_columns(pair: Pair) -> None:
    """A further step that warms up more than once must not walk out of the buffers."""
    assert_same(pair.engines(k=2, num_slots=1), greedy_requests(2))


def test_longer_rows_are_read_to_their_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that reads a part of the capacity has a graph for each such part."""
    monkeypatch.setattr(graphs_module, "_LEAST_LIVE", 8)
    engines = pair.engines(num_slots=2)
    assert_same(engines, [Request(prompt_ids=[i, 7], params=SamplingParams(max_tokens=45)) for i in range(2)])
    assert {key[6] for key in engines[1]._rounds._graphs if key[0] == "settle"} == {
        8,
        16,
        32,
        engines[1]._target.cache.capacity,
    }


def test_a_draft_built_for_few_positions_stops_there(pair: Pair) -> None:
    short = tiny_model(vocab=VOCAB, layers=1, max_positions=12).to(pair.device)
    assert_same(pair.engines(lambda: short), greedy_requests(4))


def test_logprobs_come_through_a_replay(pair: Pair) -> None:
    plain, replayed = (engine.generate(mixed_requests(4)) for engine in pair.engines(top_logprobs=3))
    for one, other in zip(plain, replayed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs.top_ids.tolist() == other.logprobs.top_ids.tolist()
        assert one.logprobs.token_logprob == pytest.approx(other.logprobs.token_logprob, abs=1e-6)


def test_requests_come_and_go_between_replays(pair: Pair) -> None:
    """Cancelled in the middle, submitted late, and late with what the first graphs had no tensors for: penalties,
    allowed ids, more stop ids than any before."""
    late = [
        SamplingParams(max_tokens=9, temperature=1.2, seed=1, frequency_penalty=0.7),
        SamplingParams(max_tokens=9, temperature=0.9, seed=2, allowed_ids=range(20)),
        SamplingParams(max_tokens=30, temperature=0.9, seed=3, stop_ids=range(26, 32), top_k=11, top_p=0.9),
    ]
    engines = pair.engines(num_slots=4)
    done: list[dict[int, tuple[Any, ...]]] = [{}, {}]
    for engine, found in zip(engines, done, strict=True):
        tickets = [engine.submit(request) for request in mixed_requests(6)]
        for turn in range(60):
            found |= {ticket: outcome(completion) for ticket, completion in engine.step()}
            if turn == 2:
                engine.cancel(tickets[1])
            if 3 <= turn < 6:
                engine.submit(Request(prompt_ids=[turn, 7], params=late[turn - 3]))
        assert not engine.has_work
    assert done[0] == done[1]
    assert len(done[0]) == 9
    assert engines[1].captured.failed is None


def test_more_stop_ids_than_any_request_before_are_seen(pair: Pair) -> None:
    """They go to a wider tensor; a graph that was made before reads the old one for ever."""
    engines = pair.engines(num_slots=1)
    assert_same(engines, greedy_requests(1))
    params = SamplingParams(max_tokens=40, stop_ids=range(8, 24))
    assert_same(engines, [Request(prompt_ids=[1, 2, 3], params=params)])
    (done,) = engines[1].generate([Request(prompt_ids=[1, 2, 3], params=params)])
    assert done.finish_reason == "stop"


class Ragged:
    """Other lengths for every row in every round."""

    k_max = 4

    def __init__(self) -> None:
        self.turn = 0

    def choose(self, rows: int) -> int:
        raise AssertionError("rows have lengths of their own")

    def choose_rows(self, names: Sequence[Hashable]) -> list[int]:
        self.turn += 1
        return [(i + self.turn) % 5 if self.turn % 4 else 0 for i, _ in enumerate(names)]

    def observe(self, round: RoundStats) -> None:
        raise AssertionError("rows have lengths of their own")

    def observe_rows(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        """Nothing is learned."""

    def observe_cost(self, rows: int, k: int, draft_s: float, verify_s: float, total_s: float) -> None:
        """Nothing is learned."""


def test_rows_with_lengths_of_their_own(pair: Pair) -> None:
    engines = [
        Engine(pair.target, pair.draft, k=Ragged(), num_slots=3, capacity=80, graphs=graphs) for graphs in (False, True)
    ]
    assert_same(engines, [*greedy_requests(4), *mixed_requests(4)])


class FixedClock:
    """Times that hang on nothing but the marks, so that a controller chooses alike in both engines."""

    def __init__(self, device: torch.device) -> None:
        self.marks: list[str] = []

    def mark(self, phase: str) -> None:
        self.marks.append(phase)

    def finish(self) -> dict[str, float]:
        assert self.marks == ["draft", "verify"]
        return {"draft": 0.002, "verify": 0.004, "total": 0.007}


@pytest.mark.parametrize("plan_rows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_adaptive_controller_sees_the_same_rounds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, plan_rows: bool
) -> None:
    monkeypatch.setattr(engine_module, "PhaseTimer", FixedClock)
    monkeypatch.setattr(
        GraphRounds, "captures", 0
    )  # rounds that made a graph count here, as they do in the eager engine
    engines = [
        Engine(
            pair.target, pair.draft, k=Adaptive(3, plan_rows=plan_rows), num_slots=2, capacity=80, graphs=graphs
        )
        for graphs in (False, True)
    ]  # fmt: skip
    assert_same(engines, [*mixed_requests(5), *greedy_requests(6)])


def test_another_k_makes_no_other_draft_step(pair: Pair) -> None:
    """Only verification has a graph for each k; k = 1 needs no second draft step."""
    made = []
    ks = cycling([1, 2, 3, 4, 5, 4, 3, 2, 1, 0])
    engine = Engine(
        pair.target, pair.draft, k=ks, k_max=5, num_slots=1, capacity=80, graphs=True,
        on_round=lambda stats: made.append(engine.captured.made),
    )  # fmt: skip
    engine.generate([Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=60))])
    assert made[:10] == [2, 4, 5, 6, 7, 7, 7, 7, 7, 8]


def test_a_round_that_made_a_graph_is_not_timed(pair: Pair) -> None:
    timed: list[bool] = []
    (_, engine) = pair.engines(num_slots=1, on_round=lambda stats: timed.append(stats.timed))
    engine.generate([Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=30))])
    assert timed[0] is False
    assert all(timed[1:])


def test_graphs_read_nothing_but_what_stays(pair: Pair) -> None:
    """State, caches, weights and the draft's buffers; anything else would be gone or stale at the next replay."""
    if pair.tape is None:
        pytest.skip("a CUDA graph does not tell what it reads")
    (_, engine) = pair.engines(k=cycling([3, 0, 2]), k_max=3)
    engine.generate(mixed_requests(8))
    models = (engine._target, engine._drafter.model)
    weights = [t for model in models for t in (*model.module.parameters(), *model.module.buffers())]
    buffers = [t for t in vars(engine._rounds._buffers).values() if isinstance(t, torch.Tensor)]
    known = {storage(t) for t in (*state_tensors(engine), *weights, *buffers)}
    strange = [t.shape for address, t in pair.tape.outside.items() if address not in known and t.device.type != "meta"]
    assert not strange


def test_few_graphs_are_held_and_the_oldest_make_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MOST_GRAPHS", 4)
    engines = [
        Engine(pair.target, pair.draft, k=cycling([1, 2, 3, 0]), k_max=3, num_slots=3, capacity=80, graphs=graphs)
        for graphs in (False, True)
    ]
    assert_same(engines, greedy_requests(9))
    assert engines[1].captured.held == 4 < engines[1].captured.made


@pytest.mark.parametrize("when", [0, 1, 2], ids=["first step", "further step", "settle"])
def test_a_capture_that_fails_leaves_eager_rounds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: int
) -> None:
    calls = itertools.count()
    whole = graphs_module.timed_capture

    def failing(*arguments: Any) -> Any:
        if next(calls) == when:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return whole(*arguments)

    monkeypatch.setattr(graphs_module, "timed_capture", failing)
    plain, replayed = pair.engines()
    with caplog.at_level(logging.INFO, logger="specdec"):
        texts = [[outcome(done) for done in engine.generate(mixed_requests(5))] for engine in (plain, replayed)]
    assert texts[0] == texts[1]
    assert "not permitted" in (replayed.captured.failed or "")
    assert len(caplog.records) == 1
    assert next(calls) == when + 1


def test_what_cannot_be_captured_is_seen_as_such(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a value in the middle of a round ends the capture, and the round goes on without graphs."""
    whole = sampling.verify_drafts

    def looking(*arguments: Any) -> Any:
        accepted_B, next_B = whole(*arguments)
        assert int(accepted_B.sum()) >= 0
        return accepted_B, next_B

    monkeypatch.setitem(engine_module._RULES, "token", looking)
    plain, replayed = pair.engines()
    texts = [[outcome(done) for done in engine.generate(mixed_requests(4))] for engine in (plain, replayed)]
    assert texts[0] == texts[1]
    assert replayed.captured.failed is not None


def test_without_a_gpu_graphs_are_an_error() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="graphs is True and the target is on cpu"):
        Engine(model, None, capacity=16, graphs=True)
    with pytest.raises(ValueError, match="leave graphs out"):
        capture_for(torch.device("cpu"))


@pytest.mark.parametrize(
    "num_slots, expected",
    [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (20, [1, 2, 4, 8, 16, 20]),
     (96, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96])],
)  # fmt: skip
def test_row_counts(num_slots: int, expected: list[int]) -> None:
    assert row_counts(num_slots) == expected


def test_a_round_pads_its_rows_to_the_next_count(pair: Pair) -> None:
    """Three rows decode in a graph of four, whose last row is inactive and keeps what it holds."""
    (_, engine) = pair.engines(num_slots=6)
    for request in greedy_requests(3):
        engine.submit(request)
    engine.step()
    before = engine._state.tokens_BT[3:].clone()
    widths: list[int] = []
    replays: Iterator[Any] = iter(engine._rounds._graphs)
    widths += [key[1] for key in replays]
    engine.step()
    assert set(widths) == {4}
    assert torch.equal(engine._state.tokens_BT[3:, :-1], before[:, :-1])
