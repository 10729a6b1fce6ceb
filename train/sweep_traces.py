"""Completions for a sweep: tokens only, in waves of thousands of rows, one part of several in this process.

    python -m train.sweep_traces --target MODEL --prompts prompts.npz --part 0/6 --copies gsm8k:5:1 self:1:0 \
        --self 40000 --out part-0.npz

The engine refills a slot as soon as it is free, which here means a prefill in nearly every step, and its bookkeeping is
by row. For many short texts of a small model a wave is faster: all rows start together, nothing but tokens is kept,
and rows that are done are dropped in bulk. Several processes share one GPU: a small model's steps wait for the host.

The set "self" holds prompts that the target writes itself: given the chat template up to where a user's words begin,
an instruction-tuned model goes on as a user would (Magpie, arXiv 2406.08464).
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.common import encode_prompt, stable_seed, stop_ids_of
from pipeline.config import DraftConfig, ModelsConfig
from pipeline.models import load_target, load_tokenizer
from specdec.model import CachedModel
from train.sweep_prompts import NOTHING
from train.texts import Text, load_texts, save_texts

SELF = "self"
MARK = "0123456789"
SELF_TOKENS = 128
SELF_TEMPERATURE = 0.8
PREFILL_ROWS = 256
CHECK_EVERY = 16
KEEP_WHILE = 0.75  # of the rows still running; below it the others are dropped

Job = tuple[Text, float]


class Waves:
    """The target decoding `rows` texts at a time, until a deadline (seconds from its making)."""

    def __init__(self, target: str, *, dtype: str, rows: int, max_tokens: int, longest: int, seconds: float) -> None:
        models = ModelsConfig(target=target, draft=DraftConfig(keep_layers=1), dtype=dtype)
        self.tokenizer = load_tokenizer(models)
        model = load_target(models, "cuda" if torch.cuda.is_available() else "cpu")
        self.stops_S = torch.tensor(stop_ids_of(model, self.tokenizer), device=model.device)
        self.model = CachedModel(model, num_rows=rows, capacity=longest + max_tokens + 8)
        self.rows, self.max_tokens = rows, max_tokens
        self.ends = time.monotonic() + seconds

    def self_prompts(self, count: int) -> list[Text]:
        """Prompts that the target writes as the user; those that it does not end are dropped."""
        begin, end = user_frame(self.tokenizer)
        start = Text(source=SELF, prompt=np.array(begin, dtype=np.int32), completion=NOTHING)
        written = self.complete([(start, SELF_TEMPERATURE)] * count, SELF_TOKENS)
        stops = self.stops_S.tolist()
        ended = [text.completion[:-1] for text in written if len(text.completion) > 1 and text.completion[-1] in stops]
        return [
            Text(source=SELF, prompt=np.concatenate([start.prompt, ids, end]).astype(np.int32), completion=NOTHING)
            for ids in ended
        ]

    def complete(self, jobs: Sequence[Job], max_tokens: int) -> list[Text]:
        """Completions of (prompt, temperature) in waves, those begun before the deadline."""
        texts: list[Text] = []
        for first in range(0, len(jobs), self.rows):
            if time.monotonic() > self.ends:
                break
            wave = jobs[first : first + self.rows]
            ids = self._wave([text.prompt for text, _ in wave], [temperature for _, temperature in wave], max_tokens)
            texts += [
                Text(source=text.source, prompt=text.prompt, completion=written, temperature=temperature)
                for (text, temperature), written in zip(wave, ids, strict=True)
            ]
        return texts

    @torch.inference_mode()
    def _wave(self, prompts: Sequence[np.ndarray], temperatures: Sequence[float], max_tokens: int) -> list[np.ndarray]:
        """The tokens after each prompt, up to a stop id or `max_tokens`."""
        device = self.model.device
        self.model.cache.lengths_B.zero_()
        for first in range(0, len(prompts), PREFILL_ROWS):
            self._prefill(prompts[first : first + PREFILL_ROWS], first)
        longest = max(map(len, prompts))
        last_B = torch.tensor([int(prompt[-1]) for prompt in prompts], device=device)
        temperature_B1 = torch.tensor(temperatures, device=device).unsqueeze(1)
        number_B = torch.arange(len(prompts), device=device)
        written_BT = torch.full((len(prompts), max_tokens), -1, device=device)
        done_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for step in range(max_tokens):
            last_B = self._step(last_B, temperature_B1, longest + step)
            written_BT[number_B, step] = torch.where(done_B, -1, last_B)
            done_B = done_B | torch.isin(last_B, self.stops_S)
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                left_B = torch.nonzero(~done_B).squeeze(1)
                if len(left_B) == 0:
                    break
                if len(left_B) < KEEP_WHILE * len(done_B):
                    self._keep(left_B)
                    last_B, temperature_B1, number_B = last_B[left_B], temperature_B1[left_B], number_B[left_B]
                    done_B = done_B[left_B]
        rows = written_BT.cpu().numpy().astype(np.int32)
        return [row[row >= 0] for row in rows]

    def _prefill(self, prompts: Sequence[np.ndarray], first: int) -> None:
        """Feed all but each prompt's last token."""
        device = self.model.device
        lengths = [len(prompt) - 1 for prompt in prompts]
        padded = np.zeros((len(prompts), max(lengths)), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt) - 1] = prompt[:-1]
        start_B = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        plan = self.model.cache.plan(
            start_B,
            torch.tensor(lengths, device=device),
            max(lengths),
            slice(first, first + len(prompts)),
            max(lengths),
        )
        self.model.forward(torch.from_numpy(padded).to(device), plan, keep=1)

    def _step(self, last_B: Tensor, temperature_B1: Tensor, longest: int) -> Tensor:
        """One token more in every row, drawn by the exponential race: argmax p / e, e exponential."""
        rows = slice(0, len(last_B))
        live = min(self.model.cache.capacity, -(-longest // 8) * 8)  # masks of aligned rows need no copy
        plan = self.model.cache.plan(self.model.cache.lengths_B[rows].clone(), torch.ones_like(last_B), 1, rows, live)
        logits_BV = self.model.forward(last_B.unsqueeze(1), plan, keep=1)[:, 0].float()
        p_BV = (logits_BV / temperature_B1.clamp(min=1e-3)).softmax(1)
        drawn_B = (p_BV / torch.empty_like(p_BV).exponential_()).argmax(1)
        return torch.where(temperature_B1.squeeze(1) > 0, drawn_B, logits_BV.argmax(1))

    def _keep(self, rows_B: Tensor) -> None:
        """Move these rows to the front of the cache."""
        cache = self.model.cache
        for pair in cache.layers.values():
            for buffer in pair:
                buffer[: len(rows_B)] = buffer[rows_B]
        cache.lengths_B[: len(rows_B)] = cache.lengths_B[rows_B]


def user_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The chat template's ids before and after a user's words."""
    ids = encode_prompt(tokenizer, [{"role": "user", "content": MARK}])
    before, after = tokenizer.decode(ids).split(MARK)
    frame = [tokenizer(text, add_special_tokens=False).input_ids for text in (before, after)]
    return frame[0], frame[1]


def jobs_of(prompts: Sequence[Text], copies: dict[str, tuple[int, int]]) -> Iterator[Job]:
    """As many sampled and greedy completions as `copies` says of each set."""
    for text in prompts:
        sampled, greedy = copies.get(text.source, (1, 0))
        yield from [(text, 1.0)] * sampled + [(text, 0.0)] * greedy


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    args = _arguments(argv)
    part, parts = map(int, args.part.split("/"))
    copies = {}
    for entry in args.copies:
        name, sampled, greedy = entry.split(":")
        copies[name] = (int(sampled), int(greedy))
    start = time.monotonic()
    prompts = load_texts([args.prompts])[part::parts]
    longest = max([SELF_TOKENS + 64, *(len(text.prompt) for text in prompts)])
    waves = Waves(
        args.target,
        dtype=args.dtype,
        rows=args.rows,
        max_tokens=args.max_tokens,
        longest=longest,
        seconds=args.seconds,
    )
    torch.manual_seed(stable_seed(args.seed, part))
    prompts += waves.self_prompts(args.self // parts)
    jobs = list(jobs_of(prompts, copies))
    random.Random(args.seed).shuffle(jobs)
    texts = waves.complete(jobs, args.max_tokens)
    save_texts(args.out, texts)
    tokens, seconds = sum(len(text.completion) for text in texts), time.monotonic() - start
    print(f"part {args.part}: {len(texts)} of {len(jobs)} texts, {tokens} tokens in {seconds:.0f} s", flush=True)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.sweep_traces", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th prompt from the I-th on")
    parser.add_argument("--copies", nargs="*", default=[], metavar="SET:SAMPLED:GREEDY")
    parser.add_argument("--self", type=int, default=0, help="prompts that the target writes, over all parts")
    parser.add_argument("--rows", type=int, default=2048, help="decoded together")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop then; what is finished is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
