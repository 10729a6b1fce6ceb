"""Chains of jobs on a real Slurm, with stand-ins for the stages: order, failures, refusals, cancelling, restarts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_site import Site, most_gpus_at_once, wait_for

from pipeline.config_slurm import JOB_STAGES
from slurm import cap
from slurm.client import Job

STAGES = list(JOB_STAGES)
ALL_COMPLETED = dict.fromkeys(STAGES, "COMPLETED")


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    """A user on an idle cluster; nothing of theirs is left behind."""
    yield Site(tmp_path / "site", cluster)
    cluster.clear()


def running(site: Site, stage: str) -> bool:
    return site.field(stage, "JobState") == "RUNNING"


# the chain


def test_make_all_runs_the_chain_to_its_end_and_has_nothing_to_do_then(site: Site) -> None:
    submitted = site.make("all")
    assert submitted.returncode == 0, submitted.stderr
    assert [job["stage"] for job in site.jobs()] == STAGES
    assert site.wait() == ALL_COMPLETED, site.trace()
    for before, after in zip(site.jobs(), site.jobs()[1:], strict=False):
        assert after["after"] == [before["job"]]
    for stage in STAGES[:-1]:
        assert (site.archive / "tiny" / stage / "done.json").is_file()
    assert "04_bench_engine 1" in (site.archive / "tiny" / "report.md").read_text()
    assert site.log(STAGES[0]).count("environment checked") == 1
    assert "environment checked" not in site.log(STAGES[1])
    again = site.make("all")
    assert again.stdout.splitlines() == [*(f"{stage}: done" for stage in STAGES), "nothing to submit"]
    assert len(site.jobs()) == len(STAGES)
    assert "report           " in (status := site.make("status").stdout)
    assert status.count("completed") == len(STAGES)


def test_a_failed_stage_ends_what_depends_on_it_and_make_all_submits_only_the_rest(site: Site) -> None:
    site.stub("03_train_draft", fail="the loss is not a number")
    site.make("all")
    states = site.wait()
    failed = STAGES.index("03_train_draft")
    assert [states[stage] for stage in STAGES[:failed]] == ["COMPLETED"] * failed
    assert states["03_train_draft"] == "FAILED"
    assert all(states[stage] == "CANCELLED" for stage in STAGES[failed + 1 :])
    told = site.make("status")
    assert told.returncode == 0
    assert site.call("slurm/jobs.sh", "status").returncode == 1
    assert "[03_train_draft] the loss is not a number" in site.make("logs", "STAGE=03").stdout
    assert "failed, exit code 2" in told.stdout
    assert "[03_train_draft] the loss is not a number" in told.stdout
    assert "04_bench_engine (job" in told.stdout
    assert "not run, because a stage before it failed" in told.stdout
    assert f"slurm/submit.sh --config {os.path.relpath(site.config, site.checkout)}" in told.stdout
    site.stub("03_train_draft")
    number = len(site.jobs())
    site.make("all")
    assert [job["stage"] for job in site.jobs()[number:]] == STAGES[failed:]
    assert site.wait() == ALL_COMPLETED, site.trace()
    assert list(dict(site.units("03_train_draft"))) == ["unit-1"]  # the first was kept


def test_stages_in_the_queue_are_waited_for_and_not_submitted_twice(site: Site) -> None:
    site.stub("01_gen_traces", hang=1)
    site.submit("01", "02")
    wait_for(lambda: running(site, "01_gen_traces"), trace=site.trace)
    more = site.submit()
    assert f"02_filter: in the queue already, job {site.job('02_filter')}" in more.stdout
    jobs = site.jobs()
    assert [job["stage"] for job in jobs] == ["01_gen_traces", "02_filter", *STAGES[2:]]
    assert jobs[2]["after"] == [jobs[1]["job"]]
    refused = site.submit("--force")
    assert refused.returncode == 2
    assert f"01_gen_traces is in the queue as job {jobs[0]['job']}; cancel it first" in refused.stderr


def test_a_script_can_be_submitted_by_hand(site: Site, cluster: Cluster) -> None:
    assert site.submit("01", "--dry-run").returncode == 0
    script = site.checkout / "logs" / "tiny" / "dry-run" / "01_gen_traces.job.sh"
    done = site.call("sbatch", "--wait", str(script))
    assert done.returncode == 0, done.stderr
    assert (site.archive / "tiny" / "01_gen_traces" / "done.json").is_file()


@pytest.mark.slow
def test_force_makes_finished_stages_again(site: Site) -> None:
    for force in ([], ["--force"]):
        site.submit("01", "02", *force)
        assert set(site.wait().values()) == {"COMPLETED"}, site.trace()
    assert len(dict(site.units("01_gen_traces"))) == 2
    assert list((site.archive / "tiny").glob("01_gen_traces.old-*"))


def test_settings_that_changed_are_refused_before_anything_is_submitted(site: Site) -> None:
    site.submit("01")
    site.wait()
    site.set_config(traces={"seed": 7})
    refused = site.submit()
    assert refused.returncode == 2
    assert "config.traces.seed: 0 -> 7" in refused.stderr
    assert "--force --from 01_gen_traces" in refused.stderr
    assert len(site.jobs()) == 1


# what is refused


@pytest.mark.parametrize(
    "section, variables, said",
    [
        ({"gpus": 5}, {}, "01_gen_traces asks for 5 GPUs at one time (5 in its job), and SPEC_GPU_CAP is 4: lower"),
        ({"stages": [{"stage": "03_train_draft", "nodes": 2, "gpus": 3}]}, {}, "6 GPUs at one time (2 nodes of 3)"),
        ({}, {"SPEC_GPU_CAP": "abc"}, "SPEC_GPU_CAP: got 'abc', expected a whole number of at least 1"),
        ({}, {"SPEC_SLURM_PARTITION": "fast"}, "got the partition 'fast', expected one of main, low, high"),
        ({}, {"SPEC_ARCHIVE_ROOT": "/no/archive"}, "SPEC_ARCHIVE_ROOT: got /no/archive, expected a folder that exists"),
        ({}, {"SPEC_SLURM_CAP_BY": "license"}, "SPEC_SLURM_CAP_BY is license, but SPEC_SLURM_LICENSE is not set"),
        (
            {},
            {"SPEC_SLURM_CAP_BY": "license", "SPEC_SLURM_LICENSE": "large"},
            "the license large lets 64 GPUs run: it does not hold the cap",
        ),
        (
            {"stages": [{"stage": "02_filter", "extra": ["--nodelist=node7"]}]},
            {},
            "sbatch: Batch job submission failed: Invalid node name specified",
        ),
    ],
)
def test_a_chain_that_could_not_run_is_refused_whole(
    site: Site, cluster: Cluster, section: dict[str, object], variables: dict[str, str], said: str
) -> None:
    site.set_config(slurm=section)
    refused = site.submit(**variables)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert site.jobs() == []
    assert cluster.run("squeue", "-h", "-t", "PENDING,RUNNING") == ""


def test_node_local_data_without_an_archive_is_refused(site: Site) -> None:
    env_sh = site.checkout / "env.sh"
    env_sh.write_text("".join(line for line in env_sh.open() if "ARCHIVE" not in line))
    refused = site.submit()
    assert refused.returncode == 2
    assert "SPEC_ARCHIVE_ROOT must name a folder that all nodes and this one see" in refused.stderr
    (site.root / "nodes" / "login").mkdir(parents=True)  # as if it were on a shared file system
    assert site.submit("01", "--dry-run").returncode == 0


def test_a_dependency_that_is_dead_or_unknown_is_refused(site: Site, cluster: Cluster) -> None:
    dead = cluster.run("sbatch", "--parsable", "--wait", "--output=/dev/null", "--wrap", "exit 3", check=False).strip()
    for job, said in ((dead, "that job has ended as FAILED"), ("999999", "Slurm knows no such job")):
        refused = site.submit("--after", job)
        assert refused.returncode == 2
        assert f"--after {job}: {said}" in refused.stderr
    assert site.jobs() == []


def test_a_log_folder_that_cannot_be_made_is_refused(site: Site) -> None:
    (site.checkout / "logs").write_text("in the way")
    refused = site.submit()
    assert refused.returncode == 2
    assert "job scripts and logs go to logs/ in the checkout" in refused.stderr


def test_a_log_folder_that_is_gone_when_the_job_starts_is_named(site: Site, cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "partition=main", "state=down")
    try:
        site.submit("01")
        entries = (site.checkout / "logs" / "tiny" / "jobs.json").read_text()
        shutil.rmtree(site.checkout / "logs")
    finally:
        cluster.run("scontrol", "update", "partition=main", "state=up")
    wait_for(lambda: not cluster.run("squeue", "-h"))
    (site.checkout / "logs" / "tiny").mkdir(parents=True)
    (site.checkout / "logs" / "tiny" / "jobs.json").write_text(entries)
    assert "Slurm could not open its log on the node" in site.make("status").stdout


def test_a_full_scratch_ends_the_job_and_status_says_so(site: Site) -> None:
    site.stub("01_gen_traces", free_bytes=1 << 60)
    site.submit("01")
    assert site.wait() == {"01_gen_traces": "FAILED"}
    told = site.make("status").stdout
    assert "failed, exit code 74" in told
    assert f"01_gen_traces needs {1 << 40} MiB to start" in told


def test_without_slurm_the_local_command_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", None)
    refused = site.submit(PATH="/bin" if not Path("/bin/sbatch").exists() else str(bin_without_slurm(tmp_path)))
    assert refused.returncode == 2
    assert f"scripts/run_pipeline.sh --config {site.config}" in refused.stderr


def bin_without_slurm(tmp_path: Path) -> Path:
    """A PATH with the few programs that the scripts use."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "dirname", "mkdir", "git"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


# dry run and scripts


def test_dry_run_submits_nothing_and_its_scripts_are_sound(tmp_path: Path) -> None:
    """On a machine without Slurm too."""
    site = Site(tmp_path / "my site", None)
    site.set_config(
        slurm={"memory_gib": 8, "stages": [{"stage": "03_train_draft", "gpus": 2, "extra": ["--exclusive"]}]}
    )
    facts = {"SPEC_SLURM_ACCOUNT": "me", "SPEC_PROMPTS": "/a b/$c", "HF_TOKEN": "hf_secret"}
    shown = site.submit("--dry-run", PATH=str(bin_without_slurm(tmp_path)), **facts)
    assert shown.returncode == 0, shown.stderr
    assert not (site.checkout / "logs" / "tiny" / "jobs.json").exists()
    scripts = sorted((site.checkout / "logs" / "tiny" / "dry-run").glob("*.job.sh"))
    assert [script.name.removesuffix(".job.sh") for script in scripts] == STAGES
    for script in scripts:
        text = script.read_text()
        assert text in shown.stdout
        assert "hf_secret" not in text
        assert 'export SPEC_PROMPTS="/a b/\\$c"\n' in text
        assert f'#SBATCH --output="{site.checkout}/logs/tiny/' in text
        assert "#SBATCH --mem=8G\n" in text
        assert "#SBATCH --account=me\n" in text
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        if shutil.which("shellcheck"):
            checked = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stdout
    text = scripts[STAGES.index("03_train_draft")].read_text()
    assert "#SBATCH --gpus-per-node=2\n" in text
    assert "#SBATCH --exclusive\n" in text
    assert "--gpus" not in scripts[STAGES.index("02_filter")].read_text()


def test_facts_of_the_shell_reach_the_job_and_env_sh_is_read_on_its_node(site: Site) -> None:
    site.stub("01_gen_traces", fail="no")
    site.submit("01")
    site.wait()
    node = site.field("01_gen_traces", "NodeList")
    assert (site.root / "nodes" / node / "tiny" / "01_gen_traces").is_dir()
    given = site.root / "given"
    site.submit("01", SPEC_DATA_ROOT=str(given))
    site.wait()
    assert (given / "tiny" / "01_gen_traces").is_dir()


# cancelling, restarts


def test_cancel_in_the_middle_leaves_a_run_that_goes_on(site: Site) -> None:
    site.stub("01_gen_traces", units=3, hang=2)
    site.make("all")
    wait_for(lambda: "made unit-1" in site.log("01_gen_traces"), trace=site.trace)
    cancelled = site.make("cancel")
    assert f"01_gen_traces: job {site.job('01_gen_traces')} cancelled" in cancelled.stdout
    assert set(site.wait().values()) == {"CANCELLED"}
    site.stub("01_gen_traces", units=3)
    site.make("all")
    assert site.wait() == ALL_COMPLETED, site.trace()
    assert list(dict(site.units("01_gen_traces"))) == ["unit-2"]


@pytest.mark.slow
def test_a_job_near_its_limit_queues_itself_and_gives_up_when_it_gets_no_further(site: Site, cluster: Cluster) -> None:
    """The first start makes a unit; the second none, so the third does not begin."""
    site.set_config(slurm={"stalls": 1})
    site.stub("01_gen_traces", units=3, hang=1)
    site.make("all")
    for starts in (1, 2):
        wait_for(lambda count=starts: site.log("01_gen_traces").count("at unit-1") == count, trace=site.trace)
        cluster.run("scancel", "--batch", "--signal=USR1", str(site.job("01_gen_traces")))
    states = site.wait()
    assert states["01_gen_traces"] == "FAILED"
    assert site.field("01_gen_traces", "ExitCode") == "76:0"
    assert site.log("01_gen_traces").count("made unit-0") == 1
    told = site.make("status").stdout
    assert "gave up: 1 starts in a row without one unit" in told
    assert f"  01_gen_traces    {site.job('01_gen_traces')} " in told


def test_jobs_json_has_what_was_submitted(site: Site) -> None:
    site.submit("01")
    (job,) = site.jobs()
    assert Path(job["script"]).is_file()
    assert job["log"].endswith(f"01_gen_traces-{job['job']}.log")
    assert job["slots"] == [0]
    assert job["gpus"] == 1
    assert job["submitted"].startswith("20")
    assert json.loads((site.checkout / "logs" / "tiny" / "jobs.json").read_text())["schema"] == 1


# the cap on GPUs


def test_three_chains_submitted_at_once_never_hold_more_gpus_than_the_cap(site: Site, cluster: Cluster) -> None:
    """1 + 2 + 3 GPUs: all at once would be 6. The first chain's jobs are one after the other on the same GPU."""
    site.stub("01_gen_traces", pause=0.5)
    shells = []
    for gpus in (1, 2, 3):
        config = site.set_config(site.root / f"chain{gpus}.yaml", run=f"chain{gpus}", slurm={"gpus": gpus})
        command = ["slurm/submit.sh", "--config", str(config), "01", "02", "03"]
        shells.append(subprocess.Popen(command, cwd=site.checkout, env=site.environment(), stdout=subprocess.DEVNULL))
    assert [shell.wait(600) for shell in shells] == [0, 0, 0]
    wait_for(lambda: not cluster.run("squeue", "-h"), trace=site.trace)
    everything = []
    for gpus in (1, 2, 3):
        folder = site.checkout / "logs" / f"chain{gpus}"
        jobs = json.loads((folder / "jobs.json").read_text())["jobs"]
        assert [len(job["slots"]) for job in jobs] == [gpus, 0, gpus]
        text = [cluster.run("scontrol", "-o", "show", "job", str(job["job"])) for job in jobs]
        assert all("JobState=COMPLETED" in each for each in text), site.trace()
        everything += jobs
    assert 3 <= most_gpus_at_once(cluster, everything) <= 4
    first = json.loads((site.checkout / "logs" / "chain1" / "jobs.json").read_text())["jobs"]
    assert first[0]["slots"] == first[2]["slots"]


def test_a_job_submitted_by_hand_counts_too(site: Site, cluster: Cluster) -> None:
    site.set_config(slurm={"gpus": 3})
    site.submit("01", "--dry-run")
    script = site.checkout / "logs" / "tiny" / "dry-run" / "01_gen_traces.job.sh"
    by_hand = cluster.run("sbatch", "--parsable", "--hold", str(script)).strip()
    site.submit("03", "04")
    assert site.jobs()[0]["behind"] == [int(by_hand)]


def test_where_the_site_has_a_license_it_holds_the_cap(site: Site, cluster: Cluster) -> None:
    site.set_config(slurm={"gpus": 3})
    licensed = {"SPEC_SLURM_CAP_BY": "license", "SPEC_SLURM_LICENSE": "specgpu"}
    site.stub("01_gen_traces", hang=0)
    assert site.submit("01", **licensed).returncode == 0
    wait_for(lambda: running(site, "01_gen_traces"), trace=site.trace)
    other = site.set_config(site.root / "other.yaml", run="other", slurm={"gpus": 2})
    site.call("slurm/submit.sh", "--config", str(other), "01", **licensed)
    (job,) = json.loads((site.checkout / "logs" / "other" / "jobs.json").read_text())["jobs"]
    assert job["behind"] == []
    shown = "scontrol", "-o", "show", "job", str(job["job"])
    wait_for(lambda: "Reason=Licenses" in cluster.run(*shown), trace=site.trace)


def test_places_prefer_gpus_that_only_the_own_chain_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_GPU_CAP", "3")
    jobs = [
        Job(number=1, state="RUNNING", comment=cap.comment((0,))),
        Job(number=2, state="PENDING", comment=cap.comment((1, 2))),
        Job(number=3, state="RUNNING", comment="somebody's note"),
        Job(number=4, state="PENDING", comment=cap.comment_by_hand(1)),
    ]
    assert cap.place(1, jobs, chain=[]) == cap.Place(slots=(0,), after=(1,))
    assert cap.place(1, jobs, chain=[2]) == cap.Place(slots=(1,), after=(2,))
    assert cap.place(2, jobs, chain=[2]) == cap.Place(slots=(0, 1), after=(1, 2))
    assert cap.place(3, jobs, chain=[]) == cap.Place(slots=(0, 1, 2), after=(1, 2, 4))
    assert cap.place(0, jobs, chain=[]) == cap.Place(slots=(), after=())
