"""The ratios that bench.vllm_lengths prints and the prices that it charges; the bench itself is run by hand, since it
measures a machine."""

from __future__ import annotations

from math import nan
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.step_charges import Recorder, Taken, nearest, prices
from bench.vllm_lengths import SHIFTING, Turn, loads, main, rows_of, shifting, variants
from bench.vllm_lengths_tables import section
from pipeline.config import load_config
from specdec.controller import Adaptive
from vllm_draft_spec.tally import Step

ROOT = Path(__file__).resolve().parent.parent


def plain(seconds: float, k: int = 0, drafts: int | None = None, **more: object) -> Taken:
    """A step over one row by a worker that drafts in 0.1 s a token and verifies in the rest, but for 0.05 s."""
    timed = {"draft_s": 0.1 * k, "verify_s": seconds - 0.1 * k - 0.05}
    facts = {"rows": 1, "k": k, "drafts": k if drafts is None else drafts, "prompt": False, "seconds": seconds}
    return Taken(**{**facts, **timed, **more})  # type: ignore[arg-type]


def prompt(drafts: int, seconds: float = 2.0) -> Taken:
    return Taken(rows=1, k=0, drafts=drafts, prompt=True, seconds=seconds)


def test_ratios_are_of_the_same_turn() -> None:
    """The machine was half as fast in the second turn; the adaptive controller was 10 % behind in each."""
    one, two, adaptive = variants(1)
    assert isinstance(adaptive.controller, Adaptive)
    for each, speeds in ((one, [80, 40, 80]), (two, [100, 50, 100]), (adaptive, [90, 45, 90])):
        each.turns = [Turn(tokens=1, seconds=1 / speed, steps=[plain(1.0)]) for speed in speeds]
    rows = rows_of([one, two, adaptive], prices([plain(1.0)]), {"batch": 1, "prompt_set": "a"})
    assert [(row["controller"], pytest.approx(row["of_best_fixed"])) for row in rows] == [
        ("fixed 0", 0.8),
        ("fixed 1", 1.0),
        ("adaptive", 0.9),
    ]
    assert (rows[2]["prompt_set"], rows[2]["tokens_per_s"]) == ("a", pytest.approx(90))


def test_charges_leave_out_what_disturbed_a_turn() -> None:
    """Plain steps take 1 s and rounds of k = 1 take 1.2 s, but 9 s in the turn of the length that drafts: charged, it
    is ahead, since it needs half the steps. The adaptive controller's turn before was all plain."""
    zero, one, adaptive = variants(1)
    calm = [plain(1.0) for _ in range(10)], [plain(1.2, 1) for _ in range(10)]
    zero.turns = [Turn(tokens=10, seconds=10.0, steps=calm[0])]
    one.turns = [Turn(tokens=10, seconds=45.0, steps=[plain(9.0, 1) for _ in range(5)])]
    adaptive.before = [Turn(tokens=10, seconds=10.0, steps=calm[0])]
    adaptive.turns = [Turn(tokens=10, seconds=6.0, steps=calm[1][:5])]
    all_steps = [step for each in (zero, one, adaptive) for step in each.steps]
    at = prices([*all_steps, *calm[1]])
    assert at.of(plain(9.0, 1)) == pytest.approx(1.2)
    zero_row, one_row, adaptive_row = rows_of([zero, one, adaptive], at, {})
    assert one_row["of_best_fixed"] < 0.5 < 1.0 == one_row["charged_of_best_fixed"]
    assert zero_row["charged_of_best_fixed"] == pytest.approx(0.6)
    assert adaptive_row["charged_of_best_fixed"] == pytest.approx(1.0)
    assert adaptive_row["charged_from_start"] == pytest.approx(12.0 / 16.0)


def test_prices_keep_prompts_and_catching_up_apart() -> None:
    late = plain(1.6, 1, draft_s=0.4, caught_up=7)
    at = prices([plain(1.0), plain(1.2, 1), plain(1.2, 1), late, prompt(1, 3.0)])
    assert at.of(plain(nan, 0, drafts=1)) == pytest.approx(1.1), "verifies nothing, drafts one"
    assert at.of(late) == pytest.approx(1.2 + 0.3)
    assert (at.of(prompt(1)), at.of(prompt(0))) == (pytest.approx(3.0), pytest.approx(2.9))
    assert nearest({(1, 0): 1.0, (4, 2): 2.0}, (1, 2)) == 2.0
    busy = [plain(5.0, 1), plain(2.0, 3)]
    at = prices([plain(1.0), plain(1.2, 1)], busy)
    assert at.of(plain(nan, 1)) == pytest.approx(1.2), "of the steps that alternate"
    assert at.of(plain(nan, 3)) == pytest.approx(2.0), "where there is no other"
    with pytest.raises(ValueError, match="no step was timed"):
        prices([prompt(1)])


def test_the_recorder_tells_the_pilot_and_leaves_late_times_out() -> None:
    told = []
    pilot = SimpleNamespace(observe=told.append)
    recorder = Recorder(pilot)
    times = SimpleNamespace(draft_s=0.3, verify_s=0.7, batch=2, k=3, caught_up=5)
    step = Step(
        names=frozenset("ab"), prompt_tokens=0, rows=((3, 1), (3, 3)), prefill=0, plain_k=3, next_k=1, times=times
    )
    for k in (3, 2):
        times.k = k
        pilot.observe(step)
    fits, late = recorder.take()
    assert told == [step, step]
    assert (fits.rows, fits.k, fits.drafts, fits.draft_s, fits.caught_up) == (2, 3, 1, 0.3, 5)
    assert (fits.reached, fits.accepted) == (5, 4)
    assert late.draft_s != late.draft_s
    assert late.seconds >= 0
    assert recorder.take() == []


def test_the_shifting_load_takes_the_sets_furthest_apart() -> None:
    assert shifting({"a": 0.5, "b": 0.9, "c": 0.3}) == ("b", "c")
    sets = [
        '{name: a, source: "reasoning_gym:basic_arithmetic", limit: 3}',
        '{name: b, source: "reasoning_gym:gcd", limit: 5}',
    ]
    config = load_config(ROOT / "configs" / "tiny.yaml", [f"bench_vllm.prompts=[{', '.join(sets)}]"])
    assert {name: [len(batch) for batch in batches] for name, batches in loads(config, 2).items()} == {
        "a": [2, 1],
        "b": [2, 2, 1],
    }


def test_the_tables_say_what_is_charged_and_what_is_the_clocks() -> None:
    names = {"prompt_set": SHIFTING, "shifts_between": ["a", "b"]}
    measured = variants(1)
    for each, speed in zip(measured, (1.0, 2.0, 3.0), strict=True):
        each.turns = [Turn(tokens=4, seconds=4 / speed, steps=[plain(1.2, 1, reached=4, accepted=3)])] * 2
    at = prices(step for each in measured for step in each.steps)
    rows = rows_of(measured, at, names) + at.records()
    text = "\n".join(section({"rows": rows}))
    assert "a and b, the sets furthest apart" in text
    assert text.index("Charged") < text.index("By the clock")
    assert "| shifting | 0.5 | 1 | 1.5 |" in text
    old = [{key: row[key] for key in ("prompt_set", "controller", "of_best_fixed")} for row in rows[:3]]
    assert "harged" not in "\n".join(section({"rows": old})), "files from before the charges"


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    asked = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--out", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit):
        main([*asked, "--batch", "0"])
    assert "--batch is 0; expected a whole number from 1 on" in capsys.readouterr().err
    assert main([*asked, "--set", "bench_vllm.prompt=1"]) == 2
    assert "unknown key" in capsys.readouterr().err
