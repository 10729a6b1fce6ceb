"""The target's step in one CUDA graph, whatever the draft length.

vLLM keeps whole graphs of decoding steps for one number of tokens a row only, 1 + num_speculative_tokens. A step with
fewer drafts, or none, runs in the graphs of its pieces with attention launched between them. Here there are whole
graphs for every number of tokens a row that the controller can ask for, 1 to k_max + 1, and for each of those for some
numbers of rows. A step takes the next larger number of rows: the rows that it lacks have no text and write nowhere, as
vLLM's own padding. Attention is captured and replayed with the same tokens a row, so that a kernel chosen by it fits.

vLLM asks its dispatcher for a key, (tokens, rows), and looks the graph up by it: (8, 8) is eight rows without drafts,
(8, 2) two with three each. So only the keys differ, and which of them a step gets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from vllm_draft_spec.drafter import RUNNER
from vllm_draft_spec.memory import GIB
from vllm_draft_spec.scheduler import why_not
from vllm_draft_spec.settings import SECTION, read_settings
from vllm_draft_spec.versions import Anchor

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
DISPATCHER = Anchor(module=RUNNER, name="CudagraphDispatcher", owner="vllm.v1.cudagraph_dispatcher")
RESOLVE = Anchor(
    module=RUNNER, name="GPUModelRunner._check_and_update_cudagraph_mode", parameters=("attention_backends",)
)
STEP = Anchor(
    module=RUNNER,
    name="GPUModelRunner._determine_batch_execution_and_padding",
    parameters=("num_tokens", "num_reqs", "max_num_scheduled_tokens"),
)
ONE = Anchor(module=RUNNER, name="GPUModelRunner._warmup_and_capture", parameters=("desc",))
ALL = Anchor(
    module=RUNNER,
    name="GPUModelRunner._capture_cudagraphs",
    parameters=("batch_descriptors", "cudagraph_runtime_mode"),
)
MEASURE = Anchor(module=RUNNER, name="GPUModelRunner.profile_cudagraph_memory")
ANCHORS = (DISPATCHER, RESOLVE, STEP, ONE, ALL, MEASURE)
OPTIONAL = True  # without it steps are slower and nothing else

# Their kernels take what differs between two steps of a shape from the device. Others plan on the host for one number
# of tokens a row (flashinfer, mamba), or have not been read.
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1024, 32))


def row_counts(most: int) -> tuple[int, ...]:
    """Up to `most`, which is the last. A larger number than asked for costs its tokens in every layer but attention:
    little where the weights' reading is what takes time, which it is with few rows."""
    return (*(count for count in ROWS if count < most), most)


def shapes(lengths: Sequence[int], *, max_rows: int, max_tokens: int) -> dict[int, tuple[int, ...]]:
    """By tokens a row the numbers of rows, of which each has at most max_tokens tokens."""
    return {q: row_counts(min(max_rows, max_tokens // q)) for q in lengths if q <= max_tokens}


class VerifyDispatcher(CudagraphDispatcher):
    """vLLM's, in its place in the runner. wanted: the tokens a row for which there shall be graphs. rows: by tokens a
    row the numbers of rows for which there are; empty where all is as in vLLM. How many tokens a row the step has that
    is asked for is vLLM's attribute uniform_decode_query_len, which is set for the time of the asking."""

    cudagraph_keys: dict[CUDAGraphMode, set[BatchDescriptor]]

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.wanted: tuple[int, ...] = ()
        self.rows: Mapping[int, tuple[int, ...]] = {}
        self._said: set[str] = set()

    def say_once(self, level: int, text: str) -> None:
        """vLLM comes here twice: to measure, and then for good."""
        if text not in self._said:
            self._said.add(text)
            logger.log(level, "%s", text)

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        self.rows = {}
        super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)
        if not self.wanted:
            return
        if not (cudagraph_mode.separate_routine() and cudagraph_mode.decode_mode() == CUDAGraphMode.FULL):
            self.say_once(logging.INFO, f"the target's steps run as in vLLM: its cudagraph_mode is {cudagraph_mode}")
            return
        most = self.vllm_config.scheduler_config.max_num_seqs
        rows = shapes(self.wanted, max_rows=most, max_tokens=self.compilation_config.max_cudagraph_capture_size)
        self.cudagraph_keys[CUDAGraphMode.FULL] = {
            key(q, count, num_loras > 0, num_loras)
            for q in rows
            for count, num_loras in product(rows[q], self._get_lora_cases())
        }
        self.rows = rows

    def give_up(self, error: Exception) -> None:
        """Back to vLLM's own keys."""
        text = f"the target's steps run as in vLLM; whole graphs for them failed ({type(error).__name__}: {error})"
        self.say_once(logging.WARNING, text)
        self.wanted = ()
        for keys in self.cudagraph_keys.values():
            keys.clear()
        self.initialize_cudagraph_keys(self.cudagraph_mode, self.uniform_decode_query_len)

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: Any = None,
        invalid_modes: Any = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """Where a whole graph may not be used (cascade attention), the tokens are padded for the graphs of pieces."""
        if self.rows and uniform_decode:
            full = CUDAGraphMode.FULL
            uniform_decode = full in (valid_modes or (full,)) and full not in (invalid_modes or ())
        return super().dispatch(num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes, invalid_modes)

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """In the same order on all ranks, also where two have as many tokens."""
        ordered = super().get_capture_descs()
        for _, descs in ordered:
            descs.sort(key=lambda desc: (desc.num_tokens, desc.num_active_loras, desc.num_reqs or 0), reverse=True)
        return ordered

    def _create_padded_batch_descriptor(
        self, num_tokens: int, uniform_decode: bool, has_lora: bool, num_active_loras: int = 0
    ) -> BatchDescriptor:
        if not (self.rows and uniform_decode):
            return super()._create_padded_batch_descriptor(num_tokens, uniform_decode, has_lora, num_active_loras)
        q = self.uniform_decode_query_len
        count = next((count for count in self.rows.get(q, ()) if count * q >= num_tokens), None)
        if count is None:
            return super()._create_padded_batch_descriptor(num_tokens, False, has_lora, num_active_loras)
        return key(q, count, has_lora, num_active_loras)


def key(q: int, rows: int, has_lora: bool, num_active_loras: int) -> BatchDescriptor:
    return BatchDescriptor(
        num_tokens=q * rows, num_reqs=rows, uniform=True, has_lora=has_lora, num_active_loras=num_active_loras
    )


@contextmanager
def asking_for(runner: Any, q: int) -> Iterator[None]:
    """Inside, a decoding step of the runner is one of q tokens a row."""
    dispatcher = runner.cudagraph_dispatcher
    before = runner.uniform_decode_query_len, dispatcher.uniform_decode_query_len
    runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = q
    try:
        yield
    finally:
        runner.uniform_decode_query_len, dispatcher.uniform_decode_query_len = before


def lengths_wanted(vllm_config: Any) -> tuple[int, ...]:
    """Tokens a row of the steps that the plugin's scheduler will ask for."""
    settings = read_settings(vllm_config.additional_config, vllm_config.speculative_config.num_speculative_tokens)
    most = settings.k + 1 if settings.controller == "fixed" else settings.k_max + 1
    return tuple(range(1, most + 1))


def why_vllms(vllm_config: Any, attention_backends: Sequence[Any]) -> str | None:
    """Why the target's steps should run as in vLLM, or None. attention_backends: its layers', one set for each group of
    the KV cache."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    names = {backend.get_name() for group in attention_backends for backend in group}
    settings = read_settings(vllm_config.additional_config, speculative.num_speculative_tokens)
    if not settings.verify_graphs:
        return f"{SECTION}.verify_graphs is false"
    fixed = why_not(vllm_config)
    if fixed is not None:
        return f"draft lengths are not chosen ({fixed})"
    if not names <= set(BACKENDS):
        return f"attention backend {', '.join(sorted(names - set(BACKENDS)))}; known are {', '.join(BACKENDS)}"
    for wrong, what in (
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode_context_parallel_size"),
        (parallel.use_ubatching, "microbatches"),
        (getattr(vllm_config.compilation_config.pass_config, "enable_sp", False), "sequence parallelism"),
        (vllm_config.model_config.is_encoder_decoder, "an encoder-decoder model"),
    ):
        if wrong:
            return f"{what} pads them in its own way"
    return None


def resolve(original: Callable[..., Any], self: Any, attention_backends: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM settles which graphs there will be."""
    dispatcher = self.cudagraph_dispatcher
    if self.speculative_config is None or not isinstance(dispatcher, VerifyDispatcher):
        return original(self, attention_backends, *args, **kwargs)
    try:
        reason, level = why_vllms(self.vllm_config, attention_backends), logging.INFO
    except Exception as error:  # something is not as in the versions that were read; vLLM itself may run all the same
        reason, level = f"{type(error).__name__}: {error}", logging.WARNING
    if reason is not None:
        dispatcher.say_once(level, f"the target's steps run as in vLLM: {reason}")
    dispatcher.wanted = lengths_wanted(self.vllm_config) if reason is None else ()
    return original(self, attention_backends, *args, **kwargs)


def step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Which graph a step gets."""
    q = kwargs.get("max_num_scheduled_tokens", 0)
    if q not in getattr(self.cudagraph_dispatcher, "rows", ()):
        return original(self, *args, **kwargs)
    with asking_for(self, q):
        return original(self, *args, **kwargs)


def make_one(original: Callable[..., Any], self: Any, desc: BatchDescriptor, *args: Any, **kwargs: Any) -> Any:
    """A graph is made, by a step of zeros that has the graph's shape."""
    if not (getattr(self.cudagraph_dispatcher, "rows", None) and desc.uniform):
        return original(self, desc, *args, **kwargs)
    with asking_for(self, desc.num_tokens // desc.num_reqs):
        return original(self, desc, *args, **kwargs)


def make_all(
    original: Callable[..., Any], self: Any, *, batch_descriptors: Any, cudagraph_runtime_mode: Any, **kwargs: Any
) -> None:
    """All graphs of a mode are made. Where ours cannot be, vLLM's are."""
    dispatcher, full = self.cudagraph_dispatcher, cudagraph_runtime_mode == CUDAGraphMode.FULL
    kwargs["cudagraph_runtime_mode"] = cudagraph_runtime_mode
    if not (full and getattr(dispatcher, "rows", None)):
        original(self, batch_descriptors=batch_descriptors, **kwargs)
        return
    began, free = time.perf_counter(), free_bytes(self.device)
    try:
        original(self, batch_descriptors=batch_descriptors, **kwargs)
    except Exception as error:
        dispatcher.give_up(error)
        own = dict(dispatcher.get_capture_descs()).get(CUDAGraphMode.FULL, [])
        original(self, batch_descriptors=own, **kwargs)
        return
    logger.info(
        "%d CUDA graphs of the target's step, for %s tokens a row and up to %s rows, made in %.1f s, %.2f GiB",
        len(batch_descriptors),
        ", ".join(map(str, dispatcher.rows)),
        ", ".join(str(counts[-1]) for counts in dispatcher.rows.values()),
        time.perf_counter() - began,
        (free - free_bytes(self.device)) / GIB,
    )


def measure(original: Callable[..., int], self: Any) -> int:
    """vLLM makes some graphs to know what memory all of them will take."""
    dispatcher = self.cudagraph_dispatcher
    try:
        return original(self)
    except Exception as error:
        if not getattr(dispatcher, "wanted", None):
            raise
        dispatcher.give_up(error)
        return original(self)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def install() -> None:
    DISPATCHER.replace(VerifyDispatcher)
    for anchor, around in ((RESOLVE, resolve), (STEP, step), (ONE, make_one), (ALL, make_all), (MEASURE, measure)):
        anchor.wrap(around)
