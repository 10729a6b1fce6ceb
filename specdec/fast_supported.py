"""Which decoder layers specdec.fast_layers computes: ValueError names what one has that it does not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_supported(module: Any) -> None:
    """ValueError when the modules are not those of a Llama / Qwen type decoder in a dtype that the kernels have."""
    config = module.config.get_text_config(decoder=True)
    if module.dtype not in _DTYPES:
        raise ValueError(f"its dtype is {module.dtype}")
    if getattr(config, "hidden_act", None) not in ("silu", "swish"):
        raise ValueError(f"its activation is {getattr(config, 'hidden_act', None)}")
    inner = getattr(module, "model", None)
    parts = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if inner is None or not parts <= {name for name, _ in inner.named_children()}:
        raise ValueError("it is not made of embed_tokens, layers, norm and rotary_emb")
    for layer in inner.layers:
        _check_layer(layer)
    _check_linears([module.get_output_embeddings()], module)
    _check_linears([m for m in inner.layers.modules() if "Linear" in type(m).__name__], module)


def _check_layer(layer: Any) -> None:
    _check_parts(layer, _LAYER_PARTS)
    _check_parts(layer.mlp, _MLP_PARTS)
    attention = layer.self_attn
    _check_parts(attention, _ATTENTION_PARTS | (_HEAD_NORMS if hasattr(attention, "q_norm") else set()))
    if not all(hasattr(attention, name) for name in ("head_dim", "scaling", "layer_idx")):
        raise ValueError(f"its {type(attention).__name__} lacks one of head_dim, scaling and layer_idx")
    dim = attention.head_dim
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"its heads have {dim} dimensions, which is no power of two from 16 on")
    if hasattr(attention, "q_norm") and attention.q_norm.weight.shape != (dim,):
        raise ValueError("its query norm is not over one head")


def _check_parts(module: nn.Module, expected: set[str]) -> None:
    """Nothing that the forward here would leave out: other submodules, or parameters of the module's own."""
    found = {name for name, _ in module.named_children()} | {name for name, _ in module.named_parameters(recurse=False)}
    if found != expected:
        odd = ", ".join(sorted(found ^ expected))
        raise ValueError(f"{type(module).__name__} has other parts than expected ({odd})")


def _check_linears(linears: Sequence[Any], module: Any) -> None:
    for linear in linears:
        if type(linear) is not nn.Linear:
            raise ValueError(f"it has a {type(linear).__name__} where a plain Linear was expected")
        if linear.weight.dtype != module.dtype or linear.weight.device != module.device:
            raise ValueError("its weights differ in dtype or device")


def check_angles(cosine_CD: Tensor, sine_CD: Tensor, *, head_dim: int) -> None:
    half = head_dim // 2
    if cosine_CD.shape[1] != head_dim:
        raise ValueError(f"it rotates {cosine_CD.shape[1]} of {head_dim} dimensions of a head")
    if not all(torch.equal(angles[:, :half], angles[:, half:]) for angles in (cosine_CD, sine_CD)):
        raise ValueError("its rotary embedding does not pair the two halves of a head")
