"""The sweep: completions by many rows at once, batches without masks, losses on the whole law, several drafts trained
at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.tiny_models import tiny_model
from pipeline import drafts, models, tiny
from specdec import Engine, Request, SamplingParams
from train import sweep, sweep_batches, sweep_policy, sweep_traces
from train.losses import Targets
from train.sweep_losses import TeacherLaw, acceptance, loss_of
from train.sweep_models import Teacher, make_student, student_logits
from train.sweep_plan import load_plan
from train.texts import Text, load_texts, save_texts


def text(prompt: list[int], completion: list[int], source: str = "a", temperature: float = 1.0) -> Text:
    return Text(
        source=source,
        prompt=np.array(prompt, np.int32),
        completion=np.array(completion, np.int32),
        temperature=temperature,
    )


TEXTS = [text([1, 2, 3], [4, 5]), text([6], [7, 1, 2, 3], "b", 0.0), text([5, 5], [1, 2, 6])]


def test_texts_come_back(tmp_path: Path) -> None:
    save_texts(tmp_path / "t.npz", TEXTS)
    back = load_texts([tmp_path / "t.npz", tmp_path / "t.npz"])
    assert [(t.source, t.prompt.tolist(), t.completion.tolist(), t.temperature) for t in back[3:]] == [
        (t.source, t.prompt.tolist(), t.completion.tolist(), t.temperature) for t in TEXTS
    ]


def test_batch_predicts_every_completion_token_and_no_other() -> None:
    """Padding on the right, causal attention: each wanted place gives the logits of the text alone."""
    batch = sweep_batches.batch_of(TEXTS, [1, 2, 0], "cpu")
    assert batch.next_N.tolist() == [7, 1, 2, 3, 1, 2, 6, 4, 5]
    assert batch.text_N.tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    model = tiny_model("llama", vocab=8, dtype=torch.float64)
    with torch.no_grad():
        together = model(batch.ids_BT).logits.flatten(0, 1)[batch.at_N]
        alone = model(torch.tensor([[5, 5, 1, 2, 6]])).logits[0, 1:4]
    assert torch.allclose(together[4:7], alone, atol=1e-6)


def test_groups_hold_every_text_once() -> None:
    many = [text([1] * (1 + n % 7), [2] * (1 + n % 5)) for n in range(50)]
    groups = sweep_batches.grouped(many, 40, np.random.default_rng(0))
    assert sorted(n for group in groups for n in group) == list(range(50))
    for group in groups:
        assert len(group) * max(len(many[n].prompt) + len(many[n].completion) for n in group) <= 40


def random_law(positions: int, vocab: int, head: int) -> tuple[torch.Tensor, TeacherLaw]:
    torch.manual_seed(0)
    logp_NV = (2 * torch.randn(positions, vocab, dtype=torch.float64)).log_softmax(1)
    top_NK, ids_NK = logp_NV.topk(8)
    targets = Targets(
        token_n=torch.randint(0, vocab, (positions,)),
        top_ids_nK=ids_NK,
        top_logprobs_nK=top_NK,
        tail_n=1 - top_NK.exp().sum(1),
    )
    columns_V = torch.arange(vocab).clamp(max=head)
    return logp_NV, TeacherLaw(logp_NH=logp_NV[:, :head], targets=targets, columns_V=columns_V)


def test_dense_losses_are_those_of_the_whole_law() -> None:
    logp_NV, law = random_law(20, 30, 30)
    logits = torch.randn(20, 30, dtype=torch.float64)
    p, logq = logp_NV.exp(), logits.log_softmax(1)
    assert loss_of("dense:kl", logits, law, 0.0).item() == pytest.approx((p * (logp_NV - logq)).sum(1).mean().item())
    assert loss_of("dense:reverse_kl", logits, law, 0.0).item() == pytest.approx(
        (logq.exp() * (logq - logp_NV)).sum(1).mean().item()
    )
    overlap = torch.minimum(p, logq.exp()).sum(1)
    assert loss_of("dense:tv", logits, law, 0.0).item() == pytest.approx(1 - overlap.mean().item())
    assert torch.allclose(acceptance(logits, law), overlap)


def test_names_of_losses() -> None:
    _, law = random_law(20, 30, 12)
    logits = torch.randn(20, 12, dtype=torch.float64)
    first, second = (loss_of(name, logits, law, 0.0) for name in ("dense:kl", "dense:tv"))
    assert loss_of("dense:kl>dense:tv", logits, law, 0.4) == first
    assert loss_of("dense:kl>dense:tv", logits, law, 0.6) == second
    assert loss_of("dense:kl+dense:tv", logits, law, 0.0) == pytest.approx(((first + second) / 2).item())
    with pytest.raises(ValueError, match="loss is 'dense:l2'; expected ce"):
        loss_of("dense:l2", logits, law, 0.0)


def test_narrowed_law_is_that_of_the_smaller_head() -> None:
    _, law = random_law(20, 30, 12)
    _, small = random_law(20, 30, 5)
    logits = torch.randn(20, 5, dtype=torch.float64)
    for name in ("ce", "dense:kl", "top8:kl"):
        assert loss_of(name, logits, law.narrowed(5), 0.0) == loss_of(name, logits, small, 0.0)


def test_teacher_gives_the_targets_own_law() -> None:
    target = tiny_model("llama", vocab=16, hidden=32, tied=True, dtype=torch.float32)
    head = [3, 1, 7, 9]
    batch = sweep_batches.batch_of(TEXTS, [0, 1, 2], "cpu")
    law = Teacher(target, head).law(batch)
    with torch.no_grad():
        expected = target(batch.ids_BT).logits.flatten(0, 1)[batch.at_N].log_softmax(1)
    assert torch.allclose(law.logp_NH, expected[:, head], atol=1e-5)
    assert torch.equal(law.targets.top_ids_nK[:, 0], expected.argmax(1))
    assert law.columns_V[[3, 1, 7, 9, 0]].tolist() == [0, 1, 2, 3, 4]


def test_kept_states_give_the_same_law_without_the_target() -> None:
    """Batches of an epoch come again as they were; what fits is kept, the rest is made again."""
    target = tiny_model("llama", vocab=16, hidden=32, tied=True, dtype=torch.float32)
    stream = sweep_batches.endless_batches(TEXTS, 5, 0, "cpu")
    batches = [next(stream) for _ in range(2 * len(TEXTS))]
    first, again = ({b.number: b for b in batches[i : i + 3]} for i in (0, 3))
    assert first.keys() == again.keys()
    one = Teacher(target, [3, 1, 7, 9])._states(first[0]).nbytes
    teacher = Teacher(target, [3, 1, 7, 9], keep=2.5 * one)
    laws = {number: teacher.law(batch) for number, batch in first.items()}
    with torch.no_grad():
        for parameter in target.get_decoder().layers.parameters():
            parameter.zero_()
    for number, batch in again.items():
        assert torch.equal(batch.ids_BT, first[number].ids_BT)
        same = torch.equal(teacher.law(batch).logp_NH, laws[number].logp_NH)
        assert same == (number in teacher._kept)
    assert 0 < len(teacher._kept) < 3
    assert sum(states.nbytes for states in teacher._kept.values()) <= 2.5 * one


def test_texts_of_heldout_prompts_are_left_out() -> None:
    assert sweep.without_heldout(TEXTS, [text([6], [1]), text([1, 2], [3])]) == [TEXTS[0], TEXTS[2]]


def test_an_interrupt_ends_the_training_and_keeps_what_is_trained(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_texts(tmp_path / "train.npz", [text([s], [s + 1]) for s in range(10, 30)])
    save_texts(tmp_path / "held.npz", [text([s], [s + 1], "a", t) for s in (40, 41) for t in (0.0, 1.0)])
    step, taken = sweep.Run.step, iter(range(100))

    def interrupted(run: sweep.Run, *args: Any) -> None:
        step(run, *args)
        if next(taken) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(sweep.Run, "step", interrupted)
    cells = [{"name": "kl", "loss": "dense:kl", "layers": 1, "head": 20, "tokens": 1e9}]
    arguments = ["--target", str(target_folder), "--dtype", "float32", "--texts", str(tmp_path / "train.npz"),
                 "--heldout", str(tmp_path / "held.npz"), "--cells", json.dumps(cells), "--batch-tokens", "8",
                 "--out", str(tmp_path / "out")]  # fmt: skip
    assert sweep.main(arguments) == 0
    [row] = json.loads((tmp_path / "out" / "rows.json").read_text())["rows"]
    assert row["steps"] == 4
    assert (tmp_path / "out" / "kl" / drafts.BORROWS).is_file()


def test_students_share_the_frozen_embedding_and_leave_the_target_alone() -> None:
    target = tiny_model("llama", vocab=16, layers=2, hidden=32, tied=True, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    one, two = (make_student(target, 1, [3, 1, 7, 9]) for _ in range(2))
    batch = sweep_batches.batch_of(TEXTS, [0, 1, 2], "cpu")
    student_logits(one, batch).sum().backward()
    for parameter in one.parameters():
        if parameter.requires_grad:
            parameter.data -= parameter.grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert one.get_input_embeddings().weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    folder.mkdir()
    tiny.make("llama", folder)
    return folder


def test_the_writer_gives_the_engines_greedy_texts(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, prefilled in parts, refilled in bulk when they end: still each its own text."""
    monkeypatch.setattr(sweep_traces, "CHECK_EVERY", 2)
    monkeypatch.setattr(sweep_traces, "PREFILL_ROWS", 3)
    writer = sweep_traces.Writer(str(target_folder), dtype="float32", rows=5, max_tokens=24, longest=50, seconds=600)
    # byte tokens that a random model says now and then, so that rows end at different steps
    writer.stops_S = torch.arange(0, 260, 13, device=writer.model.device)
    prompts = [text([(7 * n + i) % 250 for i in range(2 + 3 * n)], []) for n in range(14)]
    found = writer.complete([(prompt, 0.0) for prompt in prompts], 24)
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    params = SamplingParams(max_tokens=24, stop_ids=writer.stops_S.tolist())
    expected = Engine(model, k=0, num_slots=14, capacity=80).generate(
        [Request(prompt_ids=prompt.prompt.tolist(), params=params) for prompt in prompts]
    )
    assert len(found) == len(prompts)
    by_prompt = {tuple(each.prompt.tolist()): each.completion.tolist() for each in found}
    assert [by_prompt[tuple(prompt.prompt.tolist())] for prompt in prompts] == [each.token_ids for each in expected]
    assert len({len(each.token_ids) for each in expected}) > 2


def test_the_writer_draws_from_the_targets_law(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens of 4,000 rows against the model's own probabilities: total variation within its sampling noise, a
    mean of sum sqrt(p (1 - p)) / sqrt(2 pi N) and 4 of its standard deviations, at most 1 / (2 sqrt N) each."""
    torch.manual_seed(0)
    monkeypatch.setattr(sweep_traces, "CHECK_EVERY", 1)
    rows = 4000
    writer = sweep_traces.Writer(str(target_folder), dtype="float32", rows=rows, max_tokens=1, longest=8, seconds=600)
    prompt = text([5, 6, 7], [])
    drawn = np.array([t.completion[0] for t in writer.complete([(prompt, 1.0)] * rows, 1)])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(target_folder)
        p = model(torch.tensor([[5, 6, 7]])).logits[0, -1].double().softmax(0).numpy()
    distance = np.abs(np.bincount(drawn, minlength=len(p)) / rows - p).sum() / 2
    noise = np.sqrt(p * (1 - p)).sum() / np.sqrt(2 * np.pi * rows)
    assert distance < noise + 4 / (2 * np.sqrt(rows))


def test_at_the_deadline_what_is_done_is_kept(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_traces, "CHECK_EVERY", 1)
    writer = sweep_traces.Writer(str(target_folder), dtype="float32", rows=2, max_tokens=8, longest=8, seconds=600)
    writer.stops_S = writer.stops_S[:0]
    step, taken = writer._step, iter(range(100))

    def late_after_ten() -> None:
        step()
        if next(taken) == 10:
            writer.ends = 0.0

    monkeypatch.setattr(writer, "_step", late_after_ten)
    found = writer.complete([(text([n, n + 1], []), 0.0) for n in range(20)], 8)
    assert [len(each.completion) for each in found] == [8, 8], "of rows that were writing, nothing is kept"


def test_sweep_trains_and_its_draft_is_loaded(target_folder: Path, tmp_path: Path) -> None:
    """Texts that always count up: acceptance on held-out ones rises, and the saved folder, which borrows its
    embedding, is a draft that `resolve` completes to the trained weights."""
    rng = np.random.default_rng(0)
    starts = rng.integers(10, 200, 64)
    texts = [text([s, s + 1], [s + 2, s + 3, s + 4, s + 5]) for s in starts.tolist()]
    save_texts(tmp_path / "train.npz", texts)
    heldout = [text([s, s + 1, s + 2], [s + 3, s + 4, s + 5]) for s in starts[:8].tolist()]
    save_texts(tmp_path / "held.npz", [*heldout, *(text([s], [s + 1], "a", 0.0) for s in (20, 30))])
    cells = [
        {"name": "kl", "loss": "dense:kl", "layers": 2, "head": 150, "tokens": 4000, "lr": 5e-3},
        {"name": "ce", "loss": "ce", "layers": 1, "head": 60, "tokens": 500, "lr": 5e-3},
    ]
    out = tmp_path / "out"
    arguments = ["--target", str(target_folder), "--dtype", "float32", "--texts", str(tmp_path / "train.npz"),
                 "--heldout", str(tmp_path / "held.npz"), "--cells", json.dumps(cells), "--batch-tokens", "120",
                 "--stock", "--out", str(out)]  # fmt: skip
    assert sweep.main(arguments) == 0
    rows = json.loads((out / "rows.json").read_text())["rows"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["kl"]["alpha_t1"] > by_name["stock-2"]["alpha_t1"] + 0.1
    assert by_name["kl"]["tokens_trained"] >= 4000 > by_name["ce"]["tokens_trained"] >= 500
    assert (out / "kl" / drafts.BORROWS).is_file()
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    [again] = sweep.beside_rows(str(out / "kl"), target, load_texts([tmp_path / "held.npz"]), 120)
    assert again["alpha_t1"] == pytest.approx(by_name["kl"]["alpha_t1"], abs=0.02), "bfloat16 alone differs"
    folder = models.resolve(str(out / "kl"))
    head_ids = json.loads((folder / "head_ids.json").read_text())
    assert len(head_ids) == len(set(head_ids)) <= 150


def test_own_texts_continue_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_policy, "ROWS", 8)
    monkeypatch.setattr(sweep_policy, "GRID", 2)
    student = make_student(tiny_model("llama", vocab=16, hidden=32, tied=True, dtype=torch.float32), 1, [3, 1, 7, 9])
    teacher_batches = sweep_batches.endless_batches(TEXTS, 40, 0, "cpu")
    stream = sweep_policy.mixed_with_own(teacher_batches, student, torch.tensor([3, 1, 7, 9]), TEXTS * 2, 3)
    for number in range(6):
        batch = next(stream)
        if number % 2:
            assert len(batch.at_N) == 2 * 3  # a quarter of the rows, only what the student wrote
            assert set(batch.next_N.tolist()) <= {3, 1, 7, 9}


def test_the_plan_of_the_project_has_options_that_the_programs_know() -> None:
    plan = load_plan(Path(__file__).resolve().parent.parent / "configs" / "sweep_smollm2.json")
    for options in (plan.texts.options, plan.texts.heldout_options):
        assert sweep_traces._arguments(["--target", "t", "--prompts", "p", "--out", "o", *options]).copies
    for each in plan.processes:
        given = ["--target", "t", "--texts", "p", "--heldout", "h", "--cells", "[]", "--out", "o"]
        assert sweep._arguments([*given, *each.options, *plan.smaller]).batch_tokens == 8192
