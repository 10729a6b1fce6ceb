"""Drafts stored without the tensors that they share with their target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import drafts, models, tiny

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def _models_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))


@pytest.fixture
def lender(tmp_path: Path) -> Path:
    folder = tmp_path / "lender"
    folder.mkdir()
    tiny.make("llama", folder)
    return folder


@pytest.fixture
def borrower(lender: Path, tmp_path: Path) -> Path:
    """The lender's first two layers, without the embedding and the tokenizer."""
    folder = tmp_path / "borrower"
    draft = drafts.keep_layers(AutoModelForCausalLM.from_pretrained(lender), 2)
    draft.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights[EMBEDDING]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / drafts.BORROWS).write_text(json.dumps({"model": str(lender), "tensors": [EMBEDDING]}))
    return folder


def test_completed_once_with_the_lenders_tensors_and_tokenizer(lender: Path, borrower: Path) -> None:
    assert models.find(str(borrower)) is None
    folder = models.resolve(str(borrower))
    assert folder != borrower
    assert models.find(str(borrower)) == folder
    assert models.resolve(str(borrower)) == folder
    ids = torch.arange(12).unsqueeze(0)
    target = AutoModelForCausalLM.from_pretrained(lender)
    with torch.no_grad():
        got = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        expected = drafts.keep_layers(target, 2)(ids).logits
    assert torch.equal(got, expected)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(lender).get_vocab()


def test_new_weights_are_another_folder(borrower: Path) -> None:
    before = models.resolve(str(borrower))
    weights = load_file(borrower / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, borrower / "model.safetensors", metadata={"format": "pt"})
    assert models.resolve(str(borrower)) != before


@pytest.mark.parametrize("content", ["[]", "{", '{"model": "tiny:llama"}'])
def test_bad_borrows(borrower: Path, content: str) -> None:
    (borrower / drafts.BORROWS).write_text(content)
    with pytest.raises(ValueError, match=r"borrows\.json: not in its format"):
        models.resolve(str(borrower))


def test_lender_lacks_the_tensor(borrower: Path, lender: Path) -> None:
    (borrower / drafts.BORROWS).write_text(json.dumps({"model": str(lender), "tensors": [EMBEDDING, "model.x"]}))
    with pytest.raises(ValueError, match=r"borrows model\.x of lender, which has no such tensor"):
        models.resolve(str(borrower))
    shutil.rmtree(lender)
    with pytest.raises(ValueError, match="no such folder"):
        models.resolve(str(borrower))
