"""Controllers inside the engine: they are asked, told, and may give rows of one round different lengths."""

import itertools
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from transformers import PreTrainedModel

from bench.tiny_models import noisy_copy, tiny_model
from specdec import Completion, Engine, Request, RoundStats, SamplingParams
from specdec.controller import Adaptive, FixedK, Geometric, RowRound
from specdec.lookup import LookupDrafter
from specdec.slots import Slot

REQUESTS = [
    Request(prompt_ids=[i + 1, 3, i], params=SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i))
    for i in range(6)
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab=32, layers=2)


class Scripted(LookupDrafter):
    """In each round, row by row, as many right tokens of the greedy text as the script says."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], script: list[list[int]]) -> None:
        self.texts, self.script = texts, itertools.cycle(script)
        self.whole: dict[int, list[int]] = {}

    def start(self, row: int, tokens: Sequence[int]) -> None:
        self.whole[row] = [*tokens, *self.texts[tuple(tokens)]]

    def extend(self, row: int, tokens: Sequence[int], length: int) -> None:
        return

    def finish(self, row: int) -> None:
        return

    def prepare(self, slots: Sequence[Slot], k: int, chunk: int) -> int:
        self.counts = next(self.script)
        return super().prepare(slots, k, chunk)

    def guess(self, row: int, tokens: Sequence[int], k: int) -> list[int]:
        return self.whole[row][len(tokens) :][: min(k, self.counts[row])]


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


def test_a_round_verifies_only_as_far_as_the_longest_proposal(target: PreTrainedModel) -> None:
    """A lookup that finds nothing costs a plain round; where one row alone found something, the others are counted as
    lacking a draft, and acceptance is that of the drafts there were."""
    requests = [r for r in REQUESTS if r.params.temperature == 0][:2]
    plain = Engine(target, None, num_slots=2, capacity=64).generate(requests)
    texts = {tuple(r.prompt_ids): c.token_ids for r, c in zip(requests, plain, strict=True)}
    rounds: list[RoundStats] = []
    drafter = Scripted(texts, [[0, 0], [3, 0], [1, 2]])
    engine = Engine(target, drafter, k=4, num_slots=2, capacity=64, on_round=rounds.append)
    widths: list[int] = []
    forward = engine._target.forward
    engine._target.forward = lambda tokens, plan, keep: widths.append(tokens.shape[1]) or forward(tokens, plan, keep)
    done = engine.generate(requests)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    two = [r for r in rounds if r.rows == 2]
    decoding = widths[-len(rounds) :]
    assert decoding[:6] == [1, 4, 3, 1, 4, 3]
    assert [(r.asked, r.k, r.reached, r.lacking, r.tokens) for r in two[:3]] == [
        (4, 0, (), (), 2),
        (4, 3, (1, 1, 1), (1, 0, 0), 5),
        (4, 2, (2, 1), (0, 1), 5),
    ]
    assert two[0].draft_s == 0.0
    assert engine.stats.alpha == 1.0


def test_a_prompt_that_came_while_nothing_was_drafted_counts_as_lag(target: PreTrainedModel) -> None:
    """Its draft has read nothing of it: without that count, catching up looks like one token's worth."""
    controller = Ragged()
    controller.choose_rows = lambda names: [0] * len(names)  # type: ignore[method-assign]
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [3, 2, 1]]
    requests = [Request(prompt_ids=p, params=SamplingParams(max_tokens=6)) for p in prompts]
    engine = Engine(target, noisy_copy(target, noise=0.1, seed=1), k=controller, num_slots=1, capacity=64)
    engine.generate(requests)
    lags = [rows[0].lag for _, rows in controller.seen]
    assert lags[6:] == [3 + i for i in range(6)]  # the second prompt, fed to nobody, and what followed


@pytest.mark.parametrize("lengths", [[2], [2] * 4, []])
def test_a_controller_that_forgets_a_row_is_named(target: PreTrainedModel, lengths: list[int]) -> None:
    """And the engine goes on with what it has once the controller does its work."""
    controller = Ragged()
    controller.choose_rows = lambda names: lengths  # type: ignore[method-assign]
    engine = Engine(target, noisy_copy(target, noise=0.1, seed=1), k=controller, num_slots=3, capacity=64)
    for request in REQUESTS[:3]:
        engine.submit(request)
    with pytest.raises(ValueError, match=rf"choose_rows gave {len(lengths)} draft lengths for 3 rows"):
        engine.step()
    controller.choose_rows = lambda names: np.full(len(names), 2)  # type: ignore[method-assign, return-value]
    done: list[tuple[int, Completion]] = []
    while engine.has_work:
        done += engine.step()
    plain = Engine(target, None, num_slots=3, capacity=64).generate(REQUESTS[:3])
    assert dict(done)[0].token_ids == plain[0].token_ids
    assert {row.k for _, rows in controller.seen for row in rows} == {2}
