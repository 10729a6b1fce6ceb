"""The controller in vLLM's real scheduler, with vLLM's requests, blocks and queues; only the model is a stand-in that
accepts drafts at a known rate and tells its times (tests/vllm_steps.py). So speeds are exact on every machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm_steps import Engine, Worker, make_config, make_scheduler, save_pair
from vllm_draft_spec.scheduler import AdaptiveLength, Lookup, adaptive_class, why_not

BOTH = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
ROWS, TOKENS = 4, 1200


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(*save_pair(tmp_path_factory.mktemp("pair")))


def engine_of(config: Any, alpha: float | Callable[[float], float], ahead: bool = False, **specdec: Any) -> Engine:
    own = copy.copy(config)
    own.scheduler_config = copy.copy(config.scheduler_config)
    own.scheduler_config.async_scheduling = ahead  # a CPU build switches it off
    own.additional_config = {"specdec": specdec}
    worker = Worker(alpha=alpha if callable(alpha) else lambda tokens: alpha)
    return Engine(scheduler=make_scheduler(own, lambda: worker.now), worker=worker, ahead=ahead)


def speed(config: Any, alpha: Callable[[float], float], ahead: bool, **specdec: Any) -> float:
    return engine_of(config, alpha, ahead, **specdec).speed(ROWS, TOKENS)


@BOTH
def test_as_fast_as_the_best_fixed_length(config: Any, ahead: bool) -> None:
    """High and low acceptance: the best lengths are 6 and 1. Timing all it must time costs the controller under 3 %."""
    for alpha, near in ((0.87, (5, 6)), (0.3, (0, 1, 2))):
        best = max(engine_of(config, alpha, ahead, controller="fixed", k=k).speed(ROWS, 2 * TOKENS) for k in near)
        assert engine_of(config, alpha, ahead).speed(ROWS, 2 * TOKENS) >= 0.97 * best


@BOTH
def test_faster_than_any_fixed_length_when_acceptance_changes(config: Any, ahead: bool) -> None:
    def alpha(tokens: float) -> float:
        return 0.92 if (tokens // (ROWS * 300)) % 2 == 0 else 0.2

    adaptive = speed(config, alpha, ahead)
    assert adaptive > 1.03 * max(speed(config, alpha, ahead, controller="fixed", k=k) for k in (0, 1, 2, 3, 4, 6))


@BOTH
def test_k_0_when_drafts_do_not_pay_and_back_when_they_do(config: Any, ahead: bool) -> None:
    engine = engine_of(config, lambda tokens: 0.05 if tokens < ROWS * 600 else 0.95, ahead)
    engine.speed(ROWS, TOKENS)
    lengths = engine.lengths
    plain = lengths[100:500]
    assert plain.count(0) > 0.9 * len(plain)
    assert lengths[-30:].count(6) > 20


@BOTH
def test_requests_that_come_and_go(config: Any, ahead: bool) -> None:
    """Prompts in several chunks, more requests than fit, one aborted while its step runs: all others get their tokens,
    nothing is left over, and the counts agree with vLLM's own."""
    engine = engine_of(config, 0.7, ahead)
    scheduler, totals = engine.scheduler, dict.fromkeys(("accepted", "drafted", "generated", "rows"), 0)
    theirs = {"num_accepted_tokens": 0, "num_draft_tokens": 0, "num_drafts": 0}
    update, finished = scheduler.update_from_output, {}

    def watched(output: Any, result: Any) -> Any:
        outputs = update(output, result)
        for made in outputs.values():
            for one in made.outputs:
                finished[one.request_id] = finished.get(one.request_id, 0) + len(one.new_token_ids)
            if made.scheduler_stats is not None:
                counts = made.scheduler_stats.specdec["counts"]
                totals["rows"] += counts["drafting"] + counts["plain"] + counts["prefill"]
                for key in ("accepted", "drafted", "generated"):
                    totals[key] += counts[key]
                for key in theirs:
                    theirs[key] += getattr(made.scheduler_stats.spec_decoding_stats, key, 0)
        return outputs

    scheduler.update_from_output = watched
    for number in range(40):
        engine.add(f"r{number}", tokens=20 + number, prompt=10 if number % 3 else 3000)
        engine.step()
        if number == 20:
            scheduler.finish_requests(["r19"], _aborted())
    engine.drain()
    assert {name: count for name, count in finished.items() if name != "r19"} == {
        f"r{number}": 20 + number for number in range(40) if number != 19
    }
    assert (len(scheduler.running), len(scheduler.waiting), scheduler.kv_cache_manager.usage) == (0, 0, 0.0)
    assert 0 < totals["accepted"] < totals["drafted"]
    assert totals["generated"] == totals["accepted"] + totals["rows"]
    assert (theirs["num_accepted_tokens"], theirs["num_draft_tokens"]) == (totals["accepted"], totals["drafted"])


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


@BOTH
def test_parts_of_prompts_are_drafted_once_at_most(config: Any, ahead: bool) -> None:
    """What is drafted after a part of a prompt is thrown away; the draft model still reads the part."""
    engine = engine_of(config, 0.9, ahead, controller="fixed", k=6)
    engine.add("long", tokens=4, prompt=3000)
    engine.drain()
    assert engine.lengths[:2] == [1, 1]  # 1,024 tokens each
    assert set(engine.lengths[2:]) == {6}


def test_a_worker_without_a_clock_is_left_without_drafts(config: Any) -> None:
    """Never with drafts of an assumed price, and never is the server ended."""
    engine = engine_of(config, 0.8)
    engine.worker.tells = False
    engine.speed(ROWS, TOKENS)
    assert max(engine.lengths[:60]) > 0
    assert set(engine.lengths[70:]) == {0}


@BOTH
def test_a_prompt_of_one_token_is_a_prompt(config: Any, ahead: bool) -> None:
    engine = engine_of(config, 0.8, ahead, log_interval_s=0)
    for name in "abc":
        engine.add(name, tokens=4, prompt=1)
    engine.drain()
    counts = engine.scheduler._pilot._unlogged
    assert counts.prefill == 3
    assert counts.generated == counts.accepted + counts.drafting + counts.plain + 3


@BOTH
def test_requests_too_short_to_be_timed_do_not_stop_the_engine(config: Any, ahead: bool) -> None:
    engine = engine_of(config, 0.8, ahead)
    for number in range(150):
        engine.add(f"r{number}", tokens=2)
        engine.drain()


def test_a_drafter_that_takes_no_length_is_cut(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """custom_class and the like always draft their most; the scheduler keeps the first k."""
    monkeypatch.setattr("vllm_draft_spec.scheduler.IS_CUT", ("draft_model",))
    engine = engine_of(config, 0.9, controller="fixed", k=2)
    engine.add("a", tokens=9)
    engine.step()
    assert engine.lengths == [6]
    assert len(engine.scheduler.requests["a"].spec_token_ids) == 2


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda c: setattr(c.speculative_config, "method", "dflash"), "this method drafts a fixed number"),
        (lambda c: setattr(c.speculative_config, "num_speculative_tokens_per_batch_size", [[1, 4, 2]]), "leave it out"),
        (lambda c: setattr(c.parallel_config, "data_parallel_size", 2), "data parallel engines must"),
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "pipeline parallel stages"),
    ],
)
def test_what_it_cannot_serve_is_left_as_it_is(
    spoil: Callable[[Any], None], reason: str, config: Any, plugin_log: pytest.LogCaptureFixture
) -> None:
    own = copy.copy(config)
    own.speculative_config, own.parallel_config = (
        copy.copy(config.speculative_config),
        copy.copy(config.parallel_config),
    )
    spoil(own)
    assert reason in str(why_not(own))
    own.parallel_config = config.parallel_config
    if why_not(own) is not None:
        scheduler = make_scheduler(own, lambda: 0.0)
        assert not isinstance(scheduler.dynamic_sd_lookup, Lookup)
        assert scheduler._pilot is None
        assert [reason in record.getMessage() for record in plugin_log.records].count(True) == 1


def test_wrong_settings_stop_the_engine(config: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown key specdec\.kmax; did you mean k_max"):
        engine_of(config, 0.5, kmax=3)


def test_the_class_is_the_one_vllm_would_take() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert adaptive_class(Scheduler).__mro__[1:3] == (AdaptiveLength, Scheduler)
    assert adaptive_class(AsyncScheduler).__mro__[1:3] == (AdaptiveLength, AsyncScheduler)
