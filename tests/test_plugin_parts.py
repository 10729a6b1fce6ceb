"""The plugin's pure parts: tokens owed, sampling of drafts, kept laws, marks of time. No vLLM is needed.

Shapes: B rows, k drafts, V vocabulary, N drafts in all.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_draft_spec.drafting import drop_beyond, in_target_vocabulary, sample_draft, without_dropped
from vllm_draft_spec.laws import Laws, certain, without_drafts
from vllm_draft_spec.pending import Pending
from vllm_draft_spec.timing import StepClock, plain_k


def test_owed_tokens_come_request_by_request_in_order() -> None:
    """Rows move and leave between steps, and vLLM overwrites the buffers that it passed."""
    pending = Pending()
    buffer = torch.tensor([10, 20])
    pending.add(["a", "b"], buffer, torch.tensor([4, 7]))
    buffer[:] = torch.tensor([21, 11])
    pending.add(["b", "a"], buffer, torch.tensor([8, 5]))
    pending.add(["a"], torch.tensor([12]), torch.tensor([6]))
    assert (pending.total, pending.longest, pending.lags) == (5, 3, {"a": 3, "b": 2})
    owed = pending.take()
    assert (owed.names, owed.lengths) == (["a", "b"], [3, 2])
    assert owed.tokens_N.tolist() == [10, 11, 12, 20, 21]
    assert owed.positions_N.tolist() == [4, 5, 6, 7, 8]
    assert (pending.total, pending.longest, pending.lags) == (0, 0, {})


def test_drafts_follow_the_law_that_is_kept() -> None:
    """Frequencies of 40,000 rows: a sampled row at its temperature, a greedy row, and one under a grammar."""
    rows = 40_000
    logits_V = torch.tensor([1.0, 0.0, 2.0, -torch.inf])
    noise_BV = torch.empty(rows, 4).exponential_(generator=torch.Generator().manual_seed(0))
    temperature_B = torch.full((rows,), 0.7)
    ids_B, laws_BV = sample_draft(logits_V.expand(rows, 4), temperature_B, noise_BV, None)
    expected_V = (logits_V / 0.7).softmax(-1)
    assert torch.allclose(laws_BV, expected_V.expand(rows, 4))
    seen_V = torch.bincount(ids_B, minlength=4) / rows
    assert (seen_V - expected_V).abs().max() < 5 * 0.5 / rows**0.5
    temperature_B = torch.tensor([0.0, 0.7, 0.7])
    certain_B = torch.tensor([False, True, False])
    ids_B, laws_BV = sample_draft(logits_V.expand(3, 4), temperature_B, noise_BV[:3], certain_B)
    assert ids_B[:2].tolist() == [2, 2]
    assert laws_BV[1].tolist() == [0, 0, 1, 0]
    assert torch.allclose(laws_BV[2], expected_V)


def test_a_draft_whose_logits_are_not_finite_has_no_law() -> None:
    """All zeros: vLLM's rejection sampler rejects such a draft always and draws from the target's law instead."""
    logits_BD = torch.tensor([[torch.nan, 0.0, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3, [0.0, 0.0, 5.0]])
    certain_B = torch.tensor([False, True, False, False])
    for fixed_B in (None, certain_B):
        ids_B, laws_BD = sample_draft(logits_BD, torch.tensor([0.7, 0.7, 0.0, 0.7]), torch.ones(4, 3), fixed_B)
        assert laws_BD[:3].eq(0).all()
        assert laws_BD[3].sum() == pytest.approx(1.0)
        assert ids_B.ge(0).logical_and(ids_B < 3).all(), "the next draft step is fed with them"


def test_a_law_moves_to_the_targets_ids() -> None:
    """Draft ids 0, 2 and 3 exist in the target, as 4, 0 and 1; id 1 does not, and its law is zero there."""
    law = in_target_vocabulary(torch.tensor([[0.5, 0.0, 0.3, 0.2]]), torch.tensor([4, -1, 0, 1]), 5)
    assert torch.allclose(law, torch.tensor([[0.3, 0.2, 0.0, 0.0, 0.5]]))


def test_drafts_beyond_the_drafts_context_are_dropped() -> None:
    """Context 10: the token at position 9 may still be fed. Row 0 is far away, row 1 can make one draft, row 2 none."""
    ids_Bk, laws_BkV = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.full((3, 2, 7), 1 / 7)
    kept, laws = drop_beyond(ids_Bk, laws_BkV, 10 - torch.tensor([4, 9, 10]))
    assert kept.tolist() == [[1, 2], [3, -1], [-1, -1]]
    assert laws is not None
    assert laws.sum(-1).round().tolist() == [[1, 1], [1, 0], [0, 0]]
    assert drop_beyond(ids_Bk, None, 10 - torch.tensor([4, 9, 10]))[1] is None
    assert without_dropped(kept.tolist()) == [[1, 2], [3], []]


def test_laws_are_kept_until_their_drafts_are_verified() -> None:
    """Request b does not fit into the second step; its drafts of the first are verified in the third."""
    laws, living = Laws(), {"a", "b", "c"}
    first_BkV, second_BkV = torch.rand(2, 3, 5), torch.rand(2, 2, 5)
    laws.keep(["a", "b"], first_BkV, living)
    drafts_N = torch.tensor([1, 2, 3, 1, 2, 3])
    whole = laws.of(["a", "b"], [3, 3], drafts_N)
    assert whole is not None
    assert whole.data_ptr() == first_BkV.data_ptr()  # the common case copies nothing
    laws.keep(["c", "a"], second_BkV, living)
    got = laws.of(["a", "b", "c"], [2, 3, 1], drafts_N)
    assert torch.equal(got, torch.cat([second_BkV[1], first_BkV[1], second_BkV[0, :1]]))
    assert torch.equal(laws.of(["a", "b"], [0, 2], drafts_N[:2]), first_BkV[1, :2])


def test_a_row_without_laws_does_not_make_the_others_certain() -> None:
    """The placeholders of a new request: all zeros, so that what follows their rejection is the target's own law."""
    laws = Laws()
    laws_BkV = torch.rand(1, 2, 5)
    laws.keep(["a"], laws_BkV, {"a", "new"})
    got = laws.of(["new", "a"], [2, 2], torch.tensor([-1, -1, 3, 4]))
    assert torch.equal(got, torch.cat([torch.zeros(2, 5), laws_BkV[0]]))
    assert laws.of(["new"], [2], torch.tensor([-1, -1])) is None
    assert certain(torch.tensor([2, -1]), 4).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]


def test_certain_drafts_and_finished_requests_leave_no_law() -> None:
    laws = Laws()
    laws.keep(["a", "b"], torch.rand(2, 2, 5), {"a", "b"})
    laws.keep(["a"], None, {"a"})
    assert laws.of(["a", "b"], [2, 2], torch.tensor([1, 2, 3, 4])) is None


def test_a_preempted_request_leaves_its_law() -> None:
    """It may come back with placeholders, for which its old law is wrong; and it would keep the law of a whole step."""
    laws = Laws()
    laws.keep(["a", "b", "new"], torch.rand(3, 2, 5), {"a", "b", "new"})
    arrival = SimpleNamespace(req_id="new")
    laws.forget(without_drafts(SimpleNamespace(preempted_req_ids={"a"}, scheduled_new_reqs=[arrival])))
    got = laws.of(["a", "b", "new"], [2, 2, 2], torch.tensor([-1, -1, 3, 4, -1, -1]))
    assert got is not None
    assert got[[0, 1, 4, 5]].sum() == 0
    assert without_drafts(SimpleNamespace(preempted_req_ids=None, scheduled_new_reqs=[])) == []


def step(tokens: dict[str, int], drafts: dict[str, list[int]] | None = None, new: tuple[str, ...] = ()) -> object:
    return SimpleNamespace(
        num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts or {}, scheduled_new_reqs=list(new)
    )


@pytest.mark.parametrize(
    "scheduled, k",
    [
        (step({"a": 1, "b": 1}), 0),
        (step({"a": 3, "b": 3}, {"a": [1, 2], "b": [3, 4]}), 2),
        (step({"a": 3, "b": 1}, {"a": [1, 2]}), 2),  # a drafter that found none for b
        (step({"a": 3, "b": 2}, {"a": [1, 2]}), None),
        (step({"a": 1, "b": 20}), None),  # a prompt's chunk
        (step({"a": 1}, new=("a",)), None),
        (step({}), None),
    ],
)
def test_plain_steps(scheduled: object, k: int | None) -> None:
    assert plain_k(scheduled) == k


def run_step(clock: StepClock, scheduled: object, k: int, caught_up: int = 0, timed: bool = True) -> object:
    clock.begin(scheduled)
    for _ in range(3):
        clock.mark()
    clock.end(k, caught_up, timed=timed)
    return clock.newest()


def test_a_round_is_one_steps_drafts_and_the_next_steps_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks at 0, 1, 2, ... seconds: begin, caught up, drafting, done. The first step can have no round yet."""
    seconds = iter(range(100))
    monkeypatch.setattr("vllm_draft_spec.timing.time.perf_counter", lambda: float(next(seconds) ** 2))
    clock = StepClock(torch.device("cpu"))
    plain, drafting = step({"a": 1, "b": 1}), step({"a": 3, "b": 3}, {"a": [1, 2], "b": [3, 4]})
    assert run_step(clock, plain, 2, caught_up=5) is None
    times = run_step(clock, drafting, 0)
    assert (times.batch, times.k, times.caught_up) == (2, 2, 5)
    assert (times.draft_s, times.verify_s) == ((1 - 0) + (9 - 4), 36 - 25)
    times = run_step(clock, plain, 0)
    assert (times.batch, times.k, times.caught_up) == (2, 0, 0)
    assert run_step(clock, step({"a": 1}), 0) is None, "another batch"
    assert run_step(clock, step({"a": 9}), 0) is None, "a prompt's chunk"
    assert run_step(clock, step({"a": 1}), 0) is None, "drafted after a prompt's chunk"
    assert run_step(clock, step({"a": 1}), 0, timed=False) is not None, "drafts made in the step before"
    assert run_step(clock, step({"a": 1}), 4) is None, "a graph was made while drafting"
    fewer = run_step(clock, step({"a": 3}, {"a": [1, 2]}), 1)
    assert (fewer.batch, fewer.k) == (1, 2), "a drafter that found two of four"
    assert run_step(clock, step({"a": 3}, {"a": [1, 2]}), 0) is None, "more than were drafted"


def test_events_that_the_device_has_not_passed_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose host is two steps ahead: nothing waits, and the newest finished round comes later."""
    passed = {"until": 0}
    made: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.number = len(made)
            made.append(self)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.number < passed["until"]

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    plain = step({"a": 1})
    assert [run_step(clock, plain, 0) for _ in range(3)] == [None, None, None]
    passed["until"] = 12
    times = run_step(clock, plain, 0)
    assert (times.draft_s, times.verify_s) == (2.0, 1.0)
    assert clock.newest() is None
