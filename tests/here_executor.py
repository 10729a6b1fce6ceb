"""submitit's interface without processes, for tests of what is shared out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pipeline.worker import Task


class HereJob:
    """A job that runs when somebody first asks whether it is done, in this process."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.error, self.ran = work, None, False
        self.paths = SimpleNamespace(stderr="worker.err")

    def done(self) -> bool:
        if not self.ran:
            self.ran = True
            try:
                self.work()
            except RuntimeError as error:
                self.error = error
        return True

    def exception(self) -> Exception | None:
        return self.error


class HereExecutor:
    """Notes the tasks it was given."""

    def __init__(self) -> None:
        self.folder, self.tasks = "here", []  # type: ignore[var-annotated]

    def map_array(self, function: Callable[[Task], int], tasks: Sequence[Task]) -> list[HereJob]:
        self.tasks += tasks
        return [HereJob(lambda task=task: function(task)) for task in tasks]
