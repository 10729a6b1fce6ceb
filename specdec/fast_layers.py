"""The forward of Llama / Qwen type decoders from the weights of unmodified transformers modules, in few launches.

A layer is a pre-norm block: x += o(attention(rotary(qkv(norm x)))), x += down(SiLU(gate(norm x)) * up(norm x)). The
projections that read the same input are one product: their weights are laid side by side once, and the modules'
parameters become views of that, so memory is not doubled and the modules work on. What stands between the products is
in specdec.fast_kernels, attention in specdec.fast_attention. With few tokens the products take in the norms and the
additions (specdec.fast_residual), so that a layer has four launches and those of attention; all layers of a small model
are one launch where there is a kernel for them (specdec.fast_persistent). Nothing here depends on what is in a tensor,
and nothing waits for the device. Shapes: B rows of q tokens, T = B * q, E hidden size, C positions, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.fast_attention import attend, counters
from specdec.fast_choices import kept_for
from specdec.fast_kernels import INTERPRETED, add_norm
from specdec.fast_linear import ROW_CLASSES, Product, Scratch, row_class
from specdec.fast_persistent import MOST_TOKENS, PersistentLayers
from specdec.fast_residual import Norm, Normed, Residual, embed
from specdec.fast_supported import check_angles, check_supported
from specdec.fast_tilings import Choices, FusedChoices, choose_fused, choose_tilings, graph_seconds, untimed
from specdec.kvcache import Plan, RaggedCache

logger = logging.getLogger(__name__)

_TIMED_CONTEXT, _TIMED_ROWS = 256, 8
# Timed once a process: engines are made again and again on one model.
_TILINGS: Choices = {}
_FUSED_TILINGS: FusedChoices = {}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer. index: its entry in the cache; head_norms: for query and key heads; window: positions that it
    sees (None: all)."""

    index: int
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    input_norm: Norm
    mlp_norm: Norm
    head_norms: tuple[Norm, Norm] | None
    scale: float
    window: int | None

    @classmethod
    def of(cls, module: Any, window: int | None, scratch: Scratch) -> "Layer":
        attention, mlp = module.self_attn, module.mlp
        norms = (Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if hasattr(attention, "q_norm") else None
        return cls(
            index=int(attention.layer_idx),
            qkv=_product([attention.q_proj, attention.k_proj, attention.v_proj], scratch),
            out=_product([attention.o_proj], scratch),
            gate_up=_product([mlp.gate_proj, mlp.up_proj], scratch, gated=True),
            down=_product([mlp.down_proj], scratch),
            input_norm=Norm.of(module.input_layernorm),
            mlp_norm=Norm.of(module.post_attention_layernorm),
            head_norms=norms,
            scale=float(attention.scaling),
            window=window,
        )


class FastDecoder:
    """`forward` as CachedModel has it, over the weights of `module`.

    windows: how many positions each layer sees. num_positions: how many positions will be used; their angles come from
    the model's own rotary module, once. num_rows: of the largest batch. tuned: products of a few rows get the kernels
    that are fastest here. Raises ValueError that names the feature it does not compute.

    fused: whether the products of few tokens take in the norms and the additions; persistent: the layers as one launch,
    None where there is no such kernel for them. Benches and tests compare the ways.
    """

    def __init__(
        self, module: Any, *, windows: Sequence[int | None], num_positions: int, num_rows: int, tuned: bool = True
    ) -> None:
        check_supported(module)
        inner, device = module.model, module.device
        self.scratch = scratch = Scratch(device)
        with torch.inference_mode(False), torch.no_grad():  # parameters may be trained later
            used = inner.layers[: len(windows)]
            self.layers = [Layer.of(m, window, scratch) for m, window in zip(used, windows, strict=True)]
            self.head = _product([module.get_output_embeddings()], scratch)
            self.norm = Norm.of(inner.norm)
            self.embedding_VE = inner.embed_tokens.weight.detach()
            probe_E = torch.empty(1, device=device, dtype=module.dtype)
            cosine_1CD, sine_1CD = inner.rotary_emb(probe_E, torch.arange(num_positions, device=device).unsqueeze(0))
            self.angles_CD = cosine_1CD[0].contiguous(), sine_1CD[0].contiguous()
            check_angles(*self.angles_CD, head_dim=inner.layers[0].self_attn.head_dim)
            dim = inner.layers[0].self_attn.head_dim
            self._kv_shapes = {int(m.self_attn.layer_idx): (m.self_attn.k_proj.out_features // dim, dim) for m in used}
            kv_heads = max(heads for heads, _ in self._kv_shapes.values())
            self.arrived_N = torch.zeros(
                counters(max(num_rows, MOST_TOKENS), kv_heads), dtype=torch.int32, device=device
            )
            self.fused, self._fused_classes = tuned, self._choose_tilings() if tuned else ()
            self.persistent = self._persistent() if tuned and not INTERPRETED else None

    def _choose_tilings(self) -> tuple[bool, ...]:
        """How each product is cut up; for which of ROW_CLASSES the products take in the norms and the additions."""
        reading = [*(p for layer in self.layers for p in (layer.qkv, layer.gate_up)), self.head]
        adding = [p for layer in self.layers for p in (layer.out, layer.down)]
        if INTERPRETED:
            untimed([*reading, *adding])
            return tuple(tiling is not None for tiling in self.head.fused)
        kept = kept_for(self.embedding_VE.device)
        for products in (reading, adding):
            choose_tilings(products, graph_seconds, _TILINGS, kept)
        return choose_fused(reading, adding, self._forward_to_time, graph_seconds, _TILINGS, _FUSED_TILINGS, kept)

    def _persistent(self) -> PersistentLayers | None:
        """All layers in one launch, for as many tokens as that is faster for than launches are."""
        try:
            persistent = PersistentLayers(self.layers, self.angles_CD)
        except (ValueError, RuntimeError, OSError) as error:
            logger.debug("the layers stay launches of their own: %s", error)
            return None
        while persistent.most_tokens:
            tokens_B1, cache, plan = self._to_time(persistent.most_tokens, 1)
            seconds = []
            for self.persistent in (persistent, None):
                states = partial(self.states, tokens_B1, cache, plan, 1, len(self.layers))
                seconds.append(graph_seconds(states, repeats=5))
            if seconds[0] < seconds[1]:
                return persistent
            persistent.most_tokens //= 2
        return None

    def forward(self, tokens_Bq: Tensor, cache: RaggedCache, plan: Plan, keep: int) -> Tensor:
        """Feed q tokens a row as planned; logits of the last `keep` columns [B, keep, V]."""
        B, q = tokens_Bq.shape
        with torch.cuda.device_of(tokens_Bq):  # Triton launches on the current device
            if self._fuses(B * keep) and (self._in_one(cache, plan) or self._fuses(B * q)):
                residual = self._residual(tokens_Bq, cache, plan)
                return self.head.of(Normed(residual=residual, norm=self.norm, q=q, keep=keep)).view(B, keep, -1)
            return self.head(self.states(tokens_Bq, cache, plan, keep, len(self.layers))).view(B, keep, -1)

    def states(self, tokens_Bq: Tensor, cache: RaggedCache, plan: Plan, keep: int, num_layers: int) -> Tensor:
        """The last `keep` columns after `num_layers` layers [B * keep, E]: normalised after the last one only."""
        q, every = tokens_Bq.shape[1], num_layers == len(self.layers)
        attention = self._attends(cache, plan)
        if every and self._in_one(cache, plan):
            x_TE, residual_TE = None, self._residual(tokens_Bq, cache, plan).values_TE
        elif self._fuses(tokens_Bq.numel()):
            x_TE, residual_TE = None, self._stream(tokens_Bq, num_layers, attention).values_TE
        else:
            x_TE, residual_TE = self._by_steps(tokens_Bq, num_layers, attention)
        if not every:
            states_TE = residual_TE if x_TE is None else residual_TE + x_TE
            return states_TE.view(len(tokens_Bq), q, -1)[:, q - keep :].flatten(0, 1)
        return add_norm(x_TE, residual_TE, self.norm.weight_E, self.norm.epsilon, q=q, keep=keep)

    def _in_one(self, cache: RaggedCache, plan: Plan) -> bool:
        return self.persistent is not None and self.persistent.takes(cache, plan)

    def _residual(self, tokens_Bq: Tensor, cache: RaggedCache, plan: Plan) -> Residual:
        """The residual stream of few tokens after all layers."""
        if self.persistent is None or not self.persistent.takes(cache, plan):
            return self._stream(tokens_Bq, len(self.layers), self._attends(cache, plan))
        residual = embed(tokens_Bq.flatten(), self.embedding_VE, self.scratch.squares(tokens_Bq.numel(), 1))
        return self.persistent.stream(residual, cache, plan)

    def _fuses(self, rows: int) -> bool:
        return self.fused and rows <= ROW_CLASSES[-1] and self._fused_classes[row_class(rows)]

    def _by_steps(
        self, tokens_Bq: Tensor, num_layers: int, attention: Callable[[Layer, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(what is still to be added to the residual stream, the stream) after `num_layers` layers."""
        x_TE, residual_TE = None, functional.embedding(tokens_Bq.flatten(), self.embedding_VE)
        for layer in self.layers[:num_layers]:
            x_TE = add_norm(x_TE, residual_TE, layer.input_norm.weight_E, layer.input_norm.epsilon)
            x_TE = layer.out(attention(layer, layer.qkv(x_TE)))
            x_TE = add_norm(x_TE, residual_TE, layer.mlp_norm.weight_E, layer.mlp_norm.epsilon)
            x_TE = layer.down(layer.gate_up(x_TE))
        return x_TE, residual_TE

    def _stream(self, tokens_Bq: Tensor, num_layers: int, attention: Callable[[Layer, Tensor], Tensor]) -> Residual:
        """The residual stream of few tokens after `num_layers` layers."""
        residual = embed(tokens_Bq.flatten(), self.embedding_VE, self.scratch.squares(tokens_Bq.numel(), 1))
        for layer in self.layers[:num_layers]:
            qkv_TF = layer.qkv.of(Normed(residual=residual, norm=layer.input_norm))
            residual = layer.out.add_to(residual, attention(layer, qkv_TF))
            mlp_TI = layer.gate_up.of(Normed(residual=residual, norm=layer.mlp_norm))
            residual = layer.down.add_to(residual, mlp_TI)
        return residual

    def _forward_to_time(self, rows: int, fused: bool) -> Callable[[], object]:
        """A forward of so many tokens, over a short context."""
        B = min(rows, _TIMED_ROWS)
        tokens_Bq, cache, plan = self._to_time(B, rows // B)
        attention = self._attends(cache, plan)

        def run() -> Tensor:
            if fused:
                residual = self._stream(tokens_Bq, len(self.layers), attention)
                return self.head.of(Normed(residual=residual, norm=self.norm))
            x_TE, residual_TE = self._by_steps(tokens_Bq, len(self.layers), attention)
            return self.head(add_norm(x_TE, residual_TE, self.norm.weight_E, self.norm.epsilon))

        return run

    def _to_time(self, B: int, q: int) -> tuple[Tensor, RaggedCache, Plan]:
        """Tokens [B, q] at the end of a short context, its cache and their plan."""
        capacity, device = min(_TIMED_CONTEXT, len(self.angles_CD[0])), self.embedding_VE.device
        options: dict[str, Any] = {"dtype": self.embedding_VE.dtype, "device": device}
        cache = RaggedCache(self._kv_shapes, num_rows=B, capacity=capacity, **options)
        tokens_Bq = torch.zeros(B, q, dtype=torch.int64, device=device)
        start_B = torch.full_like(tokens_Bq[:, 0], capacity - q)
        return tokens_Bq, cache, cache.plan(start_B, torch.full_like(start_B, q), q, slice(0, B), None)

    def _attends(self, cache: RaggedCache, plan: Plan) -> Callable[[Layer, Tensor], Tensor]:
        return lambda layer, qkv_TF: self._attention(layer, qkv_TF, cache, plan)

    def _attention(self, layer: Layer, qkv_TF: Tensor, cache: RaggedCache, plan: Plan) -> Tensor:
        norms = layer.head_norms
        return attend(
            qkv_TF,
            (norms[0].weight_E, norms[1].weight_E) if norms else None,
            norms[0].epsilon if norms else 0.0,
            self.angles_CD,
            cache.layers[layer.index],
            plan,
            self.arrived_N,
            scale=layer.scale,
            window=layer.window,
        )


def _product(linears: Sequence[Any], scratch: Scratch, *, gated: bool = False) -> Product:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        raise ValueError("only some of the projections of one input have a bias")
    weight_NK = side_by_side([linear.weight for linear in linears])
    bias_N = side_by_side(biases) if biases else None
    return Product(weight_NK=weight_NK, bias_N=bias_N, scratch=scratch, gated=gated)


def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The parameters one below the other as one tensor that shares their memory: if they do not lie like that already
    (as the second time), they are copied there and made views of it."""
    first = parameters[0].detach()
    rows, ends = sum(len(p) for p in parameters), first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != ends or not parameter.is_contiguous() or not _same_memory(parameter, first):
            break
        ends += parameter.nbytes
    else:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    fused = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return fused


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
