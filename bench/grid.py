"""What stage 04 measures, with the models loaded once: cells of the grid, and the gates G1 and G2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from bench import speed_gate
from bench.cells import measure_cell
from bench.contexts import token_ids
from bench.draft_model import as_draft, draft_name, load_draft
from bench.drafters import labels_of
from bench.greedy import g2_gate, run_g2, tiny_cases
from bench.lossless import run_g1
from bench.lossless_report import format_table, g1_gate
from bench.lossless_suites import demo_suites
from bench.measure import Workload
from data.common import stop_ids_of
from pipeline.config import Config, PromptSource
from pipeline.models import load_target, load_tokenizer
from pipeline.sources import load_prompts
from specdec import ModelDrafter

EXACT_DTYPES = ("float32", "float64")


class Bench:
    """The pair of a config and its prompts. Models are loaded when the first unit that needs them is
    measured."""

    def __init__(self, config: Config, check_stop: Callable[[], None]) -> None:
        self.config, self.bench, self.check_stop = config, config.bench_engine, check_stop
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def target(self) -> Any:
        return load_target(self.config.models, self.device)

    @cached_property
    def drafts(self) -> dict[str | None, Any]:
        """What the grid's drafter "model" is, by Label.draft."""
        if "model" not in self.bench.drafters:
            return {}
        names: Sequence[str | None] = self.bench.drafts or (None,)
        return {name: load_draft(as_draft(self.config, name), self.target, self.device) for name in names}

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.config.models)

    def prompt_ids(self, source: PromptSource, context: int) -> list[list[int]]:
        """The set's prompts as token ids. ValueError naming one that does not fit the target's context."""
        room = int(self.target.config.get_text_config().max_position_embeddings) - self.bench.max_tokens
        prompts = load_prompts(source.name, source.source, source.limit, self.bench.seed)
        encoded = token_ids(self.tokenizer, prompts, context)
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) > room:
                raise ValueError(
                    f"{prompt.id}: {len(ids)} prompt tokens, expected at most {room} "
                    "(the target's context less bench_engine.max_tokens); leave it out of the bench"
                )
        return encoded

    def cell(self, source: PromptSource, temperature: float, batch: int, context: int) -> dict[str, Any]:
        """One cell's {"rows"}: k = 0, transformers, and each drafter with each controller."""
        workload = Workload(
            prompts=self.prompt_ids(source, context),
            batch=batch,
            temperature=temperature,
            max_tokens=self.bench.max_tokens,
            stop_ids=stop_ids_of(self.target, self.tokenizer),
            seed=self.bench.seed,
        )
        rows = measure_cell(
            self.target,
            self.drafts,
            labels_of(self.bench.drafters, self.bench.controllers, self.bench.ks, self.bench.drafts),
            workload,
            repeats=self.bench.repeats,
            check_stop=self.check_stop,
        )
        return {"rows": [self._named(row, source.name) for row in rows]}

    def _named(self, row: dict[str, Any], prompt_set: str) -> dict[str, Any]:
        names = {
            "target": self.config.models.target,
            "draft": (row["draft"] or draft_name(self.config)) if row["drafter"] == "model" else None,
            "dtype": self.config.models.dtype,
            "prompt_set": prompt_set,
        }
        return {**names, **row, "draft": names["draft"]}

    def g5(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gate G5 from the rows of the grid."""
        device = torch.cuda.get_device_name() if self.device == "cuda" else "a CPU"
        if speed_gate.DEVICE not in device or not self.drafts:  # without loading anything
            return speed_gate.g5(rows, speed_gate.obstacle(device, None, None))
        configs = [
            (draft._source if isinstance(draft, ModelDrafter) else draft).config for draft in self.drafts.values()
        ]
        found = [speed_gate.obstacle(device, self.target.config, config) for config in configs]
        return speed_gate.g5(rows, next(filter(None, found), None))

    def g1(self) -> dict[str, Any]:
        """Gate G1: the enumerated law of tiny models, on the CPU in float64 (the models' size is not its subject)."""
        rows = run_g1(demo_suites(), samples=self.bench.law_samples, seed=self.bench.seed)
        print(format_table(rows))
        return {"rows": rows, "gate": g1_gate(rows)}

    def g2(self) -> dict[str, Any]:
        """Gate G2 on tiny models of every family; `with_own_pair` adds what the cells saw of the config's own."""
        rows = run_g2(tiny_cases(), ks=self.bench.greedy_ks)
        return {"rows": rows, "gate": g2_gate(rows)}


def with_own_pair(gate: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """G2 with the cells' greedy texts: each must be the one of k = 0, by the engine at every k and by transformers.

    Only in float32 or float64: in lower precision near-ties flip, and the count is shown without being judged.
    """
    greedy = [row for row in rows if "texts_as_plain" in row]
    if not greedy:
        return dict(gate)
    texts, same = sum(row["texts"] for row in greedy), sum(row["texts_as_plain"] for row in greedy)
    told = f"{same} of {texts} greedy texts of the measured pair ({greedy[0]['dtype']}) are those of k = 0"
    if same == texts or greedy[0]["dtype"] not in EXACT_DTYPES:
        return dict(gate) | {"reason": f"{gate['reason']}; {told}"}
    return dict(gate) | {"state": "fail", "value": min(gate["value"] or 0.0, same / texts), "reason": told}
