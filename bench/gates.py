"""The gates of result files, as a table; the exit code says whether they hold.

    python -m bench.gates RESULT.json...
    python -m bench.gates --config configs/demo.yaml    # every result of that run under SPEC_DATA_ROOT

Exit code 1: G1 or G2 failed, or is missing or was not run where a stage must have it; or another gate failed,
or did not run, without its value and reason on record. A failed gate with both on record is shown and does
not fail the run.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tables import gate_table, to_text
from pipeline.config import load_config
from pipeline.results import read_result, stage_files
from pipeline.stage import data_root

REQUIRED = {"04_bench_engine": ("G1", "G2")}
ALWAYS_FATAL = ("G1", "G1 with graphs", "G2")


def problems(result: Mapping[str, Any]) -> Iterator[str]:
    """What makes this result unacceptable, one line each."""
    gates = result["gates"]
    for name in REQUIRED.get(result["stage"], ()):
        if name not in gates:
            yield f"{name} is missing; {result['stage']} must prove it"
        elif gates[name]["state"] == "not run":
            yield f"{name} was not run ({gates[name]['reason'] or 'no reason given'}); {result['stage']} must prove it"
    for name, record in gates.items():
        state, is_explained = record["state"], bool(record["reason"])
        if state == "fail" and name in ALWAYS_FATAL:
            yield f"{name} failed: {record['reason'] or 'no reason given'}"
        elif state == "fail" and not (is_explained and record["value"] is not None):
            yield f"{name} failed without its value and reason on record"
        elif state == "not run" and not is_explained:
            yield f"{name} was not run, and no reason is on record"


def result_paths(config_path: str | None, given: Sequence[str]) -> list[Path]:
    """The files named, else every result.json of the config's run. ValueError when there is none."""
    if given or config_path is None:
        paths = [Path(path) for path in given]
    else:
        folder = data_root() / load_config(config_path).run
        paths = stage_files(folder, "result.json")
    if not paths:
        raise ValueError("no result files: name some, or run scripts/04_bench_engine.sh --config FILE first")
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gates", description=__doc__, formatter_class=_Plain)
    parser.add_argument("results", nargs="*", metavar="RESULT.json")
    parser.add_argument("--config", help="take every result of this experiment's run")
    arguments = parser.parse_args(argv)
    try:
        results = [(path, read_result(path)) for path in result_paths(arguments.config, arguments.results)]
    except ValueError as error:
        print(f"bench.gates: {error}", file=sys.stderr)
        return 2
    found = []
    for path, result in results:
        print(f"{result['run']} {result['stage']}\n{to_text(gate_table(result))}\n")
        found += [f"{path}: {problem}" for problem in problems(result)]
    for line in found:
        print(f"bench.gates: {line}", file=sys.stderr)
    return 1 if found else 0


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
