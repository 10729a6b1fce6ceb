"""The training loop: one draft, one corpus, one recipe, on one process or many.

A step's loss is the sum over its loss positions divided by their number over all processes and micro-batches, so that
neither accumulation nor the number of processes changes what is minimised.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.common import stable_seed
from pipeline.config_train import RecipeConfig
from train.checkpoint import Checkpoints
from train.corpus import Corpus
from train.devices import make_accelerator, peak_flops, sum_over_processes, whole_weights
from train.metrics import MetricsLog
from train.order import Order, share
from train.packing import Batch, pack
from train.schedule import rate
from train.student import Student

CHECKPOINTS = "checkpoints"
# What may differ between the process that wrote a checkpoint and the one that continues: it changes no step
FREE_TO_CHANGE = (
    "checkpoint_every",
    "keep_checkpoints",
    "micro_batch",
    "sharding",
    "attention",
    "gradient_checkpointing",
    "compile",
)


Sequences = Sequence[tuple[int, ...]]


class LossError(ValueError):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`finished` is False when the training was asked to stop; `weights` are the model's own names to tensors on the
    CPU (empty on all processes but the first, or unfinished); `metrics` are the rows of this run."""

    finished: bool
    steps: int
    weights: Mapping[str, Tensor]
    metrics: list[dict[str, Any]]


class Trainer:
    """`folder` gets checkpoints and metrics (None: neither is written). `heldout` and `teacher` (a Hugging Face model
    on the device) are for the exact acceptance every `recipe.exact_every` steps. `origin` names what the rest cannot:
    a checkpoint of another origin is refused."""

    def __init__(
        self,
        student: Student,
        corpus: Corpus,
        recipe: RecipeConfig,
        folder: Path | None = None,
        *,
        heldout: Corpus | None = None,
        teacher: Any = None,
        origin: str = "",
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self.corpus = fitting(corpus, recipe, student.model.config.get_text_config().max_position_embeddings)
        self.heldout, self.teacher = heldout, teacher
        self.order = Order(self.corpus.lengths, recipe)
        self.accelerator = make_accelerator(recipe)
        identity = {**training_identity(student, self.corpus, recipe), "steps": len(self.order), "origin": origin}
        self.flops_per_token = 6 * product_weights(student.model)
        self.model, self.optimizer = self._prepare(student)
        self.checkpoints = Checkpoints((folder or Path()) / CHECKPOINTS, identity, recipe.keep_checkpoints)

    def _prepare(self, student: Student) -> tuple[Any, torch.optim.Optimizer]:
        student.model.set_attn_implementation(self.recipe.attention)
        if self.recipe.gradient_checkpointing:
            student.model.gradient_checkpointing_enable({"use_reentrant": False})
        student.to(self.accelerator.device)
        if self.recipe.compile:
            student.compile_parts()
        optimizer = torch.optim.AdamW(
            [weight for weight in student.parameters() if weight.requires_grad],
            lr=self.recipe.lr,
            betas=(0.9, self.recipe.beta2),
            weight_decay=self.recipe.weight_decay,
            fused=self.accelerator.device.type == "cuda",
        )
        model, wrapped = self.accelerator.prepare(student, optimizer)
        return model, wrapped.optimizer

    def train(
        self, should_stop: Callable[[], bool] = lambda: False, on_step: Callable[[int], None] = lambda _: None
    ) -> Outcome:
        """Train from the newest checkpoint to the end, or until `should_stop()` is true on any process: then a
        checkpoint is written first. `on_step(steps done)` after each.

        LossError for a loss that is not finite, before it reaches the weights: the last checkpoint stays good.
        """
        done = self.checkpoints.load_last(self.model, self.optimizer) if self.folder else 0
        first = self.accelerator.is_main_process
        log = MetricsLog(self.folder, done) if self.folder and first else None
        rows, stopped = [], False
        with contextlib.ExitStack() as stack:
            if log is not None:
                stack.callback(log.close)
            self.began = time.perf_counter()
            for sequences, batches in self._batches(done, stack):
                row, stopped = self._step(done, sequences, batches, should_stop)
                done += 1
                rows.append(row)
                if log is not None:
                    log.write(row)
                on_step(done)
                if self.folder and (stopped or done % self.recipe.checkpoint_every == 0 or done == len(self.order)):
                    self.checkpoints.save(done, self.model, self.optimizer)
                if stopped:
                    break
                self.began = time.perf_counter()
        finished = done == len(self.order)
        return Outcome(finished=finished, steps=done, weights=self._weights() if finished else {}, metrics=rows)

    def _batches(self, first: int, stack: contextlib.ExitStack) -> Iterator[tuple[Sequences, list[Batch]]]:
        """Each step's sequences and this process's micro-batches of them, packed by a thread while the step before is
        computed."""
        pool = stack.enter_context(ThreadPoolExecutor(1))
        accelerator, recipe = self.accelerator, self.recipe

        def make(step: int) -> tuple[Sequences, list[Batch]]:
            sequences = self.order[step]
            parts = share(sequences, accelerator.process_index, accelerator.num_processes, recipe.micro_batch)
            return sequences, [pack(self.corpus, part, recipe.length) for part in parts]

        following = pool.submit(make, first) if first < len(self.order) else None
        for step in range(first, len(self.order)):
            assert following is not None
            made = following.result()
            following = pool.submit(make, step + 1) if step + 1 < len(self.order) else None
            yield made

    def _step(
        self, step: int, sequences: Sequences, batches: list[Batch], should_stop: Callable[[], bool]
    ) -> tuple[dict[str, Any], bool]:
        """The step's row of metrics, and whether any process wants to stop after it."""
        torch.manual_seed(stable_seed(self.recipe.seed, step, self.accelerator.process_index))  # for dropout
        documents = [document for sequence in sequences for document in sequence]
        tokens = int(self.corpus.completion_lengths[documents].sum())
        read = int(self.corpus.lengths[documents].sum())
        sums = self._forward_backward(batches, tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        names = list(sums)
        flag = torch.tensor(float(should_stop()), device=self.accelerator.device)
        totals = sum_over_processes(torch.stack([*sums.values(), flag])).tolist()
        row = {name: total / max(1, tokens) for name, total in zip(names, totals, strict=False)}
        self._check_finite(step, documents, row["loss"], float(norm))
        lr = self.recipe.lr * rate(self.recipe, step, len(self.order))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        row |= {"step": step, "tokens": tokens, "lr": lr, "grad_norm": float(norm)}
        row |= self._speed(read, time.perf_counter() - self.began)
        if self.recipe.exact_every and (step + 1) % self.recipe.exact_every == 0 and self.teacher is not None:
            row["heldout_acceptance"] = self.heldout_acceptance()
        return row, totals[-1] > 0

    def _forward_backward(self, batches: list[Batch], tokens: int) -> dict[str, Tensor]:
        """Gradients of the step's loss in the weights; this process's sums of it and of its parts."""
        accelerator = self.accelerator
        totals: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                loss, sums = self.model(batch.to(accelerator.device))
                # gradients are averaged over processes, and the loss is a sum over them
                accelerator.backward(loss * (accelerator.num_processes / max(1, tokens)))
            for name, value in {"loss": loss.detach(), **sums}.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def _check_finite(self, step: int, documents: list[int], loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        kept = self.checkpoints.steps() if self.folder else []
        names = ", ".join(self.corpus.names[documents[:8]])
        raise LossError(
            f"step {step}: loss {loss}, gradient norm {norm}: not finite. The batch holds {len(documents)} documents: "
            f"{names}{' ...' if len(documents) > 8 else ''}. The weights were not changed; "
            f"last checkpoint: {f'step {kept[-1]}' if kept else 'none'}. Look at these traces, or lower lr"
        )

    def _speed(self, read: int, seconds: float) -> dict[str, Any]:
        """`read` counts the tokens of the forward pass, prompts too. MFU counts 6 operations a weight and token,
        attention and recomputation left out."""
        per_second = read / seconds
        speed: dict[str, Any] = {"tokens_per_s": per_second, "seconds": seconds}
        if self.accelerator.device.type == "cuda":
            speed["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            peak = peak_flops()
            speed["mfu"] = peak and per_second * self.flops_per_token / (peak * self.accelerator.num_processes)
        return speed

    def heldout_acceptance(self) -> float:
        """sum over tokens x of min(p(x), q(x)), mean over the completion tokens of the held-out documents, exact."""
        assert self.heldout is not None, "exact acceptance needs held-out completions"
        recipe, accelerator = self.recipe, self.accelerator
        sequences = [(document,) for document in range(len(self.heldout))]
        total = torch.zeros((), device=accelerator.device)
        with torch.no_grad():
            for part in share(sequences, accelerator.process_index, accelerator.num_processes, recipe.micro_batch):
                batch = pack(self.heldout, part, int(self.heldout.lengths.max())).to(accelerator.device)
                total += self.model(batch, self.teacher)[1]["acceptance"]
        return float(sum_over_processes(total)) / int(self.heldout.completion_lengths.sum())

    def _weights(self) -> dict[str, Tensor]:
        prefix = "model."
        weights = whole_weights(self.model)
        return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def fitting(corpus: Corpus, recipe: RecipeConfig, context: int) -> Corpus:
    """The corpus without documents that are longer than a sequence or the draft's context. ValueError when the recipe
    refuses them, or when none is left."""
    room = min(recipe.length, context)
    is_long = corpus.lengths > room
    if not is_long.any():
        return corpus
    longest = int(corpus.lengths.argmax())
    if recipe.long_rows == "refuse" or is_long.all():
        raise ValueError(
            f"{int(is_long.sum())} of {len(corpus)} completions do not fit with their prompts; the longest, "
            f"{corpus.names[longest]}, has {int(corpus.lengths[longest])} tokens, train.recipe.length is "
            f"{recipe.length} and the draft's context {context}: raise train.recipe.length, lower traces.max_tokens, "
            "or leave such completions out with train.recipe.long_rows=drop"
        )
    return corpus.select([number for number, long in enumerate(is_long) if not long])


def product_weights(model: Any) -> int:
    """How many of its weights a token is multiplied with: all, without an embedding that is only looked up."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if head is embedding else embedding.numel()
    return sum(weight.numel() for weight in model.parameters()) - looked_up


def training_identity(student: Student, corpus: Corpus, recipe: RecipeConfig) -> dict[str, Any]:
    """What makes a training what it is, as plain data: two with one identity go through the same steps."""
    digest = hashlib.sha256()
    for array in (corpus.tokens, corpus.token_begins, corpus.row_begins, corpus.top_ids):
        digest.update(array.tobytes())
    heads = None if student.head_ids is None else len(student.head_ids)
    return {
        "recipe": {key: value for key, value in asdict(recipe).items() if key not in FREE_TO_CHANGE},
        "loss": [asdict(term) for term in student.terms],
        "documents": digest.hexdigest(),
        "weights": {
            "tensors": len(list(student.parameters())),
            "numbers": sum(w.numel() for w in student.parameters()),
        },
        "head": heads,
    }


def train_student(
    student: Student, corpus: Corpus, recipe: RecipeConfig, folder: Path | None = None, **options: Any
) -> Outcome:
    """Train; on one process `student` itself is what was trained, on several its weights are in the outcome.

    `options` as for `Trainer`, errors as of `Trainer.train`.
    """
    return Trainer(student, corpus, recipe, folder, **options).train()
