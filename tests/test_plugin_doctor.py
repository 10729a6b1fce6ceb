"""The doctor's findings on pairs that go together, and on pairs that do not."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import tiny
from vllm_draft_spec import doctor
from vllm_draft_spec.doctor import Model, cache_finding, context_finding, kv_bytes, main, vocabulary_finding

TARGET = Model(name="big", vocabulary=260, context=4096, kv_bytes=3000)
DRAFT = replace(TARGET, name="small", kv_bytes=1000)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    tokenizer = tiny.byte_tokenizer()
    for name in ("target", "draft"):
        tiny.tiny_config("qwen3", tokenizer).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]


def test_a_pair_that_goes_together(
    pair: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 x 4 layers x 2 heads x 32 x 2 bytes = 1,024 bytes a token in each."""
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.32.0+cpu")
    assert main([*pair, "--k-max", "3", "--cache-gib", "1"]) == 0
    text = capsys.readouterr().out
    assert "the same 260 tokens" in text
    assert (
        "1,024 bytes a token and 1,024 for the draft: of 1 GiB the pool holds 524,288 tokens instead of 1,048,576"
        in text
    )
    command = shlex.split(text.splitlines()[-1])
    assert command[:4] == ["SPECDEC_PLUGIN=1", "vllm", "serve", pair[1]]
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative == {"method": "draft_model", "model": pair[3], "num_speculative_tokens": 3}
    assert json.loads(command[-1]) == {"specdec": {"controller": "adaptive"}}


def test_the_own_drafts_memory_is_shown(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    """1,024 bytes a token; 64 rows of 100 + 4 tokens and 136 more for pieces and drafts, one slot for padding; texts
    of 8 bytes a token."""
    (Path(pair[3]) / "model.safetensors").write_bytes(b"0" * 2**24)
    options = ["--own", "--window", "100", "--max-model-len", "1000"]
    assert main([*pair, *options]) == int(doctor.version_finding().level == "error")
    text = capsys.readouterr().out
    nbytes = 64 * ((100 + 4 + 136 + 1) * 1024 + 1002 * 8)
    assert f"its own cache of {nbytes / 2**30:.2f} GiB (64 rows of 240 tokens, 1,024 bytes each)" in text
    assert "weights of 0.02 GiB" in text
    command = shlex.split(text.splitlines()[-1])
    settings = json.loads(command[command.index("--additional-config") + 1])
    assert settings == {"specdec": {"controller": "adaptive", "draft": "own", "window": 100}}
    assert command[-4:] == ["--max-num-seqs", "64", "--max-model-len", "1000"]


def test_a_pruned_head_is_for_the_own_draft(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    (Path(pair[3]) / "head_ids.json").write_text("[0, 1]")
    assert main(pair) == 1
    assert "head is pruned to some tokens, which vLLM cannot load; the plugin can: --own" in capsys.readouterr().out
    main([*pair, "--own"])
    assert "head is pruned" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--own", "--window", "0"], r"specdec.window is 0; expected a whole number from 1 on"),
        (["--window", "5"], r"specdec.window has no effect without draft: own"),
        (["--k-max", "0"], r"--k-max 0 --cache-gib 10 --max-num-seqs 64; expected positive numbers"),
        (["--cache-gib", "-1"], r"--cache-gib -1 --max-num-seqs 64; expected positive"),
        (["--draft", "nowhere/at-all"], r"nowhere/at-all: no model with a configuration there"),
    ],
)
def test_bad_arguments(options: list[str], message: str, pair: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main([*pair, *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "version, level", [("0.26.0", "ok"), ("0.32.0+cpu", "ok"), ("0.12.0", "error"), ("1.32.0", "error")]
)
def test_versions(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    assert doctor.version_finding().level == level


def test_vocabularies() -> None:
    small = replace(DRAFT, vocabulary=256)
    assert vocabulary_finding(TARGET, small).level == "warning"
    assert "use_heterogeneous_vocab" in vocabulary_finding(TARGET, small).text
    assert '"use_heterogeneous_vocab": true' in doctor.serve_command(TARGET, small, doctor.Plan())
    reads: Any = SimpleNamespace(encode=lambda text: [1, 2, 3])
    reads_otherwise: Any = SimpleNamespace(encode=lambda text: [3, 2, 1])
    known = replace(TARGET, tokenizer=reads)
    assert vocabulary_finding(known, replace(DRAFT, tokenizer=reads)).level == "ok"
    assert vocabulary_finding(known, replace(DRAFT, tokenizer=reads_otherwise)).level == "error"
    assert vocabulary_finding(known, DRAFT).level == "warning"


def test_a_short_draft_is_a_warning() -> None:
    found = context_finding(TARGET, replace(DRAFT, context=1024))
    assert found.level == "warning"
    assert "ends at 1024 tokens, the target's at 4096" in found.text


def test_the_draft_takes_its_share_of_the_cache() -> None:
    assert "holds 268,435 tokens instead of 357,913, 89,478 fewer (25%)" in cache_finding(TARGET, DRAFT, 1.0).text


def test_bytes_of_a_token() -> None:
    """Qwen3-8B: 36 layers, 8 heads of 128, bfloat16; the head size is not hidden / heads in every model."""
    shape = SimpleNamespace(
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=4096
    )
    assert kv_bytes(SimpleNamespace(**vars(shape), dtype="torch.bfloat16")) == 36 * 8 * 128 * 2 * 2
