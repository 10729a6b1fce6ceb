"""What the plugin settles while vLLM makes its configuration: laws of drafts are kept unless asked otherwise, model
runner V1 is used, and what the plugin does not serve is said once and left alone.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

from vllm_draft_spec.settings import OWN, SECTION, read_settings
from vllm_draft_spec.versions import Anchor, minor

logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
ARGS = "vllm.engine.arg_utils"
SPECULATIVE = Anchor(module=ARGS, name="EngineArgs.create_speculative_config")
WHOLE = Anchor(module=ARGS, name="EngineArgs.create_engine_config")
V2 = Anchor(module="vllm.config.vllm", name="VllmConfig.use_v2_model_runner")
VOCABULARY = Anchor(module="vllm.config.speculative", name="SpeculativeConfig.verify_equal_vocab_size_if_draft_model")
ANCHORS = (SPECULATIVE, WHOLE, V2, VOCABULARY)
METHOD = "draft_model"
V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
# Versions of vLLM that schedule synchronously with a draft model unless asked to, though they can do otherwise; and the
# executors that can.
LEFT_SYNCHRONOUS = ("0.26",)
RUNS_AHEAD = (None, "uni", "mp")


def served(speculative_config: Any) -> bool:
    return speculative_config is not None and speculative_config.method == METHOD


def with_laws(given: dict[str, Any], config: Any) -> None:
    """Drafts are drawn at random and their laws kept, unless the user chose: with q known more drafts are accepted.

    given: the user's speculative config. With vocabularies that differ vLLM accepts the word "greedy" only, and the
    proposer draws at random all the same (drafting.in_target_vocabulary)."""
    chosen = "draft_sample_method" in given or config.use_heterogeneous_vocab
    if not chosen and config.rejection_sample_method == "standard":
        config.draft_sample_method = "probabilistic"


def schedule_ahead(arguments: Any, config: Any, version: str) -> None:
    """Steps are scheduled while the one before is still computed, as later versions of vLLM do by default: else the GPU
    waits for the host in every step. What the user chose stays."""
    if minor(version) not in LEFT_SYNCHRONOUS or arguments.async_scheduling is not None:
        return
    if config.disable_padded_drafter_batch or arguments.distributed_executor_backend not in RUNS_AHEAD:
        return
    arguments.async_scheduling = True
    logger.info("steps are scheduled asynchronously (--no-async-scheduling turns it off)")


def check(vllm_config: Any) -> None:
    """ValueError for a configuration that the plugin cannot make work; a line in the log for one it leaves alone."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        logger.warning("vllm_draft_spec has nothing to do without a speculative config")
        return
    # The scheduler reads them in the engine's process, when the model is loaded: a mistake should be told before.
    settings = read_settings(vllm_config.additional_config, speculative.num_speculative_tokens)
    if settings.draft == OWN:
        check_own(vllm_config)
    if not served(speculative):
        logger.warning(
            "vllm_draft_spec has a proposer for method %s only; that of %s stays vLLM's", METHOD, speculative.method
        )
        return
    if settings.draft != OWN and is_pruned(speculative.draft_model_config.model):
        raise ValueError(
            f"{speculative.draft_model_config.model}: its head is pruned, which vLLM cannot load; pass the {SECTION} "
            f"setting draft: {OWN}"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ValueError(
            f"pipeline_parallel_size {stages} with a draft model: expected 1, since every stage's last rank alone "
            "holds what the draft needs; use tensor parallelism, or run without speculation"
        )
    if vllm_config.use_v2_model_runner:
        logger.warning(
            "%s=1: model runner V2 drafts its largest length in every step and masks the rest, so that the plugin "
            "cannot save the draft's time there; unset it",
            V2_SWITCH,
        )


def is_pruned(folder: str) -> bool:
    """As specdec.pruned has it, which imports more than is needed before the own draft is asked for."""
    return (Path(folder) / "head_ids.json").is_file()


def check_own(vllm_config: Any) -> None:
    """ValueError where the plugin cannot run the draft model itself."""
    speculative, model, parallel = vllm_config.speculative_config, vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    for wrong, found, way_out in (
        (not served(speculative), f"method {speculative.method}", f"expected {METHOD}"),
        (ranks > 1, f"tensor_parallel_size {ranks}", "expected 1: ranks that drafted by themselves might differ"),
        (vllm_config.use_v2_model_runner, f"{V2_SWITCH}=1", "unset it: model runner V1 is needed"),
        (speculative.parallel_drafting, "parallel_drafting", "leave it out: the draft is one that drafts step by step"),
        (model.is_multimodal_model, "a multimodal target", "expected one that reads text alone"),
        (model.enable_prompt_embeds, "enable_prompt_embeds", "leave it out: the draft reads token ids"),
    ):
        if wrong:
            raise ValueError(f"{SECTION}.draft is {OWN} with {found}: {way_out}; or pass draft: vllm")


def create_speculative_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    config = original(self, *args, **kwargs)
    if served(config):
        import vllm

        with_laws(self.speculative_config, config)
        schedule_ahead(self, config, vllm.__version__)
    return config


def create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    vllm_config = original(self, *args, **kwargs)
    check(vllm_config)
    return vllm_config


def use_v2_model_runner(original: Any, self: Any) -> bool:
    if not served(self.speculative_config) or os.environ.get(V2_SWITCH) is not None:
        return original(self)
    if original(self):
        say_v1()
    return False


@functools.cache
def say_v1() -> None:
    logger.info("model runner V1 is used: V2's draft_model always drafts its largest length (%s)", V2_SWITCH)


def verify_equal_vocab(original: Any, self: Any) -> None:
    try:
        original(self)
    except ValueError as error:
        if "use_heterogeneous_vocab" in str(error):
            raise
        raise ValueError(
            f"{error} Pass use_heterogeneous_vocab=true in the speculative config to draft over the tokens that both "
            "vocabularies have."
        ) from error


def install() -> None:
    for anchor, around in (
        (SPECULATIVE, create_speculative_config),
        (WHOLE, create_engine_config),
        (VOCABULARY, verify_equal_vocab),
        (V2, use_v2_model_runner),
    ):
        anchor.wrap(around)
