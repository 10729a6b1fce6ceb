"""Real stages on a real Slurm: preempted, out of time, on two nodes, in arrays, and the same results each time."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_site import Site, wait_for

from pipeline.config_slurm import JOB_STAGES

pytestmark = pytest.mark.slow
TRACES = {"prompts": [{"name": "arithmetic", "source": "reasoning_gym:basic_arithmetic", "limit": 24}], "shard_size": 1}
STEPS = 40
TRAIN = {
    "drafts": [{"name": "sft", "loss": [{"name": "ce"}]}],
    "recipe": {"length": 256, "sequences": 2, "micro_batch": 1, "steps": STEPS, "lr": 5e-3, "checkpoint_every": 2},
    "heldout": 2,
}
# In its first job stage 01 waits for a preemption's signal after its fifth shard, stage 03 after the row of step 5.
HELD_AT = 5
HOLD = f"""\
import os
import sys
import time

words = " ".join(sys.orig_argv)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and ("data.gen_traces" in words or "train.train_draft" in words):
    from pipeline.context import StageContext, StopSignals
    from train.metrics import MetricsLog

    got, note, publish, write = [], StopSignals._note, StageContext.publish, MetricsLog.write

    def noted(signals, *arguments):
        got.append(arguments)
        note(signals, *arguments)

    def held_publish(ctx, *arguments, **options):
        record = publish(ctx, *arguments, **options)
        while len(ctx.shards) >= {HELD_AT} and not got:
            time.sleep(0.1)
        return record

    def held_write(log, row):
        write(log, row)
        while row["step"] >= {HELD_AT} and not got:
            time.sleep(0.1)

    StopSignals._note, StageContext.publish, MetricsLog.write = noted, held_publish, held_write
"""


@pytest.fixture
def cleared(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with an empty queue afterwards."""
    yield cluster
    cluster.clear()


@pytest.fixture(scope="module")
def plain(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The whole chain, which nothing interrupts."""
    site = real_site(tmp_path_factory.mktemp("plain") / "site", cluster)
    assert site.make("all").returncode == 0
    states = site.wait()
    assert states == dict.fromkeys(JOB_STAGES, "COMPLETED"), site.trace()
    return site


def real_site(root: Path, cluster: Cluster, **slurm: object) -> Site:
    """With real stages on a short experiment; units are archived as they are made."""
    site = Site(root, cluster, stubs=False)
    bench = {"bench_draft": {"prompts": [], "heldout": 2}, "bench_vllm": None}
    site.set_config(traces=TRACES, train=TRAIN, slurm=LIVELY | slurm, **bench)
    return site


LIVELY = {"archive_seconds": 0, "cpus": 1}


def site_with_traces(root: Path, plain: Site, cluster: Cluster, **slurm: object) -> Site:
    """In whose archive stages 01 and 02 of the plain run are finished, so that 03 is what is left."""
    site = real_site(root, cluster, **slurm)
    for stage in ("01_gen_traces", "02_filter"):
        shutil.copytree(plain.archive / "tiny" / stage, site.archive / "tiny" / stage)
    return site


def hashes(site: Site, stage: str) -> dict[str, str]:
    """Of the files that are the stage's result, without what holds times."""
    content = json.loads((site.archive / "tiny" / stage / "done.json").read_text())
    kept = (".parquet", ".safetensors")
    return {each["name"]: each["sha256"] for each in content["files"] if each["name"].endswith(kept)}


def losses(site: Site) -> list[float]:
    """Of every step of the draft."""
    text = (site.archive / "tiny" / "03_train_draft" / "sft" / "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


def preempt(site: Site, cluster: Cluster, stage: str) -> str:
    """Take the node of a running stage for a job of higher priority; the node's name."""
    node = site.field(stage, "NodeList")
    options = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
    cluster.run("sbatch", *options, "--job-name=important", "--wrap", "sleep 600")
    return node


def finish_elsewhere(site: Site, cluster: Cluster, stage: str, node: str) -> None:
    """Wait until the preempted job has started again, on the other node, and has ended."""
    wait_for(lambda: "restart 1" in site.log(stage), trace=site.trace)
    assert site.field(stage, "NodeList") not in (node, "")
    wait_for(lambda: site.field(stage, "JobState") == "COMPLETED", trace=site.trace)
    assert f" on {node}, restart 0" in site.log(stage)


def test_make_all_ends_with_a_report_and_gates_that_hold(plain: Site) -> None:
    for stage in JOB_STAGES[:-1]:
        assert (plain.archive / "tiny" / stage / "done.json").is_file()
    assert (plain.archive / "tiny" / "report.html").is_file()
    gates = plain.log("report")
    for gate in ("G1", "G2"):
        assert re.search(rf"{gate} +pass", gates), gates
    assert plain.make("all").stdout.splitlines() == [*(f"{stage}: done" for stage in JOB_STAGES), "nothing to submit"]


def test_traces_preempted_in_the_middle_go_on_on_the_other_node(plain: Site, cleared: Cluster, tmp_path: Path) -> None:
    site = real_site(tmp_path / "site", cleared)
    (site.checkout / "sitecustomize.py").write_text(HOLD)
    site.submit("01", SPEC_SLURM_PARTITION="low")
    partial = site.archive / "tiny" / ".01_gen_traces.partial" / "progress.jsonl"
    wait_for(lambda: partial.is_file() and len(partial.read_text().splitlines()) > HELD_AT, trace=site.trace)
    node = preempt(site, cleared, "01_gen_traces")
    finish_elsewhere(site, cleared, "01_gen_traces", node)
    kept = int(site.log("01_gen_traces").partition(" finished files taken over")[0].split()[-1])
    assert kept == HELD_AT
    assert hashes(site, "01_gen_traces") == hashes(plain, "01_gen_traces")
    assert len(hashes(site, "01_gen_traces")) == 24
    assert not partial.exists()


def test_training_preempted_in_the_middle_goes_on_on_the_other_node(
    plain: Site, cleared: Cluster, tmp_path: Path
) -> None:
    site = site_with_traces(tmp_path / "site", plain, cleared)
    (site.checkout / "sitecustomize.py").write_text(HOLD)
    site.submit("01", "02", "03", SPEC_SLURM_PARTITION="low")
    wait_for(lambda: len(list(site.archive.glob("tiny/03*.work-*/sft/round-0/checkpoints/step-*"))), trace=site.trace)
    node = preempt(site, cleared, "03_train_draft")
    finish_elsewhere(site, cleared, "03_train_draft", node)
    log = site.log("03_train_draft")
    [stopped] = re.findall(r"checkpoint at step (\d+)", log)
    assert int(stopped) <= HELD_AT + 2, "at the latest the step it was held at, counted from 0, and the one at hand"
    assert losses(site) == losses(plain)
    assert len(losses(site)) == STEPS
    assert hashes(site, "03_train_draft") == hashes(plain, "03_train_draft")


def test_out_of_time_the_job_queues_itself_and_finishes(cleared: Cluster, tmp_path: Path) -> None:
    """Forty seconds of work under a limit of one minute, the shortest that Slurm has, of which 40 s are for stopping. A
    stand-in for the stage, whose speed is no matter of the machine's."""
    site = Site(tmp_path / "site", cleared)
    site.set_config(slurm={"minutes": 1, "stop_seconds": 40, "stalls": 20})
    site.stub("01_gen_traces", units=40, pause=1.0)
    site.submit("01")
    assert site.wait() == {"01_gen_traces": "COMPLETED"}, site.trace()
    log = site.log("01_gen_traces")
    assert "the time limit is near: queueing this job again" in log
    assert int(site.field("01_gen_traces", "Restarts")) >= 1
    assert [unit for unit, _ in site.units("01_gen_traces")] == [f"unit-{number}" for number in range(40)]
    folder = site.archive / "tiny" / "01_gen_traces"
    for number in range(40):
        assert (folder / f"unit-{number}").read_text() == f"01_gen_traces {number}\n"


def test_training_on_two_nodes_gives_the_losses_of_one(plain: Site, cleared: Cluster, tmp_path: Path) -> None:
    stages = [{"stage": "03_train_draft", "nodes": 2}]
    site = site_with_traces(tmp_path / "site", plain, cleared, stages=stages)
    site.submit("01", "02", "03")
    assert site.wait() == {"03_train_draft": "COMPLETED"}, site.trace()
    assert site.field("03_train_draft", "NumNodes") == "2"
    assert losses(site) == pytest.approx(losses(plain), rel=1e-4)
    assert len(losses(site)) == STEPS
    assert [job["slots"] for job in site.jobs()][-1] == [0, 1]


def test_workers_in_an_array_stay_within_the_cap_and_make_the_same_shards(
    plain: Site, cleared: Cluster, tmp_path: Path
) -> None:
    """Three workers of a GPU each under a cap of two, one of them killed; the driver holds no GPU."""
    site = real_site(tmp_path / "site", cleared)
    content = site.config.read_text() + "workers: {count: 3, executor: slurm, minutes: 10}\n"
    site.config.write_text(content)
    site.submit("01", SPEC_GPU_CAP="2")
    assert site.jobs()[0]["slots"] == [0, 1]
    assert "gres" not in cleared.run("scontrol", "-o", "show", "job", str(site.job("01_gen_traces")))
    used, victim = [0], ""
    while cleared.run("squeue", "-h"):
        workers = cleared.run("squeue", "-h", "-r", "-t", "RUNNING,CONFIGURING", "-o", "%i %b").splitlines()
        held = [line.split()[0] for line in workers if "gpu" in line]
        used.append(len(held))  # not one that was killed and is being cleared away: the array's next job does not wait
        if not victim and held:  # while it still loads torch, so it owes all its shards
            victim = held[0]
            cleared.run("scancel", "--signal=KILL", "--full", victim)
        time.sleep(0.2)
    assert 1 <= max(used) <= 2
    assert victim
    assert "starting it again" in site.log("01_gen_traces")
    assert hashes(site, "01_gen_traces") == hashes(plain, "01_gen_traces")
