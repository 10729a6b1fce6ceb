"""Plain decoding by vLLM of the speed bench's requests, in a process of its own: one JSON line a batch.

    python -m bench.engine_vllm --config FOLDER/NAME.json --batches 1 16 --prompt-tokens 256 --new-tokens 256

Weights are vLLM's dummy ones; a wall clock around each call, prefill and all. bench.engine_speed runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cells import summarise
from bench.engine_rounds import random_requests


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.engine_vllm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--batches", required=True, type=int, nargs="+")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--memory", type=float, default=0.5, help="share of the GPU's memory (the bench holds the rest)"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(args.config.read_text(encoding="utf-8"))
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = engine(folder, args)
        for batch in args.batches:
            row = measured(llm, config["vocab_size"], batch, args)
            print(json.dumps(row), flush=True)
    return 0


def engine(folder: str, args: argparse.Namespace) -> Any:
    from vllm import LLM

    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.new_tokens,
        max_num_seqs=max(args.batches),
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
    )


def measured(llm: Any, vocab: int, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one batch: medians over `passes` calls after one that is not timed.

    Tokens a second leave out the time that the same prompts take up to their first new token; those of the whole pass
    do not.
    """
    from vllm import SamplingParams

    speeds, whole = [], []
    for seed in range(args.passes + 1):
        requests = random_requests(vocab, batch, args.prompt_tokens, args.new_tokens, seed)
        prompts: list[Any] = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        seconds = {}
        for tokens in (1, args.new_tokens):
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds[tokens] = time.perf_counter() - start
        whole.append(batch * args.new_tokens / seconds[args.new_tokens])
        speeds.append(batch * (args.new_tokens - 1) / (seconds[args.new_tokens] - seconds[1]))
    where = {"engine": "vllm", "drafter": "none", "controller": "none", "k": 0, "method": "generate", "batch": batch}
    lengths = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    values = summarise("tokens_per_s", speeds[1:]) | summarise("tokens_per_s_wall", whole[1:])
    return {**where, **lengths, "prompt_set": "random", "temperature": 0.0, **values}


if __name__ == "__main__":
    sys.exit(main())
