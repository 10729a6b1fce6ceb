"""Real vLLM with the plugin gives, at temperature 0, the tokens that vLLM gives without speculation; and a draft that
is the target itself has every draft accepted, which any hole in the draft's cache would prevent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.tiny_models import noisy_copy
from tests import plugin_cases, plugin_vllm
from tests.plugin_cases import BUDGET, LIMIT, MIXED, MOVING, VOCAB, add, finish, params, prompts, same
from tests.plugin_vllm import K_MAX, counted, generate, ids, set_lengths

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


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
    plugin_cases.every_draft_of_a_twin_is_accepted(engines, lengths)


@pytest.mark.parametrize("first", [(0,), (0, 0, 0, 0, 3), (4,)])
def test_cached_prefixes_hold_the_drafts_part_too(engines: SimpleNamespace, first: Sequence[int]) -> None:
    """Its blocks were filled while k was 0, or not, and are found again."""
    plugin_cases.second_turns_find_the_draft_whole(engines, first)


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


def test_requests_that_arrive_and_leave_at_any_time(engines: SimpleNamespace) -> None:
    plugin_cases.requests_arrive_and_leave(engines)
    drafter = plugin_vllm.runner(engines.twin).drafter
    living = set(plugin_vllm.runner(engines.twin).input_batch.req_ids)
    assert set(drafter.pending.lags) <= living


def test_ends_inside_a_round(engines: SimpleNamespace) -> None:
    plugin_cases.ends_fall_inside_a_round(engines)


@pytest.mark.parametrize("lengths", [(4,), MOVING])
def test_a_row_at_the_end_of_the_context_stops_alone(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """vLLM's runner stops drafting for all rows, and leaves the draft's cache behind, when one comes near."""
    plugin_cases.a_row_at_the_end_of_the_context_stops_alone(engines, lengths)


def test_times_of_every_kind_of_round_reach_the_scheduler(engines: SimpleNamespace) -> None:
    times = plugin_cases.times_of_rounds(engines)
    assert all(one.verify_s > 0 and one.draft_s >= 0 and one.batch in (1, 2, 3) for one in times)
