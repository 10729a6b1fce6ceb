"""Stage 05 by several workers: the rows of a single process, whatever dies in between, and nothing measured twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from here_executor import HereExecutor
from serving_stand_in import DRAFT, config_with, rows_of, use_stand_in

from bench import serving_grid
from bench.bench_serving import STAGE, body
from pipeline import fan_out, manifest
from pipeline.results import read_result
from pipeline.stage import StageStopped, run_stage
from pipeline.worker import DriverGoneError

METHODS: list[dict[str, Any]] = [
    {"name": "a", "speculative_config": DRAFT},
    {"name": "bad", "speculative_config": {"method": "mtp"}, "env": {"FAKE": "dies"}},
    {"name": "b", "speculative_config": DRAFT, "plugin": {}},
]
LOADS = ("c1", "c4", "r0.5")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> HereExecutor:
    """Workers in this process, servers of the stand-in."""
    use_stand_in(monkeypatch)
    executor = HereExecutor()
    monkeypatch.setattr(fan_out, "make_executor", lambda *_: executor)
    monkeypatch.setitem(fan_out.POLL_SECONDS, "local", 0.0)
    return executor


def units(method: str) -> list[str]:
    return [f"texts-{method}.json", *(f"load-{method}-{load}.json" for load in LOADS)]


def steady(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what the machine does besides."""
    return [{key: value for key, value in row.items() if key != "load_average"} for row in rows]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that were measured, in order."""
    names: list[str] = []
    publish = serving_grid.Grid._publish
    monkeypatch.setattr(serving_grid.Grid, "_publish", lambda *given: (names.append(given[1]), publish(*given)))
    return names


def test_methods_shared_out_give_the_rows_of_one_process(
    tmp_path: Path, data_root: Path, here: HereExecutor, made: list[str]
) -> None:
    alone = run_stage(STAGE, config_with(tmp_path, METHODS, "run=one"), body)
    alone_made = sorted(made)
    made.clear()
    shared = run_stage(STAGE, config_with(tmp_path, METHODS, "run=two", "workers.servers=2"), body)
    assert steady(rows_of(shared)) == steady(rows_of(alone))
    assert [row["not_run"] is None for row in rows_of(shared)] == [name != "bad" for name in METHOD_OF_ROW]
    results = [read_result(folder / "result.json") for folder in (alone, shared)]
    assert results[0]["gates"] == results[1]["gates"]
    assert results[0]["device"] == results[1]["device"]
    assert sorted(made) == alone_made
    first, second, third = here.tasks
    assert first.units == tuple(units("none")), "open loads are shares of its rate, so it is served first, alone"
    assert second.units == (*units("a"), *units("b"))
    assert third.units == tuple(units("bad"))
    assert first.given == {}
    assert list(second.given) == ["load-none-c1.json", "load-none-c4.json"]
    assert (shared / "logs" / "b.log").is_file()
    assert not list((data_root / "two").glob(".*/*")), "the workers' folder goes when the stage is done"
    assert run_stage(STAGE, config_with(tmp_path, METHODS, "run=two"), body) == shared, "no part of the result"


METHOD_OF_ROW = [name for name in ("none", "a", "bad", "b") for _ in LOADS]


def test_closed_loads_alone_are_shared_out_at_once(tmp_path: Path, data_root: Path, here: HereExecutor) -> None:
    settings = {"rate_shares": [], "concurrencies": [1]}
    folder = run_stage(STAGE, config_with(tmp_path, METHODS[:1], "workers.servers=8", **settings), body)
    assert [task.units for task in here.tasks] == [
        (f"texts-{name}.json", f"load-{name}-c1.json") for name in ("none", "a")
    ]
    assert {row["not_run"] for row in rows_of(folder)} == {None}


def test_a_worker_that_dies_in_the_middle_of_a_method_goes_on_with_the_rest_of_it(
    tmp_path: Path, data_root: Path, here: HereExecutor, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, died = serving_grid.Grid._load, []

    def dying(grid: serving_grid.Grid, *given: Any) -> dict[str, Any]:
        if "texts-a.json" in made and "load-a-c1.json" in made and not died:
            died.append(given)
            raise RuntimeError("out of luck")
        return load(grid, *given)

    monkeypatch.setattr(serving_grid.Grid, "_load", dying)
    folder = run_stage(STAGE, config_with(tmp_path, METHODS[:1], "workers.servers=1"), body)
    assert died
    assert made == [*units("none"), *units("a")], "each once"
    assert here.tasks[-1].units == ("load-a-c4.json", "load-a-r0.5.json")
    assert {row["not_run"] for row in rows_of(folder)} == {None}


def test_the_next_driver_serves_only_what_no_worker_has_handed_over(
    tmp_path: Path, data_root: Path, here: HereExecutor, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first driver dies when "none" and one load of "a" are measured, before it has taken anything over."""
    config = config_with(tmp_path, METHODS[:1], "workers.servers=1", "workers.retries=0")
    load = serving_grid.Grid._load
    with monkeypatch.context() as patch:
        patch.setattr(fan_out.FanOut, "gather", lambda self: None)
        with pytest.raises(ValueError, match="failed 1 times"):
            run_stage(STAGE, config, body)
    assert made == units("none")
    with monkeypatch.context() as patch:
        patch.setattr(serving_grid.Grid, "_load", lambda *given: die_at(load, "c4", *given))
        with pytest.raises(ValueError, match="failed 1 times"):
            run_stage(STAGE, config, body)
    folder = run_stage(STAGE, config, body)
    assert made == [*units("none"), *units("a")], "each once, over three drivers"
    assert {row["not_run"] for row in rows_of(folder)} == {None}


def test_workers_go_on_where_the_stage_itself_had_begun(
    tmp_path: Path, data_root: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it measured of "none" is in its own folder; the open loads of the others are shares of that."""
    serve = serving_grid.Grid._method

    def stop_at_a(grid: serving_grid.Grid, method: Any, *rest: Any) -> None:
        if method.name == "a":
            raise StageStopped("now")
        serve(grid, method, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(serving_grid.Grid, "_method", stop_at_a)
        with pytest.raises(StageStopped):
            run_stage(STAGE, config_with(tmp_path, METHODS[:1]), body)
    folder = run_stage(STAGE, config_with(tmp_path, METHODS[:1], "workers.servers=1"), body)
    assert made == [*units("none"), *units("a")]
    assert {row["not_run"] for row in rows_of(folder)} == {None}


def die_at(load: Any, name: str, grid: serving_grid.Grid, wanted: Any, *rest: Any) -> dict[str, Any]:
    """Measures a load, but dies at the one of this name."""
    if wanted.name == name:
        raise RuntimeError("out of luck")
    made: dict[str, Any] = load(grid, wanted, *rest)
    return made


def test_a_worker_whose_driver_is_gone_records_nothing_as_not_run(
    tmp_path: Path, data_root: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the middle of a load; that a client failed is a reason for a row, this is none."""
    from bench import serving_load

    def gone(client: serving_load.Client, arguments: Any) -> None:
        raise DriverGoneError("the driver is gone")

    monkeypatch.setattr(serving_load.Client, "run", gone)
    with pytest.raises(DriverGoneError):
        run_stage(STAGE, config_with(tmp_path, [], "workers.servers=1"), body)
    assert made == ["texts-none.json"]


def test_units_say_what_served(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver holds no GPU; the rows and the result are about the workers'."""
    monkeypatch.setattr(serving_grid.Grid, "on_gpu", True)
    monkeypatch.setattr(serving_grid, "_gpu_names", lambda: ["H200", "H200"])
    folder = run_stage(STAGE, config_with(tmp_path, [], "workers.servers=1"), body)
    assert {row["on_gpu"] for row in rows_of(folder)} == {True}
    assert read_result(folder / "result.json")["device"] == {"name": "H200", "kind": "gpu", "count": 2}
    assert json.loads((folder / "texts-none.json").read_text())["device"]["name"] == "H200"
    assert manifest.device()["kind"] == "cpu"
