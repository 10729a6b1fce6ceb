"""Stage 03: drafts distilled from the filtered traces, each as a model folder that the engine loads.

    python -m train.train_draft --config configs/demo.yaml

`<stage>/<draft>/` is a plain Hugging Face folder (with head_ids.json where the head is pruned), with provenance.json
and metrics.jsonl (of the last on-policy round; round-N-metrics.jsonl of those before). While the stage runs, corpora
and checkpoints lie in a work folder: under SPEC_ARCHIVE_ROOT when that is set, so that every node of the training, and
a node that continues it, reads them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import archive, files, manifest
from pipeline.stage import WORK, Stage, StageContext, stage_main
from train.ranks import Ranks

if TYPE_CHECKING:
    from pipeline.config_train import TrainedDraft
    from train.corpus import Corpus
    from train.trainer import Outcome

STAGE = Stage(
    name="03_train_draft",
    version=3,
    sections=("models.target", "models.dtype", "train", "bench_draft"),
    inputs=("02_filter",),
    free_bytes=1 << 30,
)
PLOT = "training.png"
RESULT = "result.json"


class TrainStage:
    """The stage's body; `ranks` are the processes it trains in."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, ctx: StageContext) -> Mapping[str, Any]:
        training = Training(ctx, self.ranks)
        for draft in ctx.config.train.drafts:
            ctx.check_stop()
            ctx.publish_folder(draft.name, partial(training.make, draft))
        if RESULT not in ctx.shards:
            ctx.check_stop()
            training.publish_result()
        summary = finish(ctx)
        shutil.rmtree(training.work, ignore_errors=True)
        return summary


class Training:
    """The drafts of one run. What they share is made when the first of them needs it."""

    def __init__(self, ctx: StageContext, ranks: Ranks) -> None:
        self.ctx, self.config, self.ranks = ctx, ctx.config, ranks
        self.origin = files.sha256_json(ctx.shards.header["fingerprint"])
        root = archive.root()
        home = root / ctx.config.run if root else ctx.folder
        self.work = home / f"{ctx.stage}{WORK}{self.origin[:12]}"

    def make(self, draft: TrainedDraft, folder: Path) -> None:
        """Train one draft, with its on-policy rounds, and write its folder. StageStopped after SIGTERM or USR1."""
        from train.metrics import METRICS, TENSORBOARD

        corpora, start = [self.work / "train"], self.start
        outcome = self._train(draft, start, corpora, 0)
        for number in range(1, self.config.train.on_policy.rounds + 1):
            start = self._exported(draft, start, outcome, number - 1)
            corpora.append(self._own_texts(draft, start, number))
            outcome = self._train(draft, start, corpora, number)
        self._export(draft, start, outcome, folder, self.config.models.dtype)
        rounds = self.config.train.on_policy.rounds
        for number in range(rounds):
            shutil.copyfile(self._round(draft, number) / METRICS, folder / f"round-{number}-{METRICS}")
        written = self._round(draft, rounds)
        shutil.copyfile(written / METRICS, folder / METRICS)
        if (written / TENSORBOARD).is_dir():
            shutil.copytree(written / TENSORBOARD, folder / TENSORBOARD)

    def publish_result(self) -> None:
        """Measure every draft beside the start, and write result.json with gate G3."""
        from pipeline.results import read_result, write_result
        from train.evaluate import g3_gate, line
        from train.evaluation import evaluate
        from train.metrics import training_spent

        ctx, folders = self.ctx, {draft.name: self.ctx.folder / draft.name for draft in self.config.train.drafts}
        spent = {name: training_spent(folder) for name, folder in folders.items()}
        found = evaluate(
            self.config, self.start, folders, ctx.input("02_filter"), self.tokenizer, check_stop=ctx.check_stop
        )
        rows = [row | spent.get(row["loss"], {"tokens_trained": 0, "minutes": 0.0}) for row in found]
        gates = {"G3": g3_gate(rows)}
        started = str(ctx.shards.header["started"])
        write_result(ctx.tmp(RESULT), stage=ctx.stage, run=ctx.config.run, rows=rows, gates=gates, started=started)
        ctx.publish(ctx.tmp(RESULT), RESULT, validate=read_result, rows=len(rows))
        for row in rows:
            ctx.log(line(row))
        ctx.log(f"G3 {gates['G3']['state']}: {gates['G3']['reason']}")

    def _train(self, draft: TrainedDraft, start: Path, corpora: Sequence[Path], number: int) -> Outcome:
        from train.job import Job, run_job

        job = Job(
            config=self.config,
            draft=draft,
            start=start,
            corpora=tuple(corpora),
            heldout=self.work / "heldout",
            folder=self._round(draft, number),
            origin=self.origin,
        )
        progress = None

        def on_step(done: int, steps: int) -> None:
            nonlocal progress
            progress = progress or self.ctx.progress(steps, f"steps of {draft.name}", done=done - 1)
            progress.update()

        outcome = self.ranks.run(run_job, job, should_stop=lambda: self.ctx.stopping, on_step=on_step)
        if progress is not None:
            progress.__exit__()
        if not outcome.finished:
            self.ctx.log(f"{draft.name}: checkpoint at step {outcome.steps}")
        self.ctx.check_stop()
        return outcome

    @cached_property
    def tokenizer(self) -> Any:
        from pipeline.models import load_tokenizer

        return load_tokenizer(self.config.models)

    @cached_property
    def corpus(self) -> Corpus:
        from pipeline.models import revision
        from train.corpus import Corpus
        from train.inputs import build_corpora

        target = revision(self.config.models.target)
        rows = self.ctx.input("02_filter")
        build_corpora(self.config, rows, target, self.tokenizer, self.work, self.ctx.check_stop)
        if self.config.train.recipe.exact_every and not (self.work / "heldout").is_dir():
            self.ctx.log("the filter held nothing out (filter.heldout): no exact acceptance will be measured")
        return Corpus.load(self.work / "train")

    @cached_property
    def start(self) -> Path:
        """The folder that every draft starts from."""
        from train.start import write_start

        head = self.head
        if head is not None:
            self.ctx.log(f"head of {len(head.ids)} tokens: {head.coverage:.2%} of the teacher's kept mass")
        folder = self.work / "start"
        if not folder.is_dir():
            write_start(self.config, head, self.tokenizer, folder)
        return folder

    @cached_property
    def head(self) -> Any:
        from train.start import choose_head

        return choose_head(self.config, self.corpus, self.tokenizer)

    def _round(self, draft: TrainedDraft, number: int) -> Path:
        return self.work / draft.name / f"round-{number}"

    def _exported(self, draft: TrainedDraft, start: Path, outcome: Outcome, number: int) -> Path:
        folder = self._round(draft, number) / "weights"
        if not folder.is_dir():
            self._export(draft, start, outcome, folder, "float32")
        return folder

    def _export(self, draft: TrainedDraft, start: Path, outcome: Outcome, folder: Path, dtype: str) -> None:
        import torch

        from train.student import export, load_exported

        model, head_ids = load_exported(start)
        model.load_state_dict(outcome.weights)
        export(model, self.tokenizer, folder, self._provenance(draft, outcome), head_ids, getattr(torch, dtype))

    def _own_texts(self, draft: TrainedDraft, start: Path, number: int) -> Path:
        """The corpus of the draft's own texts in this round."""
        from train.inputs import save_corpus
        from train.on_policy import load_pair, own_completions
        from train.start import target_stop_ids

        folder = self._round(draft, number) / "own"
        if not folder.is_dir():
            target, model, head_ids = load_pair(self.config.models, start)
            own = own_completions(
                model,
                head_ids,
                target,
                self.corpus,
                self.config.train.on_policy,
                stop_ids=target_stop_ids(self.config, self.tokenizer),
                seed=self.config.train.recipe.seed + number,
                check_stop=self.ctx.check_stop,
            )
            save_corpus(own, folder)
        return folder

    def _provenance(self, draft: TrainedDraft, outcome: Outcome) -> dict[str, Any]:
        from dataclasses import asdict

        content = manifest.read(self.ctx.input("02_filter"))
        assert content is not None
        return {
            "target": self.config.models.target,
            "loss": [asdict(term) for term in draft.loss],
            "train": asdict(self.config.train),
            "steps": outcome.steps,
            "head_coverage": None if self.head is None else self.head.coverage,
            "traces": manifest.content_hash(content),
            "git": manifest.git_state(),
            "versions": manifest.package_versions(),
        }


def finish(ctx: StageContext) -> dict[str, Any]:
    """The plot, and each draft's last values."""
    from train.metrics import METRICS, plot_metrics, read_metrics

    runs = {draft.name: ctx.folder / draft.name / METRICS for draft in ctx.config.train.drafts}
    if PLOT not in ctx.shards:
        plot_metrics(runs, ctx.tmp(PLOT))
        ctx.publish(ctx.tmp(PLOT), PLOT)
    drafts = {}
    for name, path in runs.items():
        rows = read_metrics(path)
        last = rows[-1]
        drafts[name] = {
            "steps": len(rows),
            "tokens": sum(row["tokens"] for row in rows),
            **{key: last[key] for key in ("loss", "acc_low", "acc_high", "top1")},
        }
        ctx.log(
            f"{name}: {len(rows)} steps, loss {last['loss']:.3f}, acceptance on the last batch between "
            f"{last['acc_low']:.3f} and {last['acc_high']:.3f}"
        )
    return {"rows": sum(each["tokens"] for each in drafts.values()), "drafts": drafts}


def main(argv: Sequence[str] | None = None) -> int:
    """The stage's command line; the exit code."""
    with Ranks() as ranks:
        code = stage_main(STAGE, TrainStage(ranks), argv)
    if ranks.stuck:  # the collectives' own threads would keep the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
