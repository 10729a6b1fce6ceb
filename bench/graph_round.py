"""Does a whole round fit into one CUDA graph? Captures it on a tiny model and compares replays with eager rounds.

A round (k draft steps with their sampling, verify, the rule, commit, both roll-backs) has fixed shapes and no host
synchronisation, so it can be captured as it is. Rows of different length and sampling parameters, several rounds,
until rows finish: every report and all readable state must be equal to the bit.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.tiny_models import noisy_copy, tiny_model
from specdec import Engine, Request, SamplingParams
from specdec.drafter import ModelDrafter
from specdec.model import CachedModel
from specdec.round import decide, score
from specdec.sampling import LawParams
from specdec.state import features_of

_ROUNDS = 12


def requests_of(vocab: int) -> list[Request]:
    """Eight rows: prompts of 2 to 30 tokens, greedy and sampled, with every filter and penalty somewhere."""
    shapes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"temperature": 1.0, "banned_ids": (1, 2), "stop_ids": (3,), "min_tokens": 6},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ]
    return [
        Request(
            prompt_ids=[(7 * row + 3 * i) % vocab for i in range(2 + 4 * row)],
            params=SamplingParams(max_tokens=16, seed=row, **shape),
        )
        for row, shape in enumerate(shapes)
    ]


def prefilled_engine(target: PreTrainedModel, draft: PreTrainedModel, k: int, requests: list[Request]) -> Engine:
    """An engine whose rows have been admitted and fed, before their first round."""
    engine = Engine(target, draft, k=k, num_slots=len(requests), capacity=64, graphs=False, fast=False)
    for request in requests:
        engine.submit(request)
    with torch.inference_mode():
        engine._admit()
        engine._prefill()
    return engine


def round_of(engine: Engine, k: int, requests: list[Request]) -> Callable[[], Tensor]:
    """One round over all slots as a function without arguments; returns the packed report on the device."""
    features = features_of([request.params for request in requests])
    state, target, drafter = engine._state, engine._target, engine._drafter
    assert drafter is not None

    def run() -> Tensor:
        proposal = drafter.propose(state, k, features, None)
        logits_BJV = score(state, target, proposal, None)
        report = decide(state, target, proposal, logits_BJV, features)
        drafter.roll_back(state)
        return report

    return run


def models_of(engine: Engine) -> list[CachedModel]:
    """The target and the draft with their caches."""
    assert isinstance(engine._drafter, ModelDrafter)
    return [engine._target, engine._drafter.model]


def state_tensors(engine: Engine) -> list[Tensor]:
    """Everything that a round changes."""
    rows = [getattr(engine._state, f.name) for f in fields(engine._state) if f.name != "law"]
    law = [getattr(engine._state.law, f.name) for f in fields(LawParams)]
    caches = [t for model in models_of(engine) for pair in model.cache.layers.values() for t in pair]
    lengths = [model.cache.lengths_B for model in models_of(engine)]
    return [t for t in (*rows, *law, *caches, *lengths) if t is not None]


def readable_state(engine: Engine) -> list[Tensor]:
    """`state_tensors` without the trash slots, where several paddings write in any order and nothing reads."""
    trash = {t.data_ptr() for model in models_of(engine) for pair in model.cache.layers.values() for t in pair}
    trimmed = [t[:, :, :-1] if t.data_ptr() in trash else t for t in state_tensors(engine)]
    return [t[:, :-1] if t is engine._state.tokens_BT else t for t in trimmed]


def captured(engine: Engine, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`run` as the replay of a CUDA graph; warm-up and capture leave the engine's state as it was."""
    before = [t.clone() for t in state_tensors(engine)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        report = run()
    for tensor, saved in zip(state_tensors(engine), before, strict=True):
        tensor.copy_(saved)

    def replay() -> Tensor:
        graph.replay()
        return report

    return replay


@torch.inference_mode()
def compare(k: int, *, family: str = "qwen3", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Eager rounds against replays of the captured round: one result row."""
    vocab = 32
    target = tiny_model(family, vocab=vocab, layers=2, hidden=32, dtype=dtype)
    draft = noisy_copy(target, noise=0.2, seed=1)
    target, draft = target.to("cuda"), draft.to("cuda")
    requests = requests_of(vocab)
    eager, graphed = (prefilled_engine(target, draft, k, requests) for _ in range(2))
    eager_round = round_of(eager, k, requests)
    graph_round = captured(graphed, round_of(graphed, k, requests))
    reports = [(eager_round().cpu(), graph_round().cpu()) for _ in range(_ROUNDS)]
    states = zip(readable_state(eager), readable_state(graphed), strict=True)
    finished = int((~eager._state.active_B).sum())
    return {
        "engine": "specdec",
        "target": f"tiny-{family}",
        "k": k,
        "batch": len(requests),
        "rounds": _ROUNDS,
        "rows_finished": finished,
        "reports_equal": all(torch.equal(a, b) for a, b in reports),
        "state_equal": all(torch.equal(a, b) for a, b in states),
        "eager_round_ms": _milliseconds(eager_round),
        "graph_round_ms": _milliseconds(graph_round),
    }


def _milliseconds(run: Callable[[], Tensor], repeats: int = 30) -> float:
    """Median device time of `run`, after three calls that are not counted."""
    times = []
    for index in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) if index >= 3 else None)
    counted = sorted(t for t in times if t is not None)
    return round(counted[len(counted) // 2], 4)
