"""The engine: requests into slots, rounds over the slots, completions out.

Continuous batching: a finished row's slot is refilled before the next round, and prompts are fed in chunks between
rounds. The last prompt token is never prefilled: it is the pending token of the row's first round, which therefore
yields the first new token like any other round. Everything data-dependent inside a round is in specdec.round.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from transformers import PreTrainedModel

from specdec.block import verify_block
from specdec.calibrate import calibrate
from specdec.capture import CaptureStats
from specdec.drafter import Drafter, ModelDrafter
from specdec.feed import feed
from specdec.graphs import GraphRounds
from specdec.lengths import DraftLength, Lengths
from specdec.listeners import Listeners
from specdec.model import CachedModel
from specdec.report import RowReport, read_report, round_stats
from specdec.request import Completion, Request
from specdec.round import EagerRounds
from specdec.sampling import Features, verify_drafts
from specdec.slots import Slot, check_sizes
from specdec.state import RowState, features_of
from specdec.stats import AcceptanceStats, RoundStats
from specdec.timing import PhaseTimer

_END = object()
_log = logging.getLogger("specdec")
_RULES = {"token": verify_drafts, "block": verify_block}


class Engine:
    """Batched speculative decoding of `target` with `draft`; the output follows the target's law exactly.

    target: a Hugging Face decoder. draft: a smaller one with the same vocabulary on the same device, or any Drafter
    (n-gram, suffix, a draft of another vocabulary); None decodes plainly (k = 0, the same machinery). k: draft
    length, or a controller (specdec.controller), or a callable that gets the last round's RoundStats (None at first)
    and returns a length in [0, k_max].
    num_slots: rows decoded together. capacity: the most tokens (prompt and output) of one request. prefill_chunk: the
    most prompt tokens a row is fed between two rounds. top_logprobs: report the target's raw law at each token
    (TokenLogprobs). rule: "token" (each draft judged alone) or "block" (block verification: exact too, accepts more
    where several tokens are drafted). fast: Triton kernels for target and draft (CachedModel). graphs: replay rounds as
    CUDA graphs (specdec.graphs), each made when its shape is first met. Both are on where the target is on an NVIDIA
    GPU; False leaves them out. on_round: called after each round. on_tokens: called with a ticket, its new tokens, and
    how many of them (the first ones) are accepted drafts.

    Raises ValueError for vocabularies that differ, an architecture that is not supported, or bad settings (graphs
    without a GPU). A request that is bad ends with finish_reason "error" and harms no other. A round that is broken off
    (Ctrl-C) may cancel the requests in it; the engine can be used again.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None = None,
        *,
        k: DraftLength = 4,
        k_max: int | None = None,
        num_slots: int = 8,
        capacity: int = 2048,
        prefill_chunk: int = 512,
        top_logprobs: int = 0,
        rule: str = "token",
        graphs: bool | None = None,
        fast: bool | None = None,
        on_round: Callable[[RoundStats], None] | None = None,
        on_tokens: Callable[[int, list[int], int], None] | None = None,
    ) -> None:
        check_sizes(num_slots=num_slots, capacity=capacity, prefill_chunk=prefill_chunk)
        if rule not in _RULES:
            raise ValueError(f"rule is {rule!r}; expected one of {', '.join(_RULES)}")
        lengths = Lengths(k, k_max)
        self._lengths = lengths if draft is not None else Lengths(0, None)
        self.k_max = self._lengths.k_max
        buffer = capacity + self.k_max + 1  # a round writes up to k slots past a row's last token
        self._target = CachedModel(target, num_rows=num_slots, capacity=buffer, fast=fast)
        # Before the drafter is bound to this engine: after an error it can go to another.
        if type(top_logprobs) is not int or not 0 <= top_logprobs <= self._target.vocab_size:
            raise ValueError(f"top_logprobs is {top_logprobs!r}; expected 0 to {self._target.vocab_size}")
        self._drafter: Drafter | None = None
        if draft is not None and self.k_max > 0:
            if not isinstance(draft, PreTrainedModel | Drafter):
                raise ValueError(f"draft is a {type(draft).__name__}; expected a model, a Drafter, or None")
            self._drafter = ModelDrafter(draft) if isinstance(draft, PreTrainedModel) else draft
            self._drafter.attach(self._target, num_slots, buffer)
        self.capacity, self._chunk, self._top_logprobs = capacity, prefill_chunk, top_logprobs
        eager = EagerRounds(self._target, top_logprobs, _RULES[rule])
        self._rounds: EagerRounds | GraphRounds = eager
        if graphs or (graphs is None and self._target.device.type == "cuda"):
            self._rounds = GraphRounds(eager, self._target, num_slots=num_slots, k_max=self.k_max)
        self._listeners = Listeners(on_round=on_round, on_tokens=on_tokens)
        self._state = RowState.empty(num_slots, buffer, self._target.device)
        self._slots: list[Slot | None] = [None] * num_slots
        self._ragged = self._draft_failed = False
        self._decoding: list[int] = []  # tickets of the last round's rows, whose features these are
        self._features = Features()
        self._queue: deque[tuple[int, Request]] = deque()
        self._done: list[tuple[int, Completion]] = []
        self._tickets = 0
        self._last_round: RoundStats | None = None
        self.stats = AcceptanceStats()

    @property
    def vocab_size(self) -> int:
        """Output ids of the target, padding included."""
        return self._target.vocab_size

    @property
    def room(self) -> int:
        """The most tokens (prompt and output) that one request may have."""
        return min(self.capacity, self._target.max_positions)

    @property
    def captured(self) -> CaptureStats | None:
        """Graphs made so far and what they cost; None without `graphs`."""
        return self._rounds.stats if isinstance(self._rounds, GraphRounds) else None

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._done or any(self._slots))

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Decode all requests (an iterator of any length is read as slots become free); completions in order.

        What the iterator or a round raises ends those of these requests that are waiting or running.
        """
        completions: dict[int, Completion] = {}
        source = iter(requests)
        tickets: list[int] = []
        waiting: set[int] = set()
        exhausted = False
        try:
            while not exhausted or waiting:
                while not exhausted and len(self._queue) < len(self._slots):
                    request = next(source, _END)
                    exhausted = request is _END
                    if not exhausted:
                        tickets.append(self.submit(cast(Request, request)))
                        waiting.add(tickets[-1])
                done = self.step()
                completions.update(done)
                waiting.difference_update(ticket for ticket, _ in done)
        finally:
            for ticket in waiting:  # none, unless something was raised
                self.cancel(ticket)
            ours = set(tickets)  # those of requests submitted before are still owed to `step`
            self._done = [done for done in (*completions.items(), *self._done) if done[0] not in ours]
        return [completions[ticket] for ticket in tickets]

    def submit(self, request: Request) -> int:
        """Queue a request; its ticket comes back with its completion from `step`."""
        ticket, self._tickets = self._tickets, self._tickets + 1
        try:
            if not isinstance(request, Request):
                raise ValueError(f"got a {type(request).__name__}; expected a Request")
            self._queue.append((ticket, self._checked(request)))
        except ValueError as error:
            name = getattr(request, "id", None)
            failed = Completion(id=name, token_ids=[], finish_reason="error", error=str(error))
            self._done.append((ticket, failed))
        return ticket

    @torch.inference_mode()
    def cancel(self, ticket: int) -> bool:
        """End a request early; `step` returns what it has so far, with finish_reason "cancelled". False when the
        ticket is not waiting or running."""
        for index, (waiting, request) in enumerate(self._queue):
            if waiting == ticket:
                del self._queue[index]
                self._done.append((ticket, Completion(id=request.id, token_ids=[], finish_reason="cancelled")))
                return True
        for slot in self._slots:
            if slot is not None and slot.ticket == ticket:
                self._state.active_B[slot.row] = False
                slot.finish_reason = "cancelled"
                self._release(slot)
                return True
        return False

    def calibrate(self, repeats: int = 3, batches: Sequence[int] | None = None) -> list[RoundStats]:
        """Time rounds of `batches` rows (1, 2, 4, ... num_slots) and 0, 1, 2, 4, ... k_max drafts, and hand the seconds
        to the controller; the rounds timed (none for a fixed length). Takes (repeats + 1) rounds of each shape.

        Raises ValueError while requests are waiting or running.
        """
        return calibrate(self, repeats, batches)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Refill slots, feed prompts a chunk, decode one round; what has finished since the last step."""
        self._admit()
        self._prefill()
        if any(slot is not None and slot.decoding for slot in self._slots):
            self._round()
        done, self._done = self._done, []
        return done

    def _checked(self, request: Request) -> Request:
        request = request.checked(self._target.vocab_size)
        total = len(request.prompt_ids) + request.params.max_tokens
        if total > self.room:
            name = "capacity" if self.room == self.capacity else "target's max positions"
            raise ValueError(
                f"prompt ({len(request.prompt_ids)}) + max_tokens ({request.params.max_tokens}) is {total} tokens; "
                f"the {name} is {self.room}: shorten the prompt, lower max_tokens, or raise the engine's capacity"
            )
        return request

    def _admit(self) -> None:
        free = [row for row, slot in enumerate(self._slots) if slot is None]
        taken = [(row, *self._queue.popleft()) for row in free[: len(self._queue)]]
        if not taken:
            return
        rows = [row for row, _, _ in taken]
        self._state.write_rows(rows, [request for _, _, request in taken], self._target.vocab_size)
        self._target.cache.lengths_B[rows] = 0
        new = [Slot(row=row, ticket=t, request=r, tokens=list(r.prompt_ids)) for row, t, r in taken]
        for slot in new:
            self._slots[slot.row] = slot
        if self._drafter is not None:
            self._drafter.admit(new)

    def _prefill(self) -> None:
        """Feed a chunk of each new prompt; rows whose target has seen all but the last token start decoding."""
        new = [slot for slot in self._slots if slot is not None and not slot.decoding]
        if not new:
            return
        feed(self._target, [f for slot in new if (f := slot.next_target_feed(self._chunk))])
        drafting = self._last_round is None or self._last_round.k > 0
        if drafting and self._drafter is not None:
            self._drafter.feed(new, self._chunk)
        ready = [slot for slot in new if slot.target_len == slot.length - 1]
        for slot in ready:
            slot.decoding = True
        if ready:
            self._state.active_B[[slot.row for slot in ready]] = True

    def _set_quotas(self, slots: list[Slot], lengths: list[int]) -> None:
        """Tell the device when rows draft different lengths (and when they no longer do)."""
        ragged = min(lengths) < max(lengths)
        if ragged:
            rows = torch.tensor([[slot.row for slot in slots], lengths], device=self._target.device)
            self._state.quota_B[rows[0]] = rows[1]
        elif self._ragged:
            self._state.quota_B.fill_(self.k_max)
        self._ragged = ragged

    def _features_of(self, slots: list[Slot]) -> Features:
        """What the rows' parameters ask for; looked at anew when other requests decode than in the last round."""
        tickets = [slot.ticket for slot in slots]
        if tickets != self._decoding:
            self._decoding, self._features = tickets, features_of([slot.request.params for slot in slots])
        return self._features

    def _round(self) -> None:
        slots = [slot for slot in self._slots if slot is not None and slot.decoding]
        lengths = self._lengths.choose(slots, self._last_round)
        k = max(lengths)
        timer = PhaseTimer(self._target.device)
        self._set_quotas(slots, lengths)
        state, captures = self._state.head(self._rounds.rows(slots[-1].row + 1)), self._rounds.captures
        features = self._features_of(slots)
        live = max(slot.length for slot in slots) + k
        drafter = self._drafter if k > 0 else None
        drafting = [slot for slot, own in zip(slots, lengths, strict=True) if own > 0]
        caught_up = drafter.prepare(drafting, k, self._chunk) if drafter else 0
        proposal = self._rounds.propose(drafter, state, k, features, live)
        asked, k = k, proposal.drafts_BK.shape[1]
        if k > asked:  # the target would verify them without seeing all that is before them
            raise ValueError(f"the drafter proposed {k} tokens a row where {asked} were asked for; expected no more")
        lengths = [min(own, k) for own in lengths]
        timer.mark("draft")
        try:
            packed = self._rounds.settle(self._drafter, state, proposal, features, live, timer)
            reports = read_report(packed.cpu(), [slot.row for slot in slots], k, self._top_logprobs)
        except BaseException:  # Ctrl-C too: the device may have committed what the host will never read
            for slot in slots:
                self.cancel(slot.ticket)
            raise
        lags = self._finish_round(slots, reports, lengths)
        timed = self._rounds.captures == captures
        stats = round_stats(reports, asked=asked, k=k, caught_up=caught_up, timed=timed, seconds=timer.finish())
        self._last_round, self.stats = stats, self.stats + stats.acceptance
        self._lengths.inform(stats, slots, reports, lengths, lags)
        self._listeners.tell(slots, reports, stats)
        if not self._draft_failed and any(slot.draft_bad for slot in slots):
            self._draft_failed = True
            _log.warning("the draft gave NaN or infinite logits; it reads such a text again once, then is left out")

    def _finish_round(self, slots: list[Slot], reports: list[RowReport], lengths: list[int]) -> list[int]:
        """Take the reports over and let go of rows that are done; each row's lag."""
        before = [slot.length for slot in slots]
        for slot, report, own in zip(slots, reports, lengths, strict=True):
            slot.commit(report, max(lengths), own)
        if self._drafter is not None:
            self._drafter.committed(slots, before, lengths)
        # Before any row is released: a drafter then forgets it.
        lags = [self._drafter.lag(slot) if self._drafter is not None else 0 for slot in slots]
        for slot in slots:
            if slot.finish_reason is not None:
                self._release(slot)
        return lags

    def _release(self, slot: Slot) -> None:
        self._done.append((slot.ticket, slot.completion()))
        self._slots[slot.row] = None
        if slot.finish_reason in ("error", "cancelled"):  # it may hold a NaN that no round has met yet
            self._target.cache.clear_rows([slot.row])
        if self._drafter is not None:
            self._drafter.release(slot)
