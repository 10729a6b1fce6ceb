"""Configs: what is accepted, and that every error names file, line, what was got and what was expected."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import pytest

from pipeline.config import (
    DraftConfig,
    PromptSource,
    bench_prompt_parts,
    bench_sections,
    expand_env,
    load_config,
    section_values,
)

ROOT = Path(__file__).resolve().parent.parent
GOOD = """\
run: try
models:
  target: tiny:qwen3
  draft:
    keep_layers: 2
traces:
  prompts:
    - {name: a, source: human_eval, limit: 4}
    - {name: b, source: "jsonl:$SPEC_PROMPTS/b.jsonl", limit: 2}
  max_tokens: 12
bench_engine:
  prompts:
    - {name: a, source: human_eval, limit: 4}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def load_changed(good: Path, old: str, new: str) -> None:
    assert GOOD.count(old) >= 1
    good.write_text(GOOD.replace(old, new, 1))
    load_config(good)


@pytest.mark.parametrize("name", ["demo", "tiny", "qwen3_8b", "vllm_methods"])
def test_the_configs_in_the_repository_load(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert config.run == name


def test_values_defaults_and_types(good: Path) -> None:
    config = load_config(good)
    assert config.models.draft == DraftConfig(keep_layers=2)
    assert config.models.dtype == "bfloat16"
    assert config.traces.prompts[1] == PromptSource(name="b", source="jsonl:$SPEC_PROMPTS/b.jsonl", limit=2)
    assert config.traces.temperatures == (1.0,)
    assert config.bench_engine.ks == (1, 2, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.traces.batch = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("max_tokens", "max_token", r"good.yaml:10: unknown key 'traces.max_token'; did you mean 'max_tokens'\?"),
        ("bench_engine:", "bench_enigne:", r"good.yaml:11: unknown key 'bench_enigne'; did you mean 'bench_engine'\?"),
        ("limit: 4", "zzz: 4", r"good.yaml:8: unknown key 'traces.prompts\[0\].zzz'; known here: limit, name, source"),
        ("max_tokens: 12", "top_p: 1.0", "good.yaml:7: missing key 'traces.max_tokens'"),
        ("run: try\n", "", "good.yaml:1: missing key 'run'"),
        ("max_tokens: 12", "max_tokens: many", "good.yaml:10: traces.max_tokens: got 'many', expected a whole number"),
        ("max_tokens: 12", "max_tokens: 1.5", "good.yaml:10: traces.max_tokens: got '1.5', expected a whole number"),
        ("max_tokens: 12", "max_tokens: yes", "good.yaml:10: traces.max_tokens: got 'yes', expected a whole number"),
        ("max_tokens: 12", "max_tokens: [12]", "good.yaml:10: traces.max_tokens: got a list, expected a whole number"),
        ("max_tokens: 12", "max_tokens:", "good.yaml:10: traces.max_tokens: got '', expected a whole number"),
        ("max_tokens: 12", "max_tokens: 0", "good.yaml:10: traces.max_tokens: got 0, expected .*at least 1"),
        ("max_tokens: 12", "max_tokens: 12\n  top_p: 1.1", r"good.yaml:11: traces.top_p: got 1.1, expected .*\(0, 1\]"),
        ("max_tokens: 12", "max_tokens: 12\n  top_p: .nan", "good.yaml:11: traces.top_p: got nan, expected"),
        (
            "max_tokens: 12",
            "max_tokens: 12\n  top_p: '0.5'",
            "good.yaml:11: traces.top_p: got '0.5', expected a number",
        ),
        ("max_tokens: 12", "max_tokens: 12\n  temperatures: 1", "good.yaml:11: traces.temperatures: .*a list of float"),
        ("max_tokens: 12", "max_tokens: 12\n  temperatures: []", "traces: temperatures: got an empty list"),
        (
            "max_tokens: 12",
            "max_tokens: 12\n  temperatures: [1, 0.5, 1.0]",
            r"temperatures: got \[1.0, 0.5, 1.0\], expected",
        ),
        ("max_tokens: 12", "max_tokens: 12\n  temperatures: [0, -1]", r"good.yaml:11: .*got -1.0, expected a temperat"),
        ("max_tokens: 12", "max_tokens: 12\n  max_tokens: 13", "good.yaml:11: 'traces.max_tokens' is given twice"),
        ("keep_layers: 2", "keep_layers: 0", "keep_layers: got 0, expected at least one layer"),
        ("keep_layers: 2", "keep_layers: -1", "good.yaml:5: models.draft.keep_layers: got -1, expected"),
        ("keep_layers: 2", "keep_layers: [0, a]", r"good.yaml:5: .*keep_layers\[1\]: got 'a', expected a whole number"),
        (
            "keep_layers: 2",
            "keep_layers: 2\n    model: x/y",
            "good.yaml:5: models.draft: got several or none of keep_l",
        ),
        ("keep_layers: 2", "keep_layers: null", "got several or none"),
        ("keep_layers: 2", "keep_layers: two", "good.yaml:5: .*got 'two', expected a whole number"),
        ("tiny:qwen3", "[tiny]", "good.yaml:3: models.target: got a list, expected text"),
        ("run: try", "run: ../up", "good.yaml:1: run: got '../up', expected a name of letters"),
        ("name: b", "name: a", "traces: prompts: got the name 'a' twice"),
        ("target: tiny", "target: [tiny", "good.yaml:.*not valid YAML"),
    ],
)
def test_errors_name_file_line_got_and_expected(good: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_changed(good, old, new)


def test_unknown_dtype_lists_the_known_ones(good: Path) -> None:
    with pytest.raises(ValueError, match="got 'int4', expected one of float32, float64, bfloat16, float16"):
        load_config(good, ["models.dtype=int4"])


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.yaml: no such config file"):
        load_config(tmp_path / "none.yaml")
    for text, message in (("", "empty.yaml:1: the file is empty"), ("- 1\n", "empty.yaml:1: config: got a list")):
        (tmp_path / "empty.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(tmp_path / "empty.yaml")


def test_overrides(good: Path) -> None:
    overrides = [
        "traces.max_tokens=99",
        "traces.top_p=1e-1",
        "traces.temperatures=[0, 1]",
        "traces.prompts.1.limit=7",
        "models.draft={model: a/b}",
        "bench_engine.law_samples=300",
        "run=other",
    ]
    config = load_config(good, overrides)
    assert (config.traces.max_tokens, config.traces.top_p, config.traces.temperatures) == (99, 0.1, (0.0, 1.0))
    assert config.traces.prompts[1].limit == 7
    assert config.models.draft == DraftConfig(model="a/b")
    assert (config.bench_engine.law_samples, config.run) == (300, "other")


@pytest.mark.parametrize(
    "override, message",
    [
        ("traces.max_tokens", "got no key=value"),
        ("=3", "got no key=value"),
        ("traces.max_token=3", "^--set traces.max_token=3: unknown key 'traces.max_token'; did you mean 'max_tokens'"),
        ("traces.max_tokens=x", "^--set traces.max_tokens=x: traces.max_tokens: got 'x', expected a whole number"),
        ("traces.max_tokens=", "^--set traces.max_tokens=: .*got 'null', expected a whole number"),
        ("trace.max_tokens=3", "^--set trace.max_tokens=3: unknown key 'trace'; did you mean 'traces'"),
        ("traces.prompts.5.limit=3", "got '5', expected an index below 2"),
        ("run.x=3", "good.yaml:1 holds a single value, so 'x' cannot be set in it"),
        ("traces.max_tokens=[", "not valid YAML"),
    ],
)
def test_bad_overrides_are_named(good: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(good, [override])


def test_section_values_are_plain_data(good: Path) -> None:
    values = section_values(load_config(good), ("models", "traces"))
    assert values["models"] == {
        "target": "tiny:qwen3",
        "draft": {"keep_layers": 2, "model": None, "trained": None},
        "dtype": "bfloat16",
    }
    assert values["traces"]["temperatures"] == [1.0]


def test_environment_variables_expand_at_use(monkeypatch: pytest.MonkeyPatch, good: Path) -> None:
    monkeypatch.setenv("SPEC_PROMPTS", "/data")
    source = load_config(good).traces.prompts[1].source
    assert source == "jsonl:$SPEC_PROMPTS/b.jsonl"
    assert expand_env(source) == "jsonl:/data/b.jsonl"
    assert expand_env("${SPEC_PROMPTS}x/$1") == "/datax/$1"


def test_an_unset_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_PROMPTS", raising=False)
    with pytest.raises(ValueError, match=r"\$SPEC_PROMPTS/x: the environment variable SPEC_PROMPTS is not set"):
        expand_env("$SPEC_PROMPTS/x")


def test_yaml_is_read_by_the_safe_loader(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(textwrap.dedent("run: !!python/object/apply:os.getcwd []\n"))
    with pytest.raises(ValueError, match=r"evil.yaml:1"):
        load_config(path)


def test_parts_of_sections() -> None:
    config = load_config(ROOT / "configs" / "tiny.yaml")
    assert section_values(config, ["bench_engine.seed", "models.target"]) == {
        "bench_engine.seed": config.bench_engine.seed,
        "models.target": "tiny:qwen3",
    }
    left_out = dataclasses.replace(config, bench_engine=None)  # type: ignore[arg-type]
    assert section_values(left_out, ["bench_engine.seed"]) == {"bench_engine.seed": None}


def test_bench_sections_are_all_with_prompts_but_the_traces() -> None:
    assert "bench_engine" in bench_sections()
    assert not {"traces", "models", "filter"} & set(bench_sections())
    assert {"bench_engine.prompts", "bench_engine.seed"} <= set(bench_prompt_parts())
