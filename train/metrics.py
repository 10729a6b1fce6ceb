"""What is written down of every step: metrics.jsonl, tensorboard where it is installed, and a plot at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """One JSON line a step. Opened at a resume, it drops the lines of steps that will be made again."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        kept = [row for row in read_metrics(self.path) if row["step"] < first_step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self.stream = self.path.open("a", encoding="utf-8")
        self.board = _tensorboard(folder, first_step)

    def write(self, row: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(dict(row)) + "\n")
        self.stream.flush()
        for key, value in row.items():
            if self.board is not None and key != "step" and value is not None:
                self.board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self.stream.close()
        if self.board is not None:
            self.board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a last line that a killed process left half written."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def training_spent(folder: Path) -> dict[str, float]:
    """What went into a draft, over all its rounds, from its folder's metrics: completion tokens, and minutes of steps
    (work that an interruption made necessary again counts once)."""
    rows = [row for path in sorted(folder.glob(f"*{METRICS}")) for row in read_metrics(path)]
    return {
        "tokens_trained": sum(row["tokens"] for row in rows),
        "minutes": round(sum(row["seconds"] for row in rows) / 60, 4),
    }


def plot_metrics(runs: Mapping[str, Path], png: Path) -> None:
    """Loss and acceptance by step, a line a draft: `runs` names each draft's metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, path in runs.items():
        rows = read_metrics(path)
        steps = [row["step"] for row in rows]
        [line] = axes[0].plot(steps, [row["loss"] for row in rows], label=name, linewidth=1)
        low, high = [row["acc_low"] for row in rows], [row["acc_high"] for row in rows]
        axes[1].fill_between(steps, low, high, color=line.get_color(), alpha=0.3, label=f"{name}: bounds, training")
        exact = [(row["step"], row["heldout_acceptance"]) for row in rows if "heldout_acceptance" in row]
        if exact:
            axes[1].plot(
                *zip(*exact, strict=True), "o-", color=line.get_color(), markersize=3, label=f"{name}: held out"
            )
    axes[0].set(xlabel="step", ylabel="loss a token")
    axes[1].set(xlabel="step", ylabel="acceptance, temperature 1", ylim=(0, 1))
    for each in axes:
        each.grid(alpha=0.3)
        each.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(png, dpi=120, format="png", metadata={"Software": None})
    pyplot.close(figure)


def _tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder / TENSORBOARD, purge_step=first_step)
