"""Rules of the code base, held by reading it: who imports whom, how long things are, what pip installs, stray words."""

from __future__ import annotations

import ast
import importlib
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED_IMPORTS = {
    "pipeline": (),
    "specdec": (),
    "vllm_draft_spec": ("specdec",),
    "data": ("pipeline", "specdec"),
    "slurm": ("pipeline",),
    "train": ("pipeline", "specdec", "data.common", "data.shards", "data.filtered", "data.scoring"),
    # the last three: what a bench of stage 01 runs
    "bench": ("pipeline", "specdec", "data.common", "train", "data.gen_traces", "data.items", "data.tracer"),
}
MODULE_LINES, FUNCTION_LINES = 320, 70
FUNCTION_LINES_90_PERCENT, FUNCTION_LINES_MEDIAN = 35, 12

# Joined from parts, so that this file holds none of them.
HOST_PARTS = (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("debian", "org"), ("pytorch", "org"))
HOSTS = [".".join(parts) for parts in HOST_PARTS]
CPU_INDEX = f"https://download.{HOSTS[-1]}/whl/cpu"  # the Makefile may name it, once
LEFTOVERS = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
MACHINE_PATH = re.compile(r"(?<![\w.}~-])/(?:home|Users|root|work|mnt|tmp/build)/\w")


def tracked_files() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def python_files(*, tests: bool = False) -> list[Path]:
    found = [path for path in tracked_files() if path.suffix == ".py"]
    return [path for path in found if tests or path.relative_to(ROOT).parts[0] != "tests"]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function, decorators left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def imported_modules(source: str, package: str) -> set[str]:
    """What `source`, a module directly in `package`, imports; `from data import common` gives data.common."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package if node.level else "", node.module or ""]))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def forbidden_imports(source: str, package: str) -> set[str]:
    """The modules of ours that `source` imports although its package may not."""
    allowed = (package, *ALLOWED_IMPORTS[package])
    ours = {name for name in imported_modules(source, package) if name.split(".")[0] in ALLOWED_IMPORTS}
    return {name for name in ours if not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)}


@pytest.mark.parametrize(
    "package, source, expected",
    [
        ("specdec", "from specdec.rng import uniforms\nfrom . import stats\nimport torch", set()),
        ("specdec", "def f():\n    import pipeline.config", {"pipeline.config"}),
        ("pipeline", "from specdec import Engine", {"specdec.Engine"}),
        ("bench", "from data.common import read\nfrom data import common\nfrom pipeline import stage", set()),
        ("bench", "from data import shards", {"data.shards"}),
        ("data", "from bench.tables import read", {"bench.tables.read"}),
        ("train", "from data.filtered import iter_rows\nfrom data.filter import body", {"data.filter.body"}),
        ("vllm_draft_spec", "from specdec.controller import Adaptive\nimport bench.tables", {"bench.tables"}),
    ],
)
def test_import_rule_sees_every_form_of_import(package: str, source: str, expected: set[str]) -> None:
    assert forbidden_imports(source, package) == expected


def test_import_directions() -> None:
    problems = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files()
        if (package := path.relative_to(ROOT).parts[0]) in ALLOWED_IMPORTS
        for name in sorted(forbidden_imports(path.read_text(encoding="utf-8"), package))
    ]
    assert not problems, "\n".join(problems)


def test_the_plugin_imports_the_engine_only_when_it_is_to_run_the_draft() -> None:
    """Beyond what is plain Python: own_draft imports specdec's models, own_proposer imports own_draft,
    and nobody imports own_proposer at a module's top."""
    eager: dict[str, set[str]] = {}
    for path in (ROOT / "vllm_draft_spec").glob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        eager[path.stem] = {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    light = re.compile(r"specdec\.(controller\w*|stats|kv_size)$")
    engine = {
        name for name, found in eager.items() if any(re.match("specdec", m) and not light.match(m) for m in found)
    }
    assert engine == {"own_draft"}
    for module, users in (("own_draft", {"own_proposer"}), ("own_proposer", set())):
        assert {name for name, found in eager.items() if f"vllm_draft_spec.{module}" in found} == users


def test_modules_and_functions_stay_short() -> None:
    long_modules = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MODULE_LINES
    }
    lengths = dict(pair for path in python_files() for pair in functions(path))
    long_functions = {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES}
    assert not long_modules
    assert not long_functions
    assert statistics.median(lengths.values()) <= FUNCTION_LINES_MEDIAN
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= FUNCTION_LINES_90_PERCENT


def stray_words(text: str) -> list[str]:
    """Lines that name a machine's folders or a package index's host, or were left for later."""
    hosts = re.compile("|".join(map(re.escape, HOSTS)))
    patterns = (MACHINE_PATH, hosts, re.compile(rf"\b(?:{LEFTOVERS})\b"))
    return [line for line in text.splitlines() if any(pattern.search(line) for pattern in patterns)]


def test_stray_words_are_seen() -> None:
    for line in ("see /ho" + "me/me/x", "pip -i https://" + HOSTS[0], "# TO" + "DO: later", "(/wo" + "rk/main)"):
        assert stray_words(line) == [line]
    assert stray_words("${HOME}/x\nbench/wo" + "rk/home\npypi:some-package==1.0") == []


def test_no_stray_words_in_tracked_files() -> None:
    problems = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path == ROOT / "Makefile":
            text = text.replace(CPU_INDEX, "", 1)
        problems += [f"{path.relative_to(ROOT)}: {line.strip()[:100]}" for line in stray_words(text)]
    assert not problems, "\n".join(problems)


def pip_dry_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What pip would install for a checkout: name -> requirements. Offline, so a hard dependency fails or shows."""
    monkeypatch.setenv("PIP_NO_INPUT", "1")
    report = tmp_path / "report.json"
    # --ignore-installed: a dependency that is already here would not show otherwise.
    options = ["--dry-run", "--ignore-installed", "--no-index", "--no-build-isolation", "--report", str(report)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    install = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"]: item["metadata"].get("requires_dist", []) for item in install}


def copy_of_package(tmp_path: Path) -> Path:
    """The tracked files that packaging reads, so that pip's build leaves nothing in the checkout."""
    copy = tmp_path / "checkout"
    for path in tracked_files():
        relative = path.relative_to(ROOT)
        needed = ("specdec", "vllm_draft_spec", "pyproject.toml", "README.md", "LICENSE")
        if relative.parts[0] in needed:
            (copy / relative).parent.mkdir(parents=True, exist_ok=True)
            (copy / relative).write_bytes(path.read_bytes())
    return copy


def test_pip_installs_specdec_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard dependency on torch would make pip resolve torch again in a shared environment, and break others there."""
    installed = pip_dry_run(copy_of_package(tmp_path), tmp_path, monkeypatch)
    assert list(installed) == ["specdec"]
    hard = [requirement for requirement in installed["specdec"] if "extra ==" not in requirement]
    assert hard == []


def test_the_plugin_is_an_entry_point_of_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = project["project"]["entry-points"]["vllm.general_plugins"]["vllm_draft_spec"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert set(project["tool"]["setuptools"]["packages"]) == {"specdec", "vllm_draft_spec"}


WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import specdec
try:
    specdec.Engine
except ImportError as error:
    print(error)
"""


def test_specdec_imports_without_torch_and_says_what_to_install() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "specdec[engine]" in result.stdout


def test_make_help_lists_the_targets() -> None:
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "test-all", "all", "lint", "clean"):
        assert re.search(rf"^  make {target} +\w", result.stdout, re.MULTILINE), result.stdout


def test_requirement_files_pin_every_version() -> None:
    for path in sorted(ROOT.glob("requirements*.txt")):
        lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        loose = [line for line in lines if line and not line.startswith("-r ") and "==" not in line]
        assert not loose, f"{path.name}: {loose}"


class FakeTokenizer:
    """Bytes as ids, for the README's example, whose models cannot be downloaded in a test."""

    eos_token_id = 0

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return str(ids)


def readme_examples() -> list[str]:
    """The Python blocks: the engine's and SpecDecoder's."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_readme_decoder_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.toy_text import byte_tokenizer, save_toy

    save_toy(tmp_path / "SmolLM2-135M-Instruct", byte_tokenizer(), max_positions=8192)
    monkeypatch.chdir(tmp_path)
    _, example = readme_examples()
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"^(length|stop), \d+ tokens, [\d.]+ a round$", capsys.readouterr().out, re.MULTILINE)


def test_readme_engine_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    from bench.tiny_models import tiny_model

    example = readme_examples()[0].replace('"cuda"', '"cpu"')
    loaders = {
        "AutoTokenizer": lambda name: FakeTokenizer(),
        "AutoModelForCausalLM": lambda name, **options: tiny_model("qwen3", vocab=256, layers=2, seed=len(name)),
    }
    for loader, load in loaders.items():
        monkeypatch.setattr(transformers, loader, SimpleNamespace(from_pretrained=load))
    exec(compile(example, "README.md", "exec"), {})
    ids = capsys.readouterr().out.partition("]")[0].strip("[").split(", ")
    assert 1 <= len(ids) <= 64


@pytest.mark.slow
@pytest.mark.timeout(3000)  # every stage, with other tests beside it
@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="make would build .venv: run by make test-all")
def test_make_demo_ends_with_a_table_and_passing_gates(data_root: Path) -> None:
    done = subprocess.run(["make", "demo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("tokens/s", "alpha", *(f"G{number}" for number in range(1, 7)), "pass", "report.html"):
        assert word in done.stdout, done.stdout
