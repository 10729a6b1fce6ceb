"""A round is capturable: fixed shapes, no host synchronisation (the capture itself needs a GPU)."""

import pytest
import torch

from bench.graph_round import compare, prefilled_engine, requests_of, round_of, state_tensors
from bench.tiny_models import noisy_copy, tiny_model
from specdec import sampling
from specdec.report import REPORT_COLUMNS


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_captured_round_replays_with_the_eager_result(k: int) -> None:
    row = compare(k)
    assert row["reports_equal"]
    assert row["state_equal"]
    assert row["rows_finished"] > 0  # rows that end inside the comparison are part of it


def test_a_round_reads_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever turns a tensor into a Python value would break a capture: none is called inside a round."""
    target = tiny_model(vocab=32, layers=1)
    requests = requests_of(32)
    engine = prefilled_engine(target, noisy_copy(target, noise=0.2, seed=1), 3, requests)
    run = round_of(engine, 3, requests)

    def refuse(self: torch.Tensor, *_: object) -> None:
        raise AssertionError("a round copied a tensor to the host")

    monkeypatch.setattr(sampling, "_sorted_descending", lambda x: x.sort(dim=-1, descending=True).values)  # as on a GPU
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with torch.inference_mode():
        report = run()
    monkeypatch.undo()
    assert report.shape == (len(requests), len(REPORT_COLUMNS) + 4)


def test_a_round_keeps_every_buffer_where_it_is() -> None:
    """A graph replays on addresses: a round must write in place, never rebind."""
    target = tiny_model(vocab=32, layers=1)
    requests = requests_of(32)
    engine = prefilled_engine(target, noisy_copy(target, noise=0.2, seed=1), 3, requests)
    before = [t.data_ptr() for t in state_tensors(engine)]
    run = round_of(engine, 3, requests)
    with torch.inference_mode():
        run()
    assert [t.data_ptr() for t in state_tensors(engine)] == before
