"""A Hugging Face decoder with the engine's cache and attention under it."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from specdec.attention import NAME
from specdec.fast import fast_decoder
from specdec.kvcache import Plan, RaggedCache
from specdec.window import Window, WindowCache

# Two ways to compute one forward: rounding differs, a missing feature (a bias, a sink, another mask) shows. In half
# precision rounding grows with depth (measured on SmolLM2-135M in bfloat16: 0.007 after two layers, 0.25 at the
# logits, transformers' own eager against its own sdpa), so the comparison is made early there.
_SELF_CHECK_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


class CachedModel:
    """One model and its ragged cache for `num_rows` rows of `capacity` tokens; with a `window`, of any length.

    Works on a private copy of the module tree that shares the weights: the caller's model and config, which hold
    the choice of attention, stay as they are. Raises ValueError for an architecture whose attention or cache
    cannot be replaced.

    fast: use the Triton kernels of specdec.fast_layers (Llama and Qwen types; needs triton and a CUDA device). They are
    compared with the eager forward here, and where they cannot be used or differ, one line in the log says so (as a
    warning where they were asked for) and the eager forward stays. The parameters of the caller's model become views of
    fused weights of the same values. None: wherever they can be used.

    tuned: time the kernels for products of a few rows; False where forwards of so few will hardly occur.
    fast: what was asked for; reads_live_only: whether it is in use, so that attention reads each row's own tokens,
    however many slots the plan allows (`Plan.live`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_rows: int,
        capacity: int,
        window: Window | None = None,
        fast: bool | None = False,
        tuned: bool = True,
    ) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions = max_positions_of(self.config)
        self.dtype, self.device = model.dtype, model.device
        self.module = private_copy(model, NAME)
        fuse_norms(self.module)
        shapes = _probe_layers(self.module, self.device)
        self._check_against_reference(model, shapes)
        options: dict[str, Any] = {"num_rows": num_rows, "dtype": self.dtype, "device": self.device}
        options["max_positions"] = self.max_positions
        self.cache = (
            RaggedCache(shapes, capacity=capacity, **options)
            if window is None
            else WindowCache(shapes, window=window, **options)
        )
        self.fast = fast
        wanted = self.device.type == "cuda" if fast is None else fast
        self._fast = fast_decoder(self.module, shapes, self.cache, asked=bool(fast), tuned=tuned) if wanted else None
        self.reads_live_only = self._fast is not None

    def forward(self, tokens_Bq: Tensor, plan: Plan, keep: int) -> Tensor:
        """Feed q tokens a row as planned; logits of the last `keep` columns [B, keep, V]."""
        if self._fast is not None:
            return self._fast.forward(tokens_Bq, self.cache, plan, keep)
        logits_BkV: Tensor = self.module(**self.cache.inputs(tokens_Bq, plan), logits_to_keep=keep).logits
        return logits_BkV

    def _check_against_reference(self, model: PreTrainedModel, shapes: dict[int, tuple[int, int]]) -> None:
        """Feed a few tokens both ways once; ValueError when the replaced attention computes something else."""
        tokens_1q = torch.arange(2, 10, device=self.device).unsqueeze(0) % self.vocab_size
        q = tokens_1q.shape[1]
        cache = RaggedCache(shapes, num_rows=1, capacity=q, dtype=self.dtype, device=self.device)
        zero_B = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            reference = _early_or_final(private_copy(model, "eager"), input_ids=tokens_1q, use_cache=False)
            plan = cache.plan(zero_B, zero_B + q, q, slice(0, 1), None)
            ours = _early_or_final(self.module, **cache.inputs(tokens_1q, plan))
        if not torch.isfinite(reference).all():
            return  # NaN weights are reported by the request that meets them
        error = float((ours - reference).norm() / reference.norm().clamp(min=1e-30))
        if error > _SELF_CHECK_TOLERANCE.get(self.dtype, 0.15):
            raise ValueError(
                f"{type(model).__name__} is not supported: with the engine's attention its output differs by "
                f"{error:.2g} (relative) from its own; expected rounding only. Its attention has a feature that the "
                f"engine does not compute"
            )


def max_positions_of(config: Any) -> int:
    """How many positions the engine may use.

    With LongRoPE (arXiv 2402.13753) transformers picks one of two sets of frequencies for a whole batch, by its largest
    position, so a row's text would depend on its neighbours' length; the engine stays below the switch, where only
    the first set is in use.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") == "longrope":
            switch = each.get("original_max_position_embeddings")
            limit = min(limit, int(switch or getattr(config, "original_max_position_embeddings", None) or limit))
    return limit


def _early_or_final(module: nn.Module, **inputs: Any) -> Tensor:
    """What the self-check compares: logits, or in half precision the hidden states after two layers."""
    out = module(output_hidden_states=True, **inputs)
    half = out.logits.dtype in (torch.bfloat16, torch.float16)
    return (out.hidden_states[:3][-1] if half and out.hidden_states else out.logits).double()


def private_copy(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """The same weights under new modules and a new config with another attention; in evaluation mode."""
    weights = list(model.parameters()) + list(model.buffers())
    clone = copy.deepcopy(model, {id(tensor): tensor for tensor in weights})
    try:
        clone.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{type(model).__name__} cannot take another attention function: {error}") from error
    return clone.eval()


@torch.inference_mode()
def fuse_norms(module: nn.Module) -> int:
    """Compute RMS norms (arXiv 1910.07467) in one call instead of half a dozen, where that gives the same bits as the
    module's own code does (in float32 it mostly does); how many were replaced."""
    fused = 0
    for norm in module.modules():
        weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not type(norm).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or epsilon is None:
            continue
        call = partial(functional.rms_norm, normalized_shape=tuple(weight.shape), weight=weight, eps=epsilon)
        probe = torch.randn(4, *weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
        if torch.equal(norm(probe), call(probe)):
            norm.forward = call  # type: ignore[method-assign]
            fused += 1
    return fused


class _ShapeProbe:
    """Stands in for a cache for one forward and notes what each layer would store."""

    is_sliding: tuple[bool, ...] = ()

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if keys.shape != values.shape:
            raise ValueError(f"layer {layer_idx}: keys {tuple(keys.shape)} and values {tuple(values.shape)} differ")
        self.shapes[layer_idx] = (keys.shape[1], keys.shape[3])
        return keys, values


def _probe_layers(module: PreTrainedModel, device: torch.device) -> dict[int, tuple[int, int]]:
    """(num_kv_heads, head_dim) by layer, read off a one-token forward."""
    name = type(module).__name__
    if module.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; expected a decoder-only model")
    probe: Any = _ShapeProbe()
    zero_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    plan = Plan(positions_Bq=zero_11, slots_Bq=zero_11, rows=slice(0, 1), live=1)
    try:
        with torch.inference_mode():
            module(input_ids=zero_11, position_ids=zero_11, past_key_values=probe, use_cache=True, ragged=plan)
    except (AttributeError, TypeError, AssertionError) as error:
        raise ValueError(f"{name} is not supported: its layers do not take the engine's cache ({error})") from error
    if not probe.shapes:
        raise ValueError(f"{name} is not supported: no layer stored keys and values in the cache")
    return probe.shapes
