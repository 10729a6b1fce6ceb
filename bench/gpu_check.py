"""The engine on a GPU: a captured round equals eager rounds, and gate G1 holds there too, with and without graphs
and Triton kernels.

    python -m bench.gpu_check --out results/gpu_check.json      # needs an NVIDIA GPU

Tiny random models: this checks what is computed, not how fast.
"""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.graph_round import compare
from bench.lossless import Suite, build_engine, run_g1
from bench.lossless_report import format_table, g1_gate
from bench.lossless_suites import demo_suites
from bench.tiny_models import noisy_copy, tiny_model
from pipeline.results import gate, write_result
from specdec import Engine

# Gates, and Engine's options.
LAWS: Mapping[str, Mapping[str, Any]] = {
    "G1": {"fast": False, "graphs": False},
    "G1 with graphs": {"fast": False, "graphs": True},
    "G1 with fast": {"fast": True, "graphs": False},
    "G1 with fast and graphs": {"fast": True, "graphs": True},
}


def fast_suites() -> tuple[Suite, ...]:
    """The same cases with models that the Triton kernels take: float32, heads of 16 dimensions."""
    shape: dict[str, Any] = {"hidden": 64, "head_dim": 16, "dtype": torch.float32}
    targets = [tiny_model(family, seed=seed, **shape) for seed, family in enumerate(("qwen3", "llama"), 1)]
    return tuple(
        replace(suite, name=f"{suite.name}, fast", target=target, draft=noisy_copy(target, noise=0.3, seed=9))
        for suite, target in zip(demo_suites(), targets, strict=True)
    )


def gpu_engine(suite: Suite, num_requests: int, **options: Any) -> Engine:
    """The suite's engine with its models on the GPU; the laws are enumerated from the CPU's copies."""

    def moved(model: PreTrainedModel | None) -> PreTrainedModel | None:
        return None if model is None else copy.deepcopy(model).to("cuda")

    target, draft = moved(suite.target), moved(suite.draft)
    assert target is not None
    engine = build_engine(replace(suite, target=target, draft=draft), num_requests, **options)
    assert engine._target.reads_live_only == options["fast"], "the fast forward is off; the log says why"
    return engine


def check_capture() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and gate of the comparison of captured with eager rounds."""
    rows = [compare(k, family=family) for family in ("qwen3", "llama", "gemma3") for k in (1, 2, 4, 8)]
    equal = all(row["reports_equal"] and row["state_equal"] for row in rows)
    reason = f"{len(rows)} captured rounds replayed, reports and state compared with eager rounds to the bit"
    return rows, gate("pass" if equal else "fail", value=equal, limit=True, reason=reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="results/gpu_check.json")
    parser.add_argument("--samples", type=int, default=20_000, help="of each law of gate G1")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible to torch; run this on a machine with an NVIDIA GPU")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    capture_rows, capture = check_capture()
    for row in capture_rows:
        print(row, flush=True)
    rows, gates = list(capture_rows), {"capture": capture}
    for name, options in LAWS.items():
        factory = partial(gpu_engine, **options)
        suites = fast_suites() if options["fast"] else demo_suites()
        law_rows = run_g1(suites, samples=args.samples, seed=0, engine_factory=factory)
        print(format_table(law_rows))
        gates[name] = g1_gate(law_rows)
        rows += [row | {"gate": name} for row in law_rows]
        write_result(args.out, stage="gpu_check", run="tiny", rows=rows, gates=gates, started=started)
    for name, record in gates.items():
        print(name, record["state"], record["reason"])
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
