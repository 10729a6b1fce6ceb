"""Many drafts trained at once from one stream of batches, and their acceptance on texts held out.

    python -m train.sweep --target MODEL --texts part-*.npz --heldout heldout-*.npz --cells cells.json --out FOLDER

A cell is {"name", "loss", "layers", "head", "tokens", "lr"}: a draft made of the target's first `layers` layers with
an output head pruned to the `head` most frequent tokens. All cells see the same batches; the teacher's forward is
shared. The learning rate is warmed up, held, and lowered to nothing over the last part of each cell's own tokens,
or of --seconds if those are over first. An interrupt (Ctrl-C) ends the training too, not the program: what is trained
by then is measured and saved.

Acceptance here is teacher-forced on the target's own texts: the mean of sum min(p, q) on sampled ones (T = 1, exactly
the rate at which the first draft of a round is accepted), of argmax agreement on greedy ones (T = 0).
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import files, manifest
from pipeline.config import DraftConfig, ModelsConfig
from pipeline.models import load_target, resolve, revision
from specdec.pruned import load_pruned_model
from train.intervals import ratio_interval
from train.sweep_batches import Batch, batch_of, endless_batches, grouped
from train.sweep_losses import TOP, TeacherLaw, acceptance, loss_of
from train.sweep_models import Teacher, make_student, save_student, student_logits
from train.sweep_plan import Cell
from train.sweep_policy import mixed_with_own
from train.texts import Text, load_texts

WARMUP_STEPS = 40
DECAY_FROM = 0.65
REPORT_EVERY = 25
PRINT_SECONDS = 15.0


@dataclass(kw_only=True)
class Run:
    """A cell being trained: `seen` completion tokens in `steps` steps that took `seconds`."""

    cell: Cell
    student: Any
    optimizer: torch.optim.Optimizer
    seen: int = 0
    steps: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)

    def progress(self, of_time: float) -> float:
        """0 to 1: of the cell's tokens or of the time, whichever is further."""
        return min(1.0, max(self.seen / self.cell.tokens, of_time))

    def step(self, batch: Batch, law: TeacherLaw, of_time: float) -> None:
        """One optimiser step on the batch."""
        progress = self.progress(of_time)
        warm = min(1.0, (self.steps + 1) / WARMUP_STEPS)
        scale = warm * min(1.0, (1 - progress) / (1 - DECAY_FROM))
        for group in self.optimizer.param_groups:
            group["lr"] = self.cell.lr * scale
        law = law.narrowed(self.cell.head)
        with torch.autocast(batch.ids_BT.device.type, torch.bfloat16, enabled=batch.ids_BT.is_cuda):
            logits_NH = student_logits(self.student, batch)
        loss = loss_of(self.cell.loss, logits_NH, law, progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.steps % REPORT_EVERY == 0:
            accepted = acceptance(logits_NH.detach(), law).mean()
            self.curve.append({"tokens": self.seen, "loss": loss.item(), "acceptance": accepted.item()})
        self.seen += len(batch.at_N)
        self.steps += 1


def make_runs(target: Any, cells: Sequence[Cell], head_ids: Sequence[int]) -> list[Run]:
    """A student and its optimiser for each cell."""
    runs = []
    for cell in cells:
        student = make_student(target, cell.layers, head_ids[: cell.head])
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        fused = target.device.type == "cuda"
        optimizer = torch.optim.AdamW(trained, lr=cell.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)
        runs.append(Run(cell=cell, student=student.train(), optimizer=optimizer))
    return runs


def train_all(runs: Sequence[Run], teacher: Teacher, batches: Iterator[Batch], seconds: float) -> None:
    """Step through the batches until every run has had its tokens, or the time is over."""
    start = printed = time.monotonic()
    while True:
        now = time.monotonic()
        if now > printed + PRINT_SECONDS:
            printed = now
            print(f"{now - start:.0f} s: {', '.join(f'{r.cell.name} {r.seen / 1e6:.2f} M' for r in runs)}", flush=True)
        elapsed = (now - start) / max(seconds, 1e-9)
        open_runs = [run for run in runs if run.progress(elapsed) < 1]
        if not open_runs:
            return
        batch = next(batches)
        law = teacher.law(batch)
        for run in open_runs:
            run.step(batch, law, elapsed)
            run.seconds = time.monotonic() - start


def frequent_tokens(texts: Sequence[Text], count: int) -> list[int]:
    """The `count` most frequent completion tokens, most frequent first."""
    counts = np.bincount(np.concatenate([text.completion for text in texts]))
    return [int(token) for token in np.argsort(-counts, kind="stable")[:count] if counts[token]]


def without_heldout(texts: Sequence[Text], heldout: Sequence[Text]) -> list[Text]:
    """The texts of other prompts than the held-out ones: two that the target writes itself can be the same."""
    known = {text.prompt.tobytes() for text in heldout}
    return [text for text in texts if text.prompt.tobytes() not in known]


def beside_rows(folder: str, target: Any, texts: Sequence[Text], tokens: int) -> list[dict[str, Any]]:
    """The rows of a draft that is there already, in a folder as `save_student` writes them. ValueError as
    pipeline.models.resolve."""
    student, head_ids = load_pruned_model(resolve(folder), dtype=torch.bfloat16)
    student.to(target.device)
    name, layers = Path(folder).name, student.config.num_hidden_layers
    cell = Cell(name=name, loss="none", layers=layers, head=len(head_ids), tokens=0.0, lr=0.0)
    run = Run(cell=cell, student=student, optimizer=torch.optim.SGD(student.parameters()))
    return acceptance_rows([run], Teacher(target, head_ids, 1), texts, tokens)


@torch.no_grad()
def acceptance_rows(runs: Sequence[Run], teacher: Teacher, texts: Sequence[Text], tokens: int) -> list[dict[str, Any]]:
    """One row a run and set: alpha_t1 and alpha_t0 with intervals over texts, and the teacher's mass on the head."""
    device = str(teacher.weight_VD.device)
    sums = {run.cell.name: np.zeros((len(texts), 3)) for run in runs}
    counts = np.array([len(text.completion) for text in texts], dtype=float)
    for numbers in grouped(texts, tokens, np.random.default_rng(0)):
        batch = batch_of(texts, numbers, device)
        law = teacher.law(batch)
        for run in runs:
            sums[run.cell.name] += _batch_sums(run, batch, law.narrowed(run.cell.head), teacher.head_ids_H, len(texts))
    return [row for run in runs for row in _rows(run, texts, sums[run.cell.name], counts)]


def _batch_sums(run: Run, batch: Batch, law: TeacherLaw, head_ids_H: torch.Tensor, num_texts: int) -> np.ndarray:
    """By text [num_texts, 3]: sums of min(p, q), of argmax agreement and of the teacher's mass on the head."""
    with torch.autocast(batch.ids_BT.device.type, torch.bfloat16, enabled=batch.ids_BT.is_cuda):
        logits_NH = student_logits(run.student, batch)
    agrees_N = head_ids_H[logits_NH.argmax(1)] == law.targets.top_ids_nK[:, 0]
    values_N3 = torch.stack([acceptance(logits_NH, law), agrees_N.float(), law.logp_NH.exp().sum(1)], 1)
    zeros = torch.zeros(num_texts, 3, dtype=torch.float64, device=values_N3.device)
    return zeros.index_add_(0, batch.text_N, values_N3.double()).cpu().numpy()


def _rows(run: Run, texts: Sequence[Text], sums: np.ndarray, counts: np.ndarray) -> Iterator[dict[str, Any]]:
    for domain in sorted({text.source for text in texts}):
        row = asdict(run.cell) | {
            "domain": domain,
            "tokens_trained": run.seen,
            "steps": run.steps,
            "minutes": round(run.seconds / 60, 3),
        }
        for name, temperature, column in (("t1", 1.0, 0), ("t0", 0.0, 1), ("mass", 1.0, 2)):
            chosen = [i for i, text in enumerate(texts) if (text.source, text.temperature) == (domain, temperature)]
            pairs = np.stack([sums[chosen, column], counts[chosen]], 1)
            if name == "mass":
                row["head_mass"] = float(pairs[:, 0].sum() / pairs[:, 1].sum())
            elif chosen:
                row[f"alpha_{name}"] = float(pairs[:, 0].sum() / pairs[:, 1].sum())
                row[f"alpha_{name}_ci"] = ratio_interval(pairs)
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    args = _arguments(argv)
    start = time.monotonic()
    cells = [Cell(**cell) for cell in json.loads(args.cells)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = ModelsConfig(target=args.target, draft=DraftConfig(keep_layers=1), dtype=args.dtype)
    target = load_target(models, device)
    exact = load_target(models, device, "float32")
    heldout = load_texts(args.heldout)
    texts = without_heldout(load_texts(args.texts), heldout)
    head_ids = frequent_tokens(texts, max(cell.head for cell in cells))
    teacher = Teacher(target, head_ids, TOP if any("top8" in cell.loss for cell in cells) else 1, args.keep * 1e9)
    runs = make_runs(exact, cells, head_ids)
    rows = acceptance_rows(runs, teacher, heldout, args.batch_tokens) if args.stock else []
    for row in rows:
        row |= {"name": f"stock-{row['layers']}", "loss": "none"}
    rows += [row for folder in args.beside for row in beside_rows(folder, target, heldout, args.batch_tokens)]
    args.out.mkdir(parents=True, exist_ok=True)
    _write(args.out, rows, runs)
    batches = endless_batches(texts, args.batch_tokens, args.seed, device)
    if args.own_tokens:
        batches = mixed_with_own(batches, runs[0].student, teacher.head_ids_H[: cells[0].head], texts, args.own_tokens)
    tokens = sum(len(text.completion) for text in texts)
    print(f"ready after {time.monotonic() - start:.0f} s: {len(texts)} texts, {tokens} tokens", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        train_all(runs, teacher, batches, args.seconds - (time.monotonic() - start))
    print(f"trained after {time.monotonic() - start:.0f} s", flush=True)
    for run in runs:
        run.student.eval()
    rows += acceptance_rows(runs, teacher, heldout, args.batch_tokens)
    _write(args.out, rows, runs)
    notes = {"target": args.target, "target_revision": revision(args.target)}
    for run in runs:
        save_student(run.student, head_ids[: run.cell.head], args.out / run.cell.name, notes | _summary(run, rows))
    _print(rows)
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)
    return 0


def _write(out: Path, rows: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> None:
    curves = {run.cell.name: run.curve for run in runs}
    found = {"rows": rows, "curves": curves, "device": manifest.device()}
    files.write_atomic(out / "rows.json", json.dumps(found))


def _summary(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine = [row for row in rows if row["name"] == run.cell.name]
    values = {row["domain"]: {key: row.get(key) for key in ("alpha_t1", "alpha_t0", "head_mass")} for row in mine}
    return {"cell": asdict(run.cell), "tokens_trained": run.seen, "steps": run.steps, "acceptance": values}


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    domains = sorted({row["domain"] for row in rows})
    print("T = 1 / T = 0 by set: " + ", ".join(domains))
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = {row["domain"]: row for row in rows if row["name"] == name}
        cells = [f"{mine[d].get('alpha_t1', 0):.3f}/{mine[d].get('alpha_t0', 0):.3f}" for d in domains]
        first = mine[domains[0]]
        print(f"{name:<20}{' '.join(cells)}  mass {first['head_mass']:.3f} tokens {first['tokens_trained']}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", nargs="+", required=True, type=Path)
    parser.add_argument("--heldout", nargs="+", required=True, type=Path)
    parser.add_argument("--cells", required=True, help="JSON list of cells")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="stop training so long after the start, the learning rate lowered",
    )
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument(
        "--own-tokens", type=int, default=0, help="train the one cell on as many tokens of its own a text too"
    )
    parser.add_argument("--keep", type=float, default=0.0, help="GB of memory for the teacher's states of batches seen")
    parser.add_argument("--stock", action="store_true", help="measure the drafts before the training too")
    parser.add_argument("--beside", nargs="*", default=[], help="folders of drafts to measure on the same texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
