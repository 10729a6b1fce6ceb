"""Packed documents: where each goes, that none sees another, and that losses are those of documents alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_corpus import VOCAB, make_corpus, make_record, student

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
    assert batch.targets.token_n.tolist() == [*second[2:], *first[3:]]
    rows = [*range(2, 6), *range(2)]
    np.testing.assert_array_equal(batch.targets.top_ids_nK.numpy(), corpus.top_ids[rows])
    np.testing.assert_array_equal(batch.targets.tail_n.numpy(), corpus.tail_mass[rows])


def losses_by_document(corpus: Corpus, sequences: list[list[int]]) -> dict[int, torch.Tensor]:
    """Each document's hidden states at its loss positions."""
    model = student()
    batch = pack(corpus, sequences, 32)
    with torch.no_grad():
        hidden_nD = model.hidden(batch)
        logits_nN = model.head(hidden_nD)
    sizes = [int(corpus.completion_lengths[document]) for document in batch.documents]
    return dict(zip(batch.documents, logits_nN.split(sizes), strict=True))


SIZES = [(3, 5), (4, 4), (2, 9), (5, 3), (1, 6)]


@pytest.mark.parametrize("changed", [0, 2])
def test_changing_one_document_leaves_the_others_bit_equal(changed: int) -> None:
    """Attention across documents, or positions that run on, would change what comes after (or beside) it."""
    corpus = make_corpus(SIZES)
    records = [make_record(*size, seed=number) for number, size in enumerate(SIZES)]
    records[changed] = make_record(*SIZES[changed], seed=99)
    sequences = [[0, 1, 2], [3, 4]]
    before = losses_by_document(corpus, sequences)
    after = losses_by_document(Corpus.from_records(records), sequences)
    assert not torch.equal(before[changed], after[changed])
    for document in set(range(len(SIZES))) - {changed}:
        assert torch.equal(before[document], after[document]), f"document {document} saw document {changed}"


def test_a_packed_document_has_the_losses_it_has_alone() -> None:
    corpus = make_corpus(SIZES)
    packed = losses_by_document(corpus, [[0, 1, 2], [3, 4]])
    for document in range(len(SIZES)):
        alone = losses_by_document(corpus, [[document]])[document]
        torch.testing.assert_close(packed[document], alone, rtol=1e-4, atol=1e-5)


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
