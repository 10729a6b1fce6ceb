"""A stage of a few small units without models, for the tests of the stage contract."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import Config, load_config
from pipeline.stage import Stage, StageContext

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"
STAGE = Stage(name="01_toy", version=1, sections=("traces",), free_bytes=0)
DOWNSTREAM = Stage(name="02_toy", version=1, sections=("bench_engine",), inputs=("01_toy",), free_bytes=0)
UNITS = 4


def toy_config(*overrides: str) -> Config:
    return load_config(TINY, overrides)


def unit_name(number: int) -> str:
    return f"unit-{number}.bin"


def unit_bytes(number: int, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{number}".encode()).digest() * 64


class ToyBody:
    """Makes files from the config's seed; `made` lists those of this run. `before_unit(ctx, number)` may interfere."""

    def __init__(self, before_unit: Any = None, units: int = UNITS) -> None:
        self.made: list[int] = []
        self.before_unit, self.units = before_unit, units

    def __call__(self, ctx: StageContext) -> Mapping[str, Any]:
        for number in range(self.units):
            name = unit_name(number)
            if name in ctx.shards:
                continue
            if self.before_unit is not None:
                self.before_unit(ctx, number)
            ctx.check_stop()
            ctx.tmp(name).write_bytes(unit_bytes(number, ctx.config.traces.seed))
            ctx.publish(ctx.tmp(name), name, validate=self.validate, rows=10)
            self.made.append(number)
        return {"rows": 10 * self.units, "note": "toy"}

    @staticmethod
    def validate(path: Path) -> None:
        if path.stat().st_size != 2048:
            raise ValueError(f"{path.name}: got {path.stat().st_size} bytes, expected 2048")


def write_to_full_disk() -> None:
    """The kernel's own answer of a full disk. Opened without O_CREAT: where the device is missing nothing is made."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


def outputs(folder: Path) -> dict[str, bytes]:
    """The unit files by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("unit-*"))}


def expected_outputs(seed: int = 0, units: int = UNITS) -> dict[str, bytes]:
    return {unit_name(number): unit_bytes(number, seed) for number in range(units)}


def main(argv: Sequence[str] | None = None) -> int:
    """The toy stage as a program; TOY_SLEEP seconds before each unit."""
    import time

    from pipeline.stage import stage_main

    sleep = float(os.environ.get("TOY_SLEEP", "0"))
    return stage_main(STAGE, ToyBody(lambda ctx, number: time.sleep(sleep)), argv)


if __name__ == "__main__":
    raise SystemExit(main())
