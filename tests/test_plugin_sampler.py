"""vLLM's rejection sampler, driven directly with the plugin's fixes: 200,000 rounds against the enumerated law of what
a round puts out. And the faults that the fixes are for: each is there without its fix.

Shapes: B rounds, V vocabulary. A round has two drafts, from q1 and q2, and three target laws p1, p2, p3. It puts out
one token with probability max(p1 - q1, 0), two with min(p1, q1) max(p2 - q2, 0), three with min(p1, q1) min(p2, q2) p3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from bench.law import processed_law
from bench.law_stats import check_law
from specdec import SamplingParams
from tests.plugin_vllm import swapped

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(900)

VOCAB, ROUNDS = 8, 200_000
FAMILIES = {
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-k with top-p": {"temperature": 1.3, "top_k": 5, "top_p": 0.85},
    "allowed ids": {"temperature": 1.0, "allowed_ids": (0, 2, 3, 5, 6)},
}


@pytest.fixture(scope="module")
def patches() -> Iterator[Any]:
    """The fixes' module, with the fixes made in this process's vLLM for a CPU; afterwards vLLM is as it was."""
    from vllm.platforms import current_platform

    from vllm_draft_spec import patches

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernels for CPUs are in a build for CPUs only")
    current_platform.register_triton_kernel_overrides()
    with ExitStack() as stack:
        for fix in patches.FIXES:
            module = __import__(fix.anchor.module, fromlist=[fix.anchor.name])
            stack.enter_context(swapped(module, fix.anchor.name, lambda original: original))  # put back at the end
        patches.repair(torch.device("cpu"))
        yield patches


def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target [3, V] and draft [2, V], alike but not equal."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(3, VOCAB, generator=generator)
    return target, target[:2] + torch.randn(2, VOCAB, generator=generator)


def metadata(settings: dict[str, Any], rows: int) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def for_all(name: str, kind: torch.dtype) -> torch.Tensor | None:
        return torch.full((rows,), settings[name], dtype=kind) if name in settings else None

    mask = None
    if "allowed_ids" in settings:
        mask = torch.ones(rows, VOCAB, dtype=torch.bool)
        mask[:, list(settings["allowed_ids"])] = False
    return SamplingMetadata(
        temperature=for_all("temperature", torch.float32),
        all_greedy=False,
        all_random=True,
        top_p=for_all("top_p", torch.float32),
        top_k=for_all("top_k", torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=mask,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[] for _ in range(rows)],
    )


def put_out(settings: dict[str, Any], seed: int, rows: int) -> np.ndarray:
    """What `rows` rounds put out, counts of shape (V + 1,) * 3; index V: nothing more."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    torch.manual_seed(seed)
    target, draft = logits(seed)
    laws = draft.softmax(-1)
    drafts = torch.stack([torch.multinomial(law, rows, replacement=True) for law in laws], 1)
    round_metadata = SpecDecodeMetadata(
        draft_token_ids=drafts.flatten().int(),
        num_draft_tokens=[2] * rows,
        cu_num_draft_tokens=torch.arange(2, 2 * rows + 1, 2, dtype=torch.int32),
        cu_num_sampled_tokens=torch.arange(3, 3 * rows + 1, 3, dtype=torch.int32),
        target_logits_indices=torch.arange(3 * rows).view(rows, 3)[:, :2].flatten(),
        bonus_logits_indices=torch.arange(2, 3 * rows, 3),
        logits_indices=torch.arange(3 * rows),
    )
    sampler = RejectionSampler(Sampler())
    output = sampler(round_metadata, laws.repeat(rows, 1), target.repeat(rows, 1), metadata(settings, rows))
    cells = output.sampled_token_ids.long()
    cells = torch.where(cells < 0, VOCAB, cells)
    index = (cells[:, 0] * (VOCAB + 1) + cells[:, 1]) * (VOCAB + 1) + cells[:, 2]
    return torch.bincount(index, minlength=(VOCAB + 1) ** 3).view(VOCAB + 1, VOCAB + 1, VOCAB + 1).numpy()


def law_of_a_round(settings: dict[str, Any], seed: int) -> np.ndarray:
    target, draft = logits(seed)
    p1, p2, p3 = (processed_law(row.double().numpy(), SamplingParams(**settings), (), ()) for row in target)
    q1, q2 = draft.double().softmax(-1).numpy()
    law = np.zeros((VOCAB + 1,) * 3)
    kept1, kept2 = np.minimum(p1, q1), np.minimum(p2, q2)
    law[:VOCAB, VOCAB, VOCAB] = p1 - kept1
    law[:VOCAB, :VOCAB, VOCAB] = np.outer(kept1, p2 - kept2)
    law[:VOCAB, :VOCAB, :VOCAB] = np.einsum("i,j,k->ijk", kept1, kept2, p3)
    return law


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_follows_the_enumerated_law(patches: Any, family: str) -> None:
    """A p-value below 1e-6 in one of 5 is a false alarm of 1 in 200,000 runs."""
    seed = list(FAMILIES).index(family)
    seen = check_law(put_out(FAMILIES[family], seed, ROUNDS), law_of_a_round(FAMILIES[family], seed), seed=0)
    assert seen.impossible == 0
    assert seen.tv_ok, seen
    assert seen.p_value > 1e-6, seen


def test_every_fault_is_there_without_its_fix(patches: Any) -> None:
    """An upstream that mends one makes this fail: then the fix goes. And a fix mends what its probe looks for."""
    assert set(patches.ORIGINALS) == {fix.what for fix in patches.FIXES}
    for fix in patches.FIXES:
        assert fix.shows(patches.ORIGINALS[fix.what]), fix.what
        assert not fix.shows(fix.anchor.value()), fix.what


def test_without_the_fix_of_expanding_the_law_breaks(patches: Any) -> None:
    from vllm.v1.sample import rejection_sampler

    fix = next(fix for fix in patches.FIXES if fix.anchor.name == "expand_batch_to_tokens")
    settings = FAMILIES["temperature"]
    with swapped(rejection_sampler, "expand_batch_to_tokens", lambda _: patches.ORIGINALS[fix.what]):
        seen = check_law(put_out(settings, 0, 20_000), law_of_a_round(settings, 0), seed=0)
    assert not seen.tv_ok or seen.p_value < 1e-6, seen


def test_a_step_without_drafts_under_top_k(patches: Any) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

    assert apply_top_k_only(torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int32)).shape == (0, VOCAB)


def test_times_travel_between_processes_with_a_steps_output() -> None:
    """vLLM pickles what a worker gives back; `specdec_times` is no field of it."""
    import pickle

    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_draft_spec.timing import StepTimes

    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    output.specdec_times = StepTimes(draft_s=0.25, verify_s=0.5, batch=1, k=2)
    assert pickle.loads(pickle.dumps(output)).specdec_times == output.specdec_times
