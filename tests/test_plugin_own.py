"""Real vLLM with the plugin's own draft: at temperature 0 the tokens of no speculation, and a draft that is the target
itself has every draft accepted, which any wrong token in the draft's cache would prevent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.law import Oracle, count_cells, enumerate_law
from bench.law_stats import check_law
from bench.tiny_models import noisy_copy
from specdec import SamplingParams
from specdec.controller import Adaptive
from tests import plugin_cases, plugin_vllm
from tests.plugin_cases import BUDGET, LIMIT, MIXED, MOVING, VOCAB, params, prompts, same
from tests.plugin_vllm import K_MAX, counted, generate, ids, set_lengths
from tests.test_plugin_own_parts import masked_logits
from vllm_draft_spec.own_failures import EVERY, Failures

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OWN = {"specdec": {"draft": "own"}}
WINDOW, SINKS = 12, 3
POOL = 14  # blocks: a few requests fill it


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """plain: without speculation. spec: a draft that is accepted about half of the time. twin: the target as its own
    draft, in a cache that holds a few requests only. seeing: `spec` with a window."""
    folder = tmp_path_factory.mktemp("own")
    with plugin_vllm.installed():
        target = plugin_vllm.make_model(VOCAB)
        draft = noisy_copy(target, noise=0.2, seed=2)
        names = [plugin_vllm.saved(model, folder / name) for model, name in ((target, "target"), (draft, "draft"))]
        options: dict[str, Any] = {"max_model_len": LIMIT, "max_num_batched_tokens": BUDGET, "max_num_seqs": 8}
        window = {"specdec": {"draft": "own", "window": WINDOW, "sinks": SINKS}}
        plain = plugin_vllm.make_engine(names[0], **options)
        pool = plugin_vllm.scheduler(plain).kv_cache_config.num_blocks
        options["additional_config"] = OWN
        yield SimpleNamespace(
            target=names[0],
            plain=plain,
            pool=pool,
            spec=plugin_vllm.make_engine(*names, **options),
            twin=plugin_vllm.make_engine(names[0], names[0], num_gpu_blocks_override=POOL, **options),
            seeing=plugin_vllm.make_engine(*names, **(options | {"additional_config": window})),
            draft=draft,
        )


@pytest.mark.parametrize("lengths", [(k,) for k in range(K_MAX + 1)] + [MOVING])
def test_greedy_text_is_the_targets_own(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    """Prompts in chunks, rows of many lengths, requests waiting for a place, rows that miss a step."""
    for engine in (engines.spec, engines.seeing):
        set_lengths(engine, lengths)
        with counted(engine) as grown:
            same(engines, engine, prompts(*MIXED, seed=sum(lengths)), params())
        assert max((drafted for _, _, drafted, _ in grown.rounds), default=0) == max(lengths)
        if max(lengths):
            assert min(grown.accepted, grown.drafted - grown.accepted) >= 50, vars(grown)


def test_greedy_text_under_the_adaptive_controller(engines: SimpleNamespace) -> None:
    """Long enough for lengths to change; what it chooses hangs on this machine's times, but that it drafts at first."""
    from vllm_draft_spec.pilot import Pilot
    from vllm_draft_spec.scheduler import Lookup

    for engine in (engines.spec, engines.seeing):
        owner = plugin_vllm.scheduler(engine)
        owner._pilot = Pilot(Adaptive(K_MAX))
        owner.dynamic_sd_lookup = Lookup(owner._pilot, None)
        with counted(engine) as grown:
            same(engines, engine, prompts(*MIXED, seed=99), params(max_tokens=60))
        assert grown.drafted > 0


def test_the_pool_is_that_of_no_speculation(engines: SimpleNamespace) -> None:
    for engine in (engines.spec, engines.seeing):
        assert plugin_vllm.scheduler(engine).kv_cache_config.num_blocks == engines.pool
        assert plugin_vllm.scheduler(engine)._pilot.report()["gauges"]["draft_kv_tokens"] == 0


@pytest.mark.parametrize("lengths", [(4,), (0, 2), MOVING])
def test_a_twin_has_every_draft_accepted(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    plugin_cases.every_draft_of_a_twin_is_accepted(engines, lengths)


@pytest.mark.parametrize("first", [(0,), (0, 0, 0, 0, 3), (4,)])
def test_a_cached_prefix_is_read_by_the_draft(engines: SimpleNamespace, first: Sequence[int]) -> None:
    """The target does not read it again."""
    plugin_cases.second_turns_find_the_draft_whole(engines, first)


def test_requests_that_arrive_and_leave_at_any_time(engines: SimpleNamespace) -> None:
    plugin_cases.requests_arrive_and_leave(engines)
    runner = plugin_vllm.runner(engines.twin)
    assert set(runner.drafter.rows._by_name) <= set(runner.requests)


def test_ends_inside_a_round(engines: SimpleNamespace) -> None:
    plugin_cases.ends_fall_inside_a_round(engines)


@pytest.mark.parametrize("lengths", [(4,), MOVING])
def test_a_row_at_the_end_of_the_context_stops_alone(engines: SimpleNamespace, lengths: Sequence[int]) -> None:
    plugin_cases.a_row_at_the_end_of_the_context_stops_alone(engines, lengths)


def test_times_of_every_kind_of_round_reach_the_scheduler(engines: SimpleNamespace) -> None:
    assert plugin_cases.times_of_rounds(engines)


@pytest.mark.parametrize("which, sinks, recent", [("spec", 0, LIMIT), ("seeing", SINKS, WINDOW)])
def test_as_much_is_accepted_as_a_cache_free_forward_says(
    engines: SimpleNamespace, which: str, sinks: int, recent: int
) -> None:
    """Each round's accepted drafts, from a forward of the draft over all tokens; with a window over the sinks, the end
    of the prompt and what came after it, at true positions. Prompts shorter than the window, longer, and in chunks."""
    asked, engine = prompts(5, WINDOW + SINKS, 90, 40, 33, seed=80), getattr(engines, which)
    set_lengths(engine, (3,))
    with counted(engine) as grown:
        outputs = same(engines, engine, asked, params(max_tokens=30))
    by_request = {output.request_id: (prompt, output) for prompt, output in zip(asked, outputs, strict=True)}
    checked = 0
    for name, before, drafted, accepted in grown.rounds:
        prompt, output = by_request[name.split("-")[0]]
        text = list(output.outputs[0].token_ids)
        expected = 0
        known, at = seen_by_draft(prompt, text[:before], sinks, recent)
        while expected < drafted and before + expected < len(text):
            token = int(masked_logits(engines.draft, known, at, sinks, recent)[-1].argmax())
            if token != text[before + expected]:
                break
            expected, known, at = expected + 1, [*known, token], [*at, at[-1] + 1]
        if before + accepted < len(text):  # the last round's text is cut off
            assert accepted == expected, (name, before)
            checked += 1
    assert checked > 40


def seen_by_draft(prompt: list[int], text: list[int], sinks: int, recent: int) -> tuple[list[int], list[int]]:
    """The tokens that the draft ever read, and their positions: it first drafts behind the prompt and one token."""
    whole, first = prompt + text, len(prompt) + 1 - recent
    at = [i for i in range(len(whole)) if i < sinks or i >= first or len(prompt) + 1 <= recent + sinks]
    return [whole[i] for i in at], at


def test_a_spoilt_cache_is_read_again(
    engines: SimpleNamespace, plugin_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in every slot of the draft's cache: as many drafts as are made until the host has looked are lost."""
    drafter = plugin_vllm.runner(engines.twin).drafter
    monkeypatch.setattr(drafter, "failures", Failures())
    for buffers in drafter.draft.cache.layers.values():
        for buffer in buffers:
            buffer.fill_(torch.nan)
    set_lengths(engines.twin, (4, 0, 4, 4))
    with counted(engines.twin) as grown:
        same(engines, engines.twin, prompts(5, 40, 20, seed=95), params(max_tokens=100))
    late = [accepted == drafted for _, before, drafted, accepted in grown.rounds if before > 2 * EVERY]
    assert len(late) > 20
    assert all(late)
    assert sum("the draft gave NaN" in record.getMessage() for record in plugin_log.records) == 1


def test_spoilt_weights_leave_a_row_to_the_target(engines: SimpleNamespace, tmp_path: Path) -> None:
    """The target as its own draft, but for one token's embedding: rows without that token draft as ever."""
    whole = [1, 5, 7, 1]
    text = ids(generate(engines.plain, [whole], params(max_tokens=60)))[0]
    poison = next(token for token in range(VOCAB) if token not in (*whole, *text))
    broken = plugin_vllm.make_model(VOCAB)
    with torch.no_grad():
        broken.get_input_embeddings().weight[poison] = torch.nan
    engine = plugin_vllm.make_engine(
        engines.target, plugin_vllm.saved(broken, tmp_path), additional_config=OWN, max_model_len=LIMIT
    )
    set_lengths(engine, (3,))
    with counted(engine) as grown:
        outputs = same(engines, engine, [[poison, *whole], whole], params(max_tokens=60))
    assert all(accepted == drafted for _, _, drafted, accepted in grown.rounds)
    drafting = {name.split("-")[0] for name, _, drafted, _ in grown.rounds if drafted}
    assert drafting == {outputs[1].request_id}
    with counted(engine) as grown:
        same(engines, engine, [whole], params(max_tokens=20))
    assert grown.accepted == grown.drafted > 10, "its slot held NaN before"
    assert plugin_vllm.runner(engine).drafter.failures.met


LAW_VOCAB, DEPTH, SAMPLES = 8, 3, 3000
LAW_PROMPT = (1, 5, 2, 7, 3, 3, 0)


def test_sampled_text_follows_the_targets_law(engines: SimpleNamespace, tmp_path: Path) -> None:
    """Joint law of the first three tokens at temperature 1; k moves between 0 and 3 while they are drawn."""
    target = plugin_vllm.make_model(LAW_VOCAB)
    draft = noisy_copy(target, noise=0.3, seed=2)
    names = [plugin_vllm.saved(model, tmp_path / name) for model, name in ((target, "target"), (draft, "draft"))]
    options: dict[str, Any] = {"max_num_seqs": 128, "max_model_len": 64, "max_num_batched_tokens": 160}
    engine = plugin_vllm.make_engine(*names, additional_config=OWN, **options)
    set_lengths(engine, (2, 0, 3, 1, 0, 0))
    with counted(engine) as grown:
        sampled = params(temperature=1.0, max_tokens=DEPTH + 2)
        completions = ids(generate(engine, [LAW_PROMPT] * SAMPLES, sampled))
    law = enumerate_law(Oracle(target), LAW_PROMPT, SamplingParams(max_tokens=DEPTH + 2, temperature=1.0), DEPTH)
    seen = check_law(count_cells(completions, LAW_VOCAB, DEPTH), law, seed=0)
    assert seen.impossible == 0
    assert seen.tv_ok, seen
    assert seen.p_value > 1e-5, seen
    assert 0.1 * grown.drafted < grown.accepted < 0.9 * grown.drafted, "both outcomes of the rule must occur"


def test_random_weights_for_a_measurement(engines: SimpleNamespace) -> None:
    """load_format dummy: both models are made from their configs."""
    engine = plugin_vllm.make_engine(
        engines.target, engines.target, additional_config=OWN, load_format="dummy", max_model_len=LIMIT
    )
    set_lengths(engine, (3,))
    with counted(engine) as grown:
        assert all(len(text) == 20 for text in ids(generate(engine, prompts(5, 9, seed=91), params(max_tokens=20))))
    assert grown.drafted > 10


def test_a_pruned_head_drafts(engines: SimpleNamespace, tmp_path: Path) -> None:
    """A draft that vLLM cannot load: its head has a row for some tokens only."""
    from specdec.pruned import prune_head, save_pruned

    head_ids = list(range(0, VOCAB, 2))
    pruned = plugin_vllm.make_model(VOCAB)
    prune_head(pruned, head_ids)
    save_pruned(pruned, head_ids, tmp_path)
    engine = plugin_vllm.make_engine(engines.target, str(tmp_path), additional_config=OWN, max_model_len=LIMIT)
    set_lengths(engine, (3,))
    with counted(engine) as grown:
        same(engines, engine, prompts(5, 9, 30, seed=90), params())
    assert min(grown.accepted, grown.drafted - grown.accepted) > 10
