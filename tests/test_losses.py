"""Each loss against its dense version, its gradient, the pruned head, and how much memory a chunk costs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _python_dispatch

from pipeline import config_train
from pipeline.config_train import LossTerm
from train.losses import (
    LOSS_NAMES,
    LOSSES,
    Targets,
    acceptance_bounds,
    chunked_losses,
    cross_entropy,
    forward_kl,
    head_columns,
    jensen_shannon,
    make_buckets,
    renormalised_kl,
    reverse_kl,
    token_losses,
    total_variation,
)

NUM_TOKENS, VOCAB, KEPT = 7, 40, 8


def laws(seed: int = 0, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Teacher's log-probabilities and draft logits, [n, V] float64."""
    generator = torch.Generator().manual_seed(seed)
    teacher = 3 * torch.randn(NUM_TOKENS, vocab, generator=generator, dtype=torch.float64)
    draft = 2 * torch.randn(NUM_TOKENS, vocab, generator=generator, dtype=torch.float64)
    return teacher.log_softmax(-1), draft


def top_targets(log_p_nV: Tensor, kept: int) -> Targets:
    top = log_p_nV.topk(kept)
    tail_n = (1 - top.values.exp().sum(-1)).clamp_min(0)
    token_n = torch.arange(len(log_p_nV)) % log_p_nV.shape[1]
    return Targets(token_n=token_n, top_ids_nK=top.indices, top_logprobs_nK=top.values, tail_n=tail_n)


def dense(name: str, log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """The textbook formula over all tokens; log_q may hold -inf (p's part there is a constant left out of kl)."""
    p, q = log_p.exp(), log_q.exp()
    zero = torch.zeros_like(p)
    if name == "kl":
        inside = log_q > -math.inf
        mass = torch.where(inside, p, zero).sum(-1, keepdim=True)
        return torch.where(inside, p * (log_p - mass.log() - log_q), zero).sum(-1)
    if name == "reverse_kl":
        return torch.where(q > 0, q * (log_q - log_p), zero).sum(-1)
    if name == "tv":
        return 0.5 * (p - q).abs().sum(-1)
    mixture = beta * p + (1 - beta) * q
    from_q = torch.where(q > 0, q * (log_q - mixture.log()), zero).sum(-1)
    return beta * (p * (log_p - mixture.log())).sum(-1) + (1 - beta) * from_q


def bucketed(log_law: Tensor, ids_nK: Tensor) -> Tensor:
    """A dense law merged by hand into K + 1 buckets."""
    law = log_law.exp()
    top = law.gather(1, ids_nK)
    return torch.cat([top, law.sum(-1, keepdim=True) - top.sum(-1, keepdim=True)], -1).log()


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv"])
def test_all_tokens_kept_gives_the_dense_loss_and_gradient(name: str) -> None:
    log_p, draft = laws()
    first, second = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    loss = LOSSES[name](make_buckets(first, top_targets(log_p, VOCAB)))
    expected = dense(name, log_p, second.log_softmax(-1))
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    loss.sum().backward()
    expected.sum().backward()
    assert first.grad is not None
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv"])
def test_top_k_gives_the_loss_of_the_merged_laws_which_is_no_more_than_the_dense_one(name: str) -> None:
    log_p, draft = laws()
    targets = top_targets(log_p, KEPT)
    loss = LOSSES[name](make_buckets(draft, targets))
    log_q = draft.log_softmax(-1)
    merged = dense(name, bucketed(log_p, targets.top_ids_nK), bucketed(log_q, targets.top_ids_nK))
    torch.testing.assert_close(loss, merged, rtol=1e-9, atol=1e-9)
    assert (loss < dense(name, log_p, log_q)).all()
    assert (loss > 0).all()


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv"])
@pytest.mark.parametrize("seed", range(3))
def test_pruned_head_gives_the_dense_loss_with_q_zero_elsewhere(name: str, seed: int) -> None:
    """The head lacks a third of the ids, and one token's best entry; all are kept, so nothing is approximate."""
    log_p, draft = laws(seed)
    head_ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[: 2 * VOCAB // 3]
    logits = draft[:, head_ids].clone().requires_grad_()
    again = logits.detach().clone().requires_grad_()
    targets = top_targets(log_p, VOCAB)
    buckets = make_buckets(logits, targets, head_columns(head_ids, VOCAB))
    assert (buckets.unreachable_n > 1e-4).all()
    log_q = torch.full_like(log_p, -math.inf).index_copy(1, head_ids, again.log_softmax(-1))
    expected = dense(name, log_p, log_q)
    loss = LOSSES[name](buckets)
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-8)
    loss.sum().backward()
    inside = log_p.exp()[:, head_ids]
    if name == "kl":  # the gradient of the whole, infinite sum: m (q - p_H)
        mass = inside.sum(-1, keepdim=True)
        torch.testing.assert_close(logits.grad, mass * again.softmax(-1) - inside, rtol=1e-8, atol=1e-8)
        return
    torch.where(torch.isfinite(expected), expected, torch.zeros_like(expected)).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    if name == "tv":
        torch.testing.assert_close(logits.grad, again.grad, rtol=1e-8, atol=1e-8)


def descend(loss_of: object, log_p: Tensor, columns: int, steps: int = 500) -> Tensor:
    logits = torch.zeros(len(log_p), columns, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(logits).sum().backward()  # type: ignore[operator]
        optimizer.step()
    return logits.detach().softmax(-1)


def test_least_of_the_tailed_kl_has_the_teachers_top_and_that_of_the_renormalised_one_has_no_tail() -> None:
    log_p, _ = laws()
    targets = top_targets(log_p - 0, KEPT)
    q = descend(lambda logits: forward_kl(make_buckets(logits, targets)), log_p, VOCAB)
    torch.testing.assert_close(q.gather(1, targets.top_ids_nK), targets.top_logprobs_nK.exp(), rtol=0, atol=1e-3)
    biased = descend(lambda logits: renormalised_kl(make_buckets(logits, targets)), log_p, VOCAB)
    assert (1 - biased.gather(1, targets.top_ids_nK).sum(-1)).max() < 0.05 * targets.tail_n.max()


def test_cross_entropy_is_that_of_torch() -> None:
    log_p, draft = laws()
    first, second = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    targets = top_targets(log_p, KEPT)
    loss = token_losses(first, targets, [LossTerm(name="ce")])["ce"]
    expected = functional.cross_entropy(second, targets.token_n, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    loss.sum().backward()
    expected.sum().backward()
    assert first.grad is not None
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-9, atol=1e-9)


def test_cross_entropy_leaves_out_tokens_without_a_column() -> None:
    _, draft = laws()
    head_ids = [0, 2, 4, 6]
    logits = draft[:, head_ids].clone().requires_grad_()
    loss = cross_entropy(logits, torch.arange(NUM_TOKENS), head_columns(head_ids, VOCAB))
    expected = -logits.log_softmax(-1)[[0, 2, 4, 6], [0, 1, 2, 3]]
    torch.testing.assert_close(loss[::2], expected)
    assert (loss[1::2] == 0).all()
    loss.sum().backward()
    assert logits.grad is not None
    assert (logits.grad[1::2] == 0).all()


@pytest.mark.parametrize("pruned", [False, True])
def test_acceptance_lies_between_its_bounds(pruned: bool) -> None:
    log_p, draft = laws()
    head_ids = list(range(0, VOCAB, 2)) if pruned else list(range(VOCAB))
    log_q = torch.full_like(log_p, -math.inf)
    log_q[:, head_ids] = draft[:, head_ids].log_softmax(-1)
    exact = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    buckets = make_buckets(draft[:, head_ids], top_targets(log_p, KEPT), head_columns(head_ids, VOCAB))
    low, high = acceptance_bounds(buckets)
    assert (low <= exact).all()
    assert (exact <= high).all()
    assert (high - low).max() > 1e-3
    torch.testing.assert_close(high, 1 - total_variation(buckets))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_extreme_laws_give_finite_losses_and_gradients(name: str) -> None:
    """A certain teacher, a certain draft that disagrees, a tail of zero, and a head with none of the top entries."""
    log_p = torch.full((4, VOCAB), -200.0)
    log_p[:, 3] = 0.0
    logits = torch.zeros(4, VOCAB)
    logits[1, 5], logits[2, 3] = 300.0, 300.0
    for head_ids in (list(range(VOCAB)), list(range(20, VOCAB))):
        pruned = logits[:, head_ids].clone().requires_grad_()
        values = token_losses(pruned, top_targets(log_p, KEPT), [LossTerm(name=name)], head_columns(head_ids, VOCAB))
        values[name].sum().backward()
        assert torch.isfinite(values[name]).all()
        assert pruned.grad is not None
        assert torch.isfinite(pruned.grad).all()


def test_config_names_every_loss() -> None:
    assert config_train.LOSSES == LOSS_NAMES


def test_jsd_tends_to_both_kls() -> None:
    """GKD section 3: JSD_beta / beta -> KL(p || q) and JSD_beta / (1 - beta) -> KL(q || p)."""
    log_p, draft = laws()
    buckets = make_buckets(draft, top_targets(log_p, KEPT))
    torch.testing.assert_close(jensen_shannon(buckets, 1e-6) / 1e-6, forward_kl(buckets), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(jensen_shannon(buckets, 1 - 1e-6) / 1e-6, reverse_kl(buckets), rtol=1e-3, atol=1e-4)


def chunk_case() -> tuple[Tensor, Tensor, Targets, list[LossTerm]]:
    generator = torch.Generator().manual_seed(1)
    log_p, _ = laws()
    hidden = torch.randn(NUM_TOKENS, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator)
    terms = [LossTerm(name="ce", weight=0.3), LossTerm(name="kl"), LossTerm(name="jsd", weight=0.5, beta=0.1)]
    return hidden, weight, top_targets(log_p.float(), KEPT), terms


def test_chunks_sum_to_the_whole_with_its_gradients() -> None:
    hidden, weight, targets, terms = chunk_case()
    results = []
    for chunk_elements in (1 << 20, 2 * VOCAB):  # one chunk; two tokens a chunk
        first, second = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss, sums = chunked_losses(
            first,
            partial(functional.linear, weight=second),
            targets,
            terms,
            num_columns=VOCAB,
            chunk_elements=chunk_elements,
        )
        loss.backward()
        results.append((loss, first.grad, second.grad, sums["kl"], sums["acc_low"], sums["top1"]))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)
    values = token_losses(hidden @ weight.T, targets, terms)
    expected = sum(term.weight * values[term.name].sum() for term in terms)
    torch.testing.assert_close(results[0][0], expected)


def test_no_tokens_give_a_zero_loss_that_can_be_differentiated() -> None:
    hidden, weight, targets, terms = chunk_case()
    weight.requires_grad_()
    loss, sums = chunked_losses(hidden[:0], lambda rows: rows @ weight.T, targets[:0], terms, num_columns=VOCAB)
    loss.backward()
    assert loss == 0
    assert set(sums) == {"ce", "kl", "jsd", "acc_low", "acc_high", "top1"}
    assert weight.grad is not None
    assert (weight.grad == 0).all()


class LargestTensor(_python_dispatch.TorchDispatchMode):
    """The elements of the largest float32 tensor made while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator, misc, dict-item]
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                self.largest = max(self.largest, each.numel())
        return result


def test_logits_of_a_large_vocabulary_exist_a_chunk_at_a_time() -> None:
    """100 tokens of 151,936 ids would be 61 MB in float32: forward and backward never make more than a chunk."""
    vocab, tokens, width, chunk = 151_936, 100, 4, 1 << 20
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = Targets(
        token_n=torch.arange(tokens),
        top_ids_nK=torch.arange(tokens * KEPT).reshape(tokens, KEPT),
        top_logprobs_nK=torch.full((tokens, KEPT), math.log(0.1)),
        tail_n=torch.full((tokens,), 0.2),
    )
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as made, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = chunked_losses(
            hidden,
            lambda rows: rows @ weight.T,
            targets,
            [LossTerm(name="kl")],
            num_columns=vocab,
            chunk_elements=chunk,
        )
        kept_for_backward = max(saved)
        loss.backward()
    assert made.largest <= chunk + 2 * tokens < vocab * tokens // 10
    assert kept_for_backward <= max(weight.numel(), hidden.numel())
