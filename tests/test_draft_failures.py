"""A draft whose logits are NaN costs its row speed and nothing else: no draft from there on counts, the draft reads the
row's text again once, and a row in which that does not help decodes without drafts.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch

from bench.tiny_models import tiny_model
from specdec import Engine, ModelDrafter, Request, SamplingParams
from specdec import graphs as graphs_module
from specdec.model import CachedModel
from specdec.parallel import ParallelDrafter
from tests.tape import Tape

VOCAB, POISON = 32, 9
MODEL = tiny_model(vocab=VOCAB)


def broken() -> Any:
    """The target as a draft, but for one embedding, which spoils every text that the token is in."""
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    return model


def requests(temperature: float, *firsts: int, tokens: int = 24) -> list[Request]:
    return [
        Request(
            prompt_ids=[first, 2, 3],
            params=SamplingParams(max_tokens=tokens, temperature=temperature, seed=first, banned_ids=[POISON]),
        )
        for first in firsts
    ]


def spoil(model: CachedModel, row: int) -> None:
    for buffers in model.cache.layers.values():
        for buffer in buffers:
            buffer[row, :, 1] = buffer[row, :, -2] = math.nan  # where it reads, and where it has not come to


@pytest.fixture(params=[False, True], ids=["eager", "replayed"])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(graphs_module, "capture_for", lambda device: Tape())
    return bool(request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_spoilt_cache_is_read_anew(graphs: bool, temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    """The draft is the target: all of its tokens are accepted but those of the round that met the NaN."""
    asked = requests(temperature, 1, 4)
    engine = Engine(MODEL, MODEL, k=3, num_slots=2, capacity=64, graphs=graphs)
    tickets, done = [engine.submit(request) for request in asked], {}
    for step in range(100):
        done |= dict(engine.step())
        if step == 2:
            spoil(engine._drafter.model, 0)  # type: ignore[union-attr]
    spoilt, other = (done[ticket] for ticket in tickets)
    if temperature == 0:
        plain = Engine(MODEL, None, num_slots=2, capacity=64).generate(asked)
        assert [spoilt.token_ids, other.token_ids] == [completion.token_ids for completion in plain]
    assert [len(completion.token_ids) for completion in (spoilt, other)] == [24, 24]
    assert spoilt.stats.alpha == other.stats.alpha == 1.0
    assert spoilt.stats.rounds == other.stats.rounds + 1, "one round had no drafts"
    assert [r.levelname for r in caplog.records if "the draft gave NaN" in r.message] == ["WARNING"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["model", "unsure", "parallel"])
def test_spoilt_weights_leave_a_row_to_the_target(
    graphs: bool, temperature: float, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not one draft of the row counts, so that it draws the very numbers of plain decoding; after two rounds it is
    asked for none. The next request in its slot drafts as if nothing had been."""
    drafters = {
        "model": lambda: broken(),
        "unsure": lambda: ModelDrafter(broken(), min_confidence=0.01),
        "parallel": lambda: ParallelDrafter(broken(), k_max=3, mask_id=1),
    }
    asked, rounds = requests(temperature, POISON, POISON, 4), []
    engine = Engine(MODEL, drafters[kind](), k=3, num_slots=1, capacity=64, graphs=graphs, on_round=rounds.append)
    with caplog.at_level(logging.WARNING, logger="specdec"):
        done = engine.generate(asked)
    plain = Engine(MODEL, None, num_slots=1, capacity=64).generate(asked)
    assert [c.token_ids for c in done[:2]] == [c.token_ids for c in plain[:2]]
    assert [sum(c.stats.reached) for c in done[:2]] == [0, 0]
    assert [stats.k for stats in rounds[:24]] == [3, 3] + [0] * 22
    assert done[2].stats.alpha > (0.0 if kind == "parallel" else 0.99)
    assert sum("the draft gave NaN" in record.message for record in caplog.records) == 1


def test_drafts_before_the_first_nan_count() -> None:
    """The draft meets NaN when it is fed its own second token; the first two came from laws that were finite."""
    asked = Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=12))
    plain = Engine(MODEL, None, num_slots=1, capacity=64).generate([asked])[0].token_ids
    spoilt = copy.deepcopy(MODEL)
    assert plain[1] not in (plain[0], *asked.prompt_ids)
    with torch.no_grad():
        spoilt.get_input_embeddings().weight[plain[1]] = math.nan
    engine = Engine(MODEL, spoilt, k=3, num_slots=1, capacity=64)
    done = engine.generate([asked])[0]
    assert done.token_ids == plain
    assert sum(done.stats.reached) == sum(done.stats.accepted) == 2
