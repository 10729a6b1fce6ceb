"""The engines of bench.vllm_speed: model folders of the given shapes, and how a method's engine is started.

All engines of a wave live on one GPU together. vLLM then must not measure its memory, since what the neighbours take
would count as its own: the KV pool is given in bytes, for as many rows as the largest batch has, and the share of the
GPU that vLLM checks at the start is small.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.memory import GIB, kv_bytes_by_config
from bench.serving_drafts import eagle_config
from bench.serving_methods import CHECKOUT, CPU_SETTINGS, SWITCH, record_of_checkout
from bench.shapes import config_of, random_model
from bench.tiny_models import noisy_copy, tiny_model
from bench.vllm_methods import DRAFT, HEAD, Method, Sizes
from data.common import encode_prompt
from pipeline import rows

SHARE = 0.03  # of the GPU: what vLLM asks to be free when it starts, and nothing else
PREFILL_TOKENS = 8192  # most tokens of a step; bounds the activations of each engine
BLOCK, CPU_BLOCK = 16, 32  # tokens of a KV block; the CPU's attention takes no smaller one
LONGEST_DRAFT = 16
# CUDA context, activations and graphs of an engine: without a draft model, with one, with the plugin's graphs by length
REST_GIB, REST_DRAFTING_GIB, REST_PLUGIN_GIB = 3.0, 4.0, 5.0
TINY_REAL = "real (a noisy copy drafts)"
WHOLE = "$WHOLE"  # the draft as vLLM takes it: with a head over the whole vocabulary
# A pair's own acceptance, greedy and sampled; a prompt of more tokens is left out.
REAL = Sizes(alphas=(), shifting=(), real="real", temperatures=(0.0, 1.0), new_tokens=128)
LONGEST_PROMPT = 256


@dataclass(frozen=True, kw_only=True)
class Models:
    """Folders by $DRAFT, $EAGLE3, $WHOLE and "" for the target. weights: bytes; kv: bytes a token; made: vLLM makes the
    weights."""

    folders: Mapping[str, str]
    weights: Mapping[str, int]
    kv: Mapping[str, int]
    vocab: int
    on_gpu: bool
    names: Mapping[str, Any]
    made: bool = False

    def pool_bytes(self, method: Method, sizes: Sizes) -> int:
        """KV of the largest batch."""
        blocks = -(-(sizes.prompt_tokens + sizes.new_tokens + LONGEST_DRAFT) // BLOCK) + 1
        return self.kv_bytes(method) * BLOCK * blocks * max(sizes.batches)

    def kv_bytes(self, method: Method) -> int:
        """Of a token in vLLM's pool: the draft's too where vLLM runs it."""
        return self.kv[""] + (0 if _runs_own(method) else self.kv.get(_model(method), 0))

    def gib(self, method: Method, sizes: Sizes) -> float:
        """What the method's engine takes of the GPU, about."""
        model = _model(method)
        own = self.kv[model] * longest(sizes) * max(sizes.batches) if _runs_own(method) else 0
        drafting = REST_DRAFTING_GIB if method.plugin is None else REST_PLUGIN_GIB
        rest = REST_GIB if model == "none" else drafting
        taken = self.weights[""] + self.weights.get(model, 0) + self.pool_bytes(method, sizes) + own
        return taken / GIB + rest


def _model(method: Method) -> str:
    return str(method.speculative.get("model", "none"))


def _runs_own(method: Method) -> bool:
    return method.plugin is not None and method.plugin.get("draft") == "own"


def longest(sizes: Sizes) -> int:
    """Tokens of a request, and room for the drafts behind its end: vLLM stops drafting for all near it."""
    return sizes.prompt_tokens + sizes.new_tokens + 2 * LONGEST_DRAFT


def random_models(shapes: Path, target: str, draft: str, folder: Path) -> Models:
    """Folders with configs alone: vLLM makes the weights ("dummy"). ValueError for configs that cannot be used."""
    configs = {"": config_of(shapes, target), DRAFT: config_of(shapes, draft)}
    head = eagle_config(configs[""], "eagle3", torch.bfloat16)
    folders = {}
    for role, name in (("", target), (DRAFT, draft)):
        values = json.loads((shapes / f"{name}.json").read_text(encoding="utf-8"))
        folders[role] = _written(folder / name, values)
    head.save_pretrained(folder / "eagle3")
    folders[HEAD] = str((folder / "eagle3").resolve())
    every = configs | {HEAD: head}
    return Models(
        folders=folders,
        weights={role: _weight_bytes(config) for role, config in every.items()},
        kv={role: kv_bytes_by_config(config, torch.bfloat16) for role, config in every.items()},
        vocab=configs[""].vocab_size,
        on_gpu=True,
        names={"target": target, "draft": draft, "dtype": "bfloat16", "weights": "random"},
        made=True,
    )


def _written(folder: Path, values: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder.resolve())


def _weight_bytes(config: Any) -> int:
    module = random_model(config, "meta", torch.bfloat16, 0)
    return sum(weight.nbytes for weight in module.parameters())


def real_models(target: Path, draft: Path) -> Models:
    """Folders with weights; the draft's head may be pruned. ValueError for those that cannot be used."""
    from transformers import AutoConfig

    for folder in (target, draft):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json; expected a model's folder, as transformers saves one")
    on_gpu = torch.cuda.is_available()
    roles = {"": target, DRAFT: draft}
    configs = {role: AutoConfig.from_pretrained(path, local_files_only=True) for role, path in roles.items()}
    return Models(
        folders={role: str(path.resolve()) for role, path in (roles | {WHOLE: with_whole_head(draft)}).items()},
        weights={role: _weight_bytes(config) for role, config in configs.items()},
        kv={role: kv_bytes_by_config(config, torch.bfloat16) for role, config in configs.items()},
        vocab=configs[""].vocab_size,
        on_gpu=on_gpu,
        names={
            "target": target.name,
            "draft": draft.name,
            "dtype": "bfloat16" if on_gpu else "float32",
            "weights": "real",
        },
    )


def with_whole_head(draft: Path) -> Path:
    """The draft as vLLM takes it."""
    from bench.serving_drafts import whole_head
    from specdec.pruned import is_pruned

    return whole_head(draft) if is_pruned(draft) else draft


def real_sizes(target: Path, file: Path) -> Sizes:
    """For prompts of a JSONL file, which pipeline.rows reads, in an order drawn once. ValueError for a file or target
    that cannot be used."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    read = [rows.read(json.loads(line))[0] for line in file.read_text(encoding="utf-8").splitlines()]
    encoded = [ids for ids in (encode_prompt(tokenizer, each) for each in read) if len(ids) <= LONGEST_PROMPT]
    if not encoded:
        raise ValueError(f"{file}: none of {len(read)} prompts has {LONGEST_PROMPT} tokens or fewer")
    random.Random(0).shuffle(encoded)
    return replace(REAL, prompts=encoded, prompt_set=file.stem, prompt_tokens=max(map(len, encoded)))


def tiny_models(folder: Path) -> Models:
    """A pair with weights that vLLM's CPU attention takes."""
    target = tiny_model(vocab=64, layers=2, hidden=64, head_dim=32, dtype=torch.float32, logit_std=2.0)
    folders = {"": folder / "target", DRAFT: folder / "draft"}
    target.save_pretrained(folders[""])
    noisy_copy(target, noise=0.1, seed=1).save_pretrained(folders[DRAFT])
    return Models(
        folders={role: str(path.resolve()) for role, path in folders.items()},
        weights={},
        kv={},
        vocab=64,
        on_gpu=False,
        names={"target": "tiny", "draft": "noisy copy", "dtype": "float32", "weights": "random"},
    )


def job(method: Method, models: Models, sizes: Sizes) -> dict[str, Any]:
    """What a worker is told of its engine."""
    return {
        "llm": arguments(method, models, sizes),
        "controller": method.controller,
        "k": method.k,
        "ks": sorted({method.k, *method.ks}),
        "vocab": models.vocab,
        "batches": list(sizes.batches),
        "temperatures": list(sizes.temperatures),
        "prompts": [list(ids) for ids in sizes.prompts],
        "prompt_tokens": sizes.prompt_tokens,
        "new_tokens": sizes.new_tokens,
    }


def arguments(method: Method, models: Models, sizes: Sizes) -> dict[str, Any]:
    """Of vLLM's LLM."""
    given = shared_arguments(
        models.folders[""],
        models.names["dtype"],
        longest=longest(sizes),
        rows=max(sizes.batches),
        pool_bytes=models.pool_bytes(method, sizes) if models.on_gpu else None,
    )
    if models.on_gpu:
        given["max_num_batched_tokens"] = PREFILL_TOKENS
    if models.made:
        given["load_format"] = "dummy"
    if method.async_scheduling is not None:
        given["async_scheduling"] = method.async_scheduling
    if method.speculative:
        given["speculative_config"] = _speculative(method, models, sizes)
    if method.plugin is not None:
        given["additional_config"] = {"specdec": dict(method.plugin)}
    return given


def shared_arguments(model: str, dtype: str, *, longest: int, rows: int, pool_bytes: int | None) -> dict[str, Any]:
    """Of vLLM's LLM, for an engine beside others. pool_bytes: of its KV cache on a GPU; None on a CPU."""
    if pool_bytes is None:
        place: dict[str, Any] = {"enforce_eager": True, "block_size": CPU_BLOCK}
    else:
        place = {"gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": pool_bytes}
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": longest,
        "max_num_seqs": rows,
        "enable_prefix_caching": False,
        **place,
    }


def _speculative(method: Method, models: Models, sizes: Sizes) -> dict[str, Any]:
    config = {**method.speculative, "num_speculative_tokens": method.k}
    if "model" in config:
        own = models.folders[config["model"]]
        whole = config["model"] == DRAFT and not _runs_own(method)
        config["model"] = models.folders.get(WHOLE, own) if whole else own
    if sizes.real is None:
        config["rejection_sample_method"] = "synthetic"
        if method.tokens_per_round is not None:
            config["synthetic_acceptance_length"] = method.tokens_per_round
        else:  # of each position, whatever became of those before it
            config["synthetic_acceptance_rates"] = [sizes.alphas[0] ** (j + 1) for j in range(method.k)]
    return config


def environment(method: Method, *, on_gpu: bool, folder: Path, cache: Path) -> dict[str, str]:
    """Of the method's process. cache: its compiled code; two processes never write one at the same time."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if method.runner == "V2" else "0",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        SWITCH: "0" if method.plugin is None else "1",
    }
    if not on_gpu:
        env |= {name: os.environ.get(name, value) for name, value in CPU_SETTINGS.items()}
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if method.plugin is not None:
        paths.insert(0, str(record_of_checkout(folder)))
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def possible(methods: Sequence[Method], models: Models) -> list[Method]:
    """Those whose draft there is."""
    return [method for method in methods if _model(method) in ("none", *models.folders)]


def fitting(methods: Sequence[Method], models: Models, sizes: Sizes, *, free_gib: float, most: int) -> list[Method]:
    """The first of `methods` that live on the device together; always one."""
    chosen: list[Method] = []
    for method in methods:
        left = free_gib - sum(models.gib(each, sizes) for each in chosen) if models.on_gpu else 0.0
        if chosen and (len(chosen) >= most or (models.on_gpu and models.gib(method, sizes) > left)):
            break
        chosen.append(method)
    return chosen
