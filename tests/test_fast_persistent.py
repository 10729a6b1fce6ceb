"""All layers in one launch against a launch each, and on a CPU against the model; and that the kernel compiles, and
fits into shared memory."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config

from bench.shapes import random_model

pytest.importorskip("triton", reason="triton is not installed")

from specdec import fast_persistent
from specdec.fast_layers import Layer
from specdec.fast_linear import Scratch
from specdec.fast_persistent import PersistentLayers, Shape, _check
from specdec.fast_residual import Residual
from specdec.fast_tilings import graph_seconds
from specdec.model import CachedModel
from specdec.nvrtc import addresses

ROWS, CAPACITY, VOCAB, LAYERS = 16, 200, 1000, 2
SHARED = 232_448  # bytes a block may have on compute capability 9.0
QWEN3_06B = Shape(hidden=1024, heads=16, kv_heads=8, width=3072, layers=28, blocks=132)
QWEN3_17B = Shape(hidden=2048, heads=16, kv_heads=8, width=6144, layers=28, blocks=132)
# (where each row starts, how many tokens it is fed): ragged rows, a row that is fed nothing, one that begins before its
# text, longer than one share of the context, and as many tokens as one launch takes.
PLANS = (
    ((150,), (1,)),
    ((150,), (2,)),
    ((0, -1), (2, 2)),
    ((5, 180, 0), (1, 0, 1)),
    ((9, 30, 190, 64), (2, 2, 2, 0)),
    (tuple(range(3, 195, 12)), (1,) * 16),
    (tuple(range(3, 195, 24)), (2,) * 8),
)


def model() -> PreTrainedModel:
    """Layers of the sizes of Qwen3-0.6B."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=512,
    )
    return random_model(config, "cuda", torch.bfloat16, seed=0)


@pytest.fixture(scope="module")
def quick() -> CachedModel:
    made = CachedModel(model(), num_rows=ROWS, capacity=CAPACITY, fast=True, tuned=False)
    assert made._fast is not None
    made._fast.persistent = PersistentLayers(made._fast.layers, made._fast.angles_CD)
    return made


@torch.inference_mode()
def run(quick: CachedModel, starts: tuple[int, ...], news: tuple[int, ...], *, one: bool, graph: bool = False):
    """(logits of real tokens, caches) after random keys and values; one: in one launch."""
    decoder, cache = quick._fast, quick.cache
    persistent, decoder.persistent = decoder.persistent, decoder.persistent if one else None
    generator = torch.Generator("cuda").manual_seed(1)
    for tensors in cache.layers.values():
        for tensor in tensors:
            tensor.normal_(generator=generator)
    B, q = len(starts), max(news)
    tokens_Bq = torch.arange(B * q, device="cuda").view(B, q) % VOCAB
    start_B, new_B = torch.tensor([starts, news], device="cuda")
    plan = cache.plan(start_B, new_B, q, slice(0, B), None)
    assert decoder._in_one(cache, plan) == one
    try:
        if graph:
            graph_seconds(lambda: decoder.forward(tokens_Bq, cache, plan, 1), repeats=3)
        logits_BqV = decoder.forward(tokens_Bq, cache, plan, q)
    finally:
        decoder.persistent = persistent
    real_Bq = plan.slots_Bq != CAPACITY
    assert torch.isfinite(logits_BqV).all()
    return logits_BqV[real_Bq].clone(), [t[..., :CAPACITY, :].clone() for pair in cache.layers.values() for t in pair]


class KernelOnCpu:
    """In the place of specdec.nvrtc.Kernel: the same text by a C++ compiler, each thread a fiber."""

    def __init__(self, source: str, name: str, options: list[str], *, shared_bytes: int) -> None:
        defines = [option[2:].replace("=", " ") for option in options if option.startswith("-D")]
        shim = f'#include "{Path(__file__).with_name("gpu_on_a_cpu.cpp")}"\n'
        text = shim + "".join(f"#define {define}\n" for define in defines) + source + shim
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernel.so"
            command = ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
            done = subprocess.run(command, input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:3000]
            self.library = ctypes.CDLL(str(library))
        self.library.shared_bytes.restype = ctypes.c_ulonglong
        assert self.library.shared_bytes() <= shared_bytes

    def launch(self, blocks: int, threads: int, arguments: list) -> None:
        places, _values = addresses(arguments)
        self.library.launch(blocks, threads, places)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[tuple[CachedModel, PersistentLayers]]:
    """A model of two layers with its own cache, and its layers in one launch of two blocks."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = Qwen3Config(vocab_size=50, num_hidden_layers=2, head_dim=128, max_position_embeddings=512, **sizes)
    eager = CachedModel(random_model(config, "cpu", torch.bfloat16, seed=0), num_rows=3, capacity=CAPACITY)
    inner = eager.module.model
    layers = [Layer.of(module, None, Scratch(torch.device("cpu"))) for module in inner.layers]
    angles = inner.rotary_emb(torch.empty(1, dtype=torch.bfloat16), torch.arange(CAPACITY + 1).unsqueeze(0))
    properties = SimpleNamespace(multi_processor_count=2, shared_memory_per_block_optin=3_000_000, major=9, minor=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_persistent, "Kernel", KernelOnCpu)
        with patch.context() as device:
            device.setattr(torch.cuda, "get_device_properties", lambda device: properties)
            device.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            persistent = PersistentLayers(layers, (angles[0][0].contiguous(), angles[1][0].contiguous()))
        persistent._shares_of = lambda B: 3  # more shares than blocks, which come last by turns
        yield eager, persistent


@pytest.mark.parametrize(
    ("starts", "news"),
    [
        ((0, -1, 130), (2, 2, 2)),
        pytest.param((5, 180, 64), (1, 1, 1), marks=pytest.mark.slow),
        pytest.param((150,), (1,), marks=pytest.mark.slow),
        pytest.param((130,), (2,), marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_on_a_cpu_the_kernel_computes_the_models_layers(on_cpu, starts, news) -> None:
    eager, persistent = on_cpu
    cache, inner = eager.cache, eager.module.model
    generator = torch.Generator().manual_seed(1)
    before = [[torch.randn(t.shape, generator=generator).to(t) for t in pair] for pair in cache.layers.values()]
    B, q = len(starts), max(news)
    tokens_Bq = torch.arange(B * q).view(B, q) + 3
    outs = []
    for one in (False, True):
        for pair, values in zip(cache.layers.values(), before, strict=True):
            for tensor, value in zip(pair, values, strict=True):
                tensor.copy_(value)
        plan = cache.plan(torch.tensor(starts), torch.tensor(news), q, slice(0, B), None)
        if one:
            for _ in range(2):  # the second launch finds counters as the first one left them
                values_TE = inner.embed_tokens(tokens_Bq.flatten())
                residual = Residual(values_TE=values_TE, squares_TP=torch.zeros(B * q, 1))
                persistent.stream(residual, cache, plan)
            states = inner.norm(residual.values_TE).view(B, q, -1)
            squares_T = residual.values_TE.float().square().sum(1)
            torch.testing.assert_close(residual.squares_TP[:, 0], squares_T, rtol=1e-5, atol=0)
        else:
            states = eager.module(**cache.inputs(tokens_Bq, plan), output_hidden_states=True).hidden_states[-1]
        real_Bq = plan.slots_Bq != CAPACITY
        kept = [tensor[:B, :, :CAPACITY].clone() for pair in cache.layers.values() for tensor in pair]
        outs.append((states[real_Bq], kept))
    assert error(outs[1][0], outs[0][0]) < 0.02
    for got, expected in zip(outs[1][1], outs[0][1], strict=True):
        assert error(got, expected) < 2e-3
        assert (got != expected).float().mean() < 0.01


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("starts", "news"), PLANS)
def test_one_launch_gives_what_a_launch_each_gives(quick, starts, news) -> None:
    logits, caches = run(quick, starts, news, one=True)
    expected, others = run(quick, starts, news, one=False)
    assert error(logits, expected) < 0.03
    for got, other in zip(caches, others, strict=True):
        assert error(got, other) < 2e-3
        assert (got != other).float().mean() < 0.01  # nothing is written where there is no new token
    again, _ = run(quick, starts, news, one=True, graph=True)
    assert torch.equal(again, logits)


@pytest.mark.gpu
def test_many_tokens_or_queries_stay_launches(quick) -> None:
    cache = quick.cache
    for B, q in ((16, 2), (1, 3)):
        zero_B = torch.zeros(B, dtype=torch.int64, device="cuda")
        plan = cache.plan(zero_B, zero_B + q, q, slice(0, B), None)
        assert not quick._fast._in_one(cache, plan)


@pytest.mark.parametrize(("tokens", "q"), [(1, 1), (4, 2), (16, 1), (16, 2)])
def test_the_kernel_compiles_and_fits(tmp_path: Path, tokens: int, q: int) -> None:
    """By CUDA's compiler, where there is one: what is reckoned for shared memory is enough for the struct."""
    slots = QWEN3_06B.slots(tokens, q, SHARED)
    assert slots >= QWEN3_06B.least_slots()
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    source = tmp_path / "kernel.cu"
    kernel = Path(fast_persistent.__file__).with_suffix(".cu").read_text(encoding="utf-8")
    source.write_text(f'{kernel}\nstatic_assert(sizeof(Shared) <= {SHARED}, "room");\n', encoding="utf-8")
    options = fast_persistent.options_of(QWEN3_06B, tokens, q, slots)
    command = ["nvcc", "-arch=sm_90", "-cubin", *options, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_that_the_kernel_is_not_for_are_refused() -> None:
    with pytest.raises(ValueError, match=r"capability is 8\.0"):
        _check([], QWEN3_06B, (8, 0))
    properties = SimpleNamespace(shared_memory_per_block_optin=SHARED, major=9, minor=0)
    with pytest.raises(ValueError, match="need 24 slots"):
        fast_persistent._kernel(QWEN3_17B, 1, 1, properties)
