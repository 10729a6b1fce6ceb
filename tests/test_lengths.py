"""Controllers inside the engine: they are asked, told, and may give rows of one round different lengths."""

import itertools
from collections.abc import Hashable, Sequence

import pytest
from transformers import PreTrainedModel

from bench.tiny_models import noisy_copy, tiny_model
from specdec import Engine, Request, RoundStats, SamplingParams
from specdec.controller import Adaptive, FixedK, Geometric, RowRound

REQUESTS = [
    Request(prompt_ids=[i + 1, 3, i], params=SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i))
    for i in range(6)
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab=32, layers=2)


class Ragged(FixedK):
    """Gives row i of n the length (i + round) % 5, so that lengths differ in most rounds."""

    def __init__(self) -> None:
        super().__init__(4)
        self.turn = 0
        self.seen: list[tuple[RoundStats, list[RowRound]]] = []

    def choose_rows(self, names: Sequence[Hashable]) -> list[int]:
        self.turn += 1
        return [(i + self.turn) % 5 if self.turn % 4 else 0 for i, _ in enumerate(names)]

    def observe_rows(self, round: RoundStats, rows: Sequence[RowRound]) -> None:
        self.seen.append((round, list(rows)))


def test_rows_of_one_round_may_draft_different_lengths(target: PreTrainedModel) -> None:
    """Text as without drafting (greedy), acceptance whole: an equal draft is accepted wherever it is tested, after
    rounds in which the row drafted nothing too."""
    controller = Ragged()
    engine = Engine(target, tiny_model(vocab=32, layers=2), k=controller, num_slots=3, capacity=64)
    done = engine.generate(REQUESTS)
    plain = Engine(target, None, num_slots=3, capacity=64).generate(REQUESTS)
    for with_drafts, without, request in zip(done, plain, REQUESTS, strict=True):
        if request.params.temperature == 0:
            assert with_drafts.token_ids == without.token_ids
    assert engine.stats.accepted == engine.stats.reached
    assert sum(engine.stats.accepted) > 50
    for stats, rows in controller.seen:
        assert stats.rows == len(rows)
        assert all(row.accepted <= row.reached <= row.k for row in rows)
        assert sum(row.accepted for row in rows) == sum(stats.accepted)
    assert any(len({row.k for row in rows}) > 1 for _, rows in controller.seen)


@pytest.mark.parametrize("make", [lambda: FixedK(3), lambda: Geometric(4), lambda: Adaptive(4)])
def test_every_controller_leaves_the_text_alone_and_is_told_the_time(target: PreTrainedModel, make) -> None:
    rounds: list[RoundStats] = []
    draft = noisy_copy(target, noise=0.15, seed=3)
    engine = Engine(target, draft, k=make(), num_slots=3, capacity=64, on_round=rounds.append)
    greedy = [r for r in REQUESTS if r.params.temperature == 0] * 3
    plain = Engine(target, None, num_slots=3, capacity=64).generate(greedy)
    assert [c.token_ids for c in engine.generate(greedy)] == [c.token_ids for c in plain]
    assert all(r.k <= engine.k_max for r in rounds)
    assert all(r.verify_s > 0 for r in rounds)


def test_a_catch_up_is_reported_to_the_controller(target: PreTrainedModel) -> None:
    """Rounds at k = 0, then one that drafts: it says how much the draft had missed."""
    rounds: list[RoundStats] = []
    ks = itertools.cycle([2, 0, 0, 0, 0, 2])
    draft = noisy_copy(target, noise=0.1, seed=1)
    engine = Engine(target, draft, k=lambda last: next(ks), k_max=2, num_slots=1, capacity=64, on_round=rounds.append)
    engine.generate([REQUESTS[0]])
    after_pause = [r.caught_up for previous, r in itertools.pairwise(rounds) if previous.k == 0 and r.k > 0]
    steady = [r.caught_up for previous, r in itertools.pairwise(rounds) if previous.k > 0]
    assert after_pause
    assert all(missed >= 3 for missed in after_pause)
    assert not any(steady)
