"""The training loop: it learns, resumes to the same bits, and splits over processes without changing what it does."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_corpus import make_corpus, random_corpus, student, target

from pipeline.config_train import LossTerm, RecipeConfig
from train.metrics import read_metrics, training_spent
from train.order import Order, share
from train.schedule import rate
from train.trainer import LossError, Outcome, Trainer, train_student

RECIPE = RecipeConfig(length=32, sequences=4, micro_batch=2, steps=12, lr=1e-2, checkpoint_every=4)


def recipe(**changes: Any) -> RecipeConfig:
    return dataclasses.replace(RECIPE, **changes)


def test_training_lowers_the_loss_and_raises_acceptance() -> None:
    outcome = train_student(student(), random_corpus(24), recipe(steps=30))
    assert outcome.finished
    first, last = outcome.metrics[0], outcome.metrics[-1]
    assert last["loss"] < 0.5 * first["loss"]
    assert last["acc_low"] > first["acc_high"]
    assert all(row["acc_low"] <= row["acc_high"] <= 1 + 1e-6 for row in outcome.metrics)


def test_accumulation_changes_no_loss() -> None:
    """A mean of micro-batch means would weigh tokens of short micro-batches more."""
    corpus = random_corpus(24)
    whole = train_student(student(), corpus, recipe(micro_batch=4))
    parts = train_student(student(), corpus, recipe(micro_batch=1))
    for one, other in zip(whole.metrics, parts.metrics, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["tokens"] == other["tokens"]


def test_gradient_checkpointing_changes_no_loss() -> None:
    corpus = random_corpus(24)
    plain = train_student(student(), corpus, recipe(steps=4))
    recomputed = train_student(student(), corpus, recipe(steps=4, gradient_checkpointing=True))
    for one, other in zip(plain.metrics, recomputed.metrics, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_compiled_layers_and_losses_change_no_loss() -> None:
    corpus = random_corpus(24)
    plain = train_student(student(), corpus, recipe(steps=3))
    compiled = train_student(student(), corpus, recipe(steps=3, attention="varlen", compile=True))
    for one, other in zip(plain.metrics, compiled.metrics, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_bfloat16_keeps_float32_weights_and_learns() -> None:
    trainer = Trainer(student(), random_corpus(24), recipe(steps=30, precision="bfloat16"))
    outcome = trainer.train()
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert outcome.metrics[-1]["loss"] < 0.5 * outcome.metrics[0]["loss"]
    exact = train_student(student(), random_corpus(24), recipe(steps=1))
    gap = abs(outcome.metrics[0]["loss"] - exact.metrics[0]["loss"]) / exact.metrics[0]["loss"]
    assert 0 < gap < 0.05, "products in bfloat16 differ a little from those in float32"


def stopping_after(steps: int) -> Any:
    calls = itertools.count(1)
    return lambda: next(calls) >= steps


def same_weights(one: Outcome, other: Outcome) -> bool:
    assert one.weights.keys() == other.weights.keys()
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_stopped_and_resumed_training_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    corpus = random_corpus(24)
    whole = Trainer(student(), corpus, RECIPE, tmp_path / "whole").train()
    half = Trainer(student(), corpus, RECIPE, tmp_path / "half").train(stopping_after(stop))
    assert not half.finished
    assert half.steps == stop
    rest = Trainer(student(), corpus, RECIPE, tmp_path / "half").train()
    assert rest.finished
    assert same_weights(whole, rest)
    files = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "half")]
    assert [row["loss"] for row in files[0]] == [row["loss"] for row in files[1]]
    assert [row["step"] for row in files[1]] == list(range(12))


def test_only_the_last_checkpoints_are_kept_and_half_of_one_counts_for_nothing(tmp_path: Path) -> None:
    trainer = Trainer(student(), random_corpus(24), recipe(checkpoint_every=2, keep_checkpoints=2), tmp_path)
    whole = trainer.train()
    folder = tmp_path / "checkpoints"
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000010", "step-00000012"]
    (folder / "step-00000012" / "complete.json").unlink()
    again = Trainer(student(), random_corpus(24), recipe(checkpoint_every=2), tmp_path).train()
    assert [row["step"] for row in again.metrics] == [10, 11]
    assert same_weights(whole, again)


@pytest.mark.parametrize(
    "other, named",
    [
        ({"recipe": recipe(lr=1e-3)}, "recipe"),
        ({"corpus": random_corpus(25)}, "documents"),
        ({"student": student((LossTerm(name="ce"),))}, "loss"),
        ({"student": student(head_ids=range(16))}, "head"),
    ],
)
def test_checkpoint_of_another_training_is_refused(tmp_path: Path, other: dict[str, Any], named: str) -> None:
    Trainer(student(), random_corpus(24), recipe(), tmp_path).train(stopping_after(2))
    parts = {"student": student(), "corpus": random_corpus(24), "recipe": recipe(), **other}
    with pytest.raises(ValueError, match=f"checkpoint of another training.*{named}"):
        Trainer(parts["student"], parts["corpus"], parts["recipe"], tmp_path).train()


def test_a_loss_that_is_not_finite_stops_before_the_weights_and_names_its_documents(tmp_path: Path) -> None:
    corpus = random_corpus(120)
    order = Order(corpus.lengths, RECIPE)
    seen = {document for step in range(6) for sequence in order[step] for document in sequence}
    broken = min(document for sequence in order[6] for document in sequence if document not in seen)
    corpus.top_logprobs[corpus.row_begins[broken]] = float("nan")
    trainer = Trainer(student(), corpus, RECIPE, tmp_path)
    with pytest.raises(LossError, match=r"step 6.*last checkpoint: step 4") as error:
        trainer.train()
    assert "prompt-" in str(error.value)
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


def test_rows_longer_than_a_sequence_are_refused_or_dropped() -> None:
    corpus = make_corpus([(3, 5), (20, 30), (2, 4)])
    with pytest.raises(ValueError, match=r"1 of 3 .*prompt-1/0, has 49 tokens.*context 512.*long_rows=drop"):
        Trainer(student(), corpus, RECIPE)
    assert len(Trainer(student(), corpus, recipe(long_rows="drop")).corpus) == 2
    with pytest.raises(ValueError, match="1 of 1"):
        Trainer(student(), corpus.select([1]), recipe(long_rows="drop"))
    long = make_corpus([(2, 600)])
    with pytest.raises(ValueError, match="the draft's context 512"):
        Trainer(student(), long, recipe(length=1024))


def test_exact_acceptance_is_that_of_whole_distributions() -> None:
    """And 1 for a draft that is the teacher."""
    corpus, heldout = random_corpus(24), random_corpus(5, seed=9)
    trainer = Trainer(student(), corpus, recipe(exact_every=6), heldout=heldout, teacher=target().eval())
    outcome = trainer.train()
    measured = [row["heldout_acceptance"] for row in outcome.metrics if "heldout_acceptance" in row]
    assert len(measured) == 2
    draft, teacher, total, count = trainer.model.model, target().eval(), 0.0, 0
    for number in range(len(heldout)):
        ids, first, _ = heldout.document(number)
        tokens = torch.tensor(ids[None, :-1].tolist())
        with torch.no_grad():
            p, q = (model(tokens).logits[0, first - 1 :].softmax(-1) for model in (teacher, draft))
        total, count = total + float(torch.minimum(p, q).sum()), count + len(ids) - first
    assert measured[-1] == pytest.approx(total / count, abs=1e-5)


def test_every_epoch_reads_every_document_once() -> None:
    corpus = random_corpus(50)
    order = Order(corpus.lengths, recipe(steps=None, epochs=2))
    seen = [document for step in range(len(order)) for sequence in order[step] for document in sequence]
    assert sorted(seen) == sorted([*range(50), *range(50)])
    assert sorted(seen[:50]) == list(range(50))
    longer = Order(corpus.lengths, recipe(steps=1000))
    assert [longer[step] for step in range(len(order) - 1)] == [order[step] for step in range(len(order) - 1)]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_shares_are_equal_in_number_and_cover_the_step(processes: int) -> None:
    sequences = [(number,) for number in range(7)]
    shares = [share(sequences, rank, processes, 2) for rank in range(processes)]
    assert len({tuple(map(len, each)) for each in shares}) == 1
    assert sorted(seq for each in shares for part in each for seq in part if seq) == sequences


def test_schedules() -> None:
    wsd = recipe(schedule="wsd", warmup=0.1, decay=0.2, final_lr=0.0)
    rates = [rate(wsd, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10:81] == [1.0] * 71
    assert rates[-1] == 0
    assert sorted(rates[80:], reverse=True) == rates[80:]
    cosine = [rate(recipe(warmup=0.0, final_lr=0.1), step, 101) for step in range(101)]
    assert (cosine[0], cosine[50], cosine[100]) == pytest.approx((1.0, 0.55, 0.1))
    assert {rate(recipe(schedule="constant", warmup=0.0), step, 10) for step in range(10)} == {1.0}


def test_metrics_of_a_torn_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 0}) + '\n{"st', encoding="utf-8")
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0}]


def test_what_a_draft_cost_is_summed_over_its_rounds(tmp_path: Path) -> None:
    for name, seconds in (("round-0-metrics.jsonl", 30.0), ("metrics.jsonl", 15.0)):
        rows = [{"step": step, "tokens": 10, "seconds": seconds} for step in range(2)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert training_spent(tmp_path) == {"tokens_trained": 40, "minutes": 1.5}
