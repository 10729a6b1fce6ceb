"""One cell of stage 06: a batch of rows with a given context, timed as it runs and then taken apart by the profiler.

Four phases: "draft" (k draft steps with their sampling), "target step" (one token a row), "verify" (k + 1 tokens a row)
and "round" (a whole one of the engine, host and all), each as the engine runs it here: on a GPU with the fast forward
where a model can take it, replayed as CUDA graphs; `variant` in the rows says which. Where graphs are replayed the
phases are timed again with each kernel launched on its own, and the difference is what launching costs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.cells import summarise
from bench.graph_round import models_of
from bench.kernel_groups import HOST, shares
from bench.memory import kv_bytes_per_token
from bench.profile_kernels import busy_ms, kernel_rows
from bench.traced import CALLS, traced
from specdec import Engine, Request, SamplingParams
from specdec.drafter import no_proposal
from specdec.graphs import GraphRounds
from specdec.model import CachedModel
from specdec.round import score
from specdec.state import features_of

PHASES = ("draft", "target step", "verify", "round")
WARM_CALLS = 2
MIB = 1 << 20
NO_GRAPHS = "none: CUDA graphs need an NVIDIA GPU"


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
        """The most tokens that a row commits in all rounds of the cell: timed, traced, and where graphs are replayed
        timed again without."""
        return (2 * (self.repeats + WARM_CALLS) + CALLS) * (self.k + 1)


def copy_gb_per_s(device: torch.device, repeats: int = 7) -> float:
    """Bytes read and written a second, in units of 1e9, by one large copy: what moving data alone could reach."""
    size = (2048 if device.type == "cuda" else 256) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device, repeats)
    return 2 * size / median(seconds) / 1e9


def prepared_engine(target: Any, drafter: Any, shape: Shape, **options: Any) -> Engine:
    """An engine whose rows hold their context, before the first round; `options`: of Engine, whose own are the default.
    ValueError when the target is built for less."""
    capacity = shape.context + shape.new_tokens
    engine = Engine(target, drafter, k=shape.k, num_slots=shape.batch, capacity=capacity, **options)
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


def variant_of(engine: Engine) -> str:
    """What the engine runs here: "fast+graphs", "eager", or for instance "fast target+graphs"."""
    target, draft = (model.reads_live_only for model in models_of(engine))
    fast = {(True, True): ["fast"], (True, False): ["fast target"], (False, True): ["fast draft"]}.get((target, draft))
    graphs = ["graphs"] if _replays(engine) else []
    return "+".join([*(fast or []), *graphs]) or "eager"


def phases_of(engine: Engine, shape: Shape) -> dict[str, Callable[[], Any]]:
    """The phases as functions. All but "round" leave the engine as it was: they begin at the rows' lengths."""
    features = features_of([slot.request.params for slot in engine._slots if slot is not None])
    rounds, drafter, target = engine._rounds, engine._drafter, engine._target
    state = engine._state.head(rounds.rows(shape.batch))
    live = max(slot.length for slot in engine._slots if slot is not None) + shape.k
    draft = partial(rounds.propose, drafter, state, shape.k, features, live)
    slots = rounds._live(target, live) if isinstance(rounds, GraphRounds) else live
    one, several = (partial(score, state, target, proposal, slots) for proposal in (no_proposal(state), draft()))
    return {
        "draft": draft,
        "target step": _replayed(engine, one),
        "verify": _replayed(engine, several),
        "round": engine.step,
    }


def _replays(engine: Engine) -> bool:
    return engine.captured is not None and engine.captured.failed is None


def _replayed(engine: Engine, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as a graph, where the engine replays graphs; it holds on to the tensors that the graph reads."""
    if not _replays(engine):
        return run
    assert isinstance(engine._rounds, GraphRounds)
    graph = engine._rounds._capture(run, lambda: None)
    return lambda kept=run: graph()  # type: ignore[misc]


@contextmanager
def launched(engine: Engine) -> Iterator[None]:
    """While entered, the engine replays nothing: each kernel is launched on its own."""
    rounds = engine._rounds
    engine._rounds = rounds._eager if isinstance(rounds, GraphRounds) else rounds
    try:
        yield
    finally:
        engine._rounds = rounds


@torch.inference_mode()
def profile_cell(
    target: Any,
    drafter: Any,
    shape: Shape,
    *,
    copy_speed: float,
    traces: Path,
    check_stop: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Rows of the cell, the summary first, then for each phase its groups and its kernels; Chrome traces go to
    `traces`. options: as prepared_engine takes them."""
    engine = prepared_engine(target, drafter, shape, **options)
    device, models = engine._target.device, models_of(engine)
    seconds: dict[str, list[float]] = {}
    parts = []
    for name, run in phases_of(engine, shape).items():  # the round last: the others stay at the context asked for
        check_stop()
        seconds[name] = _seconds(run, device, shape.repeats)
        work = traced(run, models, traces / f"{name.replace(' ', '-')}.trace.json.gz")
        typical_s = median(seconds[name])
        parts += group_rows(name, work, typical_s, device)
        step, count = ("draft step", shape.k) if name == "draft" else (name, 1)
        parts += kernel_rows(step, work, typical_s, count)
    summary = {"variant": variant_of(engine), "graphs": graphs_of(engine)}
    summary |= summary_of(seconds, shape, models, copy_speed) | launch_values(engine, seconds, shape)
    where = {"batch": shape.batch, "context": shape.context, "k": shape.k, "temperature": shape.temperature}
    return [where | row for row in (summary, *parts)]


def graphs_of(engine: Engine) -> str:
    """What graphs the engine replays, or why none."""
    stats = engine.captured
    if stats is None:
        return NO_GRAPHS if engine._target.device.type != "cuda" else "none: turned off"
    return f"{stats.made} captured in {stats.seconds:.1f} s" if stats.failed is None else f"none: {stats.failed}"


def group_rows(phase: str, work: Sequence[Any], timed_s: float, device: torch.device) -> list[dict[str, Any]]:
    """A phase's time by group. On a CPU the parts are of the profiled call, which the profiler makes longer; on a GPU
    they are kernels', and what they leave of the unprofiled time is the device waiting for the host."""
    found = shares(work)
    spent_ms = sum(share.ms for share in found if share.group != HOST)
    on_gpu = device.type == "cuda"
    idle_ms = max(0.0, 1e3 * timed_s - busy_ms(work)) if on_gpu else sum(s.ms for s in found if s.group == HOST)
    times = {share.group: idle_ms if share.group == HOST else share.ms for share in found}
    whole_ms = spent_ms + idle_ms
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
    read = {"draft_step": step_bytes(draft, shape), "target_step": step_bytes(target, shape)}
    read |= {"verify": read["target_step"], "round": shape.k * read["draft_step"] + read["target_step"]}
    for name, each in zip(read, (draft_step, seconds["target step"], seconds["verify"], seconds["round"]), strict=True):
        speed = read[name] / median(each) / 1e9
        values |= {f"{name}_bytes": read[name], f"{name}_floor_ms": read[name] / copy_speed / 1e6}
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


def launch_values(engine: Engine, replayed: Mapping[str, Sequence[float]], shape: Shape) -> dict[str, float]:
    """What each phase takes with every kernel launched on its own, and how much of that is the launching; nothing where
    the engine does so anyway."""
    values: dict[str, float] = {}
    if _replays(engine):
        with launched(engine):
            for name, run in phases_of(engine, shape).items():
                stem, ms = name.replace(" ", "_"), 1e3 * median(_seconds(run, engine._target.device, shape.repeats))
                values |= {f"{stem}_launched_ms": ms, f"{stem}_launch_ms": ms - 1e3 * median(replayed[name])}
    return values


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
