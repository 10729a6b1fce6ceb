"""Backend "score" of stage 01: records of texts that exist already, each scored by one forward of the target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from jinja2 import TemplateError

from data.common import Skipped, TraceRecord, encode_prompt
from data.scoring import score_completions
from data.teacher import find_teacher
from data.texts import Text
from pipeline.config import Config
from pipeline.models import load_target
from specdec import TokenLogprobs

BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}  # tokens a forward, padding included


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    text: Text
    prompt_ids: list[int]
    completion_ids: list[int]


class Scorer:
    """The target as transformers loads it, and its tokenizer."""

    name = f"score transformers {transformers.__version__}"

    def __init__(self, config: Config) -> None:
        self.traces, self.teacher = config.traces, find_teacher(config)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_target(config.models, self.device)
        self.vocab_size = len(self.model.get_output_embeddings().weight)

    def trace(self, texts: Sequence[Text], check_stop: Callable[[], None]) -> tuple[list[TraceRecord], list[Skipped]]:
        """Records of these texts, in order, and those that cannot be scored; `check_stop` may raise."""
        encoded, skipped = [], []
        for text in texts:
            try:
                encoded.append(self._encode(text))
            except (ValueError, TemplateError) as error:
                skipped.append(Skipped(prompt_id=text.id, reason=str(error)))
        check_stop()
        laws = score_completions(
            self.model,
            [each.prompt_ids for each in encoded],
            [each.completion_ids for each in encoded],
            top=self.traces.top_logprobs,
            batch_tokens=BATCH_TOKENS[self.device],
        )
        return [self._record(each, law) for each, law in zip(encoded, laws, strict=True)], skipped

    def _encode(self, text: Text) -> _Encoded:
        """Token ids of a text. An answer in words that is known to have ended gets the id that ends a turn."""
        tokenizer = self.teacher.tokenizer
        if text.prompt_ids is not None:
            prompt = list(text.prompt_ids)
        else:
            prompt = encode_prompt(tokenizer, text.messages, self.traces.thinking)
        if isinstance(text.completion, str):
            completion = tokenizer(text.completion, add_special_tokens=False).input_ids
            if text.finish_reason == "stop" and tokenizer.eos_token_id is not None:
                completion = [*completion, tokenizer.eos_token_id]
        else:
            completion = list(text.completion)
        total, largest = len(prompt) + len(completion), max(prompt + completion)
        if total > self.teacher.context:
            raise ValueError(f"{total} tokens of prompt and completion, expected at most {self.teacher.context}")
        if min(prompt + completion) < 0 or largest >= self.vocab_size:
            raise ValueError(f"token id {largest}, expected ids below {self.vocab_size}: of another tokenizer?")
        return _Encoded(text=text, prompt_ids=prompt, completion_ids=completion)

    def _words(self, ids: list[int]) -> str:
        """A prompt of ids alone as text: by it the filter finds benchmarks and repetitions."""
        return str(self.teacher.tokenizer.decode(ids, skip_special_tokens=True))

    def _record(self, encoded: _Encoded, law: TokenLogprobs) -> TraceRecord:
        """Sampling parameters are what the row says of them; without: the raw law, temperature 1 and top_p 1."""
        text = encoded.text
        messages = text.messages or [{"role": "user", "content": self._words(encoded.prompt_ids)}]
        has_ended = encoded.completion_ids[-1] in self.teacher.stop_ids
        return TraceRecord(
            prompt_id=text.prompt_id,
            source=text.source,
            messages=json.dumps(messages, ensure_ascii=False),
            reference=text.reference,
            verifier=None,
            prompt_ids=np.asarray(encoded.prompt_ids, dtype=np.int32),
            completion=text.index,
            completion_ids=np.asarray(encoded.completion_ids, dtype=np.int32),
            token_logprob=law.token_logprob,
            top_ids=law.top_ids,
            top_logprobs=law.top_logprobs,
            tail_mass=law.tail_mass,
            finish_reason=text.finish_reason or ("stop" if has_ended else "length"),
            temperature=text.temperature,
            top_p=text.top_p,
            max_tokens=text.max_tokens or len(encoded.completion_ids),
            seed=text.seed,
            teacher=self.teacher.name,
            teacher_revision=self.teacher.revision,
            backend=self.name,
            thinking=self.traces.thinking,
        )
