"""The target as the engine runs it."""

import pytest
import torch

from bench.tiny_models import tiny_model
from specdec.model import fuse_norms, private_copy


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("llama", True), ("gemma2", False)])
def test_norms_are_fused_only_where_the_bits_stay(family: str, fused: bool) -> None:
    """Gemma's norm has another formula under the same name."""
    model = tiny_model(family=family, vocab=32, layers=2).float()
    plain, quick = private_copy(model, "eager"), private_copy(model, "eager")
    assert (fuse_norms(quick) > 0) == fused
    tokens = torch.arange(20).unsqueeze(0)
    assert torch.equal(plain(tokens).logits, quick(tokens).logits)
