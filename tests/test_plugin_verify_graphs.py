"""Which CUDA graph a step of the target gets, in vLLM's own dispatcher and runner code; no graph is made here.

A stub stands for vLLM's runner: it has the attributes that the functions under test read, and vLLM's functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_draft_spec import verify_graphs
from vllm_draft_spec.verify_graphs import VerifyDispatcher, lengths_wanted, row_counts, shapes, why_vllms

pytestmark = pytest.mark.timeout(600)
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
K_MAX, MAX_ROWS, MAX_TOKENS = 4, 64, 300
FLASH = SimpleNamespace(get_name=lambda: "FLASH_ATTN")


def make_config(mode: CUDAGraphMode = BOTH, lora: Any = None, **specdec: Any) -> Any:
    compilation = SimpleNamespace(
        cudagraph_mode=mode,
        is_attention_compiled_piecewise=lambda: True,
        max_cudagraph_capture_size=MAX_TOKENS,
        cudagraph_capture_sizes=list(range(5, MAX_TOKENS + 1, 5)),  # as vLLM makes them for 1 + 4 tokens a row
        compile_sizes=None,
        cudagraph_specialize_lora=True,
        cudagraph_num_of_warmups=1,
        pass_config=SimpleNamespace(enable_sp=False),
    )
    return SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=K_MAX,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS, async_scheduling=False),
        lora_config=lora,
        speculative_config=SimpleNamespace(
            method="draft_model", num_speculative_tokens=K_MAX, num_speculative_tokens_per_batch_size=None
        ),
        additional_config={"specdec": specdec},
        parallel_config=SimpleNamespace(
            data_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1, use_ubatching=False
        ),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
    )


class Runner(SimpleNamespace):
    """What of vLLM's runner the functions read. made: keys in the order in which graphs for them were made."""

    _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)
    _warmup_and_capture = GPUModelRunner._warmup_and_capture
    _capture_cudagraphs = GPUModelRunner._capture_cudagraphs
    _pad_for_sequence_parallelism = staticmethod(lambda num_tokens: num_tokens)

    def __init__(self, config: Any, dispatcher_class: type = VerifyDispatcher) -> None:
        super().__init__(
            vllm_config=config,
            model_config=config.model_config,
            compilation_config=config.compilation_config,
            parallel_config=config.parallel_config,
            speculative_config=config.speculative_config,
            load_config=SimpleNamespace(use_tqdm_on_load=False),
            input_batch=SimpleNamespace(lora_id_to_lora_request={}),
            lora_config=None,
            maybe_remove_all_loras=lambda lora_config: None,
            cudagraph_dispatcher=dispatcher_class(config),
            uniform_decode_query_len=1 + K_MAX,
            device=SimpleNamespace(type="cpu"),
            made=[],
        )

    def resolve(self, backends: Any = (FLASH,)) -> None:
        """vLLM settles its graphs."""
        mode = self.compilation_config.cudagraph_mode
        verify_graphs.resolve(
            lambda self, *args: self.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1 + K_MAX),
            self,
            [backends],
        )

    def determine(self, **given: Any) -> tuple[CUDAGraphMode, Any]:
        return verify_graphs.step(
            GPUModelRunner._determine_batch_execution_and_padding,
            self,
            num_scheduled_tokens_np=None,
            use_cascade_attn=given.pop("use_cascade_attn", False),
            **given,
        )[:2]

    def step(self, rows: int, q: int, **given: Any) -> tuple[CUDAGraphMode, Any]:
        """A step in which each of `rows` has q tokens."""
        return self.determine(num_tokens=rows * q, num_reqs=rows, max_num_scheduled_tokens=q, **given)

    def _dummy_run(self, num_tokens: int, **given: Any) -> None:
        """The begin of vLLM's: its rows, its question for the key, and its check of the answer."""
        uniform, mode = given["uniform_decode"], given["cudagraph_runtime_mode"]
        q = self.uniform_decode_query_len if uniform else num_tokens
        found, desc = self.determine(
            num_tokens=num_tokens,
            num_reqs=-(-num_tokens // q),
            max_num_scheduled_tokens=q,
            force_eager=mode == NONE,
            force_uniform_decode=uniform,
            force_has_lora=given["num_active_loras"] > 0,
            force_num_active_loras=given["num_active_loras"],
        )
        assert found == mode
        if mode != NONE:
            self.made.append((mode, desc))

    def capture(self) -> None:
        """As in vLLM's capture_model."""
        for mode, descs in self.cudagraph_dispatcher.get_capture_descs():
            verify_graphs.make_all(
                Runner._capture_cudagraphs, self, batch_descriptors=descs, cudagraph_runtime_mode=mode, profiler=None
            )


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's function that makes one graph, with ours around it; nothing waits for a device."""
    from vllm.v1.worker import gpu_model_runner

    original = GPUModelRunner._warmup_and_capture
    monkeypatch.setattr(
        Runner,
        "_warmup_and_capture",
        lambda self, *args, **kwargs: verify_graphs.make_one(original, self, *args, **kwargs),
    )
    monkeypatch.setattr(gpu_model_runner, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(gpu_model_runner.torch.accelerator, "synchronize", lambda: None)


def resolved(**options: Any) -> Runner:
    runner = Runner(make_config(**options))
    runner.resolve()
    return runner


def stock(**options: Any) -> Runner:
    """The same without the plugin."""
    runner = Runner(make_config(**options), CudagraphDispatcher)
    runner.resolve()
    return runner


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_every_length_and_number_of_rows_runs_in_one_graph() -> None:
    runner = resolved()
    runner.capture()
    made = set(runner.made)
    for q, rows in product(range(1, K_MAX + 2), range(1, MAX_ROWS + 1)):
        mode, desc = runner.step(rows, q)
        if q * rows > MAX_TOKENS:
            assert mode == NONE
            continue
        assert (mode, desc) in made
        assert (mode, desc.num_tokens) == (FULL, q * desc.num_reqs)
        assert rows <= desc.num_reqs <= max(2 * rows - 1, rows)
        assert desc.num_reqs - rows < 8
    assert runner.uniform_decode_query_len == runner.cudagraph_dispatcher.uniform_decode_query_len == 1 + K_MAX


def test_each_graph_is_made_once_with_its_own_tokens_a_row_the_largest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = resolved()
    lengths = []
    dummy = Runner._dummy_run

    def noting(self: Runner, num_tokens: int, **given: Any) -> None:
        dummy(self, num_tokens, **given)
        if given["cudagraph_runtime_mode"] == FULL:
            lengths.append(self.uniform_decode_query_len)

    monkeypatch.setattr(Runner, "_dummy_run", noting)
    runner.capture()
    full = [desc for mode, desc in runner.made if mode == FULL]
    assert len(full) == len(set(full)) == sum(map(len, runner.cudagraph_dispatcher.rows.values())) == 55
    assert lengths == [desc.num_tokens // desc.num_reqs for desc in full]
    sizes = [(desc.num_tokens, desc.num_reqs) for desc in full]
    assert sizes == sorted(sizes, reverse=True)
    assert [desc for mode, desc in runner.made if mode == PIECEWISE] == [
        desc for mode, desc in captured(stock()) if mode == PIECEWISE
    ]


def captured(runner: Runner) -> list[Any]:
    runner.capture()
    return runner.made


def test_the_log_says_how_many_and_what_they_took(caplog: pytest.LogCaptureFixture) -> None:
    runner = resolved()
    with caplog.at_level(logging.INFO, logger=verify_graphs.logger.name):
        runner.capture()
    [line] = messages(caplog)
    assert line.startswith(
        "55 CUDA graphs of the target's step, for 1, 2, 3, 4, 5 tokens a row and up to 64, 64, 64, 64, 60"
    )


def test_other_steps_get_what_vllm_gives_them() -> None:
    runner, plain = resolved(), stock()
    steps: list[dict[str, Any]] = [
        {"num_tokens": 7, "num_reqs": 3, "max_num_scheduled_tokens": 3},  # rows differ
        {"num_tokens": 12, "num_reqs": 2, "max_num_scheduled_tokens": 6},  # longer than any draft
        {"num_tokens": 210, "num_reqs": 12, "max_num_scheduled_tokens": 199},  # a prompt among them
        {"num_tokens": 9, "num_reqs": 3, "max_num_scheduled_tokens": 3, "force_eager": True},
        {"num_tokens": 400, "num_reqs": 80, "max_num_scheduled_tokens": 5},  # too large
    ]
    for given in steps:
        assert runner.determine(**given) == plain.determine(**given), given
    assert runner.determine(**steps[0])[0] == PIECEWISE


def test_where_no_whole_graph_may_be_used_the_tokens_fit_the_pieces() -> None:
    """As with cascade attention in 0.26, and encoder outputs."""
    runner, plain = resolved(), stock()
    for q in (2, 5):
        for invalid, valid in (({FULL}, None), (None, {PIECEWISE, NONE})):
            found, expected = (
                each.cudagraph_dispatcher.dispatch(
                    3 * q, uniform_decode=uniform, invalid_modes=invalid, valid_modes=valid
                )
                for each, uniform in ((runner, True), (plain, False))
            )
            assert found == expected
            assert found[0] == PIECEWISE


def test_with_adapters_there_are_graphs_for_each_number_of_them() -> None:
    lora = SimpleNamespace(max_loras=2, specialize_active_lora=False)
    runner = resolved(lora=lora)
    runner.capture()
    for active in (0, 1, 2):
        mode, desc = runner.step(3, 2, force_num_active_loras=active)
        assert (mode, desc.num_reqs, desc.has_lora) == (FULL, 4, active > 0)
        assert (mode, desc) in runner.made


@pytest.mark.parametrize("mode", [NONE, PIECEWISE, FULL])
def test_another_mode_stays_as_it_is(mode: CUDAGraphMode, caplog: pytest.LogCaptureFixture) -> None:
    runner, plain = Runner(make_config(mode)), stock(mode=mode)
    with caplog.at_level(logging.INFO, logger=verify_graphs.logger.name):
        runner.resolve()
        runner.resolve()
    assert messages(caplog) == [f"the target's steps run as in vLLM: its cudagraph_mode is {mode}"]
    for q, rows in product((1, 3, 5), (1, 7)):
        assert runner.step(rows, q) == plain.step(rows, q)
    assert captured(runner) == captured(plain)


def test_switched_off_all_is_as_in_vllm(caplog: pytest.LogCaptureFixture) -> None:
    runner, plain = Runner(make_config(verify_graphs=False)), stock()
    with caplog.at_level(logging.INFO, logger=verify_graphs.logger.name):
        runner.resolve()
    assert messages(caplog) == ["the target's steps run as in vLLM: specdec.verify_graphs is false"]
    assert [runner.step(3, q) for q in range(1, 6)] == [plain.step(3, q) for q in range(1, 6)]
    assert captured(runner) == captured(plain)


def test_without_speculation_nothing_is_asked_or_said(caplog: pytest.LogCaptureFixture) -> None:
    runner, plain = Runner(make_config()), stock()
    runner.speculative_config = None
    with caplog.at_level(logging.INFO, logger=verify_graphs.logger.name):
        runner.resolve()
    assert messages(caplog) == []
    assert captured(runner) == captured(plain)


SPOILS: list[tuple[Callable[[Any], None], str]] = [
    (lambda config: setattr(config.parallel_config, "data_parallel_size", 2), "data parallel engines"),
    (lambda config: setattr(config.parallel_config, "decode_context_parallel_size", 2), "decode_context_parallel_size"),
    (lambda config: setattr(config.parallel_config, "use_ubatching", True), "microbatches"),
    (lambda config: setattr(config.compilation_config.pass_config, "enable_sp", True), "sequence parallelism"),
    (lambda config: setattr(config.model_config, "is_encoder_decoder", True), "an encoder-decoder model"),
]


@pytest.mark.parametrize("spoil, message", SPOILS)
def test_what_pads_in_its_own_way_is_left_alone(spoil: Callable[[Any], None], message: str) -> None:
    config = make_config()
    assert why_vllms(config, [[FLASH]]) is None
    spoil(config)
    assert message in str(why_vllms(config, [[FLASH]]))


def test_an_attention_that_is_not_known_is_left_alone() -> None:
    mamba = SimpleNamespace(get_name=lambda: "MAMBA2_ATTN")
    reason = why_vllms(make_config(), [[FLASH], [mamba]])
    assert reason == "attention backend MAMBA2_ATTN; known are FLASH_ATTN, TRITON_ATTN"
    runner = Runner(make_config())
    runner.resolve(backends=(mamba,))
    assert runner.cudagraph_dispatcher.rows == {}


def test_a_vllm_that_is_not_as_expected_starts_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(make_config())
    del runner.vllm_config.parallel_config.use_ubatching
    with caplog.at_level(logging.INFO, logger=verify_graphs.logger.name):
        runner.resolve()
    [line] = messages(caplog, logging.WARNING)
    assert line.startswith("the target's steps run as in vLLM: AttributeError: ")
    assert runner.step(3, 5) == stock().step(3, 5)


def test_when_graphs_cannot_be_made_vllms_own_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = resolved()
    dummy = Runner._dummy_run

    def failing(self: Runner, num_tokens: int, **given: Any) -> None:
        if given["cudagraph_runtime_mode"] == FULL and num_tokens == 4:
            raise RuntimeError("out of memory")
        dummy(self, num_tokens, **given)

    monkeypatch.setattr(Runner, "_dummy_run", failing)
    with caplog.at_level(logging.INFO, logger=verify_graphs.logger.name):
        runner.capture()
    [line] = messages(caplog, logging.WARNING)
    assert line.endswith("whole graphs for them failed (RuntimeError: out of memory)")
    plain = stock()
    assert set(captured(plain)) <= set(runner.made)
    assert [runner.step(3, q) for q in range(1, 6)] == [plain.step(3, q) for q in range(1, 6)]


def test_when_they_cannot_be_measured_vllms_own_are() -> None:
    runner = resolved()
    calls = []

    def profile(self: Runner) -> int:
        calls.append(dict(self.cudagraph_dispatcher.rows))
        if len(calls) == 1:
            raise RuntimeError("no")
        return 7

    assert verify_graphs.measure(profile, runner) == 7
    assert calls[0]
    assert calls[1] == {}
    with pytest.raises(ZeroDivisionError):
        verify_graphs.measure(lambda self: 1 // 0, runner)


def test_row_counts_and_shapes() -> None:
    assert row_counts(1) == (1,)
    assert row_counts(20) == (1, 2, 4, 8, 16, 20)
    assert row_counts(256)[-6:] == (112, 128, 160, 192, 224, 256)
    assert shapes((1, 2, 7), max_rows=8, max_tokens=6) == {1: (1, 2, 4, 6), 2: (1, 2, 3)}


def test_lengths_are_those_that_the_controller_can_ask_for() -> None:
    assert lengths_wanted(make_config()) == (1, 2, 3, 4, 5)
    assert lengths_wanted(make_config(k_max=2)) == (1, 2, 3)
    assert lengths_wanted(make_config(controller="fixed", k=1)) == (1, 2)


def test_a_key_is_vllms_with_rows_and_tokens() -> None:
    desc = verify_graphs.key(3, 8, False, 0)
    assert (desc.num_tokens, desc.num_reqs, desc.uniform) == (24, 8, True)
    assert desc != replace(desc, num_reqs=24)
