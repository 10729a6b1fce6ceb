"""The draft-model proposer in vLLM's place: this step's k, a draft cache without holes, laws kept at every temperature.

vLLM's own proposer runs the draft over each step's tokens even when it drafts nothing. Here a step with k = 0 in which
every row decodes one token only notes what the draft missed (`Pending`); `feed` makes up for it in one forward, and
always before anybody could see the gap: before the next draft, before a row leaves the batch (its blocks may be given
to another request as a prefix), before a request arrives (it may be given such blocks), and when the gap gets long.
So whatever block is found by its hash holds the draft's keys and values too.

Shapes: B rows, R rows that owe tokens, N tokens they owe, k drafts, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_draft_spec.drafter import PluginDrafter
from vllm_draft_spec.drafting import drop_beyond, in_target_vocabulary, on_device, sample_draft, sent
from vllm_draft_spec.pending import Pending

# A row's gap is closed at the latest after this many tokens. The draft's work for them is the same whenever it is
# done; in one forward it reads its weights once and not every step.
MAX_LAG = 64


class Proposer(PluginDrafter):
    """vLLM runs the draft model, in its own KV cache."""

    _last_draft_probs: torch.Tensor | None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        self.runner = runner
        if self.vocab_mapping is not None and self.speculative_config.rejection_sample_method == "standard":
            self._enable_probabilistic_draft_probs = True  # vLLM has none for vocabularies that differ
        self.pending = Pending()
        self.fed_tokens = 0  # in this step, over all rows
        self._near_limit = False
        self._certain_B: torch.Tensor | None = None
        parallel = vllm_config.parallel_config
        # With data parallelism every rank must run the same forwards; a connector reads blocks at any time.
        alone = parallel.data_parallel_size == 1 and getattr(parallel, "decode_context_parallel_size", 1) == 1
        self.may_skip = alone and vllm_config.kv_transfer_config is None
        self.max_model_len = self._say_if_shorter()  # where the base class ends slots and positions

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        # The runner stops drafting for all rows, and leaves a hole in each, when one row comes near this length.
        # Here each row has its own end (`drop_beyond`).
        self.runner.effective_drafter_max_model_len = 2**31

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft ids, int64 [B, num_speculative_tokens]; -1 where a row has no room. Called by keyword."""
        assert not args
        metadata, k = kwargs["common_attn_metadata"], num_speculative_tokens
        rejected_B = kwargs["num_rejected_tokens_gpu"]
        if k == 0 and self._skips(metadata):
            return self._skip(metadata, kwargs["target_token_ids"], kwargs["target_positions"])
        self.feed()
        self._near_limit = metadata.max_seq_len + k > self.max_model_len
        next_position_B = metadata.seq_lens if rejected_B is None else metadata.seq_lens - rejected_B
        self._certain_B = self._under_grammar() if self._enable_probabilistic_draft_probs else None
        ids_Bk = super().propose(num_speculative_tokens=k, **kwargs)
        if self._near_limit:
            room_B = self.max_model_len - next_position_B
            ids_Bk, self._last_draft_probs = drop_beyond(ids_Bk, self._last_draft_probs, room_B)
        return ids_Bk

    def set_inputs_first_pass(self, **kwargs: Any) -> tuple[int, torch.Tensor, Any]:
        """The base class gives tokens past the limit no slot but their true position, where the draft has no RoPE."""
        num_tokens, indices, metadata = super().set_inputs_first_pass(**kwargs)
        if self._near_limit:
            self.positions[:num_tokens].clamp_(max=self.max_model_len - 1)
        return num_tokens, indices, metadata

    def _skips(self, metadata: Any) -> bool:
        """A row of one token has no drafts, so that nothing of it can have been rejected."""
        return self.may_skip and metadata.max_query_len == 1 and metadata.num_actual_tokens == metadata.batch_size()

    def _skip(self, metadata: Any, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        batch = metadata.batch_size()
        self._last_draft_probs = None
        self.pending.add(self.runner.input_batch.req_ids[:batch], tokens_B[:batch], positions_B[:batch])
        full = self.pending.total + self.max_batch_size > self.max_num_tokens
        if full or self.pending.longest >= MAX_LAG:
            self.feed()
        return torch.empty(batch, 0, device=self.device, dtype=torch.int64)

    def before_step(self, scheduler_output: Any) -> None:
        """Called before the runner takes this step's requests in and lets the finished ones go."""
        self.fed_tokens = 0
        if not self.pending.total:
            return
        scheduled = scheduler_output.num_scheduled_tokens
        arrivals = scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if arrivals or any(scheduled.get(name) != 1 for name in self.pending.lags):
            self.feed()

    @torch.inference_mode()
    def feed(self) -> None:
        """One forward of the draft over all tokens that it missed. Its rows are in the runner's batch."""
        if not self.pending.total:
            return
        owed = self.pending.take()
        self.fed_tokens += sum(owed.lengths)
        num_tokens = len(owed.tokens_N)
        ids_N = owed.tokens_N
        if self.vocab_mapping is not None:
            ids_N = self.vocab_mapping.map_target_to_draft_ids(ids_N)
        self.input_ids[:num_tokens] = ids_N
        self._set_positions(num_tokens, owed.positions_N.clamp(max=self.max_model_len - 1))
        metadata = self._feed_metadata(owed.names, owed.lengths, owed.positions_N)
        _, per_layer = self.build_per_group_and_layer_attn_metadata(metadata)
        graph_mode, padded, across_ranks = self._determine_batch_execution_and_padding(num_tokens)
        inputs, slots = self.build_model_inputs_first_pass(num_tokens, padded, None)
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across_ranks,
            cudagraph_runtime_mode=graph_mode,
            slot_mapping=self._get_slot_mapping(slots, metadata.slot_mapping),
        ):
            self.model(**inputs)

    def _feed_metadata(self, names: list[str], lengths: list[int], positions_N: torch.Tensor) -> Any:
        batch = self.runner.input_batch
        rows = [batch.req_id_to_index[name] for name in names]
        rows_R = on_device(rows, self.device)
        table_RC = batch.block_table[self.kv_cache_gid].get_device_tensor(batch.num_reqs)[rows_R]
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        starts_device = sent(starts, self.device)
        # A row that has processed n tokens before its last step has n + 1 after it.
        lens_R = torch.from_numpy(batch.num_computed_tokens_cpu[rows]).to(torch.int32) + 1
        return CommonAttentionMetadata(
            query_start_loc=starts_device,
            query_start_loc_cpu=starts,
            seq_lens=(positions_N[starts_device[1:].long() - 1] + 1).to(torch.int32),
            seq_lens_cpu_upper_bound=lens_R,
            num_reqs=len(names),
            num_actual_tokens=len(positions_N),
            max_query_len=max(lengths),
            max_seq_len=int(lens_R.max()),
            block_table_tensor=table_RC,
            slot_mapping=self._slots(table_RC, on_device(lengths, self.device), positions_N),
        )

    def _slots(self, table_RC: torch.Tensor, lengths_R: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        row_N = torch.arange(len(lengths_R), device=self.device).repeat_interleave(
            lengths_R, output_size=len(positions_N)
        )
        inside_N = positions_N.clamp(max=self.max_model_len - 1)
        slots_N = table_RC[row_N, inside_N // self.block_size].long() * self.block_size + inside_N % self.block_size
        return slots_N.masked_fill_(positions_N >= self.max_model_len, PADDING_SLOT_ID)

    def _sample_draft_tokens(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, Any]:
        """Draft ids [B] in the target's vocabulary and the law they come from, [B, V]; None where it is one-hot."""
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return self._greedy_sample(hidden_states), None
        logits_BD = self.model.compute_logits(hidden_states)
        mapping = self.vocab_mapping
        if mapping is not None:
            logits_BD = mapping.constrain_draft_logits(logits_BD)
        noise_type = torch.float64 if self.use_fp64_gumbel else torch.float32
        noise_BD = torch.empty(logits_BD.shape, dtype=noise_type, device=logits_BD.device).exponential_()
        ids_B, probs = sample_draft(logits_BD, sampling_metadata.temperature, noise_BD, self._certain_B)
        if mapping is not None:
            ids_B = mapping.map_draft_to_target_ids(ids_B)
            probs = in_target_vocabulary(probs, mapping.draft_to_target_ids, mapping.target_vocab_size)
        return ids_B, probs
