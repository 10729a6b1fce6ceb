"""Real vLLM with the plugin gives, at temperature 0, the tokens that vLLM gives without speculation; and a draft that
is the target itself has every draft accepted, which any hole in the draft's cache would prevent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.tiny_models import noisy_copy
from tests import plugin_vllm
from tests.plugin_vllm import K_MAX, counted, generate, ids, set_lengths

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VOCAB, LIMIT = 64, 160
MOVING = (0, 3, 0, 0, 1, 4, 2, 0, 0, 0, 0, 4)
BUDGET = 48  # tokens a step: long prompts come in chunks, and not every row fits into every step


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """plain: without speculation. spec: a draft that is accepted about half of the time. twin: the target as its own
    draft, in a cache that holds a few requests only."""
    folder = tmp_path_factory.mktemp("greedy")
    with plugin_vllm.installed():
        target = plugin_vllm.make_model(VOCAB)
        draft = noisy_copy(target, noise=0.2, seed=2)
        names = [plugin_vllm.saved(model, folder / name) for model, name in ((target, "target"), (draft, "draft"))]
        options: dict[str, Any] = {"max_model_len": LIMIT, "max_num_batched_tokens": BUDGET, "max_num_seqs": 8}
        yield SimpleNamespace(
            plain=plugin_vllm.make_engine(names[0], max_model_len=LIMIT),
            spec=plugin_vllm.make_engine(*names, **options),
            twin=plugin_vllm.make_engine(names[0], names[0], num_gpu_blocks_override=14, **options),
        )


def params(**settings: Any) -> Any:
    import vllm

    return vllm.SamplingParams(
        **({"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "detokenize": False} | settings)
    )


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


MIXED = (5, 100, 20, 33, 7, 64, 2, 90, 12, 31, 32, 65)


def same(engines: SimpleNamespace, engine: Any, asked: Sequence[Sequence[int]], settings: Any) -> list[Any]:
    """Generates and compares with vLLM without speculation."""
    outputs = generate(engine, asked, settings)
    assert ids(outputs) == ids(generate(engines.plain, asked, settings))
    return outputs


@pytest.mark.parametrize("lengths", [(k,) for k in range(K_MAX + 1)] + [MOVING])
def test_greedy_text_is_the_targets_own(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """Prompts in chunks, rows of many lengths, requests waiting for a place, rows that miss a step."""
    set_lengths(engines.spec, lengths)
    with counted(engines.spec) as grown:
        same(engines, engines.spec, prompts(*MIXED, seed=sum(lengths)), params())
    assert max((drafted for _, _, drafted, _ in grown.rounds), default=0) == max(lengths)
    if max(lengths):
        assert min(grown.accepted, grown.drafted - grown.accepted) >= 50, vars(grown)


@pytest.mark.parametrize("lengths", [(4,), (0, 2), MOVING])
def test_a_twin_has_every_draft_accepted(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """Through preemption: at the end the requests would fill the cache three times."""
    set_lengths(engines.twin, lengths)
    with counted(engines.twin) as grown:
        same(engines, engines.twin, prompts(*MIXED, seed=10 + len(lengths)), params(max_tokens=60))
    assert grown.preempted > 0
    assert grown.drafted > 100
    assert grown.accepted == grown.drafted


@pytest.mark.parametrize("first", [(0,), (0, 0, 0, 0, 3), (4,)])
def test_cached_prefixes_hold_the_drafts_part_too(engines: SimpleNamespace, first: Sequence[int]) -> None:
    """A second turn whose prompt holds the first turn's text: its blocks were filled while k was 0, and found again."""
    set_lengths(engines.twin, first)
    asked = prompts(20, 30, 40, seed=20 + sum(first))
    turns = generate(engines.twin, asked, params(max_tokens=70))
    longer = [prompt + list(turn.outputs[0].token_ids) for prompt, turn in zip(asked, turns, strict=True)]
    set_lengths(engines.twin, (4,))
    with counted(engines.twin) as grown:
        outputs = same(engines, engines.twin, longer, params(max_tokens=30))
    assert min(output.num_cached_tokens for output in outputs) >= 2 * plugin_vllm.BLOCK
    assert grown.accepted == grown.drafted > 20


def test_a_running_requests_blocks_can_be_found_whole(engines: SimpleNamespace) -> None:
    """A request arrives whose prompt is what another, still running with k = 0, has written so far."""
    set_lengths(engines.twin, (0,))
    engine = engines.twin.llm_engine
    [prompt] = prompts(25, seed=30)
    [text] = ids(generate(engines.plain, [prompt], params(max_tokens=110)))
    add(engine, "writer", prompt, params(max_tokens=110))
    for _ in range(60):
        engine.step()
    set_lengths(engines.twin, (4,))
    add(engine, "reader", prompt + text[:50], params(max_tokens=20))
    with counted(engines.twin) as grown:
        done = finish(engine)
    assert list(done["writer"].outputs[0].token_ids) == text
    assert list(done["reader"].outputs[0].token_ids) == text[50:70]
    assert done["reader"].num_cached_tokens >= 2 * plugin_vllm.BLOCK
    assert grown.accepted == grown.drafted > 20


def add(engine: Any, name: str, prompt: Sequence[int], settings: Any) -> None:
    import vllm

    engine.add_request(name, vllm.TokensPrompt(prompt_token_ids=list(prompt)), settings)


def finish(engine: Any) -> dict[str, Any]:
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def test_requests_that_arrive_and_leave_at_any_time(engines: SimpleNamespace) -> None:
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
    drafter = plugin_vllm.runner(engines.twin).drafter
    living = set(plugin_vllm.runner(engines.twin).input_batch.req_ids)
    assert set(drafter.pending.lags) <= living


def test_ends_inside_a_round(engines: SimpleNamespace) -> None:
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


@pytest.mark.parametrize("lengths", [(4,), MOVING])
def test_a_row_at_the_end_of_the_context_stops_alone(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """vLLM's runner stops drafting for all rows, and leaves the draft's cache behind, when one comes near."""
    set_lengths(engines.twin, lengths)
    long, *others = prompts(LIMIT - 30, 8, 9, 30, seed=60)
    settings = [params(max_tokens=200), *(params(max_tokens=60) for _ in others)]
    with counted(engines.twin) as grown:
        outputs = same(engines, engines.twin, [long, *others], settings)
    assert len(outputs[0].outputs[0].token_ids) == 30
    assert grown.accepted == grown.drafted > 60


def test_times_of_every_kind_of_round_reach_the_scheduler(engines: SimpleNamespace) -> None:
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
    assert all(one.verify_s > 0 and one.draft_s >= 0 and one.batch in (1, 2, 3) for one in times)
    assert all(one.draft_s > 0 for one in times if one.k)
    assert sum(one.caught_up for one in times) > 0
