"""The fast forward of whole models against the eager one, and what happens where it cannot be used."""

import copy
import itertools
import logging
import math
import sys

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from bench.gpu_check import fast_suites
from bench.tiny_models import noisy_copy, tiny_config, tiny_model
from specdec import Engine, Request, SamplingParams
from specdec.model import CachedModel
from specdec.window import Window

pytest.importorskip("triton", reason="triton is not installed")

from specdec import fast_layers, fast_linear, fast_tilings
from specdec.fast_choices import KeptChoices
from specdec.fast_layers import side_by_side
from specdec.fast_linear import Tiling

VOCAB, ROWS, CAPACITY = 40, 3, 64
FAMILIES = ("llama", "qwen2", "qwen3")
# (start of each row, tokens fed): prefill by torch, steps, verification with a row left out, rollback, refill.
STEPS = (
    ((0, 0, 0), (18, 5, 11)),
    ((18, 5, 11), (1, 1, 1)),
    ((19, 6, 12), (5, 0, 3)),
    ((21, 4, 13), (4, 4, 4)),
    ((0, 8, 17), (9, 1, 1)),
)


def tiny(family: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> PreTrainedModel:
    """Two query heads a key head, of 16 dimensions; Qwen3 has two such groups, Qwen2 biases."""
    hidden = 64 if family == "qwen3" else 32
    return tiny_model(family, vocab=VOCAB, layers=layers, hidden=hidden, head_dim=16, dtype=dtype)


def pair(model: PreTrainedModel, device: str) -> tuple[CachedModel, CachedModel]:
    """(eager, fast) on one set of weights."""
    model = model.to(device)
    eager = CachedModel(model, num_rows=ROWS, capacity=CAPACITY)
    quick = CachedModel(model, num_rows=ROWS, capacity=CAPACITY, fast=True)
    assert quick.reads_live_only
    assert not eager.reads_live_only
    return eager, quick


@torch.inference_mode()
def largest_errors(eager: CachedModel, quick: CachedModel) -> list[float]:
    """Relative error of the logits of real tokens, step by step."""
    errors = []
    for starts, counts in STEPS:
        q = max(counts)
        start_B, count_B = torch.tensor([starts, counts], device=eager.device)
        tokens_Bq = (5 * start_B.unsqueeze(1) + 3 * torch.arange(q, device=eager.device)) % VOCAB
        logits = [
            m.forward(tokens_Bq, m.cache.plan(start_B, count_B, q, slice(0, ROWS), None), q) for m in (eager, quick)
        ]
        real_Bq = torch.arange(q, device=eager.device) < count_B.unsqueeze(1)
        expected, got = (each[real_Bq].double() for each in logits)
        errors.append(float((got - expected).norm() / expected.norm()))
    return errors


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen3", 1), *(pytest.param(family, 2, marks=pytest.mark.slow) for family in FAMILIES)]
)
def test_equals_the_eager_forward(kernel_device, family, layers) -> None:
    errors = largest_errors(*pair(tiny(family, layers=layers), kernel_device))
    assert max(errors) < 5e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_half_precision_it_rounds_where_the_modules_do(kernel_device, family) -> None:
    """A difference of one rounding grows through two layers to 1 or 2 % in bfloat16, to an eighth of that in float16,
    which the interpreter rounds right."""
    dtype, tolerance = (torch.bfloat16, 0.03) if kernel_device == "cuda" else (torch.float16, 0.004)
    errors = largest_errors(*pair(tiny(family, dtype), kernel_device))
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
def test_products_that_take_in_norms_and_additions_change_nothing(kernel_device, monkeypatch, dtype) -> None:
    """One model both ways: one row, and a few of which the last columns are kept; early states too."""
    monkeypatch.setattr("specdec.fast._check_deviation", lambda *args: None)
    quick = CachedModel(tiny("qwen2", dtype).to(kernel_device), num_rows=ROWS, capacity=CAPACITY, fast=True)
    decoder = quick._fast
    fast_tilings.untimed([decoder.head, *(p for x in decoder.layers for p in (x.qkv, x.out, x.gate_up, x.down))])
    decoder._fused_classes = True, True, True, False  # whatever is fastest on this GPU
    for rows, q, keep, layers in ((1, 1, 1, 2), (2, 3, 2, 2), (2, 2, 1, 1), (2, 9, 1, 2)):
        tokens_Bq = torch.arange(rows * q, device=kernel_device).view(rows, q)
        zero_B = torch.zeros(rows, dtype=torch.int64, device=kernel_device)
        outs = []
        for fused in (True, False):
            decoder.fused = fused
            with torch.inference_mode(), monkeypatch.context() as patch:
                plan = quick.cache.plan(zero_B, zero_B + q, q, slice(0, rows), None)
                if fused:
                    patch.setattr(fast_layers, "add_norm", None)
                    patch.setattr(functional, "linear", None)
                whole = layers == len(decoder.layers)
                arguments = (tokens_Bq, quick.cache, plan, keep)
                outs.append(decoder.forward(*arguments) if whole else decoder.states(*arguments, layers))
        error = (outs[0].double() - outs[1].double()).norm() / outs[1].double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 4e-3)


def test_a_head_may_have_other_rows_than_the_layers(kernel_device, monkeypatch) -> None:
    """Of 18 tokens two are kept, which no tiling may be known for beside a residual stream."""
    monkeypatch.setattr("specdec.fast._check_deviation", lambda *args: None)
    quick = CachedModel(tiny("llama", layers=1).to(kernel_device), num_rows=2, capacity=CAPACITY, fast=True)
    decoder, layer = quick._fast, quick._fast.layers[0]
    fast_tilings.untimed([decoder.head, layer.qkv, layer.out, layer.gate_up, layer.down])
    decoder._fused_classes, decoder.head.fused = (True, False, True, False), (None,) * 4
    tokens_Bq = torch.arange(18, device=kernel_device).view(2, 9)
    zero_B = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    outs = []
    for decoder.fused in (True, False):
        plan = quick.cache.plan(zero_B, zero_B + 9, 9, slice(0, 2), None)
        outs.append(decoder.forward(tokens_Bq, quick.cache, plan, 1))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


def test_tilings_of_a_whole_model_are_timed_once(kernel_device, monkeypatch, tmp_path) -> None:
    """As on a GPU, with a clock that finds each run slower than the last one: what comes first is best. Another process
    finds them in a file; one that cannot be read is made anew."""
    tried = [Tiling(block_n=n, block_k=n, splits=2, warps=4, stages=1) for n in (32, 64)]
    clock = itertools.count(1)
    monkeypatch.setattr(fast_tilings, "candidates", lambda outputs, inputs: tried)
    monkeypatch.setattr(fast_layers, "graph_seconds", lambda run: next(clock))
    monkeypatch.setattr("specdec.fast._check_deviation", lambda *args: None)
    monkeypatch.setattr(fast_layers, "kept_for", lambda device: KeptChoices(tmp_path / "new" / "kept.json"))
    real = fast_layers.FastDecoder._choose_tilings

    def as_on_a_gpu(decoder: fast_layers.FastDecoder) -> tuple[bool, ...]:
        with monkeypatch.context() as patch:
            for name, value in (("INTERPRETED", False), ("_TILINGS", tilings), ("_FUSED_TILINGS", fused)):
                patch.setattr(fast_layers, name, value)
            return real(decoder)

    monkeypatch.setattr(fast_layers.FastDecoder, "_choose_tilings", as_on_a_gpu)
    tilings, fused, timed = {}, {}, []
    expected = tried[0], tried[0], None, None
    for kept in (None, None, "kept", "spoiled"):
        if kept is not None:
            tilings.clear()
            fused.clear()
        if kept == "spoiled":
            (tmp_path / "new" / "kept.json").write_text("{")
        model = tiny("llama", torch.float16, layers=1).to(kernel_device)
        decoder = CachedModel(model, num_rows=1, capacity=16, fast=True)._fast
        layer = decoder.layers[0]
        assert decoder.fused
        assert [p.fused for p in (layer.qkv, layer.out, layer.gate_up, layer.down, decoder.head)] == [expected] * 5
        timed.append(next(clock))
    assert timed[1] == timed[0] + 1
    assert timed[2] == timed[1] + 1
    assert timed[3] == timed[2] + timed[0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept.json"]
    assert all(decoder._forward_to_time(3, fused)().shape == (3, VOCAB) for fused in (True, False))


def test_without_a_kernel_that_fits_the_products_stay_as_they_are(kernel_device, monkeypatch) -> None:
    """And with more tokens than the kernel takes."""
    monkeypatch.setattr(fast_layers.FastDecoder, "_choose_tilings", lambda decoder: (False,) * 4)
    errors = largest_errors(*pair(tiny("llama", layers=1), kernel_device))
    assert max(errors) < 5e-5, errors


def test_windows_of_the_layers_are_kept(kernel_device) -> None:
    """Mistral tells its window to the attention function only; 32 tokens, as the self-check has, would not show it."""
    config = MistralConfig(**tiny_config("llama", vocab=VOCAB, layers=1, hidden=32, head_dim=16).to_dict())
    config.sliding_window = 7
    torch.manual_seed(0)
    errors = largest_errors(*pair(MistralForCausalLM(config).eval(), kernel_device))
    assert max(errors) < 5e-5, errors


def test_stale_slots_cannot_be_seen(kernel_device) -> None:
    """All slots behind the rows' lengths hold NaN, the trash slot too; live is the whole capacity."""
    eager, quick = pair(tiny("qwen3", layers=1), kernel_device)
    with torch.inference_mode():
        for model in (eager, quick):
            zero_B = torch.zeros(ROWS, dtype=torch.int64, device=kernel_device)
            tokens = torch.arange(15, device=kernel_device).view(ROWS, 5)
            model.forward(tokens, model.cache.plan(zero_B, zero_B + 5, 5, slice(0, ROWS), 5), 1)
        for buffer in (b for layer in quick.cache.layers.values() for b in layer):
            buffer[:, :, 5:] = math.nan
        outs = []
        for model in (eager, quick):
            plan = model.cache.plan(zero_B + 5, zero_B + 2, 2, slice(0, ROWS), None)
            outs.append(model.forward(tokens[:, :2], plan, 2))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)


def test_nothing_is_read_back_from_the_device(kernel_device, monkeypatch) -> None:
    """Whatever makes a Python value of a tensor, or a shape of its contents, would break a capture."""
    refused = ("aten.item", "_local_scalar_dense", "nonzero", "masked_select", "aten.equal")

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert not any(name in str(func) for name in refused), func
            return func(*args, **(kwargs or {}))

    _, quick = pair(tiny("qwen2", layers=1), kernel_device)
    lengths_B = torch.tensor([5, 0, 9], device=kernel_device)
    tokens = torch.ones(ROWS, 3, dtype=torch.int64, device=kernel_device)
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # reads memory directly
    with torch.inference_mode(), Refuse():
        quick.forward(tokens, quick.cache.plan(lengths_B, lengths_B.sign() * 3, 3, slice(0, ROWS), None), 3)


def test_weights_are_fused_without_a_second_copy() -> None:
    """The parameters become views with their values; a second engine on the model finds them as they are."""
    model = tiny("qwen2")
    attention = model.model.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    before = [linear.weight.clone() for linear in linears]
    fused = side_by_side([linear.weight for linear in linears])
    assert torch.equal(fused, torch.cat(before))
    assert all(torch.equal(linear.weight, old) for linear, old in zip(linears, before, strict=True))
    with torch.no_grad():
        attention.k_proj.weight.zero_()
    assert (fused[32:48] == 0).all()
    again = side_by_side([linear.weight for linear in linears])
    assert again.data_ptr() == fused.data_ptr()
    assert again.shape == fused.shape


def test_a_fused_model_still_trains_and_saves(kernel_device, tmp_path) -> None:
    model = tiny("llama").to(kernel_device)
    reference = copy.deepcopy(model)
    pair(model, kernel_device)
    model.requires_grad_(True)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64, device=kernel_device)).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in reference.named_parameters():
        assert torch.equal(saved.get_parameter(name), weight.cpu()), name


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_greedy_texts_are_those_of_the_eager_engine(kernel_device, family) -> None:
    target = tiny(family, layers=1)
    draft = noisy_copy(target, noise=0.1, seed=3).to(kernel_device)
    target = target.to(kernel_device)
    prompts = [[(5 * i + 11 * n + 3) % VOCAB for i in range(3 + 9 * n)] for n in range(3)]
    requests = [Request(prompt_ids=p, params=SamplingParams(temperature=0.0, max_tokens=4)) for p in prompts]
    texts, accepted = [], []
    variants = [(False, False), (True, False)] + ([(True, True)] if kernel_device == "cuda" else [])
    for fast, graphs in variants:
        engine = Engine(target, draft, k=3, num_slots=2, capacity=64, fast=fast, graphs=graphs)
        assert engine._target.reads_live_only == engine._drafter.model.reads_live_only == fast
        texts.append([done.token_ids for done in engine.generate(requests)])
        accepted.append(sum(engine.stats.accepted))
        assert engine.captured is None or engine.captured.failed is None
    assert all(text == texts[0] for text in texts)
    assert all(count == accepted[0] > 0 for count in accepted)


@pytest.mark.slow
def test_gate_g1_has_models_that_the_kernels_take(kernel_device) -> None:
    for suite in fast_suites():
        target = CachedModel(suite.target.to(kernel_device), num_rows=1, capacity=16, fast=True)
        draft = CachedModel(suite.draft.to(kernel_device), num_rows=1, capacity=16, fast=True)
        assert target.reads_live_only
        assert draft.reads_live_only


def refusal(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why this model stays with the eager forward; its logits are the eager ones."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="specdec"):
        quick = CachedModel(model, num_rows=ROWS, capacity=CAPACITY, fast=True)
    assert not quick.reads_live_only
    assert largest_errors(CachedModel(model, num_rows=ROWS, capacity=CAPACITY), quick) == [0.0] * len(STEPS)
    [record] = [r for r in caplog.records if r.name.startswith("specdec")]
    return record.getMessage()


def test_why_a_model_stays_eager(kernel_device, caplog) -> None:
    sizes = {"vocab": VOCAB, "layers": 1, "hidden": 32}
    config = GraniteConfig(**tiny_config("llama", **sizes, head_dim=16).to_dict())
    config.residual_multiplier = 0.5  # in the layers' forward, not among their parts
    torch.manual_seed(0)
    assert "differ by" in refusal(GraniteForCausalLM(config).eval().to(kernel_device), caplog)
    cases = {
        "activation is None": tiny_model("gemma3", **sizes, head_dim=16, dtype=torch.float32),
        "dtype is torch.float64": tiny("llama", torch.float64),
        "heads have 8 dimensions": tiny_model("llama", **sizes, head_dim=8, dtype=torch.float32),
    }
    for expected, model in cases.items():
        assert expected in refusal(model.to(kernel_device), caplog)


def test_a_cache_with_a_window_stays_eager(kernel_device, caplog) -> None:
    window = Window(recent=8, sinks=2, margin=4)
    with caplog.at_level(logging.INFO, logger="specdec"):
        model = CachedModel(tiny("llama").to(kernel_device), num_rows=1, capacity=0, window=window, fast=True)
    assert not model.reads_live_only
    assert "its cache is a WindowCache" in caplog.text


def test_a_wrong_kernel_is_found_when_the_model_is_loaded(kernel_device, caplog, monkeypatch) -> None:
    real = fast_layers.attend
    for module, name, wrong in (
        (fast_linear, "silu_mul", lambda x: x[:, : x.shape[1] // 2].contiguous()),
        (fast_layers, "attend", lambda *args, **options: real(*args, **{**options, "scale": 2.0})),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            assert "differ by" in refusal(tiny("qwen3").to(kernel_device), caplog)


def test_without_triton_or_its_device(caplog, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        for name in ("kernels", "layers", "attention", "attention_kernels", "linear", "product", "residual", "tilings"):
            patch.delitem(sys.modules, f"specdec.fast_{name}")
        patch.setitem(sys.modules, "triton", None)
        assert "triton is not installed" in refusal(tiny("llama"), caplog)
    monkeypatch.setattr("specdec.fast_kernels.INTERPRETED", False)
    assert "on a cpu" in refusal(tiny("llama"), caplog)
