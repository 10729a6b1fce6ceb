"""One YAML file is one experiment: its schema, as frozen dataclasses, one per section.

Facts of a site (paths, accounts) stay out of it: they come from the environment (env.sh), and a string such as
`jsonl:$SPEC_PROMPTS/train.jsonl` is expanded only where it is used.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import schema
from pipeline.config_bench_vllm import BenchVllmConfig
from pipeline.config_profile import DEFAULT_PROFILE, ProfileConfig
from pipeline.config_slurm import DEFAULT_SLURM, SlurmConfig
from pipeline.config_train import DEFAULT_TRAIN, STOCK, TrainConfig
from pipeline.fields import count as _count
from pipeline.fields import name as _name
from pipeline.fields import one_of as _one_of
from pipeline.fields import temperature as _temperature
from pipeline.prompt_sets import PromptSource, check_prompts, not_empty
from pipeline.schema import setting

DTYPES = ("float32", "float64", "bfloat16", "float16")
DRAFTERS = ("none", "model", "ngram", "suffix")
CONTROLLERS = ("fixed", "geometric", "adaptive")
TRACE_BACKENDS = ("auto", "vllm", "specdec", "score")
EXECUTORS = ("local", "slurm")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Where the draft comes from: the target's first `keep_layers` layers (or the listed ones), a model's name, or a
    draft that stage 03 of this run trained, by its name under train.drafts."""

    keep_layers: int | tuple[int, ...] | None = _count(0, default=None)
    model: str | None = None
    trained: str | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.keep_layers, self.model, self.trained)) != 1:
            raise ValueError("got several or none of keep_layers, model and trained, expected exactly one")
        if self.keep_layers in (0, ()):
            raise ValueError(f"keep_layers: got {self.keep_layers!r}, expected at least one layer")


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """The pair. Names as in pipeline.models.resolve."""

    target: str
    draft: DraftConfig
    dtype: str = _one_of(DTYPES, default="bfloat16")


@dataclass(frozen=True, kw_only=True)
class TracesConfig:
    """Stage 01: `completions_per_prompt` completions of every prompt at every temperature.

    backend: "vllm" or "specdec" (our engine); "auto" is vllm where it is installed; "score" makes no text but takes
    it from the sources (data.texts). token_budget: stop after the first shard, in order, with which the completion
    tokens reach it. thinking: what the chat template of a reasoning model is told. batch: completions decoded
    together. tensor_parallel: GPUs that share one engine (vllm).
    """

    prompts: tuple[PromptSource, ...]
    backend: str = _one_of(TRACE_BACKENDS, default="auto")
    completions_per_prompt: int = _count(default=1)
    temperatures: tuple[float, ...] = _temperature(default=(1.0,))
    top_p: float = setting("a number in (0, 1]", lambda value: 0 < value <= 1, default=1.0)
    thinking: bool | None = None
    max_tokens: int = _count()
    token_budget: int | None = _count(default=None)
    seed: int = _count(0, default=0)
    shard_size: int = _count(default=64)
    top_logprobs: int = _count(default=8)
    batch: int = _count(default=8)
    tensor_parallel: int = _count(default=1)

    def __post_init__(self) -> None:
        check_prompts(self.prompts)
        not_empty(temperatures=self.temperatures)
        if len(set(self.temperatures)) < len(self.temperatures):  # seeds hang on them: the same completions again
            raise ValueError(f"temperatures: got {list(self.temperatures)}, expected each once")
        if self.tensor_parallel > 1 and self.backend in ("specdec", "score"):
            raise ValueError(
                f"tensor_parallel: got {self.tensor_parallel} with backend {self.backend}, expected backend vllm"
            )


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """Processes that share a stage's work: `count` of them the shards of stage 01, `servers` of them the methods of
    stage 05 (0: the stage's own process does all), on this machine ("local") or as an array of Slurm jobs of at most
    `minutes` each.

    No part of what a result depends on: it may be changed in the middle of a run. `retries`: how often in a row
    workers may fail without having finished a unit.
    """

    count: int = _count(0, default=0)
    servers: int = _count(0, default=0)
    executor: str = _one_of(EXECUTORS, default="local")
    retries: int = _count(0, default=2)
    minutes: int = _count(default=240)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Stage 02: what is dropped from the traces, and how much of the rest is held out.

    `truncated` and `wrong` say what becomes of completions that ended at max_tokens and of answers that a verifier
    refused. A loop is a completion that ends in one block repeated `loop_repeats` times or more, over `loop_tokens`
    tokens or more. `min_tokens` and `max_tokens` bound a completion. Two prompts are near duplicates when the Jaccard
    similarity of their `shingle_words`-word shingles is `near_threshold` or more. `heldout` is the share of prompts
    that the split puts aside. `run_code` allows running completions of HumanEval against its tests.
    """

    truncated: str = _one_of(("keep", "drop"), default="keep")
    wrong: str = _one_of(("keep", "drop"), default="keep")
    loop_repeats: int = _count(2, default=4)
    loop_tokens: int = _count(2, default=32)
    min_tokens: int = _count(default=1)
    max_tokens: int | None = _count(default=None)
    shingle_words: int = _count(default=3)
    near_threshold: float = setting("a number in (0, 1]", lambda value: 0 < value <= 1, default=0.5)
    heldout: float = setting("a share in [0, 1)", lambda value: 0 <= value < 1, default=0.05)
    run_code: bool = True
    seed: int = _count(0, default=0)


@dataclass(frozen=True, kw_only=True)
class BenchEngineConfig:
    """Stage 04: the grid prompts x temperatures x batches x contexts, in each cell drafters x controllers (and ks), and
    the sizes of gates G1 and G2.

    k = 0 is measured in every cell, as drafter "none"; controller "fixed" stands for every one of `ks`, the others
    choose up to their largest. `drafts`: the drafter "model" is each of these drafts of stage 03 of the run ("stock":
    what its training starts from) instead of models.draft. `contexts`: prompts of so many tokens; 0 leaves them as
    they are. `law_samples` is G1's sample size a case; `greedy_ks` are G2's draft lengths.
    """

    prompts: tuple[PromptSource, ...]
    drafters: tuple[str, ...] = _one_of(DRAFTERS, default=DRAFTERS)
    drafts: tuple[str, ...] = ()
    controllers: tuple[str, ...] = _one_of(CONTROLLERS, default=("fixed", "adaptive"))
    ks: tuple[int, ...] = _count(default=(1, 2, 4))
    batches: tuple[int, ...] = _count(default=(1, 4))
    temperatures: tuple[float, ...] = _temperature(default=(0.0,))
    contexts: tuple[int, ...] = _count(0, default=(0,))
    max_tokens: int = _count(default=64)
    repeats: int = _count(default=1)
    seed: int = _count(0, default=0)
    law_samples: int = _count(100, default=20_000)
    greedy_ks: tuple[int, ...] = _count(0, default=(1, 3, 8))

    def __post_init__(self) -> None:
        check_prompts(self.prompts)
        not_empty(
            drafters=self.drafters,
            controllers=self.controllers,
            ks=self.ks,
            batches=self.batches,
            temperatures=self.temperatures,
            contexts=self.contexts,
            greedy_ks=self.greedy_ks,
        )


@dataclass(frozen=True, kw_only=True)
class BenchDraftConfig:
    """Stage 03's evaluation: acceptance, by the engine at temperatures 0 and 1, of the draft that training starts from
    and of each trained one, on up to `heldout` prompts that the filter held out and on the sets of `prompts`, which
    are out of domain. `k` tokens are drafted a round."""

    prompts: tuple[PromptSource, ...] = ()
    heldout: int = _count(default=16)
    k: int = _count(default=8)
    batch: int = _count(default=8)
    max_tokens: int = _count(default=64)
    seed: int = _count(0, default=0)

    def __post_init__(self) -> None:
        if self.prompts:
            check_prompts(self.prompts)


DEFAULT_BENCH_DRAFT = BenchDraftConfig()


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment. Results go to $SPEC_DATA_ROOT/<run>/<stage>/."""

    run: str = _name()
    models: ModelsConfig
    traces: TracesConfig
    filter: FilterConfig = FilterConfig()
    train: TrainConfig = DEFAULT_TRAIN
    bench_draft: BenchDraftConfig = DEFAULT_BENCH_DRAFT
    bench_engine: BenchEngineConfig
    bench_vllm: BenchVllmConfig | None = None
    profile: ProfileConfig = DEFAULT_PROFILE
    workers: WorkersConfig = WorkersConfig()
    slurm: SlurmConfig = DEFAULT_SLURM

    def __post_init__(self) -> None:
        trained, names = self.models.draft.trained, [draft.name for draft in self.train.drafts]
        if trained is not None and trained not in names:
            raise ValueError(f"models.draft.trained: got {trained!r}, expected one of train.drafts: {', '.join(names)}")
        unknown = [name for name in part(self, "bench_engine.drafts") or () if name not in (STOCK, *names)]
        if unknown:
            known = ", ".join((STOCK, *names))
            raise ValueError(f"bench_engine.drafts: got {unknown[0]!r}, expected {known} (train.drafts)")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The experiment in a YAML file, with `overrides` such as "traces.batch=4" (values in YAML) put in first.

    Raises ValueError with file, line, key, got and expected: no such file, not YAML, an unknown, missing or repeated
    key, a value of the wrong type or out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such config file; expected a YAML file such as configs/demo.yaml")
    root = schema.compose(path.read_text(encoding="utf-8"), str(path))
    if root is None:
        raise ValueError(f"{path}:1: the file is empty; expected the keys of configs/demo.yaml")
    for assignment in overrides:
        schema.override(root, assignment)
    return schema.read(root, Config)


def section_values(config: Config, sections: Iterable[str]) -> dict[str, Any]:
    """The named sections, or parts of them such as "bench_engine.seed", as plain data (JSON), in the order given."""
    return {name: _plain(part(config, name)) for name in sections}


def part(config: Config, path: str) -> Any:
    """The section, or the part of it, that a dotted path names; None where the section is left out."""
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def bench_sections() -> tuple[str, ...]:
    """The sections whose prompts are measured: every section with `prompts` but the traces'."""
    return tuple(name for name, fields in _section_fields().items() if name != "traces" and "prompts" in fields)


def bench_prompt_parts() -> tuple[str, ...]:
    """What decides which prompts are measured, as dotted paths: `prompts` and `seed` of each bench section."""
    fields = _section_fields()
    return tuple(f"{name}.{key}" for name in bench_sections() for key in ("prompts", "seed") if key in fields[name])


def expand_env(text: str) -> str:
    """`text` with $NAME and ${NAME} replaced from the environment. ValueError naming a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in os.environ:
            raise ValueError(f"{text}: the environment variable {name} is not set; set it in env.sh")
        return os.environ[name]

    return re.sub(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", value, text)


def _section_fields() -> dict[str, set[str]]:
    """The fields of every section by name; a section may be declared as `Section | None`."""
    sections = {name: typing.get_args(kind) or (kind,) for name, kind in typing.get_type_hints(Config).items()}
    return {
        name: {field.name for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)}
        for name, kinds in sections.items()
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(element) for element in value] if isinstance(value, tuple) else value
