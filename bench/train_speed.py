"""How fast stage 03's trainer steps on a model of given shapes (random weights, random texts of one length).

    SPEC_TRAIN_PROCESSES=2 python -m bench.train_speed --shapes FOLDER_WITH_CONFIG --sharding fsdp ddp --out FILE
    ... --stop-after 6 --checkpoints FOLDER       # then without --stop-after, on another number of processes: resumes

Medians leave out the first steps of a run, in which kernels are chosen and memory is claimed. MFU counts 6 operations a
weight and token; with attention, 6 more for each layer, head dimension and token before (the causal half of PaLM's
count, arXiv 2204.02311, appendix B). Recomputation counts in neither.
"""

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config_train import ATTENTIONS, DRAFTS, SHARDINGS, RecipeConfig
from pipeline.results import write_result
from train.corpus import Corpus
from train.ranks import Ranks, layout
from train.student import Student
from train.trainer import Trainer

TOP = 8
WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process of the run does; `stop_after` steps it writes a checkpoint and ends."""

    shapes: Path
    recipe: RecipeConfig
    checkpoints: Path | None
    stop_after: int | None


def random_corpus(vocab_size: int, documents: int, length: int) -> Corpus:
    """Documents that fill a sequence each, all but the first token trained on."""
    rng = np.random.default_rng(0)
    rows = documents * length
    logprobs = np.log(np.full((rows, TOP), 0.9 / TOP, dtype=np.float32))
    # Different ids at every position: a random first one and its neighbours.
    top_ids = (rng.integers(0, vocab_size, (rows, 1)) + np.arange(TOP)) % vocab_size
    return Corpus(
        names=np.array([f"random/{number}" for number in range(documents)]),
        tokens=rng.integers(0, vocab_size, documents * (length + 1)).astype(np.int32),
        token_begins=np.arange(documents + 1) * (length + 1),
        row_begins=np.arange(documents + 1) * length,
        top_ids=top_ids.astype(np.int32),
        top_logprobs=logprobs,
        tail_mass=np.full(rows, 0.1, dtype=np.float32),
    )


def run(job: Job) -> tuple[list[dict[str, Any]], int]:
    """Train the model of these shapes; the trainer's rows, and the operations a token without attention."""
    gc.collect()  # the model of the run before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = AutoConfig.from_pretrained(job.shapes)
    torch.manual_seed(0)
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.config.use_cache = False
    assert job.recipe.steps is not None
    corpus = random_corpus(config.vocab_size, job.recipe.steps * job.recipe.sequences, job.recipe.length)
    folder = job.checkpoints and job.checkpoints / job.recipe.sharding
    trainer = Trainer(Student(model, DRAFTS[1].loss), corpus, job.recipe, folder)
    taken = 0

    def should_stop() -> bool:
        nonlocal taken
        taken += 1
        return taken == job.stop_after

    return trainer.train(should_stop).metrics, trainer.flops_per_token


def row_of(job: Job, processes: int, metrics: Sequence[dict[str, Any]], flops_per_token: int) -> dict[str, Any]:
    """The result's row of what `run` gave."""
    recipe = job.recipe
    config = AutoConfig.from_pretrained(job.shapes).get_text_config()
    warm = metrics[WARM_STEPS:] or metrics
    mfu = median(each["mfu"] for each in warm) if warm[0].get("mfu") else None
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    attention = 6 * heads * recipe.length / flops_per_token
    return {
        "target": job.shapes.name,
        "drafts": "random weights" + (f", from step {metrics[0]['step']}" if metrics[0]["step"] else ""),
        "processes": processes,
        "sharding": recipe.sharding if processes > 1 else "none",
        "attention": recipe.attention,
        "compile": recipe.compile,
        "length": recipe.length,
        "sequences": recipe.sequences,
        "micro_batch": recipe.micro_batch,
        "first_step": metrics[0]["step"],
        "tokens_per_s": median(each["tokens_per_s"] for each in warm),
        "mfu": mfu,
        "mfu_attention": mfu and mfu * (1 + attention),
        "peak_memory_gib": max(each.get("peak_memory_gib", 0.0) for each in metrics) or None,
        "losses": [each["loss"] for each in metrics],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.train_speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", required=True, type=Path, help="folder with config.json")
    parser.add_argument("--sharding", choices=SHARDINGS, nargs="+", default=["fsdp"], help="one run each")
    parser.add_argument("--attention", choices=ATTENTIONS, default="varlen")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    recipe = RecipeConfig(
        length=args.length,
        sequences=args.sequences,
        micro_batch=args.micro_batch,
        steps=args.steps,
        lr=1e-4,
        attention=args.attention,
        compile=args.compile,
    )
    started, rows = datetime.now(UTC).isoformat(timespec="seconds"), []
    processes = layout().world
    with Ranks() as ranks:
        for sharding in args.sharding:
            job = Job(
                shapes=args.shapes,
                recipe=dataclasses.replace(recipe, sharding=sharding),
                checkpoints=args.checkpoints,
                stop_after=args.stop_after,
            )
            rows.append(row_of(job, processes, *ranks.run(run, job)))
            print(json.dumps(rows[-1]), flush=True)
            write_result(args.out, stage="train_speed", run=args.shapes.name, rows=rows, gates={}, started=started)
    return 0


if __name__ == "__main__":
    # Under its own name, so that the other processes can unpickle what they are called with.
    from bench import train_speed

    sys.exit(train_speed.main())
