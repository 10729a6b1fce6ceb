"""Stages that start jobs of their own, on a real Slurm: within the cap also when the driver is killed, and stage 05."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_stand_in import DRAFT, SITE_CUSTOMIZE, config_with, rows_of, use_stand_in
from slurm_cluster import Cluster
from slurm_site import Site, gpus_in_use, most_gpus_at_once, wait_for

from bench.bench_serving import STAGE, body
from pipeline.stage import run_stage

WORKERS = {"count": 2, "executor": "slurm"}


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    """A user on an idle cluster whose stage 01 drives two workers of a GPU each."""
    site = Site(tmp_path / "site", cluster)
    site.set_config(workers=WORKERS)
    site.stub("01_gen_traces", hang=1, workers=2)
    yield site
    cluster.clear()


def other_chain(site: Site, name: str) -> list[dict[str, Any]]:
    """Submit a chain of two GPUs a job with another run's name; its jobs."""
    config = site.set_config(site.root / f"{name}.yaml", run=name, slurm={"gpus": 2})
    done = site.call("slurm/submit.sh", "--config", str(config), "01", "02", "03", SPEC_GPU_CAP="2")
    assert done.returncode == 0, done.stderr
    jobs: list[dict[str, Any]] = json.loads((site.checkout / "logs" / name / "jobs.json").read_text())["jobs"]
    return jobs


def kill_whole(site: Site, job: int) -> None:
    """kill -9 of every process that a job of this site has here; another cluster has a job of that number too."""
    mark, ours, killed = f"SLURM_JOB_ID={job}".encode(), str(site.checkout).encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes()
            if mark in environment.split(b"\0") and ours in environment:
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
    assert killed


def workers_running(cluster: Cluster) -> int:
    return len(cluster.run("squeue", "-h", "-r", "-n", "worker", "-t", "RUNNING").splitlines())


def states(cluster: Cluster, jobs: list[int]) -> set[str]:
    shown = [cluster.run("scontrol", "-o", "show", "job", str(job)) for job in jobs]
    return {found.group(1) for text in shown if (found := re.search(r"JobState=(\w+)", text))}


def test_the_cap_holds_when_a_driver_is_killed_whole(site: Site, cluster: Cluster) -> None:
    """kill -9 of everything in the driver's job: nobody is left in it to end its two workers, who would sleep on. One
    chain was submitted before, one after; both need the workers' GPUs."""
    site.submit("01", SPEC_GPU_CAP="2")
    (driver,) = site.jobs()
    assert (driver["slots"], driver["gpus"]) == ([0, 1], 2)
    wait_for(lambda: workers_running(cluster) == 2, trace=site.trace)
    for stage in (
        "01_gen_traces",
        "02_filter",
        "03_train_draft",
    ):  # what starts from here on: Slurm notes whole seconds
        site.stub(stage, pause=1.0)
    early = other_chain(site, "early")
    assert {driver["job"], driver["ender"]} == set(early[0]["behind"])
    kill_whole(site, driver["job"])
    wait_for(lambda: site.field("01_gen_traces", "JobState") == "FAILED", trace=site.trace)
    late = other_chain(site, "late")
    used = [gpus_in_use(cluster)]
    while cluster.run("squeue", "-h") and max(used) <= 2:
        used.append(gpus_in_use(cluster))
        time.sleep(0.2)
    assert max(used) <= 2
    assert most_gpus_at_once(cluster, early + late) == 2
    assert states(cluster, [job["job"] for job in early + late]) == {"COMPLETED"}
    assert states(cluster, [driver["ender"]]) == {"COMPLETED"}
    (log,) = (site.checkout / "logs" / "tiny").glob("01_gen_traces-*.end.log")
    assert "ending" in log.read_text()


@pytest.mark.slow
def test_cancel_ends_the_workers_and_leaves_the_job_that_sees_to_it(site: Site, cluster: Cluster) -> None:
    site.submit("01", "02", SPEC_GPU_CAP="2")
    (driver, _) = site.jobs()
    wait_for(lambda: workers_running(cluster) == 2, trace=site.trace)
    site.make("cancel")
    assert set(site.wait().values()) == {"CANCELLED"}
    assert states(cluster, [driver["ender"]]) == {"COMPLETED"}


@pytest.mark.slow
def test_a_driver_that_is_queued_again_starts_workers_of_its_own_within_the_cap(site: Site, cluster: Cluster) -> None:
    """As after a preemption: those of its first start are ended, also where it had no time to do so itself."""
    site.submit("01", SPEC_GPU_CAP="2")
    (driver,) = site.jobs()
    wait_for(lambda: workers_running(cluster) == 2, trace=site.trace)
    first = set(cluster.run("squeue", "-h", "-r", "-n", "worker", "-o", "%A").split())
    cluster.run("scontrol", "requeue", str(driver["job"]))
    kill_whole(site, driver["job"])
    used = [0]
    while set(cluster.run("squeue", "-h", "-r", "-n", "worker", "-t", "RUNNING", "-o", "%A").split()) <= first:
        used.append(gpus_in_use(cluster))
        assert len(used) < 10_000, site.trace()
        time.sleep(0.2)
    assert max([*used, gpus_in_use(cluster)]) == 2
    wait_for(lambda: workers_running(cluster) == 2, trace=site.trace)
    assert "restart 1" in site.log("01_gen_traces")
    assert states(cluster, [driver["ender"]]) == {"PENDING"}


def test_a_chain_that_is_refused_in_the_middle_leaves_no_ender(site: Site, cluster: Cluster) -> None:
    stages = [{"stage": "02_filter", "extra": ["--nodelist=node7"]}]
    site.set_config(workers=WORKERS, slurm={"stages": stages})
    assert site.submit(SPEC_GPU_CAP="2").returncode == 2
    assert cluster.run("squeue", "-h", "-t", "PENDING,RUNNING") == ""


@pytest.mark.slow
def test_methods_of_stage_05_are_shared_out_within_the_cap_and_one_worker_is_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three methods by two workers of a GPU each, under a cap of two, with a stand-in for vLLM. The worker of "a" is
    killed in the middle of its first load; no unit is measured twice, and the rows are those of one process."""
    go_on = tmp_path / "go on"
    methods = [
        {"name": "a", "speculative_config": DRAFT, "env": {"FAKE": "hangs", "FAKE_UNTIL": str(go_on)}},
        {"name": "b", "speculative_config": DRAFT, "plugin": {}},
    ]
    site = Site(tmp_path / "site", cluster, stubs=False)
    (site.checkout / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    site.set_config(
        bench_vllm={"methods": [{"name": "none"}, *methods]},
        workers={"servers": 3, "executor": "slurm", "minutes": 10},
        slurm={"archive_seconds": 0, "cpus": 1},
    )
    site.submit("05", SPEC_GPU_CAP="2")
    assert "gres" not in cluster.run("scontrol", "-o", "show", "job", str(site.job("05_bench_vllm")))
    (job,) = site.jobs()
    assert (job["gpus"], job["slots"]) == (2, [0, 1])
    used, victim = [0], 0
    while cluster.run("squeue", "-h"):
        used.append(gpus_in_use(cluster, ending=False))
        logs = list(site.archive.glob("tiny/.05_bench_vllm.workers/*/logs/a.log"))
        if not victim and logs and "under load" in logs[0].read_text():
            victim = worker_that_serves(site, cluster, "a")
            kill_whole(site, victim)
            go_on.touch()
        time.sleep(0.2)
    assert site.field("05_bench_vllm", "JobState") == "COMPLETED", site.trace()
    assert 1 <= max(used) <= 2
    log = site.log("05_bench_vllm")
    assert "starting it again" in log
    assert "ended with 3 units to do" in log, "its texts were handed over before"
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path))
    use_stand_in(monkeypatch)
    alone = rows_of(run_stage(STAGE, config_with(tmp_path, methods), body))
    shared = rows_of(site.archive / "tiny" / "05_bench_vllm")
    for row in (*alone, *shared):
        row.pop("load_average")
    assert shared == alone
    assert {row["not_run"] for row in shared} == {None}
    assert not list(site.archive.glob("tiny/.05_bench_vllm.workers/*"))


def worker_that_serves(site: Site, cluster: Cluster, method: str) -> int:
    """The number of the worker's job that said so."""
    running = dict(line.split() for line in cluster.run("squeue", "-h", "-r", "-o", "%i %A").splitlines())
    for path in site.archive.glob("tiny/.05_bench_vllm.workers/*/jobs-*/*_log.err"):
        name = re.match(r"(\d+(?:_\d+)?)_\d+_log\.err", path.name)
        if f"serving with {method};" in path.read_text() and name is not None and name.group(1) in running:
            return int(running[name.group(1)])
    raise AssertionError(site.trace())
