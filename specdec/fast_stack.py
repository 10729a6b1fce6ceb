"""Decoder layers in one launch: what the kernel of specdec.fast_stack_kernel is given, and where it can be used."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.fast_kernels import INTERPRETED, row_offset
from specdec.fast_stack_kernel import _stack
from specdec.fast_stack_layout import COLUMNS, PHASES, SYNC_WORDS, Buffers, Fixed, Share, Sizes, Where
from specdec.kvcache import Plan, RaggedCache

if TYPE_CHECKING:
    from specdec.fast_layers import Layer

MAX_TOKENS = 16
WARPS = 8
_INTERPRETED_PROGRAMS = 3
_MAX_SPLITS, _MAX_PARTS = 16, 8
_ROWS, _MAX_TILES = (2, 4, 8, 16, 32), 4
_BLOCKS, _MAX_CHUNKS = (2048, 1024, 512), 4
# Weights that a thread may hold ahead of a barrier; with more the kernel would spill registers.
_THREAD_BYTES = 448
_LOG2_E = 1.4426950408889634
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What may be chosen otherwise than `LayerStack.sizes` does. splits: of a row's context; out_parts: of the inputs
    of the output product; None: by the number of programs. tensor_cores: products by them, or one token after the other
    by the ordinary ones."""

    splits: int | None = None
    out_parts: int | None = None
    block_s: int = 64
    stages: int = 1
    prefetch: int = 0 if INTERPRETED else 2
    tensor_cores: bool = True


@dataclass(kw_only=True)
class LayerStack:
    """The layers of one model. programs: one a multiprocessor; all of them must be on the device at once. max_tokens:
    how many it is used for."""

    layers: Sequence["Layer"]
    angles_CD: tuple[Tensor, Tensor]
    programs: int
    choices: Choices = Choices()
    max_tokens: int = MAX_TOKENS
    _sync: Tensor = field(init=False)
    _tables: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """ValueError naming what the kernel does not compute."""
        _check_layers(self.layers)
        device = self.angles_CD[0].device
        self._sync = torch.zeros(SYNC_WORDS, dtype=torch.int32, device=device)
        sizes = self.sizes(1, 1)
        shares = (sizes.qkv, 1), (sizes.out, 1), (sizes.gate, 2), (sizes.down, 1)
        held = max(s.rows * s.tiles * s.chunks * s.block * weights for s, weights in shares)
        if not INTERPRETED and held * self._weight.element_size() > _THREAD_BYTES * 32 * WARPS:
            raise ValueError("its layers are too large for the registers of one launch")

    @classmethod
    def on(cls, device: torch.device, layers: Sequence["Layer"], angles_CD: tuple[Tensor, Tensor]) -> "LayerStack":
        programs = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            programs = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(layers=layers, angles_CD=angles_CD, programs=programs)

    def __call__(self, residual_TE: Tensor, cache: RaggedCache, plan: Plan, num_layers: int) -> Tensor:
        """Layers [0, num_layers) on at most MAX_TOKENS embedded tokens. What the last one adds to `residual_TE`, which
        is changed in place, is returned: [T, E]."""
        T, (B, q) = len(residual_TE), plan.positions_Bq.shape
        assert T == B * q <= MAX_TOKENS
        sizes = self.sizes(B, q, indexed=not isinstance(plan.rows, slice))
        keys_BGCD, _ = cache.layers[self.layers[0].index]
        first, rows_B = row_offset(plan)
        where = Where(
            positions=plan.positions_Bq,
            slots=plan.slots_Bq,
            last=plan.last_B,
            rows=plan.last_B if rows_B is None else rows_B,
            num_tokens=T,
            q=q,
            first_row=first,
            row_stride=keys_BGCD.stride(0),
            head_stride=keys_BGCD.stride(1),
        )
        buffers = self._buffers(residual_TE, sizes)
        self._launch(self._fixed(cache), where, buffers, sizes, num_layers)
        return buffers.x[:T]

    def _launch(self, fixed: Fixed, where: Where, buffers: Buffers, sizes: Sizes, num_layers: int) -> None:
        launch = _stack[(self.programs,)]
        if not INTERPRETED:
            options = {"num_warps": WARPS, "launch_cooperative_grid": True}
            launch(fixed, where, buffers, 0, num_layers, S=sizes, PHASE=-1, **options)
            return
        for layer in range(
            num_layers
        ):  # the interpreter runs one program after the other: a barrier would wait for ever
            for phase in range(PHASES):
                launch(fixed, where, buffers, layer, layer + 1, S=sizes, PHASE=phase)

    def sizes(self, B: int, q: int, *, indexed: bool = False) -> Sizes:
        """What the kernel is compiled for, for B rows of q tokens."""
        layer, choices = self.layers[0], self.choices
        E, HD = layer.out.weight_NK.shape
        width, D = layer.down.weight_NK.shape[1], self.angles_CD[0].shape[1]
        F, H = layer.qkv.weight_NK.shape[0], HD // D
        G = (F // D - H) // 2
        splits = choices.splits or _power_of_two_up_to(min(_MAX_SPLITS, self.programs // (B * G)))
        parts = choices.out_parts or _out_parts(HD, E, splits)
        return Sizes(
            tokens=triton.next_power_of_2(B * q),
            hidden=E,
            heads=H,
            kv_heads=G,
            dim=D,
            width=width,
            qkv=_share("qkv", F, E, self.programs),
            out=_share("out", E, HD, self.programs, parts=parts),
            gate=_share("gate_up", width, E, self.programs),
            up=_share("gate_up", width, E, self.programs, first=width),
            down=_share("down", E, width, self.programs, chunked=True),
            splits=splits,
            queries=max(16, triton.next_power_of_2(H // G * q)),
            block_s=choices.block_s,
            stages=choices.stages,
            head_norms=layer.head_norms is not None,
            indexed=indexed,
            prefetch=choices.prefetch,
            tensor_cores=choices.tensor_cores,
            warps=WARPS,
            # The interpreter multiplies the bits of bfloat16; there the same rounded numbers are taken as float32.
            dot=tl.float32 if INTERPRETED else _TRITON_TYPES[self._weight.dtype],
        )

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Key heads and their dimension."""
        sizes = self.sizes(1, 1)
        return sizes.kv_heads, sizes.dim

    @property
    def _weight(self) -> Tensor:
        return self.layers[0].qkv.weight_NK

    def _fixed(self, cache: RaggedCache) -> Fixed:
        layer = self.layers[0]
        return Fixed(
            table=self._table(cache),
            cosine=self.angles_CD[0],
            sine=self.angles_CD[1],
            epsilon=layer.input_norm.epsilon,
            head_epsilon=layer.head_norms[0].epsilon if layer.head_norms else 0.0,
            scale=layer.scale * _LOG2_E,
        )

    def _table(self, cache: RaggedCache) -> Tensor:
        """Addresses of the weights and of this cache; made when a cache is first seen, and kept, since a graph may read
        it."""
        key = tuple(buffer.data_ptr() for layer in self.layers for buffer in cache.layers[layer.index])
        if key not in self._tables:
            rows = [_addresses(layer, cache) for layer in self.layers]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=self._sync.device)
        return self._tables[key]

    def _buffers(self, residual_TE: Tensor, S: Sizes) -> Buffers:
        T, E = residual_TE.shape
        heads = T * S.heads * S.splits

        def sums(count: int) -> Tensor:
            return residual_TE.new_empty(count, dtype=torch.float32)

        return Buffers(
            residual=residual_TE,
            second=torch.empty_like(residual_TE),
            qkv=residual_TE.new_empty(S.tokens, (S.heads + 2 * S.kv_heads) * S.dim),
            out=sums(heads * S.dim),
            lse=sums(heads),
            sums=sums(S.out.parts * S.tokens * E),
            act=residual_TE.new_empty(S.tokens, S.width),
            x=residual_TE.new_empty(S.tokens, E),
            sync=self._sync,
        )


def _addresses(layer: "Layer", cache: RaggedCache) -> list[int]:
    norms: Any = layer.head_norms or (layer.input_norm, layer.input_norm)
    tensors = {
        "input_norm": layer.input_norm.weight_E,
        "qkv": layer.qkv.weight_NK,
        "query_norm": norms[0].weight_E,
        "key_norm": norms[1].weight_E,
        "out": layer.out.weight_NK,
        "mlp_norm": layer.mlp_norm.weight_E,
        "gate_up": layer.gate_up.weight_NK,
        "down": layer.down.weight_NK,
        "keys": cache.layers[layer.index][0],
        "values": cache.layers[layer.index][1],
    }
    return [tensors[column].data_ptr() for column in COLUMNS]


def _check_layers(layers: Sequence["Layer"]) -> None:
    """ValueError when one launch cannot do these layers: they must be alike, see everything and have no biases."""
    if any(layer.window is not None for layer in layers):
        raise ValueError("a layer has a window")
    if any(product.bias_N is not None for layer in layers for product in layer.products):
        raise ValueError("a projection has a bias")
    if len({_kind(layer) for layer in layers}) != 1:
        raise ValueError("its layers differ in their shapes, norms or scale")
    tensors = [t for layer in layers for t in _tensors(layer)]
    if any(t.data_ptr() % 16 or not t.is_contiguous() for t in tensors):
        raise ValueError("a weight does not begin at a multiple of 16 bytes")


def _tensors(layer: "Layer") -> list[Tensor]:
    norms = (layer.input_norm, layer.mlp_norm, *(layer.head_norms or ()))
    return [*(product.weight_NK for product in layer.products), *(norm.weight_E for norm in norms)]


def _kind(layer: "Layer") -> tuple[Any, ...]:
    epsilons = {layer.input_norm.epsilon, layer.mlp_norm.epsilon}, {n.epsilon for n in layer.head_norms or ()}
    shapes = tuple((t.shape, t.dtype) for t in _tensors(layer))
    return shapes, layer.scale, *(tuple(sorted(each)) for each in epsilons)


def _power_of_two_up_to(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def _out_parts(inputs: int, outputs: int, splits: int) -> int:
    """Into how many parts the output product's inputs are cut: with more of them a program reads fewer of attention's
    splits, and the next phase more partial sums."""
    best = 1
    while best < _MAX_PARTS and inputs % (32 * best) == 0:
        now, halved = (splits * inputs / parts + parts * outputs for parts in (best, 2 * best))
        if halved >= now:
            break
        best *= 2
    return best


def _share(
    name: str, outputs: int, inputs: int, programs: int, *, parts: int = 1, first: int = 0, chunked: bool = False
) -> Share:
    """The fewest rows a program that cover all outputs, in few tiles."""
    wanted = triton.cdiv(outputs * parts, programs // parts * parts)
    fits = [
        (rows * tiles, tiles, rows) for rows in _ROWS for tiles in range(1, _MAX_TILES + 1) if rows * tiles >= wanted
    ]
    if not fits:
        tiles = triton.cdiv(wanted, _ROWS[-1])
        fits = [(_ROWS[-1] * tiles, tiles, _ROWS[-1])]
    _, tiles, rows = min(fits)
    part = inputs // parts
    block = triton.next_power_of_2(part)
    if chunked:  # a power of two that divides the inputs leaves no thread without work
        block = next((b for b in _BLOCKS if part % b == 0 and part // b <= _MAX_CHUNKS), block)
    return Share(
        column=COLUMNS.index(name),
        first=first,
        outputs=outputs,
        inputs=inputs,
        rows=rows,
        tiles=tiles,
        parts=parts,
        chunks=triton.cdiv(part, block),
        block=block,
    )
