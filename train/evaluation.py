"""Stage 03's own evaluation: what its drafts are worth, as result.json with gate G3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.common import encode_prompt, stop_ids_of
from data.filtered import iter_rows
from pipeline.config import Config
from pipeline.models import load_folder, load_target
from pipeline.sources import load_prompts
from specdec.pruned import is_pruned, load_pruned
from train.evaluate import STOCK, Setting, compare

IN_DOMAIN = "held out"


def drafter_of(folder: Path, target: Any, device: str, dtype: str) -> Any:
    """What Engine takes as its draft: a model in eval mode, or a ModelDrafter where the folder's head is pruned."""
    if not is_pruned(folder):
        return load_folder(folder, device, dtype)
    size = target.get_output_embeddings().weight.shape[0]
    return load_pruned(folder, target_size=size, dtype=getattr(torch, dtype), device=device)


def evaluate(
    config: Config,
    start: Path,
    drafts: Mapping[str, Path],
    filtered: Path,
    tokenizer: Any,
    check_stop: Callable[[], None],
) -> list[dict[str, Any]]:
    """One row a draft and set, of the folders `drafts` and of `start`, from which their training began."""
    bench, dtype = config.bench_draft, config.models.dtype
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(config.models, device)
    setting = Setting(
        k=bench.k,
        batch=bench.batch,
        max_tokens=bench.max_tokens,
        stop_ids=stop_ids_of(target, tokenizer),
        seed=bench.seed,
    )
    folders = {STOCK: start, **drafts}
    makers = {name: partial(drafter_of, folder, target, device, dtype) for name, folder in folders.items()}
    room = int(target.config.get_text_config().max_position_embeddings) - bench.max_tokens
    sets = prompt_sets(config, filtered, tokenizer, room)
    rows = compare(target, makers, sets, setting, check_stop)
    return [
        {"target": config.models.target, "dtype": dtype, "in_domain": int(row["domain"] == IN_DOMAIN)} | row
        for row in rows
    ]


def prompt_sets(config: Config, filtered: Path, tokenizer: Any, room: int) -> dict[str, Sequence[Sequence[int]]]:
    """Token ids of the prompts of each set, those of at most `room` tokens; a set without any is left out."""
    bench = config.bench_draft
    held: dict[str, list[int]] = {}
    for row in iter_rows(filtered, "heldout"):
        if len(held) == bench.heldout:
            break
        held[row.prompt_id] = row.prompt_ids.tolist()
    sets = {IN_DOMAIN: list(held.values())}
    for source in bench.prompts:
        prompts = load_prompts(source.name, source.source, source.limit, bench.seed)
        sets[source.name] = [encode_prompt(tokenizer, prompt.messages) for prompt in prompts]
    fitting = {name: [ids for ids in prompts if len(ids) <= room] for name, prompts in sets.items()}
    return {name: prompts for name, prompts in fitting.items() if prompts}
