"""vLLM speculating with a draft folder, greedily: python vllm_draft.py TARGET DRAFT. Prints the texts with and without
it, and how many draft tokens were made and accepted, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

COUNTERS = ("draft_tokens", "accepted_tokens")
PROMPTS = [[2, 70, 71, 72, 73], [2, 90, 91]]


def run(target: str, speculative: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, int]]:
    """The completions, and vLLM's counters of speculation."""
    llm = LLM(
        target,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    counters = {name: values[f"vllm:spec_decode_num_{name}"] for name in COUNTERS} if speculative else {}
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def main() -> None:
    target, draft = sys.argv[1:]
    plain, _ = run(target, None)
    texts, counters = run(target, {"method": "draft_model", "model": draft, "num_speculative_tokens": 3})
    print(json.dumps({"plain": plain, "texts": texts, "counters": counters}))


if __name__ == "__main__":
    main()
