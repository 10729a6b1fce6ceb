"""Sampled text under a grammar follows the target's law among what the grammar allows.

vLLM looks at the drafts after they were drawn and drops those that the grammar forbids. Where the draft could have been
another one, the token in its place should come from the residual, but vLLM draws it from the target's law. The plugin
lets such rows draft their most likely token, where the two are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.law import Oracle
from bench.law_stats import check_law
from bench.tiny_models import noisy_copy
from pipeline import tiny
from tests import plugin_vllm
from tests.plugin_vllm import counted, generate, set_lengths, swapped

pytest.importorskip("vllm")
pytest.importorskip("xgrammar")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TEXT, LETTERS, DEPTH, SAMPLES = "ab", "abcd", 3, 3000
TEMPERATURE = 0.5


@pytest.fixture(scope="module", params=["vllm", "own"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder, tokenizer = tmp_path_factory.mktemp("grammar"), tiny.byte_tokenizer()
    with plugin_vllm.installed():
        target = plugin_vllm.make_model(len(tokenizer))
        draft = noisy_copy(target, noise=0.3, seed=2)
        letters = tokenizer.convert_tokens_to_ids(list(LETTERS))
        for model in (target, draft):  # most likely a letter, but about half of what is drawn is none
            others = torch.ones(len(tokenizer), dtype=torch.bool)
            others[letters] = False
            model.lm_head.weight.data[others] = 0.0
            model.lm_head.weight.data[letters] *= 1.5
        paths = [plugin_vllm.saved(model, folder / name) for model, name in ((target, "target"), (draft, "draft"))]
        for path in paths:
            tokenizer.save_pretrained(path)
        options: dict[str, Any] = {"max_num_seqs": 128, "max_model_len": 64, "skip_tokenizer_init": False}
        engine = plugin_vllm.make_engine(*paths, additional_config={"specdec": {"draft": request.param}}, **options)
        yield SimpleNamespace(oracle=Oracle(target), tokenizer=tokenizer, engine=engine)


def law(made: SimpleNamespace, prompt: tuple[int, ...]) -> np.ndarray:
    """The law of DEPTH letters, float64 (L,) * DEPTH: each token's law among the letters, renormalised."""
    letters = made.tokenizer.convert_tokens_to_ids(list(LETTERS))
    joint = np.ones(())
    for depth in range(DEPTH):
        contexts = [(*prompt, *(letters[i] for i in place)) for place in np.ndindex(*(len(letters),) * depth)]
        logits = np.stack(made.oracle.logits(contexts))[:, letters]
        weights = np.exp((logits - logits.max(1, keepdims=True)) / TEMPERATURE)
        step = (weights / weights.sum(1, keepdims=True)).reshape(*joint.shape, len(letters))
        joint = joint[..., None] * step
    return joint


def check(made: SimpleNamespace) -> Any:
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    prompt = tuple(made.tokenizer(TEXT).input_ids)
    grammar = StructuredOutputsParams(regex=f"[{LETTERS}]{{{DEPTH}}}")
    params = vllm.SamplingParams(temperature=TEMPERATURE, max_tokens=DEPTH, structured_outputs=grammar)
    set_lengths(made.engine, (2,))
    with counted(made.engine) as grown:
        outputs = generate(made.engine, [prompt] * SAMPLES, params)
    counts = np.zeros((len(LETTERS),) * DEPTH, dtype=np.int64)
    for output in outputs:
        counts[tuple(LETTERS.index(letter) for letter in output.outputs[0].text)] += 1
    assert 50 < grown.accepted < grown.drafted - 50, (grown.accepted, grown.drafted)
    return check_law(counts, law(made, prompt), seed=0)


def test_text_under_a_grammar_follows_the_law(made: SimpleNamespace) -> None:
    seen = check(made)
    assert seen.tv_ok, seen
    assert seen.p_value > 1e-5, seen


def test_random_drafts_under_a_grammar_would_break_it(made: SimpleNamespace) -> None:
    from vllm_draft_spec.drafter import PluginDrafter

    with swapped(PluginDrafter, "_under_grammar", lambda _: lambda self: None):
        seen = check(made)
    assert seen.p_value < 1e-5, seen
