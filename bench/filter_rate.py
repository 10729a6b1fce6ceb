"""Rows a second and memory of stage 02 at growing numbers of generated rows (data/generated_traces.py), one process.

    python -m bench.filter_rate --rows 100000 1000000 --out results/filter_rate.json

The stage runs as a process of its own, whose largest memory the kernel reports; what the index of prompts takes of it
is measured by filling the index alone in another. What is left must not grow with the rows but for one hash a row.
Seconds depend on what else the machine does, so CPU seconds and the load (of five minutes) stand beside them. The
folders, about 5 kB a row, are made under --folder and removed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.results import write_result

ROOT = Path(__file__).resolve().parent.parent
STAGE = "filter_rate"
MEGABYTE = 1 << 20


def measure(rows: int, config: str, parent: Path | None) -> dict[str, Any]:
    """One record: the stage over `rows` rows."""
    with tempfile.TemporaryDirectory(prefix="filter-rate-", dir=parent) as folder:
        environment = {**os.environ, "SPEC_DATA_ROOT": folder, "OMP_NUM_THREADS": "1"}
        run(["data.generated_traces", "--config", config, "--rows", str(rows)], environment)
        seconds, usage = timed(["data.filter", "--config", config], environment)
        index = json.loads(run(["data.generated_traces", "--rows", str(rows), "--index-only"], environment))
        (done,) = Path(folder).glob("*/02_filter/done.json")
        kept = json.loads(done.read_text(encoding="utf-8"))["rows"]
    peak_bytes = usage.ru_maxrss * 1024  # Linux counts in kB
    rest_bytes = peak_bytes - index["index_bytes"]
    return {
        "rows_in": rows,
        "prompts": index["prompts"],
        "rows_kept": kept,
        "seconds": round(seconds, 1),
        "rows_per_s": round(rows / seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "load_average": os.getloadavg()[1],
        "peak_memory_mb": round(peak_bytes / MEGABYTE, 1),
        "index_mb": round(index["index_bytes"] / MEGABYTE, 1),
        "index_kb_a_prompt": round(index["index_bytes"] / 1024 / index["prompts"], 2),
        "rest_mb": round(rest_bytes / MEGABYTE, 1),
    }


def run(module: Sequence[str], environment: dict[str, str]) -> str:
    """What a module of this checkout printed as its last line. CalledProcessError when it fails."""
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return (done.stdout.splitlines() or [""])[-1]


def timed(module: Sequence[str], environment: dict[str, str]) -> tuple[float, resource.struct_rusage]:
    """(wall seconds, what it used) of a module run to its end."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *module], cwd=ROOT, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(module))
    return time.monotonic() - started, usage


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="bench.filter_rate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000], help="multiples of 1000")
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny.yaml"))
    parser.add_argument("--folder", type=Path, help="where the traces go (default: the system's temporary folder)")
    parser.add_argument("--out", default="results/filter_rate.json")
    arguments = parser.parse_args(argv)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    records: list[dict[str, Any]] = []
    for rows in arguments.rows:
        records.append(measure(rows, arguments.config, arguments.folder))
        write_result(arguments.out, stage=STAGE, run="generated", rows=records, gates={}, started=started)
        print(json.dumps(records[-1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
