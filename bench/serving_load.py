"""Loads: what `vllm bench serve` is told, and what its result says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving_methods import CHECKOUT, SERVED_NAME
from bench.serving_metrics import Counters, acceptance
from bench.serving_server import last_error, start_group, stop
from pipeline.config import Config
from pipeline.config_bench_vllm import BenchVllmConfig

PERCENTILES = (50, 90, 99)
POLL_S = 0.5
PROGRAM = ("-m", "bench.serving_client")  # tests put a stand-in here
TOKENS_A_MILLION = 1_000_000
SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """Closed: `concurrency` requests always under way. Open: Poisson arrivals, `rate` of them a second, which is
    `rate_share` of the rate at which the method "none" was saturated."""

    concurrency: int | None = None
    rate_share: float | None = None

    @property
    def name(self) -> str:
        return f"c{self.concurrency}" if self.concurrency is not None else f"r{self.rate_share:g}"

    def requests(self, bench: BenchVllmConfig) -> int:
        return max(bench.requests, bench.requests_per_slot * (self.concurrency or 0))


def loads(bench: BenchVllmConfig) -> list[Load]:
    """Closed loads first: the open ones are stated as shares of their best rate."""
    closed = [Load(concurrency=concurrency) for concurrency in bench.concurrencies]
    return closed + [Load(rate_share=share) for share in bench.rate_shares]


class Client:
    """The process that makes the loads (bench/serving_client.py); `with` starts it and ends it."""

    def __init__(self, log: Path, check_stop: Callable[[], None]) -> None:
        self.log, self.check_stop = log, check_stop
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Client:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        stop(self.process, patience=0)

    def start(self) -> None:
        """A fresh process: it imports vLLM while the first server starts."""
        env = {"PYTHONPATH": str(CHECKOUT), "VLLM_LOGGING_LEVEL": "WARNING"}
        self.process = start_group([sys.executable, *PROGRAM], self.log, env, stdout=subprocess.PIPE)

    def restart(self) -> None:
        """Start over with another process: one that failed may be in the middle of something."""
        assert self.process is not None
        stop(self.process, patience=0)
        self.start()

    def run(self, arguments: Sequence[str]) -> None:
        """One load, to its end. RuntimeError with the load generator's own words when it fails."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        error: str | None = "it ended"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            self.process.stdin.flush()
            while not select.select([self.process.stdout], [], [], POLL_S)[0]:
                self.check_stop()
            line = self.process.stdout.readline()
            error = json.loads(line)["error"] if line else f"it ended: {last_error(self.log)}"
        if error is not None:
            raise RuntimeError(f"vllm bench serve failed: {error}")


def client_arguments(
    bench: BenchVllmConfig, load: Load, rate: float | None, *, url: str, model: Path, prompts: Path, out: Path
) -> list[str]:
    """The arguments of `vllm bench serve`. As many requests as run at once go first, unmeasured: the first of every
    shape pays for memory and compilation."""
    count = load.requests(bench)
    arrivals = ["--max-concurrency", str(load.concurrency)] if rate is None else ["--request-rate", f"{rate:.6g}"]
    return [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", str(model), "--tokenizer", str(model), "--served-model-name", SERVED_NAME),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
        *("--custom-output-len", str(bench.max_tokens), "--num-prompts", str(count), "--seed", str(bench.seed)),
        *("--temperature", str(bench.temperature), "--extra-body", json.dumps({"add_special_tokens": False})),
        *arrivals,
        *("--num-warmups", str(load.concurrency or 1), "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--goodput", f"ttft:{bench.slo.ttft_ms:g}", f"tpot:{bench.slo.tpot_ms:g}"),
        *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def load_row(
    config: Config, load: Load, rate: float | None, measured: Mapping[str, Any], counted: Counters, devices: int
) -> dict[str, Any]:
    """Row fields of one load that has just ended: `measured` is vllm bench serve's result, `counted` what the server
    counted meanwhile. load_average is the machine's over the last minute: more than the server's own, and others took
    part of its time.

    ValueError when requests failed: their times are no measurement.
    """
    bench = config.bench_vllm
    assert bench is not None
    if measured.get("failed", 0) or not measured["completed"]:
        raise ValueError(f"{measured.get('failed', 0)} requests failed and {measured['completed']} were completed")
    throughput = float(measured["output_throughput"])
    return {
        **load_fields(config, load, rate),
        "tokens_per_s": throughput,
        "requests_per_s": measured["request_throughput"],
        "goodput_requests_per_s": measured.get("request_goodput"),
        "requests": measured["completed"],
        "output_tokens": measured["total_output_tokens"],
        "input_tokens": measured["total_input_tokens"],
        "seconds": measured["duration"],
        "load_average": os.getloadavg()[0],
        **_times(measured),
        **acceptance(counted),
        "rounds": counted.rounds,
        "drafted_tokens": counted.drafted,
        "accepted_tokens": counted.accepted,
        "usd_per_million_tokens": price(bench.price_per_hour * devices, throughput),
    }


def load_fields(config: Config, load: Load, rate: float | None) -> dict[str, Any]:
    """Row fields that say under which load."""
    bench = config.bench_vllm
    assert bench is not None
    return {
        "load": "closed" if load.concurrency is not None else "open",
        "batch": load.concurrency,
        "rate_share": load.rate_share,
        "rate": rate,
        "temperature": bench.temperature,
        "prompt_set": "+".join(source.name for source in bench.prompts),
        "max_tokens": bench.max_tokens,
        "slo": f"{bench.slo.name}: TTFT <= {bench.slo.ttft_ms:g} ms, TPOT <= {bench.slo.tpot_ms:g} ms",
        "usd_per_hour": bench.price_per_hour,
    }


def price(usd_per_hour: float, tokens_per_s: float) -> float | None:
    """US dollars for a million output tokens at this speed."""
    return usd_per_hour / SECONDS_AN_HOUR / tokens_per_s * TOKENS_A_MILLION if tokens_per_s > 0 else None


def _times(measured: Mapping[str, Any]) -> dict[str, Any]:
    """ttft_ms and the like are medians; itl is the time between chunks of a stream, each of which may hold the several
    tokens of a round."""
    times: dict[str, Any] = {}
    for name in ("ttft", "tpot", "e2el", "itl"):
        label = "itl_chunk" if name == "itl" else name
        times[f"{label}_ms"] = measured[f"p50_{name}_ms"]
        for percentile in PERCENTILES[1:]:
            times[f"{label}_p{percentile}_ms"] = measured[f"p{percentile}_{name}_ms"]
    return times
