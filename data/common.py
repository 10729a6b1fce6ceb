"""What traces and benchmarks share: prompts as token ids, stop ids, seeds, and the record of a trace.

T is the number of completion tokens, N (8) how many of the teacher's largest probabilities are kept. Logprobs
are natural, raw (before temperature and filters) and float32: `top_logprobs` may be compared and summed as
they are; `tail_mass` is the probability of every other token.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_TOLERANCE = 1e-4  # probabilities from float32 logprobs over a vocabulary sum to one to about 1e-6


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """One completion. Arrays: ids int32, probabilities float32; [T], or [T, N] for the teacher's top N.

    `messages` (a list of {"role", "content"}) and `verifier` (what checks an answer) are JSON texts;
    `completion` counts the completions of one prompt at one temperature from 0; `seed` is the sampler's; `backend`
    is what computed it, with its version; `thinking` is what the chat template was told (None: nothing).
    """

    prompt_id: str
    source: str
    messages: str
    reference: str | None
    verifier: str | None
    prompt_ids: np.ndarray
    completion: int
    completion_ids: np.ndarray
    token_logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    tail_mass: np.ndarray
    finish_reason: str
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    teacher: str
    teacher_revision: str
    backend: str = "specdec"
    thinking: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A prompt, or one completion of it, that gave no record, and why."""

    prompt_id: str
    reason: str


def encode_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]], thinking: bool | None = None) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer starts, by the chat template.

    `thinking` switches a reasoning model's thinking on or off; None leaves it to the template. ValueError when the
    tokenizer has no template, or none with that switch; jinja2.TemplateError when it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template; expected an instruction-tuned model's")
    options = {} if thinking is None else {"enable_thinking": thinking}
    if options and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError("thinking is set, but the target's chat template has no enable_thinking; leave it unset")
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False, **options)
    return [int(token) for token in ids]


def stop_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion, ascending: of the model's generation config, and the tokenizer's own."""
    return stop_ids(model.generation_config, tokenizer)


def stop_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The same from a generation config alone, without the model."""
    listed = generation_config.eos_token_id
    ids = set(listed) if isinstance(listed, list | tuple) else {listed}
    return tuple(sorted((ids | {tokenizer.eos_token_id}) - {None}))


def stable_seed(*parts: str | int | float) -> int:
    """A sampler seed in [0, 2**63) that depends on the parts alone: the same on every machine."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_record(record: TraceRecord) -> None:
    """ValueError naming the prompt and what is wrong: lengths, order of the top N, logprobs, tail mass."""
    where = f"prompt {record.prompt_id!r}, completion {record.completion} at temperature {record.temperature}"
    num_tokens, num_top = len(record.completion_ids), record.top_ids.shape[-1]
    shapes = {
        "token_logprob": (num_tokens,),
        "top_ids": (num_tokens, num_top),
        "top_logprobs": (num_tokens, num_top),
        "tail_mass": (num_tokens,),
    }
    for name, shape in shapes.items():
        if getattr(record, name).shape != shape:
            raise ValueError(f"{where}: {name} has shape {getattr(record, name).shape}, expected {shape}")
    if num_tokens == 0 or len(record.prompt_ids) == 0:
        raise ValueError(f"{where}: got {len(record.prompt_ids)} prompt and {num_tokens} completion tokens")
    if record.finish_reason not in ("stop", "length"):
        raise ValueError(f"{where}: finish reason {record.finish_reason!r}, expected 'stop' or 'length'")
    for problem, broken in _faults(record):
        if broken.any():
            raise ValueError(f"{where}: {problem} at completion token {int(np.argmax(broken))}")


def _faults(record: TraceRecord) -> Iterator[tuple[str, np.ndarray]]:
    """(what is wrong, [T] bool) for every property a token must have; NaN counts as broken."""
    top, tail = record.top_logprobs, record.tail_mass
    yield "token_logprob is not a log-probability", ~(record.token_logprob <= _TOLERANCE)
    yield "top_logprobs are not sorted, largest first", ~np.all(np.diff(top, axis=1) <= 0, axis=1)
    repeats = np.diff(np.sort(record.top_ids, axis=1), axis=1) == 0
    yield "top_ids repeat a token", np.any(repeats, axis=1)
    yield "tail_mass is outside [0, 1]", ~((tail >= 0) & (tail <= 1))
    mass = np.exp(top.astype(np.float64)).sum(axis=1) + tail
    yield "the top entries and the tail do not sum to one", ~(np.abs(mass - 1) <= _TOLERANCE)
    is_sampled = record.top_ids == record.completion_ids[:, None]
    gap = np.where(is_sampled, np.abs(top - record.token_logprob[:, None]), 0.0).max(axis=1)
    yield "token_logprob differs from the token's top entry", ~(gap <= _TOLERANCE)
    smallest = np.where(is_sampled.any(axis=1), 0.0, top[:, -1])
    is_above = ~(record.token_logprob <= smallest + _TOLERANCE)
    yield "token_logprob is above the top entries it is not part of", is_above
