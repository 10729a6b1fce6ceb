"""Stage 03 as its users meet it: whole on tiny models, killed anywhere, stopped, on two processes, refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.draft_model import as_draft, load_draft
from data import filter as filter_stage
from data import gen_traces
from data.filtered import iter_rows
from pipeline import manifest
from pipeline.config import Config, load_config
from pipeline.models import load_target, load_tokenizer, revision
from pipeline.results import read_result
from pipeline.stage import StaleError, run_stage
from specdec import Engine, Request, SamplingParams
from specdec.drafter import ModelDrafter
from train.inputs import build_corpora, checked
from train.metrics import read_metrics
from train.ranks import Ranks
from train.train_draft import STAGE, TrainStage

TESTS = Path(__file__).resolve().parent
TINY = TESTS.parent / "configs" / "tiny.yaml"
DRAFTS = ("sft", "sft_kd")


def tiny_config(*overrides: str) -> Config:
    return load_config(TINY, overrides)


def train(config: Config) -> Path:
    with Ranks() as ranks:
        return run_stage(STAGE, config, TrainStage(ranks))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with stages 01 and 02 of the tiny config done."""
    root = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_DATA_ROOT", str(root))
        run_stage(gen_traces.STAGE, tiny_config(), gen_traces.body)
        run_stage(filter_stage.STAGE, tiny_config(), filter_stage.body)
    return root


def copied(data: Path, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A copy of a data root, which is the data root from now on."""
    copy = folder / "data"
    shutil.copytree(data, copy)
    patch.setenv("SPEC_DATA_ROOT", str(copy))
    return copy


@pytest.fixture
def root(traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copied(traced, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def trained(traced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it with stage 03 done too."""
    with pytest.MonkeyPatch.context() as patch:
        copy = copied(traced, tmp_path_factory.mktemp("trained"), patch)
        train(tiny_config())
    return copy


@pytest.fixture
def done(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished stage's folder, in a data root of the test's own."""
    return copied(trained, tmp_path, monkeypatch) / "tiny" / STAGE.name


def test_stage_trains_both_drafts_and_says_so(done: Path) -> None:
    content = manifest.read(done)
    assert content is not None
    assert set(content["summary"]["drafts"]) == set(DRAFTS)
    assert not list(done.glob("*work*"))
    for name in DRAFTS:
        rows = read_metrics(done / name / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(6))
        assert rows[-1]["loss"] < rows[0]["loss"]
        assert 0 < rows[2]["heldout_acceptance"] < 1
        provenance = json.loads((done / name / "provenance.json").read_text(encoding="utf-8"))
        assert provenance["target"] == "tiny:qwen3"
        assert 0.5 < provenance["head_coverage"] <= 1
    assert (done / "training.png").stat().st_size > 1000


def test_finished_stage_trains_nothing_and_refuses_other_settings(done: Path) -> None:
    before = (done / "done.json").read_bytes()
    assert train(tiny_config()) == done
    assert (done / "done.json").read_bytes() == before
    with pytest.raises(StaleError, match=r"train\.recipe\.lr"):
        train(tiny_config("train.recipe.lr=1e-4"))


def test_engine_decodes_with_a_trained_draft_named_in_the_config(done: Path) -> None:
    config = tiny_config()
    named = dataclasses.replace(config.models.draft, keep_layers=None, trained="sft_kd")
    config = dataclasses.replace(config, models=dataclasses.replace(config.models, draft=named))
    target = load_target(config.models, "cpu")
    draft = load_draft(config, target, "cpu")
    assert isinstance(draft, ModelDrafter), "its head is pruned"
    request = Request(prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=24))
    [plain], [drafted] = (Engine(target, each, k=2).generate([request]) for each in (None, draft))
    assert drafted.token_ids == plain.token_ids
    by_path = dataclasses.replace(named, trained=None, model=str(done / "sft_kd"))
    elsewhere = dataclasses.replace(config, models=dataclasses.replace(config.models, draft=by_path))
    assert isinstance(load_draft(elsewhere, target, "cpu"), ModelDrafter)
    by_name = {name: load_draft(as_draft(config, name), target, "cpu") for name in ("stock", "sft")}
    assert isinstance(by_name["sft"], ModelDrafter)
    assert by_name["stock"].config.num_hidden_layers == 2
    assert by_name["stock"].get_output_embeddings().weight.shape[0] == target.config.vocab_size
    unknown = dataclasses.replace(named, trained="x")
    with pytest.raises(ValueError, match=r"expected one of train\.drafts: sft, sft_kd"):
        dataclasses.replace(config, models=dataclasses.replace(config.models, draft=unknown))


def test_a_damaged_draft_is_made_again(done: Path) -> None:
    path = done / "sft" / "model.safetensors"
    before = path.read_bytes()
    path.write_bytes(b"broken")
    train(tiny_config())
    assert path.read_bytes() == before


def test_finished_stage_is_copied_back_from_the_archive(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folders in it: a flat copy would lose the drafts."""
    (tmp_path / "archive").mkdir()
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(tmp_path / "archive"))
    before = (done / "sft" / "model.safetensors").read_bytes()
    train(tiny_config())
    shutil.rmtree(done)
    assert train(tiny_config()) == done
    assert (done / "sft" / "model.safetensors").read_bytes() == before


def test_on_policy_rounds_train_on_the_drafts_own_texts(root: Path) -> None:
    settings = [f"train.on_policy.{name}" for name in ("rounds=1", "prompts=3", "max_tokens=6", "batch=2")]
    folder = train(tiny_config(*settings, "train.recipe.steps=4", "train.recipe.exact_every=0"))
    plain = json.loads((folder / "sft" / "provenance.json").read_text(encoding="utf-8"))
    assert plain["train"]["on_policy"]["rounds"] == 1
    first, second = (read_metrics(folder / "sft" / name) for name in ("round-0-metrics.jsonl", "metrics.jsonl"))
    assert len(first) == len(second) == 4
    assert second[0]["loss"] < first[0]["loss"], "the second round did not go on from the first"


@pytest.mark.slow
def test_killed_anywhere_the_final_weights_are_the_same(traced: Path, tmp_path: Path) -> None:
    """kill -9 at random file operations, again and again, and SIGTERM in the middle (tests/train_crash.py)."""
    command = [sys.executable, str(TESTS / "train_crash.py"), str(traced), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["kills"]) >= 5
    assert set(result["expected"]) == {f"{name}/model.safetensors" for name in DRAFTS}
    for outcome in result["outcomes"]:
        assert outcome == result["expected"], result["kills"]
    stopped = result["stopped"]
    assert stopped["code"] == 75
    assert stopped["steps"] == list(range(stopped["signalled"] + 2)), "it ends with the step at hand"
    assert f"step-{len(stopped['steps']):08d}" in stopped["checkpoints"], "no checkpoint of the last step"


@pytest.mark.slow
def test_two_processes_train_the_same_drafts(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "two"
    shutil.copytree(root, other)
    folder = train(tiny_config())
    environment = {
        **os.environ,
        "SPEC_DATA_ROOT": str(other),
        "SPEC_TRAIN_PROCESSES": "2",
        "PYTHONPATH": str(TESTS.parent),
    }
    command = [sys.executable, "-m", "train.train_draft", "--config", str(TINY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in DRAFTS:
        one, two = (load_file(each / name / "model.safetensors") for each in (folder, other / "tiny" / STAGE.name))
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4)


LEADER_LEAVES = """
import torch.distributed as dist
from train.ranks import Ranks

def leave():
    if dist.get_rank() == 0:
        raise ValueError("only here")
    dist.barrier()

if __name__ == "__main__":
    import os, sys, leader_leaves
    with Ranks() as ranks:
        try:
            ranks.run(leader_leaves.leave)
        except ValueError as error:
            print(error, ranks.followers[0].pid, flush=True)
    print("stuck" if ranks.stuck else "free", flush=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_leader_that_fails_alone_ends_with_its_followers(tmp_path: Path) -> None:
    """A full disk at a checkpoint, say: the follower waits in a collective for a leader that has left it."""
    (tmp_path / "leader_leaves.py").write_text(LEADER_LEAVES, encoding="utf-8")
    environment = {
        **os.environ,
        "SPEC_TRAIN_PROCESSES": "2",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(tmp_path)]),
    }
    command = [sys.executable, str(tmp_path / "leader_leaves.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert ended.returncode == 3, ended.stderr
    message, follower = ended.stdout.splitlines()[0].rsplit(" ", 1)
    assert message == "only here"
    with pytest.raises(ProcessLookupError):
        os.kill(int(follower), 0)


def rows_of(root: Path) -> list[Any]:
    return list(iter_rows(root / "tiny" / "02_filter", "train"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"teacher": "tiny:llama"}, "its teacher is tiny:llama, models.target is tiny:qwen3"),
        ({"teacher_revision": "old"}, "made by revision old"),
        ({"prompt_ids": np.array([1, 2, 3], dtype=np.int32)}, "another tokenizer or chat template"),
    ],
)
def test_traces_of_another_teacher_or_tokenizer_are_refused(root: Path, change: dict[str, Any], message: str) -> None:
    config = tiny_config()
    rows = [dataclasses.replace(row, **change) for row in rows_of(root)]
    target = revision(config.models.target)
    with pytest.raises(ValueError, match=message):
        list(checked(rows, config, target, load_tokenizer(config.models)))


def test_an_empty_filter_output_is_refused(root: Path, tmp_path: Path) -> None:
    config = tiny_config()
    for path in (root / "tiny" / "02_filter").glob("train-*.parquet"):
        empty = next(path.parent.glob("dropped-*.parquet"))
        assert empty.exists()
        path.unlink()
    with pytest.raises(ValueError, match=r"no train-\*\.parquet"):
        build_corpora(config, root / "tiny" / "02_filter", "", None, tmp_path / "work")


def test_stage_measures_its_drafts_beside_the_start(root: Path) -> None:
    """Rows for start and drafts in domain and on the config's sets, a gate, and no new measurement on the next run."""
    folder = train(tiny_config())
    result = read_result(folder / "result.json")
    assert [row["loss"] for row in result["rows"]] == ["stock", *DRAFTS] * 3
    assert [row["in_domain"] for row in result["rows"]] == [1] * 3 + [0] * 6
    for row in result["rows"]:
        assert len(row["alpha_by_position_t1"]) == len(row["tokens_by_k_t1"]) == 3
        is_stock = row["loss"] == "stock"
        assert (row["tokens_trained"] == 0, row["minutes"] == 0) == (is_stock, is_stock)
    assert result["gates"]["G3"]["state"] in ("pass", "fail")
    assert result["gates"]["G3"]["value"] is not None
    before = (folder / "result.json").stat().st_mtime_ns
    assert train(tiny_config()) == folder
    assert (folder / "result.json").stat().st_mtime_ns == before
