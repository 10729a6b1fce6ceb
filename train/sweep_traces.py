"""Completions for a sweep: tokens only, by thousands of rows at once, one part of several in this process.

    python -m train.sweep_traces --target MODEL --prompts prompts.npz --part 0/4 --copies gsm8k:12:1 self:1:0 \
        --self 10000 --seconds 100 --out part-0.npz

The engine refills a slot as soon as it is free, which here means a prefill in nearly every step, and its bookkeeping is
by row. For many short texts of a small model it is faster to keep nothing but tokens and to refill in bulk: the rows
that are done write on into nothing until there is one in four of them. A step has one shape, so that on a GPU it is a
CUDA graph, and the forward is the engine's fast one where that can be used.

The set "self" holds prompts that the target writes itself: given the chat template up to where a user's words begin,
an instruction-tuned model goes on as a user would (Magpie, arXiv 2406.08464).
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.common import encode_prompt, stable_seed, stop_ids_of
from pipeline.config import DraftConfig, ModelsConfig
from pipeline.models import load_target, load_tokenizer
from specdec.capture import capture_for
from specdec.model import CachedModel
from train.sweep_prompts import NOTHING
from train.texts import Text, load_texts, save_texts

SELF = "self"
MARK = "0123456789"
SELF_TOKENS = 128
SELF_TEMPERATURE = 0.8
PREFILL_ROWS = 256
CHECK_EVERY = 8
PRINT_SECONDS = 10.0
REFILL_FROM = 0.25  # of the rows that are done

Job = tuple[Text, float]


class Writer:
    """The target writing in `rows` rows, until a deadline (seconds from the beginning of its making).

    plain: without the fast forward and the CUDA graph, which a GPU gets else.

    Of each row: its last token, its temperature, how many tokens it has written, at most how many it may, and whether
    it is done. Column `most` of `written_BT` takes what rows write that are done.
    """

    def __init__(
        self,
        target: str,
        *,
        dtype: str,
        rows: int,
        max_tokens: int,
        longest: int,
        seconds: float,
        plain: bool = False,
    ) -> None:
        self.ends = time.monotonic() + seconds
        models = ModelsConfig(target=target, draft=DraftConfig(keep_layers=1), dtype=dtype)
        self.tokenizer = load_tokenizer(models)
        model = load_target(models, "cuda" if torch.cuda.is_available() else "cpu")
        device = model.device
        self.stops_S = torch.tensor(stop_ids_of(model, self.tokenizer), device=device)
        self.plain = plain or device.type != "cuda"
        fast = False if plain else None
        self.model = CachedModel(model, num_rows=rows, capacity=longest + max_tokens + 8, fast=fast, tuned=False)
        self.most = max_tokens
        self.last_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature_B = torch.zeros(rows, device=device)
        self.count_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limit_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done_B = torch.ones(rows, dtype=torch.bool, device=device)
        self.written_BT = torch.zeros(rows, max_tokens + 1, dtype=torch.int64, device=device)
        self._replay: Callable[[], object] | None = None

    def self_prompts(self, count: int) -> list[Text]:
        """Prompts that the target writes as the user; those that it does not end are dropped."""
        begin, end = user_frame(self.tokenizer)
        start = Text(source=SELF, prompt=np.array(begin, dtype=np.int32), completion=NOTHING)
        written = self.complete([(start, SELF_TEMPERATURE)] * count, min(SELF_TOKENS, self.most))
        stops = self.stops_S.tolist()
        ended = [text.completion[:-1] for text in written if len(text.completion) > 1 and text.completion[-1] in stops]
        return [
            Text(source=SELF, prompt=np.concatenate([start.prompt, ids, end]).astype(np.int32), completion=NOTHING)
            for ids in ended
        ]

    @torch.inference_mode()
    def complete(self, jobs: Sequence[Job], max_tokens: int) -> list[Text]:
        """Completions of (prompt, temperature), up to a stop id or `max_tokens`, in the order in which they end; at the
        deadline those that are done."""
        texts: list[Text] = []
        waiting, running = iter(jobs), dict[int, Job]()
        self.done_B.fill_(True)
        more, started = True, time.monotonic()
        printed = started
        while more or running:
            if time.monotonic() > printed + PRINT_SECONDS:
                printed = time.monotonic()
                tokens = sum(len(text.completion) for text in texts)
                print(f"{printed - started:.0f} s: {len(texts)} texts, {tokens} tokens", flush=True)
            done = self.done_B.cpu().numpy()
            late = time.monotonic() > self.ends
            if late or not more or done.mean() >= REFILL_FROM:
                texts += self._collected(running, np.flatnonzero(done).tolist())
                if late:
                    break
            if more and done.mean() >= REFILL_FROM:
                more = self._refill(running, np.flatnonzero(done).tolist(), waiting, max_tokens)
            for _ in range(CHECK_EVERY if running else 0):
                self._step()
        return texts

    def _collected(self, running: dict[int, Job], rows: Sequence[int]) -> list[Text]:
        """The texts of the rows among these that were running; they are free then."""
        found = [row for row in rows if row in running]
        index_R = torch.tensor(found, dtype=torch.int64, device=self.model.device)
        counts = self.count_B[index_R].tolist()
        written = self.written_BT[index_R].cpu().numpy().astype(np.int32)
        texts = []
        for row, ids, count in zip(found, written, counts, strict=True):
            text, temperature = running.pop(row)
            completion = ids[:count].copy()
            texts.append(Text(source=text.source, prompt=text.prompt, completion=completion, temperature=temperature))
        return texts

    def _refill(self, running: dict[int, Job], rows: list[int], waiting: Iterator[Job], max_tokens: int) -> bool:
        """Start the next jobs in these free rows, PREFILL_ROWS at a time; False when no job is left."""
        for first in range(0, len(rows), PREFILL_ROWS):
            part = rows[first : first + PREFILL_ROWS]
            jobs = [job for _, job in zip(part, waiting, strict=False)]
            if jobs:
                self._start(part[: len(jobs)], jobs, max_tokens)
                running.update(zip(part, jobs, strict=False))
            if len(jobs) < len(part):
                return False
        return True

    def _start(self, rows: Sequence[int], jobs: Sequence[Job], max_tokens: int) -> None:
        """Feed all but each prompt's last token, which the next step feeds."""
        device = self.model.device
        prompts = [text.prompt for text, _ in jobs]
        longest = max(map(len, prompts))
        padded = np.zeros((len(prompts), max(1, longest - 1)), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt) - 1] = prompt[:-1]
        index_R = torch.tensor(rows, device=device)
        lengths_R = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        plan = self.model.cache.plan(torch.zeros_like(index_R), lengths_R, padded.shape[1], index_R, padded.shape[1])
        self.model.forward(torch.from_numpy(padded).to(device), plan, keep=1)
        self.model.cache.lengths_B[index_R] = lengths_R  # a plan leaves the length of a row that it feeds nothing
        self.last_B[index_R] = torch.tensor([int(prompt[-1]) for prompt in prompts], device=device)
        self.temperature_B[index_R] = torch.tensor([temperature for _, temperature in jobs], device=device)
        self.limit_B[index_R] = max_tokens
        self.count_B[index_R] = 0
        self.done_B[index_R] = False

    def _step(self) -> None:
        """One token more in every row."""
        if self._replay is None:
            advance = self._advance
            self._replay = advance if self.plain else capture_for(self.model.device)(advance, lambda: None)
        self._replay()

    def _advance(self) -> None:
        """Draw by argmax of logits - T log e, e exponential: the Gumbel trick, and greedy where T = 0.

        A row that is done goes on where it is: its length stays, so that it never outgrows the cache.
        """
        lengths_B = self.model.cache.lengths_B
        before_B = lengths_B.clone()
        plan = self.model.cache.plan(before_B, torch.ones_like(before_B), 1, slice(0, len(before_B)), None)
        logits_BV = self.model.forward(self.last_B.unsqueeze(1), plan, keep=1)[:, 0].float()
        noise_BV = torch.empty_like(logits_BV).exponential_().log_()
        drawn_B = (logits_BV - self.temperature_B.unsqueeze(1) * noise_BV).argmax(1)
        token_B = torch.where(self.done_B, self.last_B, drawn_B)
        column_B = torch.where(self.done_B, self.most, self.count_B)
        self.written_BT.scatter_(1, column_B.unsqueeze(1), token_B.unsqueeze(1))
        lengths_B.copy_(torch.where(self.done_B, before_B, lengths_B))
        self.last_B.copy_(token_B)
        self.count_B += (~self.done_B).long()
        self.done_B |= (token_B.unsqueeze(1) == self.stops_S).any(1) | (self.count_B >= self.limit_B)


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
    writer = Writer(
        args.target,
        dtype=args.dtype,
        rows=args.rows,
        max_tokens=args.max_tokens,
        longest=longest,
        seconds=args.seconds,
        plain=args.plain,
    )
    torch.manual_seed(stable_seed(args.seed, part))
    print(f"part {args.part}: ready after {time.monotonic() - start:.0f} s", flush=True)
    prompts += writer.self_prompts(args.self // parts)
    jobs = list(jobs_of(prompts, copies))
    random.Random(args.seed).shuffle(jobs)
    texts = writer.complete(jobs, args.max_tokens)
    tokens, seconds = sum(len(text.completion) for text in texts), time.monotonic() - start
    save_texts(args.out, texts)
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
    parser.add_argument("--plain", action="store_true", help="on a GPU: no fast forward, no CUDA graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
