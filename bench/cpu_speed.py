"""What speculation and the engine are worth on a CPU, as ratios measured in one run, each beside its aim.

    python -m bench.cpu_speed --config configs/demo.yaml --out results/cpu_speed.json

Both sides of a ratio decode the same requests, in turn there and back (bench/measure.py), `repeats` times; the value
is the median of the repeats' ratios. Plain decoding is compared with `generate` of transformers under the faster of
its caches; the draft model with transformers' assisted generation under the faster of its settings.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from bench.cells import summarise
from bench.drafters import Label, drafter_of
from bench.measure import EngineVariant, TransformersVariant, Variant, Workload, interleave, tokens_per_s_wall, warm_up
from data.common import encode_prompt, stop_ids_of
from pipeline.config import Config, load_config
from pipeline.results import write_result
from pipeline.sources import load_prompts
from specdec import ModelDrafter, NgramDrafter
from specdec.controller import Adaptive
from specdec.vocab import VocabularyMap

K_MAX = 8
MODEL = Label(engine="specdec", drafter="model", controller="fixed", k=4)
ASSISTED: tuple[Mapping[str, Any], ...] = (
    {},  # the defaults: 20 tokens, stopping where the draft is not confident
    {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0},
)
CACHES: tuple[Mapping[str, Any], ...] = ({}, {"cache_implementation": "static"})


@dataclass(frozen=True, kw_only=True)
class Check:
    """A ratio of two speeds (or a share of time) and what it should at least (`above`) or at most be."""

    name: str
    value: float
    aim: float
    above: bool
    values: Mapping[str, Any]

    def row(self, names: Mapping[str, Any]) -> dict[str, Any]:
        holds = self.value >= self.aim if self.above else self.value <= self.aim
        bound = f"{'>=' if self.above else '<='} {self.aim}"
        return {**names, "check": self.name, "value": self.value, "aim": bound, "holds": holds, **self.values}


def edits(limit: int) -> list[list[dict[str, str]]]:
    """Requests whose answer repeats much of the question: a function with another name."""
    prompts = load_prompts("edit", "human_eval", limit, 0)
    ask = "Rename this Python function to `solve`. Reply with the whole code, docstring included.\n\n"
    return [[{"role": "user", "content": ask + p.messages[-1]["content"].split("\n\n", 1)[1]}] for p in prompts]


def questions(limit: int) -> list[list[dict[str, str]]]:
    """Requests whose answer repeats little of the question."""
    prompts = load_prompts("question", "reasoning_gym:propositional_logic,family_relationships", limit, 0)
    return [prompt.messages for prompt in prompts]


class CpuSpeed:
    """The config's pair on this CPU."""

    def __init__(self, config: Config, *, max_tokens: int, repeats: int, prompts: int) -> None:
        from bench.draft_model import load_draft
        from pipeline.models import load_target, load_tokenizer

        self.target = load_target(config.models, "cpu")
        self.draft = load_draft(config, self.target, "cpu")
        self.tokenizer = load_tokenizer(config.models)
        self.stop_ids = stop_ids_of(self.target, self.tokenizer)
        self.max_tokens, self.repeats, self.num_prompts = max_tokens, repeats, prompts

    def checks(self) -> list[Callable[[], Check]]:
        """Every comparison, to be made one after the other."""
        return [
            lambda: self.plain_against_transformers(1),
            lambda: self.plain_against_transformers(8),
            lambda: self.ngram("code edits", edits(self.num_prompts), 1.3),
            lambda: self.ngram("questions", questions(self.num_prompts), 0.97),
            self.draft_model_against_assisted,
            lambda: self.outside_forwards(0.0),
            lambda: self.outside_forwards(0.8),
            self.batch,
        ]

    def plain_against_transformers(self, batch: int) -> Check:
        work = self._work(questions(max(batch, self.num_prompts)), batch, fixed_length=True)
        variants: list[Variant] = [self._engine(work), *(self._transformers(batch, each) for each in CACHES)]
        ours, *theirs = self._speeds(variants, work)
        return _ratio(f"k = 0 over transformers generate, batch {batch}", 1.0, ours, _fastest(theirs))

    def ngram(self, kind: str, messages: Sequence[Any], aim: float) -> Check:
        work = self._work(messages, 1)
        plain, ngram = self._speeds([self._engine(work), self._engine(work, NgramDrafter(), Adaptive(K_MAX))], work)
        return _ratio(f"n-gram, adaptive, over k = 0: {kind}", aim, ngram, plain)

    def draft_model_against_assisted(self) -> Check:
        work = self._work([*edits(self.num_prompts // 2), *questions(self.num_prompts // 2)], 1)
        theirs = [self._transformers(1, {"assistant_model": assistant(self.draft, each)}) for each in ASSISTED]
        ours, *others = self._speeds(
            [self._engine(work, drafter_of(MODEL, self.draft), Adaptive(K_MAX)), *theirs], work
        )
        return _ratio("draft model, adaptive, over transformers assisted generation", 1.0, ours, _fastest(others))

    def outside_forwards(self, temperature: float) -> Check:
        """The share of a round with 4 drafts that is spent outside the two models' forwards."""
        work = self._work(questions(self.num_prompts), 1, temperature=temperature)
        engine = EngineVariant(self.target, drafter_of(MODEL, self.draft), k=4, batch=1, capacity=work.longest)
        warm_up([engine], work, lambda: None)
        with forward_time(engine.engine) as seconds:
            rounds = engine.run(work.requests(0, 0)).rounds
        total_s = sum(stats.total_s for stats in rounds)
        share = 1 - sum(seconds[-len(rounds) :]) / total_s
        values = {"rounds": len(rounds), "round_ms": 1e3 * total_s / len(rounds)}
        name = f"outside the forwards, share of a round, T = {temperature:g}"
        return Check(name=name, value=share, aim=0.05, above=False, values=values)

    def batch(self) -> Check:
        eight, one = (self._work(questions(8), size, fixed_length=True) for size in (8, 1))
        many = self._speeds([self._engine(eight)], eight)[0]
        return _ratio("k = 0, batch 8 over batch 1", 2.0, many, self._speeds([self._engine(one)], one)[0])

    def _work(
        self, messages: Sequence[Any], batch: int, *, temperature: float = 0.0, fixed_length: bool = False
    ) -> Workload:
        return Workload(
            prompts=[encode_prompt(self.tokenizer, each) for each in messages],
            batch=batch,
            temperature=temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.max_tokens if fixed_length else 0,
            stop_ids=self.stop_ids,
            seed=0,
            waves=1,
        )

    def _engine(self, work: Workload, draft: Any = None, k: Any = 0) -> EngineVariant:
        return EngineVariant(self.target, draft, k=k, batch=work.batch, capacity=work.longest)

    def _transformers(self, batch: int, options: Mapping[str, Any]) -> TransformersVariant:
        return TransformersVariant(self.target, batch=batch, options=options)

    def _speeds(self, variants: Sequence[Variant], work: Workload) -> list[list[float]]:
        """Tokens a second over whole passes, prefill and all, [variant][repeat]."""
        warm_up(variants, work, lambda: None)
        measured = interleave(variants, work, self.repeats, lambda: None)
        return [[tokens_per_s_wall(each) for each in passes] for passes in measured]


def assistant(draft: Any, settings: Mapping[str, Any]) -> Any:
    """The draft for transformers' assisted generation, which reads its settings from the draft's own config; a pruned
    head is followed by what puts its logits at the target's ids."""
    model = copy.copy(draft._source if isinstance(draft, ModelDrafter) else draft)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.update(**settings)
    if isinstance(draft, ModelDrafter) and draft.vocabulary is not None:
        model._modules = {**model._modules, "lm_head": _Expanded(model.lm_head, draft.vocabulary)}
    return model


class _Expanded(torch.nn.Module):
    """A pruned head and the map from its columns to the target's ids."""

    def __init__(self, head: torch.nn.Module, vocabulary: VocabularyMap) -> None:
        super().__init__()
        self.head, self.vocabulary = head, vocabulary

    def forward(self, hidden_BqD: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.expand(self.head(hidden_BqD))


@contextmanager
def forward_time(engine: Any) -> Any:
    """A list that gets the seconds both models' forwards took, one number a round."""
    seconds: list[float] = []
    spent = [0.0]
    models = [engine._target, engine._drafter.model]
    before = [model.forward for model in models]

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = forward(*args, **options)
            spent[0] += time.perf_counter() - start
            return result

        return call

    def round_without_prefill() -> None:
        spent[0] = 0.0
        one_round()
        seconds.append(spent[0])

    one_round = engine._round
    for model, forward in zip(models, before, strict=True):
        model.forward = timed(forward)
    engine._round = round_without_prefill
    try:
        yield seconds
    finally:
        engine._round = one_round
        for model, forward in zip(models, before, strict=True):
            model.forward = forward


def _fastest(speeds: Sequence[Sequence[float]]) -> Sequence[float]:
    return max(speeds, key=median)


def _ratio(name: str, aim: float, ours: Sequence[float], theirs: Sequence[float]) -> Check:
    ratios = summarise("ratio", [mine / other for mine, other in zip(ours, theirs, strict=True)])
    value = ratios.pop("ratio")
    values = ratios | {"tokens_per_s": median(ours), "tokens_per_s_other": median(theirs)}
    return Check(name=name, value=value, aim=aim, above=True, values=values)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.cpu_speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", required=True)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a comparison, from 2 on (default 4)")
    args = parser.parse_args(argv)
    for name, least in (("max_tokens", 1), ("repeats", 1), ("prompts", 2)):  # one comparison halves the prompts
        if (value := getattr(args, name)) < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a whole number from {least} on")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        config = load_config(args.config, args.set)
    except ValueError as error:
        print(f"bench.cpu_speed: {error}", file=sys.stderr)
        return 2
    bench = CpuSpeed(config, max_tokens=args.max_tokens, repeats=args.repeats, prompts=args.prompts)
    names = {"target": config.models.target, "dtype": config.models.dtype, "max_tokens": args.max_tokens}
    rows = []
    for check in bench.checks():
        rows.append(check().row(names))
        print("{check}: {value:.3f} (aim {aim})".format(**rows[-1]), flush=True)
        write_result(args.out, stage="cpu_speed", run=config.run, rows=rows, gates={}, started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
