"""A worker of bench.vllm_speed without vLLM, for tests: what it does is in the folder that STAND_IN names.

Every request and answer is a line of turns.log there: when they interleave, two measured at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    folder = Path(os.environ["STAND_IN"])
    job = json.loads(sys.stdin.readline())
    plan = json.loads((folder / "plan.json").read_text())
    name = plan["names"][str(job["llm"].get("speculative_config", {}).get("method", "none"))]

    def note(text: str) -> None:
        with (folder / "turns.log").open("a") as log:
            log.write(f"{text} {name}\n")

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), flush=True)

    note("start")
    if name in plan["fails"]:
        print("ValueError: this engine cannot start", file=sys.stderr)
        sys.exit(3)
    time.sleep(plan["slow"].get(name, 0))
    note("up")
    answer({"ready": {"start_s": 1.5}})
    for line in sys.stdin:
        cell = json.loads(line)
        note("begin")
        if name in plan["hangs"]:
            time.sleep(600)
        if cell["batch"] in plan["breaks"].get(name, []):
            answer({"error": "RuntimeError: a kernel is missing"})
            continue
        time.sleep(0.02)
        note("end")
        answer({"row": {"tokens_per_s": 100.0 * cell["batch"], "mean_k": 1.0, "passes": cell["passes"]}})


if __name__ == "__main__":
    main()
