"""The teacher's law on texts that exist already: against a plain forward, for any batch and any slice of the
vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.tiny_models import tiny_model
from data.scoring import score_completions
from specdec import Engine, Request, SamplingParams

VOCAB = 50


def make_texts(count: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 20, size=(count, 2))
    return tuple([rng.integers(0, VOCAB, size=size).tolist() for size in column] for column in sizes.T)  # type: ignore[return-value]


def plain_law(model: Any, prompt: list[int], completion: list[int]) -> np.ndarray:
    """[T, V] logprobs by one forward of one text."""
    with torch.inference_mode():
        logits_SV = model(torch.tensor([prompt + completion])).logits[0].double()
    return logits_SV[len(prompt) - 1 : -1].log_softmax(-1).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])  # gemma2 soft-caps its logits
@pytest.mark.parametrize("batch_tokens, chunk_elements", [(16384, 1 << 26), (1, 1), (60, 700)])
def test_the_law_is_that_of_a_plain_forward(family: str, batch_tokens: int, chunk_elements: int) -> None:
    model = tiny_model(family, vocab=VOCAB, layers=2, dtype=torch.float32)
    prompts, completions = make_texts(9)
    sizes = {"batch_tokens": batch_tokens, "chunk_elements": chunk_elements}
    scored = score_completions(model, prompts, completions, top=8, **sizes)
    assert len(scored) == 9
    for prompt, completion, law in zip(prompts, completions, scored, strict=True):
        expected_TV = plain_law(model, prompt, completion)
        rows_T = np.arange(len(completion))
        assert np.allclose(law.token_logprob, expected_TV[rows_T, completion], atol=1e-5)
        assert np.allclose(law.top_logprobs, -np.sort(-expected_TV, axis=1)[:, :8], atol=1e-5)
        assert np.allclose(law.top_logprobs, np.take_along_axis(expected_TV, law.top_ids, 1), atol=1e-5)
        assert np.allclose(law.tail_mass, 1 - np.exp(law.top_logprobs).sum(1), atol=1e-5)
        assert [array.dtype for array in vars(law).values()] == [np.float32, np.int32, np.float32, np.float32]


def test_the_engines_own_report_of_a_text_is_the_score_of_it() -> None:
    model = tiny_model("qwen3", vocab=VOCAB, layers=2, dtype=torch.float32)
    prompts, _ = make_texts(5)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
    engine = Engine(model, k=0, num_slots=3, capacity=64, top_logprobs=8)
    made = engine.generate([Request(prompt_ids=prompt, params=params) for prompt in prompts])
    scored = score_completions(model, prompts, [completion.token_ids for completion in made])
    for completion, law in zip(made, scored, strict=True):
        assert completion.logprobs is not None
        for name, array in vars(law).items():
            assert np.allclose(array, getattr(completion.logprobs, name), atol=1e-5), name


def test_half_precision_keeps_the_softmax_in_float32() -> None:
    """bfloat16 has 8 bits: a softmax in it would leave masses that miss one by a percent."""
    model = tiny_model("llama", vocab=4000, layers=1, dtype=torch.bfloat16)
    prompts, completions = make_texts(3)
    for law in score_completions(model, prompts, completions, chunk_elements=5000):
        assert law.top_logprobs.dtype == np.float32
        assert np.abs(np.exp(law.top_logprobs.astype(np.float64)).sum(1) + law.tail_mass - 1).max() < 1e-6
    exact = score_completions(model, prompts, completions)
    halves = score_completions(model, prompts, completions, chunk_elements=5000)
    assert np.allclose(exact[0].token_logprob, halves[0].token_logprob, atol=1e-4)


@pytest.mark.parametrize(
    "prompts, completions, message",
    [
        ([[1]], [[]], "text 0: got 1 prompt and 0 completion tokens"),
        ([[1], [2]], [[1], [VOCAB]], f"text 1: got ids 2 to {VOCAB}, expected 0 to {VOCAB - 1}"),
        ([[1]], [[1] * 512], "text 0: got 513 tokens, expected at most 512"),
    ],
)
def test_a_text_that_cannot_be_scored_is_named(
    prompts: list[list[int]], completions: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        score_completions(tiny_model("llama", vocab=VOCAB), prompts, completions)


def test_a_model_that_would_be_scored_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    with pytest.raises(ValueError, match="in training mode"):
        score_completions(model.train(), [[1]], [[2]])
    model.eval()
    with pytest.raises(ValueError, match="top is 51; expected 1 to 50"):
        score_completions(model, [[1]], [[2]], top=51)
    forward = type(model).forward

    def scaled(self: Any, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(type(model), "forward", scaled)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not supported: its logits differ by 0\.5"):
        score_completions(model, [[1]], [[2]])


def test_a_model_with_nan_is_refused() -> None:
    model = tiny_model("llama", vocab=VOCAB)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    with pytest.raises(ValueError, match="text 1: the model's logits are NaN"):
        score_completions(model, [[1, 2], [7, 2]], [[3], [3]])
