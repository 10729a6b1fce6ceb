"""report.html from a run's folder, and two runs compared: what stands in them, whatever the run holds or lacks."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench import report, report_compare, report_html
from bench.kernel_groups import GROUPS
from bench.report_data import read_run
from pipeline.results import gate
from tests.chromium import PROGRAM, browser
from tests.toy_results import PROVEN, WHERE, drafted, plain, write_draft, write_filter, write_run

SECTIONS = [
    *("recommendation", "gates", "methods", "speed", "pareto", "acceptance", "adaptive", "time", "profile", "memory"),
    *("training", "data", "rows", "provenance"),
]
HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}$\\frac{x}$ _x \x00 \ud800"
METRICS = (
    '{"step": 0, "loss": 2.0, "acc_low": 0.1, "top1": 0.2}\n{"step": 1, "loss": NaN, "acc_low": 0.2}\n{"step": 2, "lo'
)


class Ids(HTMLParser):
    """The ids of a page, its link and image targets, and the tags that were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.targets += [found[name] or "" for name in ("href", "src", "xlink:href") if name in found]


def page_of(folder: Path) -> str:
    [page, *tables] = report_html.write_report(read_run(folder), folder / "report.html")
    assert all(path.is_file() for path in tables)
    return page.read_text(encoding="utf-8")


def full_run(folder: Path, name: str = "arithmetic") -> Path:
    """A run with something for every section but the server's."""
    cell = WHERE | {"batch": 1, "context": 32, "k": 2, "controller": "fixed", "verify_ms": 3.0}
    shares = [cell | {"phase": "draft", "group": g, "group_ms": 1.0, "share": 1 / len(GROUPS)} for g in GROUPS]
    write_run(folder, [cell | {"cost_ratio": 0.1}, *shares], gates={}, stage="06_profile")
    write_filter(folder, name)
    write_draft(folder, METRICS, domain=name)
    rows = [
        row
        for batch in (1, 4)
        for row in (
            plain(batch, peak_memory_gib=1.0),
            drafted("ngram", 1.1 * batch, batch, speedup_ci=[1.05 * batch, 1.2 * batch], peak_memory_gib=1.5),
            drafted("model", 1.3, batch, draft=name, alpha_by_position=[0.5, None]),
        )
    ]
    return write_run(folder, [*rows, {"gate": "G1", "case": name, "tv": None, "passed": True}])


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = full_run(tmp_path_factory.mktemp("runs") / "demo")
    page_of(folder)
    return folder / "report.html"


def test_every_section_is_there_with_its_data_as_csv(page_path: Path) -> None:
    found = Ids(page_path.read_text(encoding="utf-8"))
    assert [each for each in found.ids if each in SECTIONS] == SECTIONS
    assert found.tags.count("svg") == 8
    folder = page_path.parent / "report_data"
    speeds = pd.read_csv(folder / "speed_by_batch.csv")
    assert set(speeds["drafter"]) == {"ngram", "model"}
    assert list(pd.read_csv(folder / "training_curves.csv")["step"]) == [0, 1]
    assert found.targets.count("#speed") == 1
    assert sum(target.startswith("data:text/csv") for target in found.targets) == len(list(folder.glob("*.csv")))


def test_page_asks_for_nothing_and_repeats_no_id(page_path: Path) -> None:
    found = Ids(page_path.read_text(encoding="utf-8"))
    assert all(target.startswith(("#", "data:")) for target in found.targets)
    assert len(found.ids) == len(set(found.ids))
    assert not {"link rel=stylesheet", "img", "iframe"} & set(found.tags)
    assert not re.search(r"@import|url\((?!#)", page_path.read_text(encoding="utf-8"))


def test_page_is_a_function_of_the_run(page_path: Path) -> None:
    assert page_of(page_path.parent) == page_path.read_text(encoding="utf-8")


def test_recommendation_gates_and_memory_are_on_top(page_path: Path) -> None:
    top = page_path.read_text(encoding="utf-8").partition('id="gates"')[0]
    for words in (
        "4.40x at batch 4",
        "G1 pass",
        "G6 not run",
        "The output is unchanged",
        "memory 1.5 GiB at the peak (plain decoding: 1)",
    ):
        assert words in top, words


@pytest.mark.parametrize("stage", ["04_bench_engine", "03_train_draft", "02_filter and no result"])
def test_a_run_of_one_stage_says_what_is_missing(tmp_path: Path, stage: str) -> None:
    folder = tmp_path / "demo"
    if stage == "04_bench_engine":
        write_run(folder, [plain(), drafted()])
    elif stage == "03_train_draft":
        write_draft(folder, METRICS)
    else:
        write_filter(folder)
        with pytest.raises(ValueError, match=r"no stage has a result\.json"):
            read_run(folder)
        return
    page = page_of(folder)
    assert ("Run scripts/03_train_draft.sh." in page) == (stage == "04_bench_engine")
    assert ("No speeds. Run scripts/04_bench_engine.sh." in page) == (stage == "03_train_draft")
    assert "Run scripts/06_profile.sh." in page


def test_a_failed_gate_is_the_first_thing_said(tmp_path: Path) -> None:
    gates = PROVEN | {"G2": gate("fail", value=0.9, limit=1.0, reason="3 texts differ")}
    page = page_of(write_run(tmp_path / "demo", [plain(), drafted()], gates=gates))
    headline = page.partition('class="headline"')[2].partition("</p>")[0]
    assert "G2 not proven, so not yet" in headline
    assert "The output is unchanged" not in page
    assert "3 texts differ" in page


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "demo", HOSTILE))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "{{ 7 * 7 }}" in page
    assert Ids(page).tags.count("script") == 1


def test_rows_of_nothing_and_of_other_stages_break_nothing(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"engine": "specdec"},
        WHERE | {"tokens_per_s": None, "alpha_by_position": []},
        plain() | {"verify_ms": None, "batch": None},
        drafted(alpha_by_position=[None, None], draft_step_ms=None, overhead_ms=None),
        {"engine": "vllm", "method": "eagle3", "batch": 4, "tokens_per_s": 9.0, "tpot_ms": 3.0, "ttft_ms": 1.0},
        {"engine": "vllm", "drafter": "none", "load": "open", "rate_share": 0.5, "tokens_per_s": 9.0, "tpot_ms": None},
    ]
    folder = write_run(tmp_path / "demo", odd)
    page = page_of(write_run(folder, odd, stage="05_bench_vllm", gates={}))
    assert [each for each in Ids(page).ids if each in SECTIONS] == SECTIONS


def test_a_servers_run_has_its_loads_and_methods(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "05_bench_vllm"
    folder.mkdir(parents=True)
    committed = Path(__file__).resolve().parent.parent / "results" / "serving_cpu.json"
    (folder / "result.json").write_bytes(committed.read_bytes())
    page = page_of(folder.parent)
    for words in ("With 4 requests at once (vLLM)", "vLLM under load", "plugin_adaptive", "Good requests:"):
        assert words in page, words


def test_a_huge_table_is_cut_on_the_page_and_whole_in_its_csv(tmp_path: Path) -> None:
    rows = [plain(batch) for batch in range(1, 260)]
    rows += [drafted("ngram", 1.5, batch, prompt_set=f"set {batch}") for batch in range(1, 260)]
    folder = write_run(tmp_path / "demo", rows)
    page = page_of(folder)
    assert len(page) < 3_000_000
    assert "more rows are in the CSV" in page
    assert len(pd.read_csv(folder / "report_data" / "rows_0.csv")) == len(rows)


def test_command_writes_both_pages_and_names_the_html_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))
    folder = write_run(tmp_path / "tiny", [plain(), drafted()])
    config = Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml"
    assert report.main(["--config", str(config)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "report.html")
    assert (folder / "RESULTS_ENGINE.md").is_file()


# --compare


def test_two_runs_are_compared_in_text_and_as_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))
    write_run(tmp_path / "a", [plain(), drafted("model", 1.5, draft="old", alpha=0.4)])
    failed = PROVEN | {"G2": gate("fail", value=0.9, limit=1.0, reason="3 texts differ")}
    write_run(tmp_path / "b", [plain(), drafted("model", 2.0, draft="new", alpha=0.7)], gates=failed)
    out = tmp_path / "comparison.html"
    assert report.main(["--compare", "a", str(tmp_path / "b"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"draft model \(old\), k = 2 / draft model \(new\), k = 2 +150 +200 +1.33 +higher", printed)
    assert re.search(r"0.4 +0.7 +0.3 +higher", printed)
    assert re.search(r"^G2 +pass +fail", printed, re.MULTILINE)
    assert Ids(out.read_text(encoding="utf-8")).ids[1:] == [
        *("recommendation", "recommendation-2", "speed", "acceptance", "gates", "settings"),
    ]


@pytest.mark.parametrize(
    "old, new, said",
    [
        ({"x": 100.0}, {"x": 105.0}, "no clear difference"),
        ({"x": 100.0}, {"x": 120.0}, "higher"),
        ({"x": 100.0, "x_ci": [99, 101]}, {"x": 105.0, "x_ci": [104, 106]}, "higher"),
        ({"x": 100.0, "x_ci": [90, 110]}, {"x": 120.0, "x_ci": [105, 130]}, "no clear difference"),
        ({"x": 100.0, "x_ci": [99, 101]}, {"x": 95.0, "x_ci": [94, 96]}, "lower"),
        ({"x": None}, {"x": 1.0}, "-"),
    ],
)
def test_what_counts_as_a_difference(old: Any, new: Any, said: str) -> None:
    assert report_compare.verdict(old, new, "x") == said


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    for name, heldout in (("a", 0.2), ("b", 0.3)):
        write_filter(tmp_path / name)
        done = tmp_path / name / "02_filter" / "done.json"
        done.write_text(done.read_text().replace("0.2", str(heldout)))
        write_run(tmp_path / name, [plain()])
    sections = {s.id: s for s in report_compare.compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))}
    [settings] = sections["settings"].blocks
    assert settings.frame.to_numpy().tolist() == [["02_filter", "filter.heldout", "0.2", "0.3"]]
    assert "No method was measured" not in sections["speed"].missing


def test_comparing_with_nothing_is_an_error(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--compare", "a", "b"]) == 2
    assert "neither a folder nor a run under" in capsys.readouterr().err


# in a browser

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
INK = "getComputedStyle(document.body).color + getComputedStyle(document.querySelector('svg text')).fill"
SEEN = "[...document.querySelectorAll('section')].filter(s => s.getBoundingClientRect().height > 40).map(s => s.id)"
TALL = "Math.min(...[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height))"


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; .ci/run installs it")
def test_page_in_a_browser(tmp_path: Path) -> None:
    """No error on the console, no request, every section, and nothing wider than a desktop's or a phone's window."""
    folder = full_run(tmp_path / "demo", HOSTILE + "x" * 300)
    page_of(folder)
    inks = {}
    with browser(tmp_path / "profile") as page:
        page.open(folder / "report.html")
        for width in (1280, 390):
            for theme in ("light", "dark"):
                page.view(width=width, theme=theme)
                assert page.evaluate(OVERFLOW) <= 0, (width, theme)
                assert page.evaluate(SEEN) == SECTIONS
                assert page.evaluate(TALL) > 90
                inks[theme] = page.evaluate(INK)
        assert page.problems == []
        assert len(page.requests) == 1
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate(INK) == inks["light"] != inks["dark"]
