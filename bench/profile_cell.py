"""One cell of stage 06: a batch of rows with a given context, timed as it runs and then taken apart by the profiler.

Four phases: "draft" (k draft steps with their sampling), "target step" (one token a row), "verify" (k + 1 tokens a row)
and "round" (a whole one of the engine, host and all). Nothing is captured or compiled here that the engine itself does
not capture; on a GPU the same phases are then timed again as CUDA graphs, and the difference is what launching costs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.cells import summarise
from bench.graph_round import captured, models_of, round_of
from bench.kernel_groups import HOST, shares
from bench.memory import kv_bytes_per_token
from bench.traced import CALLS, traced
from specdec import Engine, Request, SamplingParams
from specdec.drafter import no_proposal
from specdec.model import CachedModel
from specdec.round import score
from specdec.state import features_of

PHASES = ("draft", "target step", "verify", "round")
WARM_CALLS = 2
NO_GRAPHS = "not run: CUDA graphs need an NVIDIA GPU"
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured: `batch` rows of `context` prompt tokens, k drafts a round."""

    batch: int
    context: int
    k: int
    repeats: int
    temperature: float

    @property
    def new_tokens(self) -> int:
        """The most tokens that a row commits in all rounds of the cell: the engine's own, and on a GPU those beside
        and inside a graph and the three before its capture."""
        return (3 * (self.repeats + WARM_CALLS) + CALLS + 3) * (self.k + 1)


def copy_gb_per_s(device: torch.device, repeats: int = 7) -> float:
    """Bytes read and written a second, in units of 1e9, by one large copy: what moving data alone could reach."""
    size = (2048 if device.type == "cuda" else 256) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device, repeats)
    return 2 * size / median(seconds) / 1e9


def prepared_engine(target: Any, drafter: Any, shape: Shape) -> Engine:
    """An engine whose rows hold their context, before the first round. ValueError when the target is built for less."""
    capacity = shape.context + shape.new_tokens
    engine = Engine(target, drafter, k=shape.k, num_slots=shape.batch, capacity=capacity, graphs=False, fast=False)
    if engine.room < capacity:
        raise ValueError(
            f"profile.contexts: got {shape.context}, with {shape.new_tokens} tokens to decode; the target is built for "
            f"{engine.room} tokens: expected at most {engine.room - shape.new_tokens}"
        )
    for row in range(shape.batch):
        prompt = [(7 * i + 13 * row + 3) % engine.vocab_size for i in range(shape.context)]
        params = SamplingParams(temperature=shape.temperature, max_tokens=shape.new_tokens, seed=row)
        engine.submit(Request(prompt_ids=prompt, params=params))
    with torch.inference_mode():
        engine._admit()
        while not all(slot is not None and slot.decoding for slot in engine._slots):
            engine._prefill()
        engine._drafter.prepare(engine._slots, shape.k, engine._chunk)  # type: ignore[union-attr,arg-type]
    return engine


def phases_of(engine: Engine, shape: Shape) -> dict[str, Callable[[], Any]]:
    """The phases as functions. All but "round" leave the engine as it was: they begin at the rows' lengths."""
    assert engine._drafter is not None
    features = features_of([slot.request.params for slot in engine._slots if slot is not None])
    state, target, live = engine._state, engine._target, shape.context + shape.k
    proposal = engine._drafter.propose(state, shape.k, features, live)
    return {
        "draft": partial(engine._drafter.propose, state, shape.k, features, live),
        "target step": partial(score, state, target, no_proposal(state), live),
        "verify": partial(score, state, target, proposal, live),
        "round": engine.step,
    }


@torch.inference_mode()
def profile_cell(
    target: Any,
    drafter: Any,
    shape: Shape,
    *,
    copy_speed: float,
    traces: Path,
    check_stop: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Rows of the cell, the summary first, then one for each phase and group; Chrome traces go to `traces`."""
    engine = prepared_engine(target, drafter, shape)
    device, models = engine._target.device, models_of(engine)
    seconds: dict[str, list[float]] = {}
    graphs: dict[str, Any] = {"graphs": NO_GRAPHS if device.type != "cuda" else "captured"}
    groups = []
    for name, run in phases_of(engine, shape).items():  # the round last: the others stay at the context asked for
        check_stop()
        seconds[name] = _seconds(run, device, shape.repeats)
        trace = traces / f"{name.replace(' ', '-')}.trace.json.gz"
        groups += group_rows(name, traced(run, models, trace), median(seconds[name]), device)
        if device.type == "cuda":
            graphs |= graph_values(engine, name, run, shape)
    summary = summary_of(seconds, shape, models, copy_speed) | graphs | graph_ratio(graphs, shape.k)
    where = {"batch": shape.batch, "context": shape.context, "k": shape.k, "temperature": shape.temperature}
    return [where | row for row in (summary, *groups)]


def group_rows(phase: str, work: Sequence[Any], timed_s: float, device: torch.device) -> list[dict[str, Any]]:
    """A phase's time by group. On a CPU the parts are of the profiled call, which the profiler makes longer; on a GPU
    they are kernels', and what they leave of the unprofiled time is the device waiting for the host."""
    found = shares(work)
    busy_ms = sum(share.ms for share in found if share.group != HOST)
    on_gpu = device.type == "cuda"
    idle_ms = max(0.0, 1e3 * timed_s - busy_ms) if on_gpu else sum(s.ms for s in found if s.group == HOST)
    times = {share.group: idle_ms if share.group == HOST else share.ms for share in found}
    whole_ms = busy_ms + idle_ms
    return [
        {
            "phase": phase,
            "group": share.group,
            "group_ms": times[share.group],
            "share": times[share.group] / whole_ms,
            "events": share.count,
            "top": list(share.top),
        }
        for share in found
    ]


def summary_of(
    seconds: Mapping[str, Sequence[float]], shape: Shape, models: Sequence[CachedModel], copy_speed: float
) -> dict[str, Any]:
    """Times, the ratios that decide whether drafting pays, and the bandwidth that each step reached."""
    target, draft = models
    draft_step = [s / shape.k for s in seconds["draft"]]
    overhead = median(seconds["round"]) - median(seconds["draft"]) - median(seconds["verify"])
    values: dict[str, Any] = {"repeats": shape.repeats, "copy_gb_per_s": copy_speed}
    named = {
        "draft_step_ms": draft_step,
        "target_step_ms": seconds["target step"],
        "verify_ms": seconds["verify"],
        "round_ms": seconds["round"],
    }
    for name, each in named.items():
        values |= summarise(name, [1e3 * s for s in each])
    values |= {
        "overhead_ms": 1e3 * overhead,
        "cost_ratio": median(draft_step) / median(seconds["target step"]),
        "verify_ratio": median(seconds["verify"]) / median(seconds["target step"]),
    }
    for name, model, each in (
        ("draft_step", draft, draft_step),
        ("target_step", target, seconds["target step"]),
        ("verify", target, seconds["verify"]),
    ):
        speed = step_bytes(model, shape) / median(each) / 1e9
        values |= {f"{name}_gb_per_s": speed, f"{name}_of_copy": speed / copy_speed}
    values |= {f"{n}_kv_bytes_per_token": kv_bytes_per_token(m) for n, m in (("target", target), ("draft", draft))}
    return values


def step_bytes(model: CachedModel, shape: Shape) -> int:
    """What a step has to read at least: every weight it uses once, and the keys and values of all rows' contexts."""
    return weight_bytes(model.module) + shape.batch * shape.context * kv_bytes_per_token(model)


def weight_bytes(module: Any) -> int:
    """Of all weights but an input embedding that is not the head too: of that a step reads a row a token."""
    head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    read = {p.data_ptr(): p.nbytes for p in module.parameters() if p is not embedding}
    return sum((read | {head.data_ptr(): head.nbytes}).values())


def graph_values(engine: Engine, name: str, run: Callable[[], Any], shape: Shape) -> dict[str, float]:
    """A phase as a CUDA graph, beside the same work launched one kernel at a time. A round is only its inside here:
    what the host does with its report cannot be captured."""
    if name == "round":
        run = round_of(engine, shape.k, [slot.request for slot in engine._slots if slot is not None])
    device, stem = engine._target.device, name.replace(" ", "_")
    eager = 1e3 * median(_seconds(run, device, shape.repeats))
    graph = 1e3 * median(_seconds(captured(engine, run), device, shape.repeats))
    return {f"{stem}_eager_ms": eager, f"{stem}_graph_ms": graph, f"{stem}_launch_ms": eager - graph}


def graph_ratio(graphs: Mapping[str, Any], k: int) -> dict[str, float]:
    """c as it is when nothing waits for launches; nothing where there are no graphs."""
    if "draft_graph_ms" not in graphs:
        return {}
    return {"cost_ratio_graph": graphs["draft_graph_ms"] / k / graphs["target_step_graph_ms"]}


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Wall time of `repeats` calls, each waited for, after some that do not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for call in range(WARM_CALLS + repeats):
        wait()
        start = time.perf_counter()
        run()
        wait()
        if call >= WARM_CALLS:
            seconds.append(time.perf_counter() - start)
    return seconds
