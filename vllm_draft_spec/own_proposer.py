"""The plugin's own draft in vLLM: the draft model runs through specdec, outside vLLM's KV pool.

vLLM builds no layers for the draft and so gives it no part of the pool. Per step the runner hands over the tokens that
the target has read and the ones sampled, on the device; they are noted, and where the draft is to make more it is fed
what it lacks first. A row can be made again from its tokens at any time, so that cached prefixes, preemption and steps
without drafts leave nothing behind that had to be kept right.

Shapes: B rows of a step in vLLM's order, N tokens, k drafts, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_draft_spec.drafter import PluginDrafter
from vllm_draft_spec.drafting import GREEDY, drop_beyond, on_device
from vllm_draft_spec.laws import without_drafts
from vllm_draft_spec.memory import GIB, cache_size, check_room
from vllm_draft_spec.own_draft import Feed, OwnDraft, window_of
from vllm_draft_spec.own_failures import Failures
from vllm_draft_spec.own_model import load_drafter, room_on
from vllm_draft_spec.own_rows import MISSED_AFTER_DRAFTS, Row, Rows
from vllm_draft_spec.settings import read_settings

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
# Tokens that a row may miss while nothing is drafted. A request that ends before never pays for them; but when drafting
# begins again all that rows have missed is fed first, a step of vLLM's at a time.
MAX_MISSED = 512


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A row of this step. ends: a bound on its text's length now; partial: only a part of its prompt was read."""

    row: Row
    scheduled: int
    partial: bool
    ends: int


class OwnProposer(PluginDrafter):
    """Of vLLM's class only the steps before `propose` are used."""

    draft: OwnDraft

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        # Not DraftModelProposer's: it maps vocabularies and compares ranks for a model that vLLM would run.
        SpecDecodeBaseProposer.__init__(self, vllm_config, device, pass_hidden_states_to_model=False, runner=runner)
        self.runner = runner
        self.settings = read_settings(vllm_config.additional_config, self.num_speculative_tokens)
        speculative = self.speculative_config
        self.probabilistic = speculative.rejection_sample_method == "standard" and (
            speculative.draft_sample_method == "probabilistic" or speculative.use_heterogeneous_vocab
        )
        self.rows, self.failures = Rows(self.max_batch_size), Failures()
        self.fed_tokens = 0
        self._last_draft_probs: torch.Tensor | None = None
        self._rehearsed = False
        self._say_if_shorter()

    # What the runner calls while it starts

    def load_model(self, target_model: torch.nn.Module) -> None:
        """vLLM measures the memory that is taken in here, cache included, and sizes its own pool by what is left."""
        drafter = load_drafter(self.vllm_config, self.device)
        config, settings = self.draft_model_config.hf_text_config, self.settings
        size = cache_size(
            settings, config, itemsize=self.dtype.itemsize, num_rows=self.max_batch_size, max_tokens=self.max_model_len
        )
        check_room(size, room_on(self.device, self.vllm_config.cache_config))
        window = window_of(settings.window, settings.sinks, settings.k_max) if settings.window else None
        self.draft = OwnDraft(
            drafter,
            target_size=self.vllm_config.model_config.get_vocab_size(),
            num_slots=self.max_batch_size,
            max_tokens=self.max_model_len,
            k_max=settings.k_max,
            window=window,
            fast=settings.fast,
            graphs=self.device.type == "cuda" and not self.vllm_config.model_config.enforce_eager,
        )
        # The runner stops drafting for all rows when one comes near this length. Here each row has its own end.
        self.runner.effective_drafter_max_model_len = 2**31
        logger.info(
            "own draft %s: weights %.2f GiB, cache %.2f GiB (%d rows of %d tokens)%s; none of vLLM's KV cache",
            self.draft_model_config.model,
            self.draft.weight_bytes / GIB,
            size.nbytes / GIB,
            size.num_rows,
            size.slots,
            f", attends to the first {settings.sinks} and the last {settings.window} tokens" if window else "",
        )

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        """No layer of the draft is vLLM's."""

    def initialize_cudagraph_keys(self, *args: Any, **kwargs: Any) -> None:
        """Nor are its graphs."""

    def dummy_run(self, *args: Any, is_graph_capturing: bool = False, **kwargs: Any) -> None:
        """Once, on a GPU, where vLLM measures what its steps need."""
        if self.device.type == "cuda" and not self._rehearsed and not is_graph_capturing:
            self.draft.rehearse(self.settings.k_max)
            self._rehearsed = True

    # What it calls in each step

    @torch.inference_mode()
    def before_step(self, scheduler_output: Any) -> None:
        """Requests that ended, or were put back (their tokens come again when they resume), give up their slots."""
        self.fed_tokens, self.captured = 0, False
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for source, to in self.rows.release(
            [*scheduler_output.finished_req_ids, *without_drafts(scheduler_output), *resumed]
        ):
            self.draft.move(source, to)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor | list[list[int]]:
        """Draft ids, int64 [B, num_speculative_tokens]; -1 where a row has none. Called by keyword."""
        assert not args
        k, metadata = num_speculative_tokens, kwargs["common_attn_metadata"]
        rows = self._step_rows(metadata)
        self._read_again(rows)
        slots_B = on_device([each.row.slot for each in rows], self.device)
        self._note(rows, slots_B, kwargs)
        self._last_draft_probs = None
        lagging = [each for each in rows if is_to_be_fed(each.row, k)]
        if k or lagging:
            self._note_ends(len(rows), slots_B, kwargs)
            self._catch_up(lagging)
        return self._draft(rows, k, slots_B, kwargs["sampling_metadata"]) if k else self._no_drafts(len(rows))

    def _no_drafts(self, batch: int) -> torch.Tensor | list[list[int]]:
        """In a step without drafts nothing else hides the host's work. Of a list, unlike of a tensor, the runner makes
        no copy that it would have to wait for; running ahead, it makes none, and asks the tensor for its shape."""
        if self.vllm_config.scheduler_config.async_scheduling:
            return torch.empty(batch, 0, device=self.device, dtype=torch.int64)
        return [[] for _ in range(batch)]

    def _step_rows(self, metadata: Any) -> list[StepRow]:
        batch, starts = self.runner.input_batch, metadata.query_start_loc_cpu.tolist()
        partial = self.runner.discard_request_mask.np[: metadata.num_reqs].tolist()
        befores = batch.num_computed_tokens_cpu[: metadata.num_reqs].tolist()
        rows = []
        for b, name in enumerate(batch.req_ids[: metadata.num_reqs]):
            before, scheduled = befores[b], starts[b + 1] - starts[b]
            row = self.rows.get(name)
            if row is None:
                row = self.rows.admit(name, known=before)
                if self.failures.met:  # of a row that left, or moved away
                    self.draft.clear(row.slot)
                known_n = torch.from_numpy(batch.token_ids_cpu[b, :before])
                self.draft.admit(row.slot, self._seed(name), known_n)
            row.advance(scheduled, partial[b])
            rows.append(StepRow(row=row, scheduled=scheduled, partial=partial[b], ends=before + scheduled + 1))
        return rows

    def _seed(self, name: str) -> int:
        """Of the request's own stream of random numbers; drafts repeat where the request asked for a seed."""
        params = self.runner.requests[name].sampling_params
        key = name if params is None or params.seed is None else params.seed
        digest = hashlib.blake2b(f"{self.vllm_config.model_config.seed} {key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _note(self, rows: list[StepRow], slots_B: torch.Tensor, given: Any) -> None:
        slots = [each.row.slot for each in rows for _ in range(each.scheduled)]
        slots_N = slots_B if len(slots) == len(rows) else on_device(slots, self.device)
        tokens_N, positions_N = (given[name][: len(slots)] for name in ("target_token_ids", "target_positions"))
        self.draft.note(slots_N, positions_N, tokens_N)

    def _note_ends(self, batch: int, slots_B: torch.Tensor, given: Any) -> None:
        ends_B, rejected_B = given["common_attn_metadata"].seq_lens[:batch].long(), given["num_rejected_tokens_gpu"]
        if rejected_B is not None:
            ends_B = ends_B - rejected_B
        next_B = given["next_token_ids"].masked_fill(self.runner.discard_request_mask.gpu[:batch], -1)
        self.draft.note_ends(slots_B, next_B, ends_B + (next_B >= 0))

    def _read_again(self, rows: list[StepRow]) -> None:
        """What rows that failed hold may be the cause."""
        failed = self.failures.found()
        for each in rows:
            if each.row.name in failed:
                each.row.failures += 1
                self.draft.clear(each.row.slot)
                each.row.missed = each.ends

    def _catch_up(self, lagging: list[StepRow]) -> None:
        """In one step at most as many tokens are fed as a step of vLLM has: a long prompt that the target found cached
        is read over several steps, and its row drafts when it is through."""
        left, feeds = self.max_num_tokens, []
        for each in lagging:
            row = each.row
            if self.settings.window:
                if each.partial:
                    continue  # of a prompt its end matters
                feeds += self._skip(row)
            count = min(row.missed - MISSED_AFTER_DRAFTS, left)
            if count > 0:
                feeds.append(Feed(slot=row.slot, back=row.missed, count=count, end=each.ends - row.missed + count))
                row.missed, left = row.missed - count, left - count
        self.fed_tokens += sum(feed.count for feed in feeds)
        self.draft.feed(feeds)

    def _skip(self, row: Row) -> list[Feed]:
        """With a window, over what lies between the sinks and the window. The sinks are read (again: those of a short
        text may have been drafts)."""
        recent, sinks = max(self.settings.window, MISSED_AFTER_DRAFTS), self.settings.sinks
        if row.missed <= recent + sinks:
            return []
        self.draft.skip_to([row.slot], recent)
        row.missed = recent
        return [Feed(slot=row.slot, count=sinks, end=sinks)] if sinks else []

    def _draft(self, rows: list[StepRow], k: int, slots_B: torch.Tensor, sampling: Any) -> torch.Tensor:
        ready = [each for each in rows if is_ready(each)]
        if not ready:
            return torch.full((len(rows), k), -1, device=self.device, dtype=torch.int64)
        for each in ready:
            each.row.drafted = True
        temperature_B, greedy = self._temperatures(len(rows), sampling)
        by_slot = torch.zeros(self.rows.span, device=self.device).index_copy_(0, slots_B, temperature_B)
        longest, captures = max(each.ends for each in rows), self.draft.rounds.captures
        proposal = self.draft.propose(k, [each.row.slot for each in ready], by_slot, greedy, longest)
        self.captured = self.draft.rounds.captures > captures
        ids_Bk, laws = proposal.drafts_BK[slots_B], proposal.draft_probs_BKV
        drafting_B = self.draft.state.active_B[: len(proposal.bad_B)]
        self.failures.note([each.row for each in rows], (proposal.bad_B & drafting_B)[slots_B])
        room_B = (proposal.num_drafts_B * drafting_B)[slots_B]
        laws_BkV = None if laws is None else laws[slots_B]
        ids_Bk, self._last_draft_probs = drop_beyond(ids_Bk, laws_BkV, room_B)
        return ids_Bk

    def _temperatures(self, batch: int, sampling: Any) -> tuple[torch.Tensor, bool]:
        """By row, 0 where the most likely token is drafted; and whether that is so in all rows."""
        if not self.probabilistic or sampling.all_greedy:
            return torch.zeros(batch, device=self.device), True
        temperature_B = sampling.temperature[:batch].float()
        certain_B = self._under_grammar()
        greedy_B = temperature_B < GREEDY if certain_B is None else (temperature_B < GREEDY) | certain_B
        return temperature_B.masked_fill(greedy_B, 0.0), False


def is_ready(each: StepRow) -> bool:
    return not each.partial and each.row.missed <= MISSED_AFTER_DRAFTS and not each.row.undrafted


def is_to_be_fed(row: Row, k: int) -> bool:
    """All that are to draft now, and those that lag by much."""
    return row.missed > MISSED_AFTER_DRAFTS and (k > 0 or row.missed >= MAX_MISSED) and not row.undrafted
