"""What the plugin adds around the steps of vLLM's model runner, whatever its drafter: times and kept laws; and for our
own drafter what it must do before the batch changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_draft_spec import patches
from vllm_draft_spec.drafter import RUNNER, PluginDrafter
from vllm_draft_spec.drafting import without_dropped
from vllm_draft_spec.laws import Laws, without_drafts
from vllm_draft_spec.timing import StepClock
from vllm_draft_spec.versions import Anchor

EXECUTE = Anchor(module=RUNNER, name="GPUModelRunner.execute_model", parameters=("scheduler_output",))
SAMPLE = Anchor(module=RUNNER, name="GPUModelRunner.sample_tokens", parameters=("grammar_output",))
PROPOSE = Anchor(module=RUNNER, name="GPUModelRunner.propose_draft_token_ids", parameters=("scheduler_output",))
TAKE = Anchor(module=RUNNER, name="GPUModelRunner.take_draft_token_ids")
KEPT = Anchor(module=RUNNER, name="GPUModelRunner._get_spec_decode_draft_probs", parameters=("spec_decode_metadata",))
ANCHORS = (EXECUTE, SAMPLE, PROPOSE, TAKE, KEPT, *patches.ANCHORS)


ORIGINALS: dict[Anchor, Callable[..., Any]] = {}  # vLLM's own


class Watch:
    """The plugin's state in one runner, as its attribute `specdec_watch`."""

    def __init__(self, runner: Any) -> None:
        drafter = getattr(runner, "drafter", None)
        self.drafter = drafter if isinstance(drafter, PluginDrafter) else None
        self.clock = StepClock(runner.device)
        self.laws = Laws()
        self.k = 0  # drafted in this step
        patches.repair(runner.device)

    @staticmethod
    def of(runner: Any) -> Watch | None:
        """The runner's, made when first asked for; None for one that does not speculate."""
        if runner.speculative_config is None:
            return None
        if not hasattr(runner, "specdec_watch"):
            runner.specdec_watch = Watch(runner)
        return runner.specdec_watch


def execute_model(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """The draft catches up while the rows that owe tokens are still there."""
    watch = Watch.of(self)
    if watch is not None and self.execute_model_state is None:
        watch.k = 0
        watch.laws.forget(without_drafts(scheduler_output))
        watch.clock.begin(scheduler_output)
        if watch.drafter is not None:
            watch.drafter.before_step(scheduler_output)
        watch.clock.mark()
    return original(self, scheduler_output, *args, **kwargs)


def propose(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Drafting, between two marks."""
    watch = Watch.of(self)
    assert watch is not None
    watch.clock.mark()
    drafts = original(self, scheduler_output, *args, **kwargs)
    watch.clock.mark()
    watch.k = scheduler_output.num_spec_tokens_to_schedule
    return drafts


def sample_tokens(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keeps the laws of this step's drafts, and sends the newest times along."""
    watch = Watch.of(self)
    ran = self.execute_model_state is not None
    with unread_prompts_apart(self):
        output = original(self, *args, **kwargs)
    if watch is None or not ran:
        return output
    watch.laws.keep(self.input_batch.req_ids, self._draft_probs, self.requests)
    drafter = watch.drafter
    caught_up, captured = (drafter.fed_tokens, drafter.captured) if drafter is not None else (0, False)
    watch.clock.end(watch.k, caught_up, timed=not captured)
    carrier = getattr(output, "_model_runner_output", output)  # inside, when the scheduler runs ahead
    if getattr(carrier, "req_ids", None):  # the empty output is one object for all steps
        carrier.specdec_times = watch.clock.newest()
    return output


@contextmanager
def unread_prompts_apart(runner: Any) -> Iterator[None]:
    """A request of which only a part of the prompt is read draws a token that is thrown away. vLLM sets its generator
    back afterwards, which a CPU's generator refuses; here such a request draws from the common one."""
    if runner.device.type != "cpu":
        yield
        return
    batch = runner.input_batch
    unread = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    apart = {b: batch.generators.pop(b) for b in unread if b in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(apart)


def take_draft_token_ids(original: Callable[..., Any], self: Any) -> Any:
    """Without the drafts that could not be made."""
    taken = original(self)
    watch = Watch.of(self)
    if taken is not None and watch is not None and watch.drafter is not None:
        taken.draft_token_ids = without_dropped(taken.draft_token_ids)
    return taken


def draft_laws(original: Callable[..., Any], self: Any, spec_decode_metadata: Any) -> Any:
    """The laws of the drafts that are verified now. Takes the place of `original`."""
    watch = Watch.of(self)
    assert watch is not None
    metadata = spec_decode_metadata
    names = self.input_batch.req_ids[: len(metadata.num_draft_tokens)]
    return watch.laws.of(names, metadata.num_draft_tokens, metadata.draft_token_ids)


WRAPPERS = ((EXECUTE, execute_model), (SAMPLE, sample_tokens), (PROPOSE, propose), (TAKE, take_draft_token_ids))


def install() -> None:
    for anchor, around in (*WRAPPERS, (KEPT, draft_laws)):
        ORIGINALS[anchor] = anchor.value()
        anchor.wrap(around)
