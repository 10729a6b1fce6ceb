"""Bring-up checkpoints 1 to 6 of a speculating server, greedy texts against the server without, and gate G6."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.serving_methods import SERVED_NAME
from bench.serving_metrics import Counters, consistent, drafter_loaded, has_plugin, memory, parse_counters
from bench.serving_server import Server, last_lines
from pipeline.config import Config
from pipeline.config_bench_vllm import BASELINE, MethodConfig
from pipeline.results import gate

TEXTS = 16
NO_VLLM = "vLLM is not installed"
LOGPROBS = 5
# How far apart the two likeliest tokens may be, in nats, for a divergence between them to be a tie: rounding of a
# bfloat16 logit near 20 is 0.125; float32's is a million times finer.
TIE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 0.25, "float16": 0.05}
CHECKPOINTS = (
    "plugin found",
    "draft loaded",
    "KV pool reported",
    "first draft accepted",
    f"{TEXTS} greedy texts as without speculation",
    "metrics consistent",
)
LEAST_SPEEDUP = 0.98
TEXT_S = 1800.0
ALL = 1_000_000
SETTLE_S = 10.0
PLUGIN_SAYS = "draft length by controller"


def greedy_texts(server: Server, prompts: Sequence[Sequence[int]], tokens: int, logprobs: bool) -> list[dict[str, Any]]:
    """TEXTS completions at temperature 0, all at once: {"ids", and with `logprobs` "top": LOGPROBS a token by id}.

    Prompts are given as ids, and used again when there are fewer than TEXTS.
    """
    bodies = [
        {
            "model": SERVED_NAME,
            "prompt": list(prompts[index % len(prompts)]),
            "temperature": 0,
            "max_tokens": tokens,
            "return_token_ids": True,
        }
        | ({"logprobs": LOGPROBS, "return_tokens_as_token_ids": True} if logprobs else {})
        for index in range(TEXTS)
    ]
    with ThreadPoolExecutor(TEXTS) as pool:
        return list(pool.map(lambda body: _completion(server, body), bodies))


def _completion(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TEXT_S) as answer:
            choice = json.loads(answer.read())["choices"][0]
    except OSError as error:
        raise server.error(f"a completion failed: {error}") from error
    text: dict[str, Any] = {"ids": choice["token_ids"]}
    if choice.get("logprobs"):
        text["top"] = [
            {token.removeprefix("token_id:"): value for token, value in top.items()}
            for top in choice["logprobs"]["top_logprobs"]
        ]
    return text


def observe(server: Server, prompts: Sequence[Sequence[int]], tokens: int, *, logprobs: bool) -> dict[str, Any]:
    """One method's unit: its greedy texts, what the server counted while it wrote them, and what its log says."""
    before = parse_counters(server.get("/metrics"))
    texts = greedy_texts(server, prompts, tokens, logprobs)
    after = settled(server)
    counted = parse_counters(after).since(before)
    log = server.log.read_text(errors="replace")
    return {
        "texts": texts,
        "counters": dataclasses.asdict(counted),
        "drafter_loaded": drafter_loaded(log),
        "plugin": has_plugin(after),
        "plugin_says": next((line for line in last_lines(server.log, count=ALL) if PLUGIN_SAYS in line), None),
        **memory(log),
    }


def settled(server: Server) -> str:
    """The text of /metrics when it has stopped changing: a server counts the end of a request after having told it."""
    text, deadline = "", time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        before, text = text, server.get("/metrics")
        if parse_counters(before) == parse_counters(text):
            break
        time.sleep(SETTLE_S / 20)
    return text


def compare(texts: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
    """How many texts are those without speculation, and how many of the others part at a tie (see TIE); the largest
    gap in nats of those that do not part at a tie is None where the other token was not even among the likeliest."""
    same, ties, worst = 0, 0, 0.0
    for mine, theirs in zip(texts, plain, strict=True):
        at = parting(mine["ids"], theirs["ids"])
        if at is None:
            same += 1
            continue
        gap = gap_at(theirs, mine["ids"], at)
        ties += gap <= TIE[dtype]
        worst = max(worst, gap)
    return {"texts": len(texts), "texts_same": same, "texts_tied": ties, "texts_gap": worst if worst < 1e9 else None}


def parting(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position where two texts differ; None when they are the same."""
    for position, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return position
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def gap_at(plain: Mapping[str, Any], mine: Sequence[int], at: int) -> float:
    """Nats between the token without speculation and the other one, by the server without; infinite if it is not
    known."""
    if at >= len(mine) or at >= len(plain["ids"]) or "top" not in plain:
        return float("inf")
    top = plain["top"][at]
    other = top.get(str(mine[at]))
    return float("inf") if other is None else abs(float(top[str(plain["ids"][at])]) - float(other))


def checkpoints(
    config: Config, method: MethodConfig, seen: Mapping[str, Any], plain: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """(name, state, reason) of each checkpoint. `seen` and `plain` are units of `observe`, of the method and of
    "none"; where a server did not start they hold "not_run"."""
    stopped = seen.get("not_run") or plain.get("not_run")
    if stopped:
        yield from ((name, "not run" if stopped == NO_VLLM else "fail", stopped) for name in CHECKPOINTS)
        return
    settings = method.speculative_config or {}
    counted = Counters(**seen["counters"])
    yield CHECKPOINTS[0], *_plugin(method, seen)
    needs_model = settings.get("method", "draft_model") in ("draft_model", "eagle", "eagle3", "mtp")
    loaded = seen["drafter_loaded"] or not needs_model
    yield CHECKPOINTS[1], _state(loaded), "by the server's log" if needs_model else "this method has no draft model"
    yield CHECKPOINTS[2], *_pool(seen, plain)
    first = counted.accepted_by_position[:1]
    told = f"{counted.accepted} of {counted.drafted} accepted, {first[0] if first else 0} of them first in their round"
    yield CHECKPOINTS[3], _state(bool(first and first[0])), told
    compared = compare(seen["texts"], plain["texts"], config.models.dtype)
    agree = compared["texts_same"] + compared["texts_tied"] == compared["texts"]
    told = f"{compared['texts_same']} of {compared['texts']} token for token; {compared['texts_tied']} part at a tie"
    yield CHECKPOINTS[4], _state(agree), told
    k = int(settings.get("num_speculative_tokens", 0))
    sound, told = consistent(seen["counters"], k)
    yield CHECKPOINTS[5], _state(sound), told


def _plugin(method: MethodConfig, seen: Mapping[str, Any]) -> tuple[str, str]:
    if method.plugin is None:
        return "not run", f"the method {method.name} is served without the plugin"
    if not seen["plugin"]:
        return "fail", "its figures are not on /metrics"
    return "pass", seen["plugin_says"] or "by its figures on /metrics"


def _pool(seen: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[str, str]:
    mine, theirs = seen["kv_tokens"], plain["kv_tokens"]
    if mine is None or theirs is None:
        return "fail", "a server's log does not say how many tokens its pool holds"
    share = 1 - mine / theirs
    return _state(0 < mine <= theirs), f"{mine} tokens, {theirs} without speculation: {share:.0%} less"


def _state(holds: bool) -> str:
    return "pass" if holds else "fail"


def smoke_method(methods: Sequence[MethodConfig]) -> MethodConfig | None:
    """The method that the checkpoints are about: the first with the plugin, else the first draft_model, else the first
    that speculates."""
    speculating = [method for method in methods if method.speculative_config]
    ranked = sorted(
        speculating,
        key=lambda method: (method.plugin is None, (method.speculative_config or {}).get("method") != "draft_model"),
    )
    return ranked[0] if ranked else None


def g6(points: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Gate G6 from the checkpoints (rows with "check", "state", "reason") and the measured loads of the plugin.

    The law of sampled text is proved by the plugin's own tests, and is not part of this record.
    """
    passed, failed = _names(points, "pass"), _names(points, "fail")
    if not points:
        return gate("not run", reason="bench_vllm.methods has no method that speculates")
    told = f"checkpoints {len(passed)} of {len(points)} pass"
    told += f"; failed: {', '.join(failed)} ({_reason(points, failed[0])})" if failed else ""
    missing = _names(points, "not run")
    speeds = _plugin_speeds(rows)
    told += f"; {_speeds_told(speeds)}"
    worst = min(speeds.values(), default=None)
    if failed:
        return gate("fail", value=len(passed), limit=len(points), reason=told)
    if missing or not speeds:
        why = f"not judged: {_reason(points, missing[0])}" if missing else "not judged: no load of the plugin measured"
        return gate("not run", value=worst, limit=LEAST_SPEEDUP, reason=f"{told}; {why}")
    least = min(speeds)
    holds = speeds[least] > 1 and all(speed >= LEAST_SPEEDUP for speed in speeds.values())
    return gate(_state(holds), value=worst, limit=LEAST_SPEEDUP, reason=told)


def _names(points: Sequence[Mapping[str, Any]], state: str) -> list[str]:
    return [str(point["check"]) for point in points if point["state"] == state]


def _reason(points: Sequence[Mapping[str, Any]], name: str) -> str:
    return next(str(point["reason"]) for point in points if point["check"] == name)


def _plugin_speeds(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The best of the plugin's methods by concurrency, against "none" of the same run."""
    speeds: dict[int, float] = {}
    for row in rows:
        if row.get("plugin") and row.get("batch") and row.get("speedup") is not None:
            speeds[row["batch"]] = max(row["speedup"], speeds.get(row["batch"], 0.0))
    return speeds


def _speeds_told(speeds: Mapping[int, float]) -> str:
    if not speeds:
        return "no load of the plugin measured"
    listed = ", ".join(f"{speed:.2f} at {batch}" for batch, speed in sorted(speeds.items()))
    return f"the plugin's speed against {BASELINE} by concurrency: {listed}"
