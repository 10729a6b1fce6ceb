"""All decoder layers of a small model for a few tokens, in one launch (fast_persistent.cu): on Hopper GPUs.

A draft step is some hundred products of a few megabytes each. As launches they take 4 to 5 us however little they read;
here one block a multiprocessor stays for all of them, and its part of the weights flows into shared memory without a
pause, while the blocks meet after each phase of a layer. Shapes: T = B * q tokens, E hidden size, H query heads, G key
heads, D head dimension, J = H * D, F = (H + 2 G) * D, I width of the MLP, N shares of cached tokens for one head.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.fast_kernels import row_offset
from specdec.fast_residual import Residual
from specdec.kvcache import Plan, RaggedCache
from specdec.nvrtc import Kernel

MOST_TOKENS, MOST_QUERIES = 16, 2
_HEAD_DIM, _THREADS, _WARPS, _ROWS, _UNIT, _MOST_SHARES = 128, 256, 8, 8, 1024, 16
_LAYER_WORDS = 10
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the layers, and how many blocks work on them. kv_heads: heads of keys; width: of the MLP."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    layers: int
    blocks: int

    @classmethod
    def of(cls, layers: Sequence[Any], blocks: int) -> "Shape":
        first = layers[0]
        hidden, inner = first.out.weight_NK.shape
        kv_heads = (len(first.qkv.weight_NK) - inner) // (2 * _HEAD_DIM)
        width = first.down.weight_NK.shape[1]
        heads = inner // _HEAD_DIM
        return cls(hidden=hidden, heads=heads, kv_heads=kv_heads, width=width, layers=len(layers), blocks=blocks)

    def items(self) -> tuple[tuple[int, int], ...]:
        """(eight rows at a time that a block multiplies at most, inputs) of the products of a layer."""
        inner = self.heads * _HEAD_DIM
        sizes = (
            (inner + 2 * self.kv_heads * _HEAD_DIM, self.hidden),
            (self.hidden, inner),
            (2 * self.width, self.hidden),
            (self.hidden, self.width),
        )
        return tuple((-(-outputs // (_ROWS * self.blocks)), inputs) for outputs, inputs in sizes)

    def room(self, tokens: int, q: int) -> int:
        """Bytes of shared memory beside the ring, at most."""
        rows = q * self.heads // self.kv_heads
        attention = 4 * (rows * _HEAD_DIM + 2 * q * _HEAD_DIM + _WARPS * rows * (_HEAD_DIM + 2) + 1)
        sums = 4 * max(items for items, _ in self.items()) * _WARPS * tokens * _ROWS
        shared = max(2 * tokens * (self.hidden + 32), sums, attention)
        return shared + 2 * tokens * self.hidden + 4 * (_WARPS + 1) * tokens + 8 * _LAYER_WORDS * self.layers + 512

    def slots(self, tokens: int, q: int, shared_bytes: int) -> int:
        """Of the ring of weights."""
        return (shared_bytes - self.room(tokens, q)) // (_ROWS * (_UNIT + 32) * 2 + 8)

    def least_slots(self) -> int:
        """What one phase reads at once has to fit."""
        return max(items * inputs // _UNIT for items, inputs in self.items())


class PersistentLayers:
    """The residual stream after all layers, for up to `most_tokens` tokens, at most MOST_QUERIES a row.

    Its blocks wait for each other, so all of them have to be on the GPU at once: nothing that runs beside it on another
    stream may hold a multiprocessor and wait for it. ValueError for models and GPUs that the kernel is not written for,
    RuntimeError or OSError where it cannot be compiled.
    """

    def __init__(self, layers: Sequence[Any], angles_CD: tuple[Tensor, Tensor]) -> None:
        device = angles_CD[0].device
        properties = torch.cuda.get_device_properties(device)
        self.shape = shape = Shape.of(layers, properties.multi_processor_count)
        _check(layers, shape, torch.cuda.get_device_capability(device))
        if angles_CD[0].shape[1] != _HEAD_DIM or angles_CD[0].dtype != torch.bfloat16:
            raise ValueError(f"its heads have {angles_CD[0].shape[1]} dimensions; the kernel is for {_HEAD_DIM}")
        self.most_tokens = MOST_TOKENS
        self._properties = properties
        self._kernels: dict[tuple[int, int], Kernel] = {}
        self._kernel(MOST_TOKENS, MOST_QUERIES)  # the one with the least room
        self._layers, self._angles_CD = layers, angles_CD
        self._tables: dict[tuple[int, int], Tensor] = {}
        T, inner = MOST_TOKENS, shape.heads * _HEAD_DIM
        half = {"dtype": torch.bfloat16, "device": device}
        self._qkv_TF = torch.empty(T, inner + 2 * shape.kv_heads * _HEAD_DIM, **half)
        self._heads_TJ = torch.empty(T, inner, **half)
        self._mlp_TI = torch.empty(T, shape.width, **half)
        self._added_TE = torch.empty(T, shape.hidden, **half)
        self._lse_N = torch.empty(T * shape.heads * _MOST_SHARES, device=device)
        self._shares_ND = torch.empty(len(self._lse_N), _HEAD_DIM, device=device)
        self._counters_N = torch.zeros(5 * shape.layers, dtype=torch.int32, device=device)
        self._came_N = torch.zeros(T * shape.kv_heads, dtype=torch.int32, device=device)

    def takes(self, cache: RaggedCache, plan: Plan) -> bool:
        """Whether the kernel is there for such a forward."""
        B, q = plan.positions_Bq.shape
        return B * q <= self.most_tokens and q <= MOST_QUERIES and type(cache) is RaggedCache

    def stream(self, residual: Residual, cache: RaggedCache, plan: Plan) -> Residual:
        """`residual`, of the embedded tokens, in place, after all layers; new keys and values are in the cache."""
        shape, (B, q) = self.shape, plan.positions_Bq.shape
        first, rows_B = row_offset(plan)
        norm = self._layers[0].input_norm
        head_norm = self._layers[0].head_norms
        integers = (first, cache.capacity + 1, B, self._shares_of(B))
        floats = (norm.epsilon, head_norm[0].epsilon if head_norm else 0.0, self._layers[0].scale * _LOG2_E)
        self._kernel(B * q, q).launch(
            shape.blocks,
            _THREADS,
            [
                self._table(cache),
                residual.values_TE,
                residual.squares_TP,
                plan.positions_Bq,
                plan.slots_Bq,
                rows_B,
                *self._angles_CD,
                self._qkv_TF,
                self._heads_TJ,
                self._shares_ND,
                self._lse_N,
                self._mlp_TI,
                self._added_TE,
                self._counters_N,
                self._came_N,
                *map(ctypes.c_int, integers),
                *map(ctypes.c_float, floats),
            ],
        )
        return residual

    def _shares_of(self, B: int) -> int:
        """How many blocks share a row's cached tokens for one key head."""
        return max(1, min(_MOST_SHARES, self.shape.blocks // (B * self.shape.kv_heads)))

    def _kernel(self, tokens: int, q: int) -> Kernel:
        """Compiled when it is first used: for the next power of two of tokens."""
        key = 1 << (tokens - 1).bit_length(), q
        if key not in self._kernels:
            self._kernels[key] = _kernel(self.shape, *key, self._properties)
        return self._kernels[key]

    def _table(self, cache: RaggedCache) -> Tensor:
        """Where the weights and this cache's keys and values lie, by layer: int64 [layers, 10]."""
        first, last = (cache.layers[layer.index] for layer in (self._layers[0], self._layers[-1]))
        key = first[0].data_ptr(), last[1].data_ptr()
        if key not in self._tables:
            rows = [
                [each.data_ptr() if each is not None else 0 for each in (*_weights(layer), *cache.layers[layer.index])]
                for layer in self._layers
            ]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=self._qkv_TF.device)
        return self._tables[key]


def _weights(layer: Any) -> list[Tensor | None]:
    heads = layer.head_norms or (None, None)
    products = [product.weight_NK for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    norms = [layer.input_norm.weight_E, layer.mlp_norm.weight_E]
    return [*products, *norms, *(norm.weight_E if norm else None for norm in heads)]


def _kernel(shape: Shape, tokens: int, q: int, properties: Any) -> Kernel:
    room = int(properties.shared_memory_per_block_optin)
    slots = shape.slots(tokens, q, room)
    if slots < shape.least_slots():
        raise ValueError(f"its layers need {shape.least_slots()} slots of shared memory, and {slots} fit")
    options = [f"--gpu-architecture=sm_{properties.major}{properties.minor}", "--std=c++17"]
    options += options_of(shape, tokens, q, slots)
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return Kernel(source, "decoder_layers", options, shared_bytes=room)


def options_of(shape: Shape, tokens: int, q: int, slots: int) -> list[str]:
    """What the source is told of the sizes."""
    sizes = {"E": shape.hidden, "H": shape.heads, "G": shape.kv_heads, "I": shape.width, "LAYERS": shape.layers}
    sizes |= {"GRID": shape.blocks, "TOKENS": tokens, "Q": q, "SLOTS": slots}
    return [f"-D{name}={size}" for name, size in sizes.items()]


def _check(layers: Sequence[Any], shape: Shape, capability: tuple[int, int]) -> None:
    if capability[0] != 9:
        raise ValueError(f"the GPU's compute capability is {capability[0]}.{capability[1]}; the kernel is for 9.0")
    first = layers[0]
    if first.qkv.weight_NK.dtype != torch.bfloat16:
        raise ValueError(f"its dtype is {first.qkv.weight_NK.dtype}; the kernel is for bfloat16")
    if any(product.bias_N is not None for layer in layers for product in (layer.qkv, layer.out)):
        raise ValueError("its projections have biases")
    if any(layer.window is not None for layer in layers):
        raise ValueError("its layers see a window")
    if any(inputs % _UNIT for _, inputs in shape.items()):
        raise ValueError(f"its sizes ({shape}) are no multiples of 1,024")
    if shape.hidden > 2048 or shape.heads > 2 * shape.kv_heads or shape.heads % shape.kv_heads:
        raise ValueError(f"its sizes ({shape}) are beyond those of the kernel")
    epsilons = {norm.epsilon for layer in layers for norm in (layer.input_norm, layer.mlp_norm)}
    same = {(layer.scale, layer.qkv.weight_NK.shape, layer.head_norms is None) for layer in layers}
    if len(same) > 1 or len(epsilons) > 1:
        raise ValueError("its layers differ from each other")
