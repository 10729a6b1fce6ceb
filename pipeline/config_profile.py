"""The config section of stage 06: where the time of a round goes."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.fields import count, temperature


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Stage 06: every batch of `batches` with every context of `contexts` (prompt tokens a row), `k` tokens drafted a
    round. Times are medians over `repeats` calls; `temperature` above 0 makes the sampling part of what is measured."""

    batches: tuple[int, ...] = count(default=(1, 4))
    contexts: tuple[int, ...] = count(2, default=(64, 256))
    k: int = count(default=4)
    repeats: int = count(default=5)
    temperature: float = temperature(default=1.0)

    def __post_init__(self) -> None:
        for name, values in (("batches", self.batches), ("contexts", self.contexts)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: got {list(values)}, expected at least one number, each once")


DEFAULT_PROFILE = ProfileConfig()
