"""The load generator of `vllm bench serve`, imported once for many loads: it takes 10 s and more to import.

    python -m bench.serving_client

Reads from standard input one JSON list of that command's arguments a line, runs it, answers with one line of JSON on
standard output: {"error": null or text}. What the command prints goes to standard error. Ends with standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from typing import IO

from bench.vllm_cli import name_cpu_package


def answer(line: str, answers: IO[str]) -> None:
    """Run one load."""
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    error = None
    try:
        main(parser.parse_args(json.loads(line)))
    except (Exception, SystemExit) as problem:  # whatever stops one load must not stop the next
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    print(json.dumps({"error": error}), file=answers, flush=True)


def serve() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name_cpu_package()
    import vllm.benchmarks.serve  # noqa: F401 (now, while the first server starts)

    for line in sys.stdin:
        answer(line, answers)


if __name__ == "__main__":
    serve()
