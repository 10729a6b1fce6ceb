"""Phase times of a round, on the device's own clock."""

import time

import torch


class PhaseTimer:
    """Marks phase ends; on a GPU with events, so that marking waits for nothing.

    `finish` reads the times, in seconds by phase name plus "total" (wall clock since construction); call it after
    the round's device-to-host copy, when all events have passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._wall = time.perf_counter()
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("start", self._now())]

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: str) -> None:
        """The phase that began at the last mark ends here."""
        self._marks.append((phase, self._now()))

    def finish(self) -> dict[str, float]:
        seconds = {"total": time.perf_counter() - self._wall}
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(begin, float) and isinstance(end, float):
                seconds[phase] = end - begin
            else:
                seconds[phase] = begin.elapsed_time(end) / 1e3  # type: ignore[union-attr,arg-type]
        return seconds
