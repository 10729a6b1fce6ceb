"""The bench's requests decoded by others in the same run: transformers' generate, its assisted generation, and vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.cells import summarise
from bench.cpu_speed import ASSISTED, assistant
from bench.engine_cells import Cell, Sizes
from bench.engine_rounds import random_requests
from bench.measure import TransformersVariant, tokens_per_s_wall
from bench.shapes import Pair
from bench.synthetic import impose, label

VLLM_SECONDS = 400.0
_OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {},
    "static cache, compiled": {"cache_implementation": "static"},  # on a GPU, transformers then compiles the forward
}
_ASSISTED = {"4 tokens": ASSISTED[1]}  # the default stops by the draft's confidence, and random weights have none


def measure_transformers(pair: Pair, cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """The row of a "transformers" cell: whole calls, prefill and all."""
    variant = TransformersVariant(pair.target, batch=cell.batch, options=_OPTIONS[cell.method])
    return _generated(pair, variant, cell, sizes) | {"drafter": "none", "controller": "none", "k": 0}


def measure_assisted(pair: Pair, cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """The row of an "assisted" cell, with the acceptance that the engine's rows have."""
    assert cell.alpha is not None
    options = {"assistant_model": assistant(pair.draft, _ASSISTED[cell.method])}
    variant = TransformersVariant(pair.target, batch=1, options=options)
    with imposed_on_module(pair.target, cell.alpha):
        row = _generated(pair, variant, cell, sizes)
    limit = int(_ASSISTED[cell.method].get("num_assistant_tokens", 20))
    named = {"drafter": "model", "controller": "transformers", "k": limit, "acceptance": label(cell.alpha)}
    return row | named


def _generated(pair: Pair, variant: TransformersVariant, cell: Cell, sizes: Sizes) -> dict[str, Any]:
    vocab = pair.target.config.vocab_size

    def run(seed: int, new_tokens: int) -> float:
        requests = random_requests(vocab, cell.batch, sizes.prompt_tokens, new_tokens, seed)
        return tokens_per_s_wall(variant.run(requests))

    run(0, sizes.new_tokens)  # compiles for these lengths, where anything is compiled
    return {
        "engine": "transformers",
        "method": cell.method,
        "batch": cell.batch,
        "prompt_set": "random",
        "prompt_tokens": sizes.prompt_tokens,
        "new_tokens": sizes.new_tokens,
        "temperature": 0.0,
        **summarise("tokens_per_s", [run(seed, sizes.new_tokens) for seed in range(sizes.passes)]),
    }


@contextmanager
def imposed_on_module(model: Any, alpha: float) -> Iterator[None]:
    """bench.synthetic's acceptance for a model whose forward is given the drafts as input ids: each call is a round."""
    alpha_K = torch.full((model.config.max_position_embeddings,), alpha, dtype=torch.float64, device=model.device)
    calls = 0

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        tokens_BJ = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        J = min(output.logits.shape[1], tokens_BJ.shape[1])
        if J > 1:
            positions_BJ = torch.arange(calls * len(alpha_K), calls * len(alpha_K) + J, device=model.device)[None]
            seeds_B = torch.zeros(1, dtype=torch.int64, device=model.device)
            impose(output.logits[:, -J:], tokens_BJ[:, -J:], positions_BJ, seeds_B, alpha_K)
        return output

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def measure_vllm(shapes: Path, target: str, batches: Sequence[int], sizes: Sizes, dtype: str) -> list[dict[str, Any]]:
    """Rows of vLLM without speculation, one a batch, from a process of its own. ValueError saying why there are
    none."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed")
    command = [sys.executable, "-m", "bench.engine_vllm", "--config", str(shapes / f"{target}.json")]
    command += ["--batches", *map(str, batches), "--dtype", dtype, "--passes", str(sizes.passes)]
    command += ["--prompt-tokens", str(sizes.prompt_tokens), "--new-tokens", str(sizes.new_tokens)]
    code, out, errors = _run(command, VLLM_SECONDS)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code or not lines:
        raise ValueError(f"vLLM ended with {code}: {' '.join(errors.split())[-400:]}")
    return [json.loads(line) for line in lines]


def _run(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """(exit code, output, errors). ValueError when it takes longer; its own children, which hold a GPU's memory, end
    with it."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"vLLM took longer than {seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, out, errors
