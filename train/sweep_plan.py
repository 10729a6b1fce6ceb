"""What a whole sweep is: its texts and its processes, read from a JSON file (without importing torch)."""

from dataclasses import dataclass
from pathlib import Path

from pipeline import schema
from pipeline.fields import count, name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One draft to train."""

    name: str
    loss: str
    layers: int = 4
    head: int = 4096
    tokens: float
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Texts:
    """`parts` writers of the training texts and one of the held-out ones: all write for `seconds`, with these options
    of train.sweep_traces, and have `save_s` more to save."""

    seconds: float
    save_s: float
    parts: int = count()
    options: tuple[str, ...]
    heldout_options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The cells of one table of the report."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Process:
    """One train.sweep with these options; `early_s`: its training ends so long before the others'."""

    name: str = name()
    groups: tuple[Group, ...]
    options: tuple[str, ...]
    early_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep. Seconds are set aside for a process's imports, for measuring and saving after an interrupt, and at the
    end for the result.

    smaller: options with which a process that failed is started again. The best draft is the one of group `choose` with
    the highest mean of alpha over the sets `choose_by` and both temperatures.
    """

    run: str
    target: str
    dtype: str = "bfloat16"
    imports_s: float
    save_s: float
    collect_s: float
    texts: Texts
    processes: tuple[Process, ...]
    smaller: tuple[str, ...]
    choose: str
    choose_by: tuple[str, ...]
    note: str = ""

    def __post_init__(self) -> None:
        groups = [group.name for process in self.processes for group in process.groups]
        if self.choose not in groups:
            raise ValueError(f"choose: got {self.choose!r}, expected a group; {schema.nearest(self.choose, groups)}")
        names = [process.name for process in self.processes]
        if len(set(names)) < len(names):
            raise ValueError(f"processes: got {names}, expected each once")
        for process in self.processes:
            cells = [cell.name for group in process.groups for cell in group.cells]
            if not cells or len(set(cells)) < len(cells):
                raise ValueError(f"processes: {process.name} has the cells {cells}, expected at least one, each once")


def load_plan(path: Path) -> Plan:
    """ValueError with file, line, key, what was got and what was expected."""
    try:
        node = schema.compose(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such plan") from None
    if node is None:
        raise ValueError(f"{path}: is empty, expected a plan")
    return schema.read(node, Plan)
