"""A whole sweep in a set time on one GPU: texts, then several train.sweep side by side, then one result file.

    python -m train.sweep_run --plan configs/sweep_smollm2.json --prompts prompts.npz \
        --heldout-prompts heldout-prompts.npz --minutes 7 --out FOLDER

FOLDER gets the texts (those of an earlier call that lie there are used again), a log and a folder of drafts of each
process, and draft_sweep.json, a result file that bench.training_report reads and that names the best draft.

Every process has a deadline, at which it is killed; a train.sweep is interrupted some seconds before, and then measures
and saves. One that fails is started once more: a writer of texts with --plain, a train.sweep with the plan's `smaller`.
"""

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import files, manifest
from pipeline.results import write_result
from train.sweep_plan import Plan, Process, load_plan
from train.texts import load_texts
from train.timed_jobs import Job, say, wait_for

WRITER = (sys.executable, "-m", "train.sweep_traces")
TRAINER = (sys.executable, "-m", "train.sweep")
RESULT = "draft_sweep.json"
HELDOUT = "heldout"
LEAST_SECONDS = 20.0  # of training: for less, a process is not started
AGAIN_SHARE = 0.6  # of the time for texts that a second writer gets at least


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A plan being carried out in folder `out` until `ends` (time.monotonic())."""

    plan: Plan
    out: Path
    ends: float

    def texts(self) -> list[Path]:
        """The files of training texts that are there."""
        return [path for part in range(self.plan.texts.parts) if (path := self.out / f"part-{part}.npz").exists()]

    def write_texts(self, prompts: Path, heldout_prompts: Path) -> None:
        """What is missing of the texts, by one process a file."""
        texts = self.plan.texts
        names = {
            f"part-{part}": ["--prompts", str(prompts), "--part", f"{part}/{texts.parts}", *texts.options]
            for part in range(texts.parts)
        }
        names[HELDOUT] = ["--prompts", str(heldout_prompts), *texts.heldout_options]
        end = time.monotonic() + texts.seconds
        missing = {name: options for name, options in names.items() if not (self.out / f"{name}.npz").exists()}
        for name in wait_for([self._writer(name, options, end) for name, options in missing.items()]):
            files.publish(self._unfinished(name), self.out / f"{name}.npz")

    def _unfinished(self, name: str) -> Path:
        return self.out / f"{files.TMP_PREFIX}{name}.npz"

    def _writer(self, name: str, options: Sequence[str], end: float, second: bool = False) -> Job:
        def again() -> Job:
            late = max(end, time.monotonic() + AGAIN_SHARE * self.plan.texts.seconds)
            return self._writer(name, [*options, "--plain"], late, second=True)

        seconds = max(1.0, end - time.monotonic() - self.plan.imports_s)
        command = [*WRITER, "--target", self.plan.target, "--dtype", self.plan.dtype, *options]
        command += ["--seconds", f"{seconds:.0f}", "--out", str(self._unfinished(name))]
        deadline = end + self.plan.texts.save_s
        return Job(name, command, self.out / f"{name}.log", deadline=deadline, again=None if second else again)

    def train(self) -> set[str]:
        """All of the plan's processes; the names of those that ended well. Earlier folders are moved aside."""
        for process in self.plan.processes:
            self._move_aside(process)
        started = [self._trainer(process, process.options) for process in self.plan.processes]
        return wait_for([job for job in started if job is not None])

    def _trainer(self, process: Process, options: Sequence[str], second: bool = False) -> Job | None:
        """None when no time is left for it; what a first one measured stays then."""
        deadline = self.ends - self.plan.collect_s
        interrupt = deadline - self.plan.save_s
        seconds = interrupt - process.early_s - self.plan.imports_s - time.monotonic()
        if seconds < LEAST_SECONDS:
            say(f"{process.name}: not started, {max(0.0, seconds):.0f} s are left to train")
            return None
        self._move_aside(process)
        cells = json.dumps([asdict(cell) for group in process.groups for cell in group.cells])
        command = [*TRAINER, "--target", self.plan.target, "--dtype", self.plan.dtype, "--cells", cells]
        command += ["--texts", *map(str, self.texts()), "--heldout", str(self.out / f"{HELDOUT}.npz")]
        command += [*options, "--seconds", f"{seconds:.0f}", "--out", str(self.out / process.name)]

        def again() -> Job | None:
            return self._trainer(process, [*options, *self.plan.smaller], second=True)

        log = self.out / f"{process.name}.log"
        return Job(process.name, command, log, deadline=deadline, interrupt=interrupt, again=None if second else again)

    def _move_aside(self, process: Process) -> None:
        if (folder := self.out / process.name).exists():
            files.move_aside(folder)

    def write_result(self, started: str, well: set[str]) -> bool:
        """RESULT, of what was measured; False when nothing was."""
        found = {}
        for process in self.plan.processes:
            with contextlib.suppress(FileNotFoundError):
                found[process.name] = json.loads((self.out / process.name / "rows.json").read_text(encoding="utf-8"))
        rows = [row for process in self.plan.processes if process.name in found
                for row in rows_of(self.plan, process, found[process.name]["rows"])]  # fmt: skip
        if not rows:
            return False
        about = describe(self.texts(), self.out / f"{HELDOUT}.npz")
        notes = [f"{len(self.plan.processes)} processes side by side on one device. {about}", self.plan.note]
        if unwell := [process.name for process in self.plan.processes if process.name not in well]:
            notes.append(f"Failed, or killed at the deadline: {', '.join(unwell)}.")
        if best := self.best(rows):
            notes.append(f"The best of `{self.plan.choose}` by {' and '.join(self.plan.choose_by)} is {best}.")
        device = next(iter(found.values()))["device"]
        note = " ".join(filter(None, notes))
        write_result(self.out / RESULT, stage="draft_sweep", run=self.plan.run, rows=rows, gates={}, started=started,
                     device=device, note=note)  # fmt: skip
        say(f"{self.out / RESULT}: {note}")
        return True

    def best(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """`process/cell` of the best saved draft of the group to choose from."""
        scores = {}
        for process in self.plan.processes:
            for cell in [c for group in process.groups if group.name == self.plan.choose for c in group.cells]:
                mine = [row for row in rows if (row["group"], row["draft"]) == (self.plan.choose, cell.name)]
                values = [row[key] for row in mine if row["domain"] in self.plan.choose_by
                          for key in ("alpha_t1", "alpha_t0")]  # fmt: skip
                if values and (self.out / process.name / cell.name / "provenance.json").exists():  # saved last
                    scores[f"`{process.name}/{cell.name}`"] = sum(values) / len(values)
        return max(scores, key=scores.__getitem__) if scores else None


def rows_of(plan: Plan, process: Process, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """train.sweep's rows as the report wants them; sets without texts at both temperatures are left out."""
    groups = {cell.name: group.name for group in process.groups for cell in group.cells}
    for row in rows:
        if "alpha_t1" in row and "alpha_t0" in row:
            group = groups.get(row["name"], process.groups[0].name)  # of a draft that is not trained: the first
            first = {"target": plan.target, "dtype": plan.dtype, "group": group, "draft": row["name"]}
            yield first | {key: value for key, value in row.items() if key not in ("name", "tokens")}


def describe(texts: Sequence[Path], heldout: Path) -> str:
    """How many texts of each set, and completion tokens."""
    parts = []
    for what, paths in (("Training texts", texts), ("Held out", [heldout])):
        counts: dict[str, int] = {}
        tokens = 0
        for text in load_texts(paths):
            counts[text.source] = counts.get(text.source, 0) + 1
            tokens += len(text.completion)
        sets = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        parts.append(f"{what}: {sets}; {tokens / 1e6:.2f} million completion tokens.")
    return " ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 0 with a result, 1 without, 2 for a bad plan."""
    parser = argparse.ArgumentParser(prog="train.sweep_run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path, help="of train.sweep_prompts, for training texts")
    parser.add_argument("--heldout-prompts", required=True, type=Path, help="of train.sweep_prompts")
    parser.add_argument("--minutes", required=True, type=float, help="for all of it")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    started, ends = manifest.now(), time.monotonic() + 60 * args.minutes
    try:
        sweep = Sweep(plan=load_plan(args.plan), out=args.out, ends=ends)
    except ValueError as error:
        print(f"train.sweep_run: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and no process outlives us
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in processes of a shell's background job
    args.out.mkdir(parents=True, exist_ok=True)
    sweep.write_texts(args.prompts, args.heldout_prompts)
    if not sweep.texts() or not (args.out / f"{HELDOUT}.npz").exists():
        say("no texts, so nothing is trained")
        return 1
    return 0 if sweep.write_result(started, sweep.train()) else 1


if __name__ == "__main__":
    sys.exit(main())
