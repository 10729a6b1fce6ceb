"""Compiles the Triton kernels for a Hopper GPU on a machine without one, in the shapes of Qwen3-8B, Qwen3-0.6B,
SmolLM2-135M and Qwen2.5-0.5B.

Prints a JSON object: kernel -> [{"registers", "stack_bytes", "shared_bytes"}] for each variant compiled. A process of
its own, without TRITON_INTERPRET: python tests/compile_kernels.py
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from specdec import fast_kernels, fast_round, fast_steps
from specdec.fast_attention import attend_short, counters
from specdec.fast_kernels import add_norm, rotate_and_store, silu_mul
from specdec.fast_linear import MAX_ROWS, Scratch, Tiling, add_product, split_product
from specdec.fast_residual import Norm, Normed, embed
from specdec.fast_tilings import candidates, wide_candidates
from specdec.graph_draft import DraftBuffers
from specdec.kvcache import RaggedCache
from specdec.state import RowState

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class NoDevice:
    """What the launcher asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: object) -> dict[str, int]:
    """What the machine code asks for; a stack is where registers are spilled to."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cubin"
        code.write_bytes(kernel.asm["cubin"])
        command = [str(CUOBJDUMP), "--dump-resource-usage", str(code)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", said))) for name in ("REG", "STACK"))
    return {"registers": registers, "stack_bytes": stack, "shared_bytes": kernel.metadata.shared}


def compile_instead_of_launching() -> dict[str, dict[str, dict[str, int]]]:
    """From now on a launch compiles only; the result fills: kernel -> variant -> resources."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel is not None and kernel.hash not in found[self.__name__]:
            found[self.__name__][kernel.hash] = resources(kernel)

    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    return found


def run_all(heads: int, kv_heads: int, dim: int, hidden: int, dtype: torch.dtype) -> None:
    """Every kernel once for each kind of forward: one token, two, five, indexed rows, a window."""
    cache = RaggedCache({0: (kv_heads, dim)}, num_rows=4, capacity=4096, dtype=dtype)
    angles = torch.zeros(4096, dim, dtype=dtype), torch.zeros(4096, dim, dtype=dtype)
    weight = torch.ones(hidden, dtype=dtype)
    arrived = torch.zeros(counters(2, kv_heads), dtype=torch.int32)
    for q, rows, options in (
        (1, slice(0, 2), {}),
        (2, slice(0, 2), {}),
        (5, slice(1, 3), {"window": 512, "sinks": 4}),
        (16, [3, 1], {}),
    ):
        index = rows if isinstance(rows, slice) else torch.tensor(rows)
        plan = cache.plan(torch.tensor([700, 900]), torch.tensor([q, q]), q, index, None)
        residual = torch.zeros(2 * q, hidden, dtype=dtype)
        add_norm(None, residual, weight, 1e-6)
        add_norm(residual.clone(), residual, weight, 1e-6, q=q, keep=1)
        silu_mul(torch.zeros(2 * q, 6 * hidden, dtype=dtype))
        qkv = torch.zeros(2 * q, (heads + 2 * kv_heads) * dim, dtype=dtype)
        norms = None if dim == 64 else (weight[:dim], weight[:dim])
        rotate_and_store(qkv, norms, 1e-6, angles, cache.layers[0], plan)
        attend_short(qkv, norms, 1e-6, angles, cache.layers[0], plan, arrived, scale=0.1, splits=64, **options)


def products(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    tried = candidates(outputs, inputs)
    weight, bias = torch.zeros(outputs, inputs, dtype=dtype), torch.zeros(outputs, dtype=dtype)
    for rows, tiling, added, gated in [
        *((5, t, None, gated) for t in tried for gated in (False, True)),
        (1, tried[0], None, False),
        (5, tried[-1], bias, True),
    ]:
        scratch = Scratch(torch.device("cpu"))
        scratch.reserve(*tiling.scratch(outputs))
        split_product(torch.zeros(rows, inputs, dtype=dtype), weight, added, tiling, scratch, gated=gated)


def layer(hidden: int, inner: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, rows: int) -> None:
    """A decoder layer's products beside the residual stream, in each tiling that may be tried."""
    scratch = Scratch(torch.device("cpu"))
    weight_VE, tokens = torch.zeros(8, hidden, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    residual = embed(tokens, weight_VE, scratch.squares(rows, 1))
    normed = Normed(residual=residual, norm=Norm(weight_E=weight_VE[0], epsilon=1e-6))

    def tried(outputs: int, inputs: int) -> list[Tiling]:
        if rows > MAX_ROWS:
            return wide_candidates(outputs, inputs)
        return [tiling for tiling in candidates(outputs, inputs) if tiling.early]  # the others take no more

    for outputs, gated in (((heads + 2 * kv_heads) * dim, False), (2 * inner, True)):
        weight = torch.zeros(outputs, hidden, dtype=dtype)
        for tiling in tried(outputs, hidden):
            scratch.reserve(*tiling.scratch(outputs, rows))
            split_product(normed, weight, None, tiling, scratch, gated=gated)
    for inputs in (heads * dim, inner):
        weight = torch.zeros(hidden, inputs, dtype=dtype)
        for tiling in tried(hidden, inputs):
            scratch.reserve(*tiling.scratch(hidden, rows))
            add_product(residual, torch.zeros(rows, inputs, dtype=dtype), weight, None, tiling, scratch)


def rounds(dtype: torch.dtype) -> None:
    """What a round does between its forwards."""
    B, K = 4, 3
    state, buffers = RowState.empty(B, 99, "cpu"), DraftBuffers(B, K, 64, torch.device("cpu"))
    fast_round.uniforms(state.seeds_B, state.lengths_B, buffers.drafts_BK, 1)
    fast_round.place(state.lengths_B, state.limit_B, K, state.quota_B, 99, 99)
    fast_round.largest(torch.zeros(B, K, 151_936, dtype=dtype))
    fast_steps.begin_drafts(state, buffers, 2)
    fast_steps.next_draft(state, buffers)
    for usable in (None, buffers.alive_B):
        fast_steps.note_draft(state, buffers, state.lengths_B, buffers.bad_B, usable, 99)
    fast_steps.verify_inputs(state, buffers.drafts_BK)
    bad = torch.zeros(B, K + 1, dtype=torch.bool)
    proposal = buffers.proposal(B, K, has_law=False)
    fast_steps.commit(state, state.quota_B, proposal, bad, chosen=torch.zeros(B, K + 1, dtype=torch.int64))
    fast_steps.commit(state, state.quota_B, proposal, bad, chosen=state.quota_B, accepted_B=state.quota_B)


def main() -> None:
    found = compile_instead_of_launching()
    fast_kernels.starts_early = lambda device: True  # as on that GPU
    run_all(32, 8, 128, 4096, torch.bfloat16)
    run_all(16, 8, 128, 1024, torch.bfloat16)
    run_all(9, 3, 64, 576, torch.float32)
    run_all(14, 2, 64, 896, torch.float32)
    products(4096, 1024, torch.bfloat16)
    layer(1024, 3072, 16, 8, 128, torch.bfloat16, rows=5)
    for rows in (5, 64):
        layer(4096, 12_288, 32, 8, 128, torch.bfloat16, rows)
    rounds(torch.bfloat16)
    print(json.dumps({name: list(variants.values()) for name, variants in found.items()}))


if __name__ == "__main__":
    main()
