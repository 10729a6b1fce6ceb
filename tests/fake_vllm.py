"""Stands in for vLLM where a test is about what is around it: `python -m tests.fake_vllm serve ...` answers as a server
does, `... client` as the load generator. FAKE in the environment says what goes wrong; one that hangs does so until the
file FAKE_UNTIL is there."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.vllm_cli import die_with_parent

FAKE = os.environ.get("FAKE", "")
RESULT = json.loads((Path(__file__).parent / "vllm_bench_serve.json").read_text())
COUNTS = {"rounds": 0, "requests": 0, "generated": 0}
TOKENS_A_ROUND = 2  # one of two drafted tokens is accepted


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def metrics() -> str:
    rounds = COUNTS["rounds"] if "--speculative-config" in sys.argv else 0
    values = {
        "vllm:spec_decode_num_drafts_total": rounds,
        "vllm:spec_decode_num_draft_tokens_total": 2 * rounds,
        "vllm:spec_decode_num_accepted_tokens_total": rounds,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': rounds,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 0,
        "vllm:generation_tokens_total": COUNTS["generated"],
        "vllm:request_success_total": COUNTS["requests"],
    }
    if os.environ.get("SPECDEC_PLUGIN") == "1":
        values['vllm:specdec_steps_total{k="2"}'] = rounds
    return "".join(f"{name} {value}.0\n" for name, value in values.items())


class Server(ThreadingHTTPServer):
    request_queue_size = 64


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if self.path == "/load":
            if FAKE == "dies under load":
                print("(EngineCore pid=1) ERROR 11-30 02:37:40 [core.py:1] RuntimeError: out of memory", flush=True)
                os._exit(3)
            while FAKE == "hangs" and not os.path.exists(os.environ.get("FAKE_UNTIL", "")):
                print("under load", flush=True)
                time.sleep(0.1)
        self.reply(metrics() if self.path == "/metrics" else "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"]
        ids = [7] * count if FAKE != "wrong text" else [7] * (count - 1) + [8]
        COUNTS["rounds"] += (count - 1) // TOKENS_A_ROUND
        COUNTS["requests"] += 1
        COUNTS["generated"] += 1 + (count - 1) // TOKENS_A_ROUND * TOKENS_A_ROUND
        top = {"top_logprobs": [{"token_id:7": -0.1, "token_id:9": -0.11}] * count} if "logprobs" in body else None
        self.reply(json.dumps({"choices": [{"token_ids": ids, "logprobs": top}]}))


def serve() -> None:
    die_with_parent()
    if FAKE == "dies":
        print('(APIServer pid=1) File "/some/where/site-packages/x.py", line 1', flush=True)
        print("(APIServer pid=1) ValueError: this draft does not fit\n(APIServer pid=1) bye", flush=True)
        sys.exit(1)
    if FAKE == "ignores SIGTERM":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server = Server(("127.0.0.1", int(option("--port"))), Handler)
    except OSError as error:
        print(f"OSError: {error}", flush=True)
        sys.exit(1)
    print("(Worker pid=1) INFO 11-30 02:38:13 [cpu_model_runner.py:75] Loading drafter model...")
    print("INFO CPU KV cache size: 20,480 tokens, Maximum concurrency for 1,024 tokens per request: 20.00x", flush=True)
    server.serve_forever()


def client() -> None:
    for line in sys.stdin:
        arguments = json.loads(line)
        given = dict(itertools.pairwise(arguments))
        try:
            urllib.request.urlopen(given["--base-url"] + "/load").read()
            Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(RESULT))
            error = None
        except OSError as problem:
            error = str(problem)
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    {"serve": serve, "client": client}[sys.argv[1]]()
