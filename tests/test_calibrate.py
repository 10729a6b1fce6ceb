"""Timing at start: the controller knows every batch size and length, and nothing of it stays in the engine."""

import pytest
from transformers import PreTrainedModel

from bench.tiny_models import noisy_copy, tiny_model
from specdec import Engine, NgramDrafter, Request, SamplingParams, SuffixDrafter
from specdec.controller import Adaptive, FixedK
from specdec.stats import RoundStats

REQUESTS = [Request(prompt_ids=[i, 2, 3, i], params=SamplingParams(max_tokens=12)) for i in range(4)]
LENGTHS = [0, 1, 2, 4, 5]


class Listening(Adaptive):
    """Notes what it is told at start, and asks for the length that was last asked."""

    def __init__(self, k_max: int) -> None:
        super().__init__(k_max)
        self.costs: list[tuple[int, int, float, float, float]] = []

    def observe_cost(self, rows: int, k: int, draft_s: float, verify_s: float, total_s: float) -> None:
        self.costs.append((rows, k, draft_s, verify_s, total_s))
        super().observe_cost(rows, k, draft_s, verify_s, total_s)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab=32, layers=2)


@pytest.mark.parametrize("drafter", ["model", "ngram", "suffix"])
def test_every_batch_and_length_is_timed_and_nothing_stays(target: PreTrainedModel, drafter: str) -> None:
    make = {"model": lambda: noisy_copy(target, noise=0.1, seed=1), "ngram": NgramDrafter, "suffix": SuffixDrafter}
    controller = Listening(5)
    rounds: list[RoundStats] = []
    draft = make[drafter]()
    engine = Engine(target, draft, k=controller, num_slots=3, capacity=64, on_round=rounds.append)
    timed = engine.calibrate(repeats=2)
    assert [(rows, k) for rows, k, *_ in controller.costs] == [
        (rows, k) for rows in (1, 2, 3) for k in LENGTHS for _ in range(2)
    ]
    assert all(0 <= draft_s < total_s for _, _, draft_s, _, total_s in controller.costs)
    assert all(draft_s > 0 for _, k, draft_s, _, _ in controller.costs if k)
    assert not any(r.caught_up for r in timed)
    assert (engine.has_work, rounds, engine.stats.rounds) == (False, [], 0)
    if isinstance(draft, SuffixDrafter):
        assert (draft._past, draft._own) == ([], {})
    fresh = Engine(target, make[drafter](), k=2, num_slots=3, capacity=64).generate(REQUESTS)
    assert [c.token_ids for c in engine.generate(REQUESTS)] == [c.token_ids for c in fresh]
    assert len(rounds) > 0


def test_calibration_is_for_controllers_that_measure(target: PreTrainedModel) -> None:
    draft = noisy_copy(target, noise=0.1, seed=1)
    for k in (3, FixedK(3), lambda last: 1):
        assert Engine(target, draft, k=k, k_max=3, num_slots=2, capacity=64).calibrate() == []
    assert Engine(target, None, k=Adaptive(3), num_slots=2, capacity=64).calibrate() == []


def test_a_target_without_usable_numbers_ends_the_timing(target: PreTrainedModel) -> None:
    """Every row ends with an error in its first round; the rounds that ran are of the right shape all the same."""
    broken = noisy_copy(target, noise=0.0, seed=0)
    broken.lm_head.weight.data.fill_(float("nan"))
    engine = Engine(broken, NgramDrafter(), k=Adaptive(3), num_slots=2, capacity=64)
    engine.calibrate(repeats=1)
    assert engine.generate(REQUESTS[:1])[0].finish_reason == "error"


def test_calibrating_is_refused_while_something_runs(target: PreTrainedModel) -> None:
    engine = Engine(target, NgramDrafter(), k=Adaptive(3), num_slots=2, capacity=64)
    engine.submit(REQUESTS[0])
    with pytest.raises(ValueError, match="requests waiting or running"):
        engine.calibrate()
    engine = Engine(target, NgramDrafter(), k=Adaptive(3), num_slots=2, capacity=64)
    with pytest.raises(ValueError, match="repeats is 0"):
        engine.calibrate(repeats=0)
    for batches in ([3], [1.5], []):
        with pytest.raises(ValueError, match="expected whole numbers from 1 to num_slots = 2"):
            engine.calibrate(batches=batches)
    assert {r.rows for r in engine.calibrate(repeats=1, batches=[2])} == {2}


@pytest.mark.parametrize("chunk", [1, 4])
def test_small_chunks_of_prompts_leave_no_shape_untimed(target: PreTrainedModel, chunk: int) -> None:
    """Steps that only feed a prompt are no rounds: they once used up the rounds of k = 0."""
    draft = noisy_copy(target, noise=0.1, seed=1)
    engine = Engine(target, draft, k=Adaptive(2), num_slots=2, capacity=160, prefill_chunk=chunk)
    shapes = [(r.rows, r.k) for r in engine.calibrate(repeats=1)]
    assert shapes == [(rows, k) for rows in (1, 2) for k in (0, 1, 2)]
    fed: list[int] = []
    forward = engine._target.forward
    engine._target.forward = lambda tokens, plan, keep: fed.append(tokens.shape[1]) or forward(tokens, plan, keep)
    engine.generate([Request(prompt_ids=[1] * 20, params=SamplingParams(max_tokens=1))])
    assert fed[:-1] == [chunk] * (len(fed) - 2) + [19 - chunk * (len(fed) - 2)]
