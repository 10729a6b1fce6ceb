"""Submit the stages of a run as a chain of Slurm jobs, each after the one before it has succeeded.

    slurm/submit.sh [STAGE ...] [--config FILE] [--from STAGE] [--after JOBID] [--dry-run] [--force]

Stages that are finished are left out, and one that is in the queue already is waited for, not submitted twice. Job
scripts, logs and the record of jobs are under logs/<run>/.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import check_env, manifest, site
from pipeline.config import Config, load_config
from pipeline.findings import package_version
from slurm import cap, client, plan, record
from slurm.client import Job
from slurm.facts import checkout, given_facts
from slurm.record import Submitted
from slurm.render import Script, render
from slurm.resources import fans_out, resources
from slurm.workers import submit_ender

DRY_RUN = "dry-run"
FAILED = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for. `after` is a job of somebody's that the first stage waits for."""

    config: Config
    config_path: Path
    checkout: Path
    stages: Sequence[str]
    after: int | None
    force: bool
    dry_run: bool

    @property
    def logs(self) -> Path:
        return self.checkout / "logs" / self.config.run


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 submitted (or nothing left to do), 2 refused."""
    parser = argparse.ArgumentParser(
        prog="slurm/submit.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="only these (03_train_draft, or 03)")
    parser.add_argument("--config", default="configs/qwen3_8b.yaml", help="the experiment (default: %(default)s)")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="this stage and those behind it")
    parser.add_argument("--after", type=int, metavar="JOBID", help="start only after this job has succeeded")
    parser.add_argument("--dry-run", action="store_true", help="write and print the job scripts, submit nothing")
    parser.add_argument("--force", action="store_true", help="make finished stages again; old folders are moved aside")
    arguments = parser.parse_args(argv)
    try:
        request = Request(
            config=load_config(arguments.config),
            config_path=Path(arguments.config).absolute(),
            checkout=checkout(),
            stages=plan.wanted(arguments.stages, arguments.first),
            after=arguments.after,
            force=arguments.force,
            dry_run=arguments.dry_run,
        )
        submit(request)
    except ValueError as error:
        print(f"submit.sh: {error}", file=sys.stderr)
        return 2
    return 0


def submit(request: Request) -> list[Submitted]:
    """Write and submit the jobs that are missing; what was submitted. ValueError when anything is not as it must be: in
    that case nothing stays submitted."""
    if not request.dry_run and not client.is_installed():
        raise ValueError(
            "sbatch was not found: this is no node of a Slurm cluster. To run every stage on this machine: "
            f"scripts/run_pipeline.sh --config {request.config_path}"
        )
    prepare_logs(request.logs)
    root = plan.results_root()
    done = {} if request.force else plan.finished(request.config, root)
    scripts = job_scripts(request, [stage for stage in request.stages if stage not in done])
    for stage in request.stages:
        if stage in done:
            print(f"{stage}: done")
    if request.dry_run:
        _print_scripts(scripts)
        return []
    check_prompts(request)
    check_cluster(scripts, request.after)
    warn_of_cpu_build(scripts)
    with cap.submitting():
        entries = submit_chain(request, scripts)
        record.add(request.logs, entries)
    _say_what_now(request, entries)
    return entries


def job_scripts(request: Request, stages: Sequence[str]) -> list[Script]:
    """The scripts of these stages, not yet written. ValueError for too many GPUs, or a site fact that is missing."""
    where = site.slurm_site()
    if not os.environ.get("SPEC_DATA_ROOT"):
        raise ValueError("SPEC_DATA_ROOT is not set; copy env.sh.example to env.sh and edit it, or export it")
    facts = given_facts(request.checkout)
    number = len(record.read(request.logs)) + 1
    return [
        Script(
            path=request.logs / f"{stage}-{number + place}.job.sh",
            run=request.config.run,
            stage=stage,
            asked=resources(request.config, stage, where),
            config=request.config_path,
            checkout=request.checkout,
            logs=request.logs,
            facts=facts,
            stop_seconds=request.config.slurm.stop_seconds,
            license=where.license if where.cap_by == "license" else None,
            check=place == 0,
            force=request.force and stage != plan.REPORT,
        )
        for place, stage in enumerate(stages)
    ]


def check_prompts(request: Request) -> None:
    """ValueError for prompts that a stage would not find, hours later perhaps."""
    found = check_env.check_prompts(request.config)
    if found.level == "error":
        raise ValueError(f"{request.config_path}: prompts need what is not here: {found.found}")


def warn_of_cpu_build(scripts: Sequence[Script]) -> None:
    """Say it where jobs would hold GPUs that their PyTorch cannot use."""
    version = package_version("torch") or ""
    if "+cpu" in version and any(script.asked.all_gpus for script in scripts):
        print(
            f"submit.sh: PyTorch {version} is a CPU build, and these jobs ask for GPUs; to use them set SPEC_VENV=gpu "
            "in env.sh and make again",
            file=sys.stderr,
        )


def check_cluster(scripts: Sequence[Script], after: int | None) -> None:
    """ValueError for what sbatch would take and never run: partitions, a job to wait for, a cap that does not hold."""
    cap.check_site_cap(site.slurm_site())
    known = client.partitions()
    for script in scripts:
        for name in (script.asked.partition or "").split(","):
            if name and name not in known:
                raise ValueError(
                    f"{script.stage}: got the partition {name!r}, expected one of {', '.join(known)}; correct "
                    "slurm.stages in the config, or SPEC_SLURM_PARTITION in env.sh"
                )
    if after is not None:
        job = client.jobs([after]).get(after)
        if job is None:
            raise ValueError(f"--after {after}: Slurm knows no such job; sbatch would take it and start at once")
        if job.state in FAILED:
            raise ValueError(f"--after {after}: that job has ended as {job.state}: what waits for it would never run")


def submit_chain(request: Request, scripts: Sequence[Script]) -> list[Submitted]:
    """One job after the other; on an error those of this call are cancelled."""
    known = record.latest(record.read(request.logs))
    chain: list[int] = [] if request.after is None else [request.after]
    enders: list[int] = []
    entries: list[Submitted] = []
    try:
        for script in scripts:
            jobs = client.queue()
            entry = _waiting(request, known.get(script.stage), jobs)
            if entry is None:
                entry = submit_one(request, script, chain, enders, jobs)
                entries.append(entry)
                print(f"{script.stage}: job {entry.job}")
            chain.append(entry.job)
            enders += [] if entry.ender is None else [entry.ender]
    except BaseException:
        client.cancel(job for entry in reversed(entries) for job in (entry.ender, entry.job) if job is not None)
        raise
    return entries


def _waiting(request: Request, entry: Submitted | None, jobs: Sequence[Job]) -> Submitted | None:
    """The stage's last job if it is in the queue. ValueError when it is to be made again."""
    if entry is None or entry.job not in {job.number for job in jobs}:
        return None
    if request.force:
        raise ValueError(f"{entry.stage} is in the queue as job {entry.job}; cancel it first")
    print(f"{entry.stage}: in the queue already, job {entry.job}")
    return entry


def submit_one(
    request: Request, script: Script, chain: Sequence[int], enders: Sequence[int], jobs: Sequence[Job]
) -> Submitted:
    """Write the script and submit it behind the last job of the chain and those that hold its GPUs. `enders` are the
    jobs that end the workers of the chain's jobs."""
    after, place, comment = tuple(chain[-1:]), cap.Place(slots=(), after=()), None
    if script.asked.all_gpus and site.slurm_site().cap_by == "submitter":
        place = cap.place(script.asked.all_gpus, jobs, [*chain, *enders])
        comment = cap.comment(place.slots)
    behind = tuple(job for job in place.after if job not in after)
    conditions = [f"afterok:{job}" for job in after] + [f"afterany:{job}" for job in behind]
    options = ["--kill-on-invalid-dep=yes", *([f"--comment={comment}"] if comment else [])]
    if conditions:
        options.append(f"--dependency={','.join(conditions)}")
    write(script)
    job = client.submit(str(script.path), options)
    try:
        ender = submit_ender(script, job, comment) if fans_out(request.config, script.stage) else None
    except BaseException:
        client.cancel([job])
        raise
    return Submitted(
        stage=script.stage,
        job=job,
        script=str(script.path),
        log=str(script.log).replace("%j", str(job)),
        config=str(request.config_path),
        after=after,
        behind=behind,
        gpus=script.asked.all_gpus,
        slots=place.slots,
        submitted=manifest.now(),
        ender=ender,
    )


def prepare_logs(logs: Path) -> None:
    """Make the folder. ValueError when it cannot be made: Slurm would fail every job without a word."""
    try:
        (logs / DRY_RUN).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make {logs} ({error.strerror}); job scripts and logs go to logs/ in the checkout, which all nodes "
            "must see: make it a folder that you can write to"
        ) from error


def write(script: Script) -> None:
    """Put the job script into its place."""
    script.path.write_text(render(script), encoding="utf-8")
    script.path.chmod(0o755)


def _print_scripts(scripts: Sequence[Script]) -> None:
    for script in scripts:
        shown = replace(script, path=script.path.parent / DRY_RUN / f"{script.stage}.job.sh")
        write(shown)
        print(f"\n==> {shown.path} (not submitted)\n{render(shown)}", end="")


def _say_what_now(request: Request, entries: Sequence[Submitted]) -> None:
    config = f" CONFIG={os.path.relpath(request.config_path)}"
    if not entries:
        print("nothing to submit")
        return
    print(f"{len(entries)} jobs submitted; scripts and logs in {request.logs}")
    print(f"make status{config}   make logs{config} STAGE={entries[0].stage[:2]}   make cancel{config}")


if __name__ == "__main__":
    sys.exit(main())
