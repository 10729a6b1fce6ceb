"""What vLLM's runner calls `drafter` when the plugin drafts: one of two classes, by the setting `draft`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_draft_spec.drafting import sent
from vllm_draft_spec.settings import OWN, read_settings
from vllm_draft_spec.versions import Anchor

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
BASE = "vllm.v1.spec_decode.llm_base_proposer"
RUNNER = "vllm.v1.worker.gpu_model_runner"
DRAFTER = Anchor(module=RUNNER, name="DraftModelProposer", owner="vllm.v1.spec_decode.draft_model")
ANCHORS = (
    DRAFTER,
    Anchor(module=BASE, name="SpecDecodeBaseProposer.propose", parameters=("num_speculative_tokens",)),
    Anchor(module=BASE, name="SpecDecodeBaseProposer.set_inputs_first_pass", parameters=("num_rejected_tokens_gpu",)),
    Anchor(module=BASE, name="SpecDecodeBaseProposer._sample_draft_tokens", parameters=("sampling_metadata",)),
    Anchor(module=BASE, name="SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata"),
    Anchor(module=BASE, name="SpecDecodeBaseProposer.build_model_inputs_first_pass"),
    Anchor(module=BASE, name="SpecDecodeBaseProposer._determine_batch_execution_and_padding"),
    Anchor(module=BASE, name="SpecDecodeBaseProposer._get_slot_mapping", parameters=("num_tokens", "slot_mapping")),
    # what the own draft replaces, and where its step begins
    Anchor(module=BASE, name="SpecDecodeBaseProposer.initialize_attn_backend"),
    Anchor(module=BASE, name="SpecDecodeBaseProposer.initialize_cudagraph_keys"),
    Anchor(module=BASE, name="SpecDecodeBaseProposer.dummy_run"),
    Anchor(module=BASE, name="SpecDecodeBaseProposer.prepare_next_token_ids_padded", parameters=("sampled_token_ids",)),
)


class PluginDrafter(DraftModelProposer, ABC):
    """In the place of vLLM's DraftModelProposer, which the runner makes and asks for with isinstance. fed_tokens: what
    the draft was fed in this step besides the usual, over all rows, because it had missed it. captured: a CUDA graph
    was made in this step, so that its time says nothing."""

    runner: Any
    draft_model_config: Any
    max_model_len: int
    fed_tokens: int
    captured = False

    def __new__(cls, vllm_config: Any, device: torch.device, runner: Any = None) -> PluginDrafter:
        chosen: type[PluginDrafter] = class_for(vllm_config) if cls is PluginDrafter else cls
        drafter: PluginDrafter = object.__new__(chosen)
        return drafter

    @abstractmethod
    def before_step(self, scheduler_output: Any) -> None:
        """Called before the runner takes this step's requests in and lets the finished ones go."""

    def _say_if_shorter(self) -> int:
        """Tokens up to which the draft can draft."""
        own, targets = self.draft_model_config.max_model_len, self.max_model_len
        if own < targets:
            text = "The draft's context ends at %d tokens, the target's at %d: a request draws no drafts beyond %d."
            logger.warning(text, own, targets, own)
        return min(own, targets)

    def _under_grammar(self) -> torch.Tensor | None:
        """Rows under a grammar, bool [B]. vLLM drops a draft that the grammar forbids after it was drawn; that leaves
        the law as it was only where nothing else could have been drawn."""
        batch = self.runner.input_batch
        under_grammar = [
            (params := self.runner.requests[name].sampling_params) is not None and params.structured_outputs is not None
            for name in batch.req_ids
        ]
        return sent(torch.tensor(under_grammar), self.device) if any(under_grammar) else None


def class_for(vllm_config: Any) -> type[PluginDrafter]:
    """specdec, and with it transformers, is imported only when it is to run the draft."""
    k_max = vllm_config.speculative_config.num_speculative_tokens
    if read_settings(vllm_config.additional_config, k_max).draft == OWN:
        from vllm_draft_spec.own_proposer import OwnProposer

        return OwnProposer
    from vllm_draft_spec.proposer import Proposer

    return Proposer


def install() -> None:
    DRAFTER.replace(PluginDrafter)
