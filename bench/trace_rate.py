"""Stage 01 against the raw generate loop of its own backend: the same prompts, sampling and engine, tokens a second.

    python -m bench.trace_rate --config configs/demo.yaml --backends specdec vllm --out results/trace_rate_cpu.json

"stage" is everything between prompts and published shards (records, checks, parquet, hashes, fsync; shards that start
with an empty engine); "raw" is one call of the backend's generate with all prompts and the same log-probabilities. The
start of the engine is in neither. They take turns, there and back, in one process; the ratio of each pair is a reading.
Two numbers stand beside it, steadier on a machine that others use: the ratio by the process's CPU time, and the share
of the stage's time that it spent outside the backend.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.gen_traces import STAGE, make_shard, summary
from data.items import all_items, cut
from data.tracer import Tracer
from pipeline.config import Config, load_config
from pipeline.results import gate, write_result
from pipeline.stage import StageContext, run_stage

LEAST_RATIO = 0.95


class Arms:
    """One backend with its engine, and the two ways to have it complete the config's prompts."""

    def __init__(self, config: Config) -> None:
        self.config = dataclasses.replace(config, run=f"trace-rate-{os.getpid()}")
        self.items = all_items(config.traces)
        self.tracer = Tracer(config, self.items)
        self.samples = self.tracer.plan.samples(self.items)
        self.inside_s = 0.0
        self.raw = self._raw_vllm if config.traces.backend == "vllm" else self._raw_engine

    def stage(self) -> int:
        """A run of the stage, with the engine that is there; completion tokens. `inside_s`: seconds in the backend."""
        tokens, self.inside_s = 0, 0.0

        def body(ctx: StageContext) -> dict[str, Any]:
            nonlocal tokens
            shards = cut(self.items, ctx.config.traces.shard_size)
            for shard in shards:
                make_shard(ctx, self.tracer, shard)
            counts = summary(ctx, [shard.name for shard in shards])
            tokens = counts["tokens"]
            return counts

        with contextlib.redirect_stderr(io.StringIO()), self._timed_backend():
            folder = run_stage(STAGE, self.config, body)
        shutil.rmtree(folder.parent)
        return tokens

    @contextlib.contextmanager
    def _timed_backend(self) -> Iterator[None]:
        backend: Any = self.tracer.backend
        complete = backend.complete

        def timed_complete(*arguments: Any) -> Any:
            began = time.perf_counter()
            made = complete(*arguments)
            self.inside_s += time.perf_counter() - began
            return made

        backend.complete = timed_complete
        yield
        backend.complete = complete

    def _raw_engine(self) -> int:
        backend: Any = self.tracer.backend
        completions = backend.engine.generate([backend.request(sample) for sample in self.samples])
        return sum(len(completion.token_ids) for completion in completions)

    def _raw_vllm(self) -> int:
        """As vLLM's documentation shows it, but for the token ids in place of text."""
        from vllm import SamplingParams

        backend: Any = self.tracer.backend
        prompts = [{"prompt_token_ids": list(sample.prompt_ids)} for sample in self.samples]
        params = [
            SamplingParams(
                temperature=sample.temperature,
                top_p=sample.top_p,
                max_tokens=sample.max_tokens,
                seed=sample.seed,
                stop_token_ids=backend.stop_ids,
                logprobs=self.config.traces.top_logprobs,
            )
            for sample in self.samples
        ]
        outputs = backend.llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(config: Config, repeats: int) -> list[dict[str, Any]]:
    """One row a pair: raw and stage next to each other, the first of a pair by turns."""
    arms = Arms(config)
    arms.raw()  # kernels and caches warm
    rows = []
    for repeat in range(repeats):
        order = ("raw", "stage") if repeat % 2 == 0 else ("stage", "raw")
        rates = {name: timed(getattr(arms, name)) for name in order}
        rows.append(
            {
                "target": config.models.target,
                "engine": config.traces.backend,
                "backend": arms.tracer.backend.name,
                "batch": config.traces.batch,
                "shard_size": config.traces.shard_size,
                "completions": len(arms.samples),
                "tokens": rates["stage"].tokens,
                "raw_tokens": rates["raw"].tokens,
                "raw_tokens_per_s": round(rates["raw"].per_s, 3),
                "stage_tokens_per_s": round(rates["stage"].per_s, 3),
                "ratio": round(rates["stage"].per_s / rates["raw"].per_s, 4),
                "cpu_ratio": round(rates["stage"].per_cpu_s / rates["raw"].per_cpu_s, 4),
                "outside_share": round(1 - arms.inside_s * rates["stage"].per_s / rates["stage"].tokens, 4),
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "target"}, file=sys.stderr)
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Completion tokens, by the clock and by the process's CPU time."""

    tokens: int
    per_s: float
    per_cpu_s: float


def timed(arm: Callable[[], int]) -> Rate:
    """Run an arm once."""
    began, cpu_began = time.perf_counter(), time.process_time()
    tokens = arm()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Rate(tokens=tokens, per_s=tokens / seconds, per_cpu_s=tokens / cpu_seconds)


def rate_gate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Passes when the median ratio of every backend is at least LEAST_RATIO."""
    medians = {
        engine: statistics.median(row["ratio"] for row in rows if row["engine"] == engine)
        for engine in sorted({row["engine"] for row in rows})
    }
    worst = min(medians.values())
    reason = ", ".join(f"{engine}: median {ratio:.3f}" for engine, ratio in medians.items())
    state = "pass" if worst >= LEAST_RATIO else "fail"
    return gate(state, value=worst, limit=LEAST_RATIO, reason=f"stage / raw tokens a second; {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when the gate holds."""
    parser = argparse.ArgumentParser(prog="bench.trace_rate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--backends", nargs="+", choices=("specdec", "vllm"), default=["specdec", "vllm"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args(argv)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    rows: list[dict[str, Any]] = []
    for backend in arguments.backends:
        config = load_config(arguments.config, [*arguments.set, f"traces.backend={backend}"])
        rows += measure(config, arguments.repeats)
    gates = {"trace_rate": rate_gate(rows)}
    write_result(Path(arguments.out), stage="trace_rate", run=config.run, rows=rows, gates=gates, started=started)
    print(f"{gates['trace_rate']['state']}: {gates['trace_rate']['reason']}")
    return 0 if gates["trace_rate"]["state"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
