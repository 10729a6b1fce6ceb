"""The inside of a round as CUDA graphs.

Eager, a round launches some thousand small kernels and the device waits for them; a graph launches them at once.
Three kinds are made, each when it is first needed: a round's first draft step, one further step that is replayed
k - 1 times (specdec.graph_draft), and verify + rule + commit + roll-back, one for each k. Each of them for

- a number of rows: 1, 2, 4, 8, 16, 24, 32, 48, ... num_slots; a round takes the next such number, and the rows that
  are too many are inactive ones, which change nothing;
- the processing that the requests ask for (`Features`, with top-k rounded up) and the tensors it reads;
- the slots that attention may read: all where its kernel looks at each row's own length, else the next power of two,
  or all where twice that is more than there are.

A graph replays on addresses. What goes from one to the next lies in buffers made outside (DraftBuffers, RowState, the
caches), never in a graph's own memory. While a graph is made its rows are inactive, so that the calls to warm up
leave every request as it was. What cannot be captured is computed by EagerRounds, with one line in the log.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.capture import CaptureStats, capture_for, timed_capture
from specdec.drafter import Drafter, ModelDrafter, Proposal, no_proposal
from specdec.graph_draft import DraftBuffers, DraftSteps, drafts_step_by_step
from specdec.model import CachedModel
from specdec.round import EagerRounds
from specdec.sampling import Features
from specdec.state import RowState
from specdec.timing import PhaseTimer

MOST_GRAPHS = 256  # held at once; the one that was not used for longest makes room
_LEAST_LIVE = 256
_log = logging.getLogger("specdec")


class GraphRounds:
    """Does what EagerRounds does, by replays. `stats` says what was captured. vocab_size: ids that drafts are made of,
    the target's own.

    Raises ValueError when the target is not on a GPU.
    """

    def __init__(
        self, eager: EagerRounds, target: CachedModel, *, num_slots: int, k_max: int, vocab_size: int | None = None
    ) -> None:
        self._capture = capture_for(target.device)
        self._eager, self._target = eager, target
        self._row_counts = row_counts(num_slots)
        self._buffers = DraftBuffers(num_slots, k_max, vocab_size or target.vocab_size, target.device)
        self._graphs: dict[Any, Callable[[], Any]] = {}
        self._told = False
        self.stats = CaptureStats()

    @property
    def captures(self) -> int:
        return self.stats.made

    def rows(self, used: int) -> int:
        """The number of rows of the graph for a round whose last decoding row is number `used`."""
        return next(count for count in self._row_counts if count >= used)

    def propose(self, drafter: Drafter | None, state: RowState, k: int, features: Features, live: int) -> Proposal:
        """k drafts for each row, in this object's buffers when they were replayed."""
        if drafter is None or self.stats.failed is not None:
            return self._eager.propose(drafter, state, k, features, live)
        if not isinstance(drafter, ModelDrafter) or not drafts_step_by_step(drafter):
            self._tell_once(f"{type(drafter).__name__} proposes without graphs; what follows its proposal is replayed")
            return self._eager.propose(drafter, state, k, features, live)
        steps = self._steps(drafter, state, features, live)
        key = (len(state.lengths_B), steps.features, steps.live, _addresses(state))
        first = self._graph(("first", *key), state, steps.first)
        further = first
        if k > 1 and first is not None:
            further = self._graph(("next", *key), state, steps.next, before=self._buffers.step_1.zero_)
        if first is None or further is None:
            return self._eager.propose(drafter, state, k, features, live)
        first()
        for _ in range(k - 1):
            further()
        return self._buffers.proposal(len(state.lengths_B), k, has_law=not features.all_greedy)

    def settle(
        self,
        drafter: Drafter | None,
        state: RowState,
        proposal: Proposal,
        features: Features,
        live: int | None,
        timer: PhaseTimer | None = None,
    ) -> Tensor:
        """As EagerRounds.settle; the time to the mark "verify" holds the rule too."""
        if self.stats.failed is not None:
            return self._eager.settle(drafter, state, proposal, features, live, timer)
        k, has_law = proposal.drafts_BK.shape[1], proposal.draft_probs_BKV is not None
        held = self._buffers.hold(proposal) if k else None
        captured = drafter if drafts_step_by_step(drafter) else None
        rounded, slots = _rounded(features), self._live(self._target, live)
        key = ("settle", len(state.lengths_B), k, has_law, captured is not None, rounded, slots, _addresses(state))
        graph = self._graph(key, state, partial(self._settle, captured, state, held, rounded, slots))
        if graph is None:
            return self._eager.settle(drafter, state, proposal, features, live, timer)
        packed: Tensor = graph()
        if timer is not None:
            timer.mark("verify")
        if drafter is not None and captured is None:
            drafter.roll_back(state)
        return packed

    def _settle(
        self, drafter: Drafter | None, state: RowState, held: Proposal | None, features: Features, live: int | None
    ) -> Tensor:
        proposal = no_proposal(state) if held is None else held
        return self._eager.settle(drafter, state, proposal, features, live)

    def _steps(self, drafter: ModelDrafter, state: RowState, features: Features, live: int | None) -> DraftSteps:
        if not features.all_greedy:
            self._buffers.need_law(torch.promote_types(drafter.model.dtype, torch.float32))
        if features.penalties:
            self._buffers.need_counts()
        slots = self._live(drafter.model, live)
        return DraftSteps(drafter=drafter, buffers=self._buffers, state=state, features=_rounded(features), live=slots)

    def _live(self, model: CachedModel, live: int | None) -> int | None:
        if live is None or model.reads_live_only:
            return None
        slots = _power_of_two(max(live, _LEAST_LIVE))
        return slots if 2 * slots <= model.cache.capacity else model.cache.capacity

    def _graph(
        self,
        key: Any,
        state: RowState,
        run: Callable[[], Any],
        before: Callable[[], object] = lambda: None,
    ) -> Callable[[], Any] | None:
        """The graph of that key, made when there is none; None, and a line in the log, when it cannot be made."""
        graph = self._graphs.pop(key, None)
        if graph is None:
            if len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = self._made(state, run, before)
        if graph is not None:
            self._graphs[key] = graph  # the last one is the one used last
        self.stats = replace(self.stats, held=len(self._graphs))
        return graph

    def _made(self, state: RowState, run: Callable[[], Any], before: Callable[[], object]) -> Callable[[], Any] | None:
        try:
            with _inactive(state):
                graph, seconds, mebibytes = timed_capture(self._capture, run, before)
        except RuntimeError as error:  # torch's own, out of memory among them
            self.stats = replace(self.stats, failed=str(error))
            _log.warning("no CUDA graphs from here on, rounds go on without them: %s", error)
            return None
        old = self.stats
        self.stats = replace(old, made=old.made + 1, seconds=old.seconds + seconds, mebibytes=old.mebibytes + mebibytes)
        return graph

    def _tell_once(self, line: str) -> None:
        if not self._told:
            _log.info(line)
        self._told = True


def row_counts(num_slots: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ... up to num_slots, which is the last."""
    counts, step = [1, 2, 4, 8], 16
    while step < num_slots:
        counts += [step, step * 3 // 2]
        step *= 2
    return [*(count for count in counts if count < num_slots), num_slots]


@contextmanager
def _inactive(state: RowState) -> Iterator[None]:
    """No row decodes inside the block."""
    active_B = state.active_B.clone()
    state.active_B.fill_(False)
    try:
        yield
    finally:
        state.active_B.copy_(active_B)


def _rounded(features: Features) -> Features:
    """A larger top-k than any row asks for changes no row's law, so that a few graphs do for all."""
    top_k = features.max_top_k
    return replace(features, max_top_k=_power_of_two(top_k) if top_k else 0)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _addresses(state: RowState) -> tuple[Any, ...]:
    """Of the tensors that a request may cause to be made anew: a graph reads those it was captured with."""
    law = state.law
    optional = (law.stop_BS, law.allowed_BV, law.in_prompt_BV, law.counts_BV)
    return tuple(None if tensor is None else (tensor.data_ptr(), tensor.shape[1]) for tensor in optional)
