"""Packed documents: where each goes, that none sees another, and that losses are those of documents alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_corpus import VOCAB, make_corpus, make_record, student

from train import attention
from train.corpus import Corpus
from train.order import plan_epoch
from train.packing import pack


def test_plan_holds_every_document_once_within_the_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=500)
    plan = plan_epoch(lengths, 64, seed=1, epoch=0)
    assert sorted(document for sequence in plan for document in sequence) == list(range(500))
    filled = [int(lengths[list(sequence)].sum()) for sequence in plan]
    assert max(filled) <= 64
    assert sum(filled) / (64 * len(plan)) > 0.9, "sequences are mostly padding"


def test_plan_depends_on_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=100)
    plan = plan_epoch(lengths, 64, seed=1, epoch=0)
    assert plan == plan_epoch(lengths, 64, seed=1, epoch=0)
    assert plan != plan_epoch(lengths, 64, seed=1, epoch=1)
    assert plan != plan_epoch(lengths, 64, seed=2, epoch=0)


def test_batch_predicts_completion_tokens_only() -> None:
    corpus = make_corpus([(3, 2), (2, 4)])
    batch = pack(corpus, [[1, 0]], 12)
    second, first = corpus.document(1)[0], corpus.document(0)[0]
    assert batch.input_ids_SL.tolist() == [[*second[:-1], *first[:-1], 0, 0, 0]]
    assert batch.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]
    assert batch.positions_n.tolist() == [1, 2, 3, 4, 7, 8]
    assert batch.ends_E.tolist() == [0, 5, 9, 12]
    assert batch.targets.token_n.tolist() == [*second[2:], *first[3:]]
    rows = [*range(2, 6), *range(2)]
    np.testing.assert_array_equal(batch.targets.top_ids_nK.numpy(), corpus.top_ids[rows])
    np.testing.assert_array_equal(batch.targets.tail_n.numpy(), corpus.tail_mass[rows])


def losses_by_document(corpus: Corpus, sequences: list[list[int]], chosen: str = "sdpa") -> dict[int, torch.Tensor]:
    """Each document's logits at its loss positions."""
    model = student()
    model.model.set_attn_implementation(chosen)
    batch = pack(corpus, sequences, 32)
    with torch.no_grad():
        hidden_nD = model.hidden(batch)
        logits_nN = model.head(hidden_nD)
    sizes = [int(corpus.completion_lengths[document]) for document in batch.documents]
    return dict(zip(batch.documents, logits_nN.split(sizes), strict=True))


SIZES = [(3, 5), (4, 4), (2, 9), (5, 3), (1, 6)]


@pytest.mark.parametrize("chosen", ["sdpa", "varlen"])
@pytest.mark.parametrize("changed", [0, 2])
def test_changing_one_document_leaves_the_others_bit_equal(changed: int, chosen: str) -> None:
    """Attention across documents, or positions that run on, would change what comes after (or beside) it."""
    corpus = make_corpus(SIZES)
    records = [make_record(*size, seed=number) for number, size in enumerate(SIZES)]
    records[changed] = make_record(*SIZES[changed], seed=99)
    sequences = [[0, 1, 2], [3, 4]]
    before = losses_by_document(corpus, sequences, chosen)
    after = losses_by_document(Corpus.from_records(records), sequences, chosen)
    assert not torch.equal(before[changed], after[changed])
    for document in set(range(len(SIZES))) - {changed}:
        assert torch.equal(before[document], after[document]), f"document {document} saw document {changed}"


@pytest.mark.parametrize("chosen", ["sdpa", "varlen"])
def test_a_packed_document_has_the_losses_it_has_alone(chosen: str) -> None:
    corpus = make_corpus(SIZES)
    packed = losses_by_document(corpus, [[0, 1, 2], [3, 4]], chosen)
    for document in range(len(SIZES)):
        alone = losses_by_document(corpus, [[document]])[document]
        torch.testing.assert_close(packed[document], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_the_kernel_computes_what_the_mask_does() -> None:
    """Values and gradients, with fewer key heads than query heads, in bfloat16: within its rounding."""
    torch.manual_seed(0)
    ends_E = torch.tensor([0, 50, 64, 100, 128], dtype=torch.int32, device="cuda")
    shapes = ((2, 4, 64, 64), (2, 2, 64, 64), (2, 2, 64, 64))
    inputs = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outs = [attention.varlen_attention(torch.nn.Identity(), *x, None, ends_E=ends_E)[0] for x in (inputs, exact)]
    weights = torch.randn_like(outs[1])
    for out in outs:
        (out.double() * weights).sum().backward()
    pairs = [(outs[0], outs[1]), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))]
    for ours, reference in pairs:
        assert ours is not None
        assert reference is not None
        assert (ours.double() - reference).norm() < 0.02 * reference.norm()


@pytest.mark.parametrize("feature", [{"softcap": 50.0}, {"sliding_window": 8}, {"dropout": 0.1}])
def test_an_attention_with_more_features_is_refused(feature: dict[str, float]) -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="computes plain causal attention"):
        ends_E = torch.tensor([0, 2], dtype=torch.int32)
        attention.varlen_attention(torch.nn.Identity(), x, x, x, None, ends_E=ends_E, **feature)  # type: ignore[arg-type]


def test_corpus_survives_its_files_and_joins(tmp_path: Path) -> None:
    corpus = make_corpus(SIZES)
    corpus.save(tmp_path)
    loaded = Corpus.load(tmp_path)
    assert isinstance(loaded.tokens, np.memmap)
    parts = Corpus.join([corpus.select([0, 1]), loaded.select([2, 3, 4])])
    for field in dataclasses.fields(Corpus):
        np.testing.assert_array_equal(getattr(corpus, field.name), getattr(loaded, field.name))
        np.testing.assert_array_equal(getattr(corpus, field.name), getattr(parts, field.name))


def test_token_mass_sums_the_kept_probabilities() -> None:
    corpus = make_corpus(SIZES)
    mass = corpus.token_mass(VOCAB)
    assert mass.shape == (VOCAB,)
    assert mass.sum() == pytest.approx(np.exp(corpus.top_logprobs.astype(np.float64)).sum())
    token = int(corpus.top_ids[0, 0])
    assert mass[token] == pytest.approx(np.exp(corpus.top_logprobs[corpus.top_ids == token].astype(np.float64)).sum())


def test_no_records_and_mixed_records_are_refused() -> None:
    with pytest.raises(ValueError, match="no completion to train on"):
        Corpus.from_records([])
    with pytest.raises(ValueError, match=r"\[4, 8\] teacher entries"):
        Corpus.from_records([make_record(2, 3, seed=0), make_record(2, 3, seed=1, kept=4)])
