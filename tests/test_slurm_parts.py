"""What jobs need beside Slurm: scratch, site facts, what counts as finished, progress, accounting."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_stage import STAGE, ToyBody, toy_config

from pipeline import files, site, stages
from pipeline.config import load_config
from pipeline.config_slurm import JOB_STAGES
from pipeline.stage import StageStopped, run_stage
from slurm import client, plan, record, scratch, submit
from slurm.client import SlurmError
from slurm.facts import given_facts
from slurm.progress import progress
from slurm.resources import resources

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
DAY = 86400.0


# scratch


def age(folder: Path, days: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - days * DAY,) * 2)


def finished_run(data_root: Path, run: str, days: float) -> Path:
    run_stage(STAGE, toy_config(f"run={run}"), ToyBody())
    age(data_root / run, days)
    return data_root / run


def test_scratch_lists_and_removes_old_runs_that_are_archived(
    archive_root: Path, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = finished_run(data_root, "old", 30), finished_run(data_root, "new", 1)
    lost = finished_run(data_root, "lost", 30)
    shutil.rmtree(archive_root / "lost")
    other = finished_run(data_root, "other", 30)
    archived = archive_root / "other" / "01_toy" / "done.json"
    archived.write_text(archived.read_text().replace('"sha256": "', '"sha256": "0', 1))
    assert scratch.main([]) == 0
    listed = capsys.readouterr().out
    assert "old: can go" in listed
    assert "new: kept: touched in the last 7 days" in listed
    assert f"lost: kept: 4 of 4 files of 01_toy are not in {archive_root / 'lost'}" in listed
    assert "other: kept: 1 of 4 files of 01_toy" in listed
    assert "make clean-scratch DELETE=1" in listed
    assert old.is_dir()
    assert scratch.main(["--delete"]) == 0
    assert [folder.is_dir() for folder in (old, new, lost, other)] == [False, True, True, True]


def test_scratch_keeps_a_run_at_work_and_one_with_units_that_are_here_only(
    archive_root: Path, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(ctx: object, number: int) -> None:
        if number == 2:
            raise StageStopped("now")

    with pytest.raises(StageStopped):
        run_stage(STAGE, toy_config("run=partial"), ToyBody(stop))
    age(data_root / "partial", 30)
    with files.lock(data_root / "partial" / ".01_toy.lock", "busy"):
        assert scratch.main(["--delete"]) == 0
    assert "partial: kept: a stage is at work in it" in capsys.readouterr().out
    shutil.rmtree(archive_root / "partial")
    assert scratch.main(["--delete"]) == 0
    assert "partial: kept: 2 of 2 files" in capsys.readouterr().out
    assert (data_root / "partial").is_dir()


def test_scratch_without_a_second_copy_is_refused(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scratch.main(["--delete"]) == 2
    assert "SPEC_ARCHIVE_ROOT is not set" in capsys.readouterr().err
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(data_root))
    assert scratch.main(["--delete"]) == 2
    assert "are one folder" in capsys.readouterr().err


# site facts, stages, resources


def test_only_spec_variables_that_env_sh_does_not_give_go_into_a_script(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text('export SPEC_A="${SPEC_A:-site}" SPEC_B="${SPEC_B:-site/$NODE}"\n')
    shell = {
        "PATH": os.environ["PATH"],
        "NODE": "",
        "SPEC_A": "mine",
        "SPEC_B": "site/",
        "SPEC_C": "c",
        "HF_TOKEN": "x",
    }
    assert given_facts(tmp_path, shell) == {"SPEC_A": "mine", "SPEC_C": "c"}
    (tmp_path / "env.sh").write_text("exit 3\n")
    with pytest.raises(ValueError, match=r"env\.sh cannot be read"):
        given_facts(tmp_path, shell)


def test_stage_names_and_numbers() -> None:
    assert stages.stage_name("04") == stages.stage_name("04_bench_engine") == "04_bench_engine"
    assert plan.wanted([], None) == list(JOB_STAGES)
    assert plan.wanted(["03", "01"], None) == ["01_gen_traces", "03_train_draft"]
    assert plan.wanted([], "report") == ["report"]
    for names, first, said in (
        (["9"], None, "'9'"),
        ([], "00", "part of the first job"),
        (["01"], "03", "one of the two"),
    ):
        with pytest.raises(ValueError, match=said):
            plan.wanted(names, first)


def test_every_stage_has_its_script() -> None:
    for stage in stages.STAGES[:-1]:
        assert (ROOT / "scripts" / f"{stage}.sh").is_file()


@pytest.mark.parametrize(
    "overrides, stage, gpus, workers",
    [
        ((), "01_gen_traces", 1, 0),
        ((), "02_filter", 0, 0),
        ((), "04_bench_engine", 1, 0),
        (("slurm.gpus=0",), "04_bench_engine", 0, 0),
        (("bench_vllm.tensor_parallel=2",), "05_bench_vllm", 2, 0),
        (("workers.count=3",), "01_gen_traces", 3, 0),
        (("workers.count=3", "workers.executor=slurm"), "01_gen_traces", 0, 3),
        (("workers.count=9", "workers.executor=slurm"), "01_gen_traces", 0, 4),
        (("workers.count=9", "workers.executor=slurm", "slurm.gpus=0"), "01_gen_traces", 0, 0),
        (("workers.count=9", "workers.executor=slurm"), "03_train_draft", 1, 0),
        (("workers.count=9", "workers.executor=slurm"), "05_bench_vllm", 1, 0),
        (("workers.servers=9", "workers.executor=slurm"), "05_bench_vllm", 0, 2),
        (("workers.servers=9", "workers.executor=slurm"), "01_gen_traces", 1, 0),
        (("workers.servers=2",), "05_bench_vllm", 2, 0),
        (("workers.servers=2", "workers.executor=slurm", "bench_vllm=null"), "05_bench_vllm", 1, 0),
        (("slurm.stages=[{stage: 03_train_draft, nodes: 2, gpus: 2}]",), "03_train_draft", 2, 0),
    ],
)
def test_gpus_of_a_stage(overrides: tuple[str, ...], stage: str, gpus: int, workers: int) -> None:
    asked = resources(load_config(TINY, overrides), stage, site.slurm_site())
    assert (asked.gpus, asked.worker_gpus) == (gpus, workers)


def test_a_config_with_impossible_jobs_is_refused() -> None:
    for override, said in (
        ("slurm.stages=[{stage: 3_train}]", "expected one of 01_gen_traces"),
        ("slurm.stages=[{stage: 02_filter, nodes: 2}]", "only 03_train_draft spans nodes"),
        ("slurm.stages=[{stage: 02_filter}, {stage: 02_filter}]", "each stage once"),
        ("slurm.stages=[{stage: 02_filter, extra: [exclusive]}]", "an option of sbatch as --exclusive"),
    ):
        with pytest.raises(ValueError, match=said):
            load_config(TINY, [override])


def test_the_reference_config_fits_its_cap() -> None:
    config = load_config(ROOT / "configs" / "qwen3_8b.yaml")
    asked = {stage: resources(config, stage, site.slurm_site()) for stage in JOB_STAGES}
    for stage in ("01_gen_traces", "05_bench_vllm"):
        assert asked[stage].gpus == 0
        assert asked[stage].worker_gpus == 4
    assert asked["03_train_draft"].all_gpus == 4


# progress, records, accounting


def test_progress_changes_with_each_unit_and_checkpoint_only(archive_root: Path, data_root: Path) -> None:
    def look() -> str:
        return progress(archive_root / "tiny", "01_toy")

    seen = [look()]
    for limit in (0, 1, 1, 2):

        def stop(ctx: object, number: int, limit: int = limit) -> None:
            if number == limit:
                raise StageStopped("now")

        with pytest.raises(StageStopped):
            run_stage(STAGE, toy_config(), ToyBody(stop))
        seen.append(look())
    assert seen[0] == seen[1] != seen[2] == seen[3] != seen[4]
    checkpoint = archive_root / "tiny" / "01_toy.work-0123456789ab" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    assert look() != seen[4]
    exchange = archive_root / "tiny" / ".01_toy.workers" / "0123456789abcdef"
    (exchange / "jobs-1a2b3c4d").mkdir(parents=True)  # of every start, also of one that gets nowhere
    (exchange / "unit-2.bin").touch()
    before = look()
    (exchange / "jobs-5e6f7a8b").mkdir()
    assert look() == before
    (exchange / "unit-2.bin.note").touch()
    assert look() != before


def test_a_record_of_jobs_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert record.read(tmp_path) == []
    (tmp_path / record.NAME).write_text("[]")
    with pytest.raises(ValueError, match=r"jobs\.json: not a record of jobs"):
        record.read(tmp_path)


def answers(monkeypatch: pytest.MonkeyPatch, reply: Callable[[tuple[str, ...]], str]) -> None:
    """Stand for Slurm's commands."""
    monkeypatch.setattr(client, "call", lambda *command: reply(command))
    monkeypatch.setattr(client.shutil, "which", lambda name: f"/bin/{name}")


def test_a_job_that_slurm_has_forgotten_is_looked_up_in_the_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """sacct lists every run of a requeued job; the last counts."""

    def reply(command: tuple[str, ...]) -> str:
        if command[:3] == ("scontrol", "show", "config"):
            return "AccountingStorageType   = accounting_storage/slurmdbd\n"
        if command[0] == "sacct":
            return "7|PREEMPTED|a|node1|00:01:00|0:0\n7|CANCELLED by 0|a|node2|00:02:00|0:0\n"
        raise SlurmError("scontrol: Invalid job id specified")

    answers(monkeypatch, reply)
    assert client.has_accounting()
    (job,) = client.jobs([7]).values()
    assert (job.state, job.nodes, job.is_live) == ("CANCELLED", "node2", False)


def test_without_accounting_sacct_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(command: tuple[str, ...]) -> str:
        if command[:3] == ("scontrol", "show", "config"):
            return "AccountingStorageType   = accounting_storage/none\n"
        assert command[0] != "sacct"
        raise SlurmError("scontrol: Invalid job id specified")

    answers(monkeypatch, reply)
    assert not client.has_accounting()
    assert client.jobs([7]) == {}


def test_a_qos_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda command: "cpu=64,gres/gpu=4|\n")
    assert client.qos_gpu_limit("spec") == 4
    answers(monkeypatch, lambda command: "gres/gpu=4|gres/gpu=2\n")
    assert client.qos_gpu_limit("spec") == 2
    answers(monkeypatch, lambda command: "\n")
    assert client.qos_gpu_limit("spec") is None


# what submit.sh looks at before it submits


def test_prompts_that_are_not_there_are_named_before_anything_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_PROMPTS", raising=False)
    config = load_config(TINY, ["traces.prompts.0.source=jsonl:$SPEC_PROMPTS/a.jsonl"])
    request = submit.Request(
        config=config, config_path=TINY, checkout=ROOT, stages=(), after=None, force=False, dry_run=False
    )
    with pytest.raises(ValueError, match=r"tiny.yaml: prompts need what is not here: .*SPEC_PROMPTS is not set"):
        submit.check_prompts(request)
    submit.check_prompts(replace(request, config=load_config(TINY)))


@pytest.mark.parametrize(
    "version, gpus, warned", [("2.13.0+cpu", 1, True), ("2.13.0+cpu", 0, False), ("2.11.0", 1, False)]
)
def test_jobs_that_ask_for_gpus_with_a_cpu_build_are_warned_of(
    version: str, gpus: int, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "package_version", lambda name: version)
    scripts: Any = [SimpleNamespace(asked=SimpleNamespace(all_gpus=gpus))]
    submit.warn_of_cpu_build(scripts)
    assert ("set SPEC_VENV=gpu in env.sh" in capsys.readouterr().err) == warned
