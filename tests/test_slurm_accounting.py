"""On a real Slurm with accounting: what became of jobs that the controller has forgotten, and a cap held by a QOS."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_accounting
import slurm_cluster
from slurm_cluster import Cluster
from slurm_site import Site, most_gpus_at_once, wait_for

from slurm import client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with accounting, and three QOS: with a limit a user, with one for all its users, and with none."""
    reason = slurm_cluster.missing() or slurm_accounting.missing()
    if reason:
        pytest.skip(reason)
    with Cluster.started(tmp_path_factory.mktemp("accounted"), accounted=True) as cluster:
        wait_for(lambda: "gres" in cluster.run("sacctmgr", "-n", "-P", "show", "tres"), 60)
        add = ("sacctmgr", "-i", "add")
        cluster.run(*add, "qos", "capped", "MaxTRESPerUser=gres/gpu=2")
        cluster.run(*add, "qos", "shared", "GrpTRES=gres/gpu=2")
        cluster.run(*add, "qos", "wide")
        cluster.run("sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal,capped,shared,wide")
        job = ("sbatch", "--parsable", "--hold", "--qos=shared", "--output=/dev/null", "--wrap", "true")
        wait_for(lambda: cluster.run(*job, check=False), 60)  # the controller is told
        cluster.clear()
        yield cluster


@pytest.fixture
def site(accounted: Cluster, tmp_path: Path) -> Iterator[Site]:
    yield Site(tmp_path / "site", accounted)
    accounted.clear()


def test_status_of_jobs_that_the_controller_has_forgotten_comes_from_sacct(
    site: Site, accounted: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was queued again in the middle, so it is there twice; the second failed."""
    site.stub("01_gen_traces", hang=1)
    site.stub("02_filter", fail="no rows are left")
    assert site.submit("01", "02").returncode == 0
    wait_for(lambda: "at unit-1" in site.log("01_gen_traces"), trace=site.trace)
    site.stub("01_gen_traces")
    accounted.run("scontrol", "requeue", str(site.job("01_gen_traces")))
    wait_for(lambda: not accounted.run("squeue", "-h"), trace=site.trace)
    for stage in ("01_gen_traces", "02_filter"):
        shown = ("scontrol", "-o", "show", "job", str(site.job(stage)))
        wait_for(lambda shown=shown: not accounted.run(*shown, check=False), 300)
    runs = accounted.run("sacct", "-X", "-n", "-D", "-o", "State", "-j", str(site.job("01_gen_traces"))).split()
    assert runs == ["REQUEUED", "COMPLETED"]
    told = site.make("status").stdout
    assert "run tiny   (states from sacct)" in told
    assert re.search(r"01_gen_traces +\d+ +completed +1 +node[12]", told), told
    assert re.search(r"02_filter +\d+ +failed ", told), told
    assert "failed, exit code 2; the end of" in told
    assert "[02_filter] no rows are left" in told
    monkeypatch.setenv("SLURM_CONF", accounted.environment["SLURM_CONF"])
    assert client.has_accounting()
    assert client.jobs([site.job("02_filter")])[site.job("02_filter")].code == "2:0"


@pytest.mark.parametrize("qos", ["capped", "shared"])
def test_where_the_site_has_a_qos_it_holds_the_cap(site: Site, accounted: Cluster, qos: str) -> None:
    """Two chains of two GPUs, which do not wait for each other, but for the QOS."""
    limited = {"SPEC_SLURM_CAP_BY": "qos", "SPEC_SLURM_QOS": qos, "SPEC_GPU_CAP": "2"}
    site.stub("01_gen_traces", pause=1.0)
    jobs = []
    for name in ("one", "two"):
        config = site.set_config(site.root / f"{name}.yaml", run=name, slurm={"gpus": 2})
        done = site.call("slurm/submit.sh", "--config", str(config), "01", **limited)
        assert done.returncode == 0, done.stderr
        jobs += json.loads((site.checkout / "logs" / name / "jobs.json").read_text())["jobs"]
    assert [job["behind"] for job in jobs] == [[]] * 2
    wait_for(lambda: not accounted.run("squeue", "-h"), trace=site.trace)
    assert most_gpus_at_once(accounted, jobs) == 2
    for name in ("one", "two"):
        assert (site.archive / name / "01_gen_traces" / "done.json").is_file(), site.trace()


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"SPEC_SLURM_QOS": "capped", "SPEC_GPU_CAP": "1"}, "the QOS capped lets 2 GPUs run: it does not hold the cap"),
        ({"SPEC_SLURM_QOS": "wide"}, "the QOS wide is not there or has no limit; ask the site"),
        ({"SPEC_SLURM_QOS": "absent"}, "the QOS absent is not there or has no limit; ask the site"),
        ({"SPEC_SLURM_CAP_BY": "submitter", "SPEC_SLURM_ACCOUNT": "others"}, "Invalid account"),
    ],
)
def test_what_the_database_does_not_allow_is_refused(site: Site, facts: dict[str, str], said: str) -> None:
    refused = site.submit(**{"SPEC_SLURM_CAP_BY": "qos"} | facts)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert site.jobs() == []
