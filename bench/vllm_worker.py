"""One engine of vLLM, measured when it is told to: a child of bench.vllm_speed (bench/vllm_turns.py).

    python -m bench.vllm_worker

Reads JSON lines from standard input: first the engine (bench.vllm_engines.job), then one cell after the other, or texts
to write (bench.vllm_identity). Answers each with one line on standard output; what vLLM prints goes to standard error.
Ends with standard input, however busy.

What a pass is: the batch's requests handed over together, with random prompts of one length or given ones, each of as
many new tokens, the end of a text passed over. Tokens a second are
those that came after every request had its first one, over the time from there to the end of the last request;
`tokens_per_s_wall` counts all new tokens over the wall time of the whole call, the reading of the prompts included.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from bench.cells import summarise
from bench.round_times import round_times
from specdec.controller import Adaptive, FixedK

WARM_TOKENS = 24
WARM_PASSES = {"adaptive": 2}  # of a cell, uncounted: the controller learns; others: 1, the first time
SEED_OF_WARM_UP = 10_000


@dataclass(frozen=True, kw_only=True)
class Pass:
    """New tokens and seconds of one call; and of them what came once all prompts had been read."""

    tokens: int
    seconds: float
    decoded: int
    decoding_s: float

    def __add__(self, other: Pass) -> Pass:
        return Pass(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Counts:
    """What rounds of single rows did: rounds that verified drafts, the drafts, those that were tested (all before them
    were accepted) and those accepted."""

    rounds: int = 0
    drafted: int = 0
    reached: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.rounds += 1
            self.drafted += drafted
            self.reached += min(drafted, accepted + 1)
            self.accepted += accepted

    def values(self, tokens: int, requests: int) -> dict[str, Any]:
        """Row fields, for passes that gave so many tokens. mean_k counts rounds without drafts; the first token of a
        request comes from its prompt."""
        if not self.rounds:
            return {"mean_k": 0.0, "alpha": None, "tokens_per_round": 1.0}
        plain = max(0, tokens - requests - self.accepted - self.rounds)
        return {
            "mean_k": self.drafted / (self.rounds + plain),
            "alpha": self.accepted / self.reached,
            "tokens_per_round": 1 + self.accepted / self.rounds,
        }


class InTurn:
    """A controller of these lengths, one step after the other, whatever happens."""

    def __init__(self, ks: Sequence[int]) -> None:
        self.k_max, self._endless = max(ks), itertools.cycle(ks)

    def choose(self, rows: int) -> int:
        return next(self._endless)

    def observe(self, *_: object) -> None:
        """Nothing is learned."""

    observe_cost = observe


class SpeedEngine:
    """vLLM in this process. started_s: how long that took."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        from vllm import LLM

        begin = time.perf_counter()
        self.job = job
        self.llm = LLM(**job["llm"])
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.pilot = getattr(self.scheduler, "_pilot", None)
        if self.pilot is None and "additional_config" in job["llm"]:
            raise ValueError("the plugin does not choose draft lengths here; the log says why")
        self.counts = Counts()
        self.times: list[Any] = []
        self._warm: set[tuple[Any, ...]] = set()
        self._batch = 0
        self._all_read: tuple[int, float] | None = None  # new tokens when all prompts were, and the time
        self._count_rounds()
        self._note_when_prompts_are_read()
        self.started_s = time.perf_counter() - begin

    def _count_rounds(self) -> None:
        """vLLM tells its scheduler of every row's drafts, whether it logs statistics or not."""
        whole = self.scheduler.make_spec_decoding_stats

        def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any) -> Any:
            self.counts.add(num_draft_tokens, num_accepted_tokens)
            return whole(stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **more)

        self.scheduler.make_spec_decoding_stats = counted
        if self.pilot is not None:
            observe = self.pilot.observe

            def observed(step: Any) -> None:
                if step.times is not None and not step.times.caught_up:
                    self.times.append(step.times)
                observe(step)

            self.pilot.observe = observed

    def _note_when_prompts_are_read(self) -> None:
        whole = self.scheduler.update_from_output

        def noted(*args: Any, **kwargs: Any) -> Any:
            outputs = whole(*args, **kwargs)
            if self._all_read is None:
                counts = [request.num_output_tokens for request in self.scheduler.running]
                if counts and len(counts) == self._batch and min(counts) > 0:
                    self._all_read = sum(counts), time.perf_counter()
            return outputs

        self.scheduler.update_from_output = noted

    def warm_up(self) -> dict[str, Any]:
        """A few rounds of each batch at each length, so that kernels are compiled; what is known of the engine."""
        begin = time.perf_counter()
        for batch in self.job["batches"]:
            for k, temperature in itertools.product(self.job["ks"], self.job["temperatures"]):
                self.control("fixed", k)
                self.run(batch, SEED_OF_WARM_UP, WARM_TOKENS, temperature)
        return {"start_s": self.started_s, "warm_up_s": time.perf_counter() - begin, **self._graphs()}

    def _graphs(self) -> dict[str, Any]:
        """How many CUDA graphs there are: the target's by model runner V1, the draft's by the plugin."""
        dispatcher = getattr(self.runner, "cudagraph_dispatcher", None)
        found: dict[str, Any] = {}
        if dispatcher is not None:
            found["target_graphs"] = sum(map(len, dispatcher.cudagraph_keys.values()))
        rounds = getattr(getattr(getattr(self.runner, "drafter", None), "draft", None), "rounds", None)
        stats = getattr(rounds, "stats", None)
        if stats is not None:
            found |= {
                "draft_graphs": stats.held,
                "draft_capture_s": stats.seconds,
                "draft_capture_mib": stats.mebibytes,
            }
        return found

    def control(self, controller: str, k: int) -> None:
        """A controller that has learned nothing, where the plugin asks one."""
        if self.pilot is not None:
            self.pilot.controller = Adaptive(k) if controller == "adaptive" else FixedK(k)
            self.pilot._blind = False  # what another cell ended with

    def impose(self, alpha: float) -> None:
        """From now on each draft is accepted with this probability once it is reached."""
        with torch.inference_mode():
            self.runner.rejection_sampler.synthetic_conditional_rates.fill_(alpha)

    def prompts(self, batch: int, seed: int) -> list[list[int]]:
        """Of a pass: from the given ones the next after those of the seed before, or random ones."""
        given: list[list[int]] = self.job["prompts"]
        if given:
            return [given[(seed * batch + row) % len(given)] for row in range(batch)]
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.job["vocab"], (batch, self.job["prompt_tokens"]), generator=generator).tolist()

    def run(self, batch: int, seed: int, new_tokens: int, temperature: float = 0.0) -> Pass:
        """One call."""
        from vllm import SamplingParams

        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in self.prompts(batch, seed)]
        params = SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self._batch, self._all_read = batch, None
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        end = time.perf_counter()
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if self._all_read is None:
            raise ValueError(f"{batch} requests were never decoded together: {new_tokens} new tokens are too few")
        before, since = self._all_read
        return Pass(tokens=tokens, seconds=end - begin, decoded=tokens - before, decoding_s=end - since)

    def measure(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """The measured values of a cell's row."""
        self.control(cell["controller"], cell["k"])
        key = (cell["controller"], cell["k"], cell["batch"], cell["temperature"])
        warm = WARM_PASSES.get(cell["controller"], 0 if key in self._warm else 1)
        self._warm.add(key)
        for seed in range(warm):
            self._turn(cell, SEED_OF_WARM_UP + seed)
        self.counts, self.times = Counts(), []
        passes = [self._turn(cell, seed) for seed in range(cell["passes"])]
        tokens = sum(each.tokens for each in passes)
        requests = len(passes) * cell["batch"] * max(1, len(cell["alphas"]))
        return {
            **summarise("tokens_per_s", [each.decoded / each.decoding_s for each in passes]),
            **summarise("tokens_per_s_wall", [each.tokens / each.seconds for each in passes]),
            "passes": len(passes),
            **self.counts.values(tokens, requests),
            **round_times(self.times, cell["batch"]),
            **self._graphs(),
        }

    def texts(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Texts of all prompts at once, greedy ones without "sampling": {"ids"}, and with logprobs "top", by token its
        likeliest and their logprobs. ks: the draft lengths of one step after the other, where the plugin asks a
        controller."""
        from vllm import SamplingParams

        if self.pilot is not None:
            self.pilot.controller = InTurn(asked["ks"])
        self.counts = Counts()
        params = SamplingParams(
            **asked.get("sampling", {"temperature": 0.0}),
            max_tokens=asked["new_tokens"],
            logprobs=asked["logprobs"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        outputs = [request.outputs[0] for request in self.llm.generate(prompts, params, use_tqdm=False)]
        return [
            {"ids": list(output.token_ids)}
            | (
                {"top": [{str(id): one.logprob for id, one in top.items()} for top in output.logprobs]}
                if output.logprobs
                else {}
            )
            for output in outputs
        ]

    def _turn(self, cell: Mapping[str, Any], seed: int) -> Pass:
        """A pass at each of the cell's acceptances, together."""
        passes = []
        for alpha in cell["alphas"] or (None,):
            if alpha is not None:
                self.impose(alpha)
            passes.append(self.run(cell["batch"], seed, self.job["new_tokens"], cell["temperature"]))
        return reduce(operator.add, passes)


def commands() -> Iterator[dict[str, Any]]:
    """What standard input says. When it ends this process is killed with all that it started, whatever it does: its
    parent is gone, or wants its memory back."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(values: Mapping[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    asked = commands()
    engine = SpeedEngine(next(asked))
    answer({"ready": engine.warm_up()})
    for request in asked:
        try:
            if "prompts" in request:
                texts = engine.texts(request)
                answer({"texts": texts, "counts": vars(engine.counts)})
            else:
                answer({"row": engine.measure(request)})
        except Exception as error:  # the parent ends this process, whose engine may hold requests of the cell
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
