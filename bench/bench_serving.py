"""Stage 05: the target served by vLLM with every method of the config, under closed and open loads; gate G6.

    python -m bench.bench_serving --config configs/demo.yaml            # the grid
    python -m bench.bench_serving --config configs/demo.yaml --smoke    # the bring-up checkpoints alone

A method is one `vllm serve`; its 16 greedy texts, and each load, is a unit of resume. A method that cannot be served
here, or whose server dies, gives rows "not run" with the server's own last words, and the next one is tried. Logs are
in the stage's folder, under logs/. With workers.servers the methods are shared out (bench/serving_workers.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.stage import Stage, StageContext, data_root, stage_main

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config import Config


def inputs(config: Config) -> tuple[str, ...]:
    """The stage that trains the drafts, when one is served that is trained there."""
    methods = config.bench_vllm.methods if config.bench_vllm else ()
    named = [(method.speculative_config or {}).get("model") for method in methods]
    trained = config.models.draft.trained is not None or any(str(name).startswith("$DRAFT:") for name in named)
    return ("03_train_draft",) if trained else ()


SECTIONS = ("models", "bench_vllm")
STAGE = Stage(name="05_bench_vllm", version=2, sections=SECTIONS, inputs=inputs)
SMOKE = Stage(name="05_smoke", version=2, sections=SECTIONS, inputs=inputs)
RESULT = "result.json"


def body(ctx: StageContext) -> Mapping[str, Any]:
    """Measure the units that are missing, then write result.json from all of them."""
    from bench.serving_grid import Grid
    from bench.serving_load import loads
    from bench.serving_rows import checkpoint_rows, load_rows
    from bench.serving_tables import serving_table
    from bench.tables import to_text

    if ctx.config.bench_vllm is None:
        return _publish(ctx, [], [], nothing="the config has no section bench_vllm")
    grid = Grid(ctx)
    if ctx.config.workers.servers:
        from bench.serving_workers import share_out

        share_out(grid)
    else:
        grid.measure(grid.bench.methods, loads(grid.bench))
    rows = load_rows(ctx.config, grid.read)
    print(f"\n{to_text(serving_table(rows))}\n")
    return _publish(ctx, rows, checkpoint_rows(ctx.config, grid.read), device=grid.measured_on())


def smoke_body(ctx: StageContext) -> Mapping[str, Any]:
    """The checkpoints of one method, which takes two servers."""
    from bench.serving_checks import smoke_method
    from bench.serving_grid import Grid
    from bench.serving_rows import checkpoint_rows

    grid = Grid(ctx)
    method = smoke_method(grid.bench.methods)
    if method is None:
        raise ValueError("bench_vllm.methods: got none that speculates, expected one with a speculative_config")
    grid.measure([grid.bench.methods[0], method], [])
    return _publish(ctx, [], checkpoint_rows(ctx.config, grid.read), device=grid.measured_on())


def _publish(
    ctx: StageContext,
    rows: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, Any]],
    *,
    device: Mapping[str, Any] | None = None,
    nothing: str = "",
) -> dict[str, Any]:
    """Write result.json and print the checkpoints; `nothing` says why there is nothing in it, `device` is what served
    where that was not this process's."""
    from bench.serving_checks import g6
    from pipeline.results import gate, read_result, write_result

    record = gate("not run", reason=nothing) if nothing else g6(points, rows)
    write_result(
        ctx.tmp(RESULT),
        stage=ctx.stage,
        run=ctx.config.run,
        rows=[*rows, *points],
        gates={"G6": record},
        started=str(ctx.shards.header["started"]),
        device=device,
    )
    ctx.publish(ctx.tmp(RESULT), RESULT, validate=read_result, rows=len(rows) + len(points))
    for line in checkpoint_lines(points):
        print(line)
    print(f"G6 {record['state']}: {record['reason']}\n{ctx.folder / RESULT}")
    return {"rows": len(rows) + len(points), "gates": {"G6": record["state"]}}


def checkpoint_lines(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a checkpoint, for a person."""
    return [
        f"{number}. {point['check']:42} {point['state']:8} {point['reason']}" for number, point in enumerate(points, 1)
    ]


def smoke_failures(folder: Path) -> list[str]:
    """The checkpoints that do not hold, by the result in a finished folder; all of them when none was made."""
    rows = json.loads((folder / RESULT).read_text(encoding="utf-8"))["rows"]
    made = any(row["state"] == "pass" for row in rows)
    return [str(row["check"]) for row in rows if row["state"] == "fail" or not made]


def main(argv: Sequence[str]) -> int:
    """The stage; with --smoke the checkpoints alone, and exit code 1 when one of them fails."""
    if "--smoke" not in argv:
        return stage_main(STAGE, body, argv)
    import argparse

    from pipeline.config import load_config

    rest = [argument for argument in argv if argument != "--smoke"]
    code = stage_main(SMOKE, smoke_body, rest)
    if code:
        return code
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--set", action="append", default=[])
    known, _ = parser.parse_known_args(rest)
    failed = smoke_failures(data_root() / load_config(known.config, known.set).run / SMOKE.name)
    if failed:
        print(f"[{SMOKE.name}] failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
