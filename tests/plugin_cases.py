"""What holds in vLLM for the plugin's drafter and for its own draft alike: loads on engines of tiny models.

engines: a fixture's `plain` (no speculation), `spec` (a draft accepted about half of the time) and `twin` (the target
as its own draft, in a cache that holds a few requests only).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests import plugin_vllm
from tests.plugin_vllm import counted, generate, ids, set_lengths

VOCAB, LIMIT = 64, 160
MOVING = (0, 3, 0, 0, 1, 4, 2, 0, 0, 0, 0, 4)
BUDGET = 48  # tokens a step: long prompts come in chunks, and not every row fits into every step
MIXED = (5, 100, 20, 33, 7, 64, 2, 90, 12, 31, 32, 65)


def params(**settings: Any) -> Any:
    import vllm

    return vllm.SamplingParams(
        **({"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "detokenize": False} | settings)
    )


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def same(engines: SimpleNamespace, engine: Any, asked: Sequence[Sequence[int]], settings: Any) -> list[Any]:
    """Generates and compares with vLLM without speculation."""
    outputs = generate(engine, asked, settings)
    assert ids(outputs) == ids(generate(engines.plain, asked, settings))
    return outputs


def add(engine: Any, name: str, prompt: Sequence[int], settings: Any) -> None:
    import vllm

    engine.add_request(name, vllm.TokensPrompt(prompt_token_ids=list(prompt)), settings)


def finish(engine: Any) -> dict[str, Any]:
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def every_draft_of_a_twin_is_accepted(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """Through preemption: at the end the requests would fill the cache three times."""
    set_lengths(engines.twin, lengths)
    with counted(engines.twin) as grown:
        same(engines, engines.twin, prompts(*MIXED, seed=10 + len(lengths)), params(max_tokens=60))
    assert grown.preempted > 0
    assert grown.drafted > 100
    assert grown.accepted == grown.drafted


def second_turns_find_the_draft_whole(engines: SimpleNamespace, first: Sequence[int]) -> None:
    """A second turn whose prompt holds the first turn's text, which the target finds cached."""
    set_lengths(engines.twin, first)
    asked = prompts(20, 30, 40, seed=20 + sum(first))
    turns = generate(engines.twin, asked, params(max_tokens=70))
    longer = [prompt + list(turn.outputs[0].token_ids) for prompt, turn in zip(asked, turns, strict=True)]
    set_lengths(engines.twin, (4,))
    with counted(engines.twin) as grown:
        outputs = same(engines, engines.twin, longer, params(max_tokens=30))
    assert min(output.num_cached_tokens for output in outputs) >= 2 * plugin_vllm.BLOCK
    assert grown.accepted == grown.drafted > 20


def requests_arrive_and_leave(engines: SimpleNamespace) -> None:
    """One arrives every second step; some are aborted; the others' text is what it would have been alone."""
    set_lengths(engines.twin, MOVING)
    engine, asked = engines.twin.llm_engine, prompts(*MIXED, *MIXED, seed=40)
    settings = [params(max_tokens=10 + 3 * i) for i in range(len(asked))]
    done: dict[str, Any] = {}
    with counted(engines.twin) as grown:
        for i, (prompt, setting) in enumerate(zip(asked, settings, strict=True)):
            add(engine, str(i), prompt, setting)
            for _ in range(2):
                done |= {output.request_id: output for output in engine.step() if output.finished}
            if i % 5 == 4:
                engine.abort_request([str(i - 1)])
        done |= finish(engine)
    expected = generate(engines.plain, asked, settings)
    whole = {name: output for name, output in done.items() if output.outputs[0].finish_reason == "length"}
    assert len(whole) >= len(asked) - len(asked) // 5
    for name, output in whole.items():
        assert list(output.outputs[0].token_ids) == list(expected[int(name)].outputs[0].token_ids)
    assert grown.accepted == grown.drafted > 50


def ends_fall_inside_a_round(engines: SimpleNamespace) -> None:
    """Stop tokens and max_tokens fall on any place in a round of 4; n completions of one prompt."""
    set_lengths(engines.twin, (4,))
    asked = prompts(9, 40, 17, 5, 6, 8, seed=50)
    free = ids(generate(engines.plain, asked, params()))
    stops = [params(stop_token_ids=[text[6 + i]]) for i, text in enumerate(free)]
    outputs = same(engines, engines.twin, asked, stops)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    same(engines, engines.twin, asked, [params(max_tokens=1 + i) for i in range(len(asked))])
    # vLLM allows several completions at a temperature only; top_k=1 makes them all the greedy one
    assert ids(generate(engines.twin, asked[:3], params(n=3, temperature=1.0, top_k=1))) == [
        text for text in free[:3] for _ in range(3)
    ]


def a_row_at_the_end_of_the_context_stops_alone(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """vLLM's runner stops drafting for all rows, and leaves the draft's cache behind, when one comes near."""
    set_lengths(engines.twin, lengths)
    long, *others = prompts(LIMIT - 30, 8, 9, 30, seed=60)
    settings = [params(max_tokens=200), *(params(max_tokens=60) for _ in others)]
    with counted(engines.twin) as grown:
        outputs = same(engines, engines.twin, [long, *others], settings)
    assert len(outputs[0].outputs[0].token_ids) == 30
    assert grown.accepted == grown.drafted > 60


def times_of_rounds(engines: SimpleNamespace) -> list[Any]:
    """Those that the scheduler gets, of rounds of every kind."""
    set_lengths(engines.spec, MOVING)
    scheduler = plugin_vllm.scheduler(engines.spec)
    seen = []

    def update(original: Any) -> Any:
        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            seen.append(getattr(model_runner_output, "specdec_times", None))
            return original(scheduler_output, model_runner_output)

        return update_from_output

    with plugin_vllm.swapped(scheduler, "update_from_output", update):
        generate(engines.spec, prompts(5, 6, 7, seed=70), params(max_tokens=80))
    times = [one for one in seen if one is not None]
    assert {one.k for one in times} == set(MOVING)
    assert all(one.draft_s > 0 for one in times if one.k)
    assert sum(one.caught_up for one in times) > 0
    return times
