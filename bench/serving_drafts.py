"""Model folders that vLLM can load, for the texts $TARGET, $DRAFT, $EAGLE and $EAGLE3 of a method.

D is the hidden size, V the vocabulary, N the rows of a pruned head.

**A pruned head made whole.** vLLM has no draft head of fewer rows than the vocabulary, and no bias in a head, so the
missing rows must give a low logit by themselves. Behind the last norm all states of a model share a direction: with
their mean m_D, v_D = m_D / |m_D|^2 has h_D . v_D = 1 on average, and never near 0. A missing row is then -c v_D, with c
such that its logit is LOW on the state where the product is smallest; the states are those of random tokens, where it
is smaller than on text. The tokens of missing rows so have less than e^LOW V of the probability together: the draft
proposes what the pruned one does. (Whatever a draft proposes, the output's law stays the target's.)

**Fabricated EAGLE heads** have random weights on the target's shapes: loaded and run as real ones are, accepted as
little as chance has it. They show that the method works and what a step of it costs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import drafts, files, local_models, models
from pipeline.config import Config

if TYPE_CHECKING:
    from torch import Tensor

NAMED_DRAFT, NAMED_MODEL = "$DRAFT:", "$MODEL:"
LOW = -60.0
LEAST_PRODUCT = 0.05  # of a state with v_D, whose mean is 1
PROBE_ROWS, PROBE_TOKENS = 8, 256
AUX_STATES = 3  # hidden states of the target that an EAGLE-3 head reads
WEIGHTS = "model.safetensors"


def folder_of(name: str, config: Config, whole: bool = True) -> str:
    """The folder that $TARGET, $DRAFT, $DRAFT:NAME, $MODEL:NAME, $EAGLE or $EAGLE3 stands for, absolute, made first
    if need be; other texts as they are. A $DRAFT's NAME is a draft of stage 03, or "stock", the one that its training
    starts from; a $MODEL's is one of pipeline.models. whole: a draft's pruned head is made whole, as vLLM needs it and
    the plugin's own draft does not.

    ValueError where the draft is not there, or cannot be made into what vLLM loads.
    """
    makers: dict[str, Callable[[Config], Path]] = {
        "$TARGET": lambda config: models.resolve(config.models.target),
        "$DRAFT": lambda config: draft_folder(config, whole),
        "$EAGLE": lambda config: eagle_folder(config, "eagle"),
        "$EAGLE3": lambda config: eagle_folder(config, "eagle3"),
    }
    if name.startswith(NAMED_MODEL):
        return str(models.resolve(name.removeprefix(NAMED_MODEL)).resolve())
    if name.startswith(NAMED_DRAFT):
        from bench.draft_model import as_draft

        return str(draft_folder(as_draft(config, name.removeprefix(NAMED_DRAFT)), whole).resolve())
    return str(makers[name](config).resolve()) if name in makers else name


def draft_folder(config: Config, whole: bool) -> Path:
    """The config's draft; `whole`: with a head over the whole vocabulary."""
    from bench.draft_model import trained_folder
    from specdec.pruned import is_pruned

    draft = config.models.draft
    if draft.keep_layers is not None:
        return _kept_layers(config)
    folder = trained_folder(config) if draft.trained is not None else models.draft_folder(config.models)
    return whole_head(folder) if whole and is_pruned(folder) else folder


def _kept_layers(config: Config) -> Path:
    kept, target = config.models.draft.keep_layers, models.resolve(config.models.target)
    assert kept is not None
    name = files.sha256_json([models.revision(config.models.target), kept, config.models.dtype])[:12]

    def make(tmp: Path) -> None:
        loaded = models.load_target(config.models, "cpu")
        drafts.keep_layers(loaded, kept).save_pretrained(tmp)
        _copy_tokenizer(target, tmp)

    return local_models.make_once(f"kept-layers-{name}", make)


def whole_head(folder: Path) -> Path:
    """A copy of a draft with a pruned head whose head has all rows; made once, checked on the way."""
    state = {path.name: files.sha256_file(path) for path in sorted(folder.glob("*")) if path.is_file()}
    name = f"{folder.resolve().name}-whole-{files.sha256_json(state)[:12]}"
    return local_models.make_once(name, lambda tmp: _make_whole(folder, tmp))


def _make_whole(folder: Path, tmp: Path) -> None:
    import torch
    from torch import nn

    from specdec.pruned import load_pruned_model

    dtype = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype") or "float32"
    model, head_ids = load_pruned_model(folder, dtype=torch.float32)
    weight_ND = model.get_output_embeddings().weight.detach()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    weight_VD = missing_row(_probe_states(model, vocabulary)).repeat(vocabulary, 1)
    weight_VD[head_ids] = weight_ND
    head = nn.Linear(weight_VD.shape[1], vocabulary, bias=False)
    head.weight = nn.Parameter(weight_VD, requires_grad=False)
    model.set_output_embeddings(head)
    model.config.vocab_size = vocabulary
    model.to(getattr(torch, dtype)).save_pretrained(tmp)
    _copy_tokenizer(folder, tmp)


def missing_row(states_ND: Tensor) -> Tensor:
    """The head row, [D], whose logit is LOW or less on each of the states. ValueError when they share no direction."""
    mean_D = states_ND.mean(0)
    direction_D = mean_D / (mean_D @ mean_D)
    least = float((states_ND @ direction_D).min())
    if not least > LEAST_PRODUCT:
        raise ValueError(
            f"the draft's pruned head cannot be made whole for vLLM: its last states share no direction "
            f"(smallest product with their mean {least:.3g}, expected more than {LEAST_PRODUCT}); "
            "train it with train.head_tokens null"
        )
    return LOW / least * direction_D


def _probe_states(model: Any, vocabulary: int) -> Tensor:
    """The states behind the last norm, [rows * tokens, D], on random tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = min(PROBE_TOKENS, model.config.max_position_embeddings)
    ids_BT = torch.randint(0, vocabulary, (PROBE_ROWS, tokens), generator=generator)
    with torch.no_grad():
        states_BTD = model.get_decoder()(ids_BT).last_hidden_state
    return states_BTD.flatten(0, 1)


def eagle_folder(config: Config, method: str) -> Path:
    """A fabricated head for the target: method "eagle" (one state of the target and a token's embedding, joined) or
    "eagle3" (three states joined, then attention over the embedding beside them)."""
    target = models.resolve(config.models.target)
    name = files.sha256_json([models.revision(config.models.target), method, 2])[:12]
    return local_models.make_once(f"{method}-random-{name}", lambda tmp: _make_eagle(target, method, tmp))


def _make_eagle(target: Path, method: str, tmp: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    dtype = shape.dtype if isinstance(shape.dtype, torch.dtype) else torch.float32
    head = eagle_config(shape, method, dtype)
    head.save_pretrained(tmp)
    save_file(_eagle_weights(head, method, dtype), tmp / WEIGHTS, metadata={"format": "pt"})
    _copy_tokenizer(target, tmp)


def eagle_config(shape: Any, method: str, dtype: Any) -> Any:
    """transformers' config of a fabricated head for a target of that config."""
    from transformers import LlamaConfig

    head = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=False,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )
    if method == "eagle3":
        head.draft_vocab_size = shape.vocab_size
        head.eagle_aux_hidden_state_layer_ids = aux_layers(shape.num_hidden_layers)
    return head


def aux_layers(layers: int) -> list[int]:
    """The target's layers whose outputs an EAGLE-3 head reads: an early, a middle and a late one, all different, which
    vLLM's own choice is not for a target of a few layers."""
    if layers < AUX_STATES:
        raise ValueError(f"$EAGLE3: the target has {layers} layers, expected at least {AUX_STATES}")
    return [2, layers // 2, layers - 3] if layers >= 8 else [layers - 3, layers - 2, layers - 1]


def _eagle_weights(head: Any, method: str, dtype: Any) -> dict[str, Tensor]:
    """Random weights by their published names; norms are ones."""
    import torch

    hidden, inner = head.hidden_size, head.intermediate_size
    query, pair = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    layer, joined = ("midlayer", 2 * hidden) if method == "eagle3" else ("layers.0", hidden)
    shapes = {
        "fc.weight": (hidden, hidden * (AUX_STATES if method == "eagle3" else 2)),
        f"{layer}.self_attn.q_proj.weight": (query, joined),
        f"{layer}.self_attn.k_proj.weight": (pair, joined),
        f"{layer}.self_attn.v_proj.weight": (pair, joined),
        f"{layer}.self_attn.o_proj.weight": (hidden, query),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if method == "eagle3":
        norms = (f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight", "norm.weight")
        shapes |= {"lm_head.weight": (head.vocab_size, hidden)} | dict.fromkeys(norms, (hidden,))
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
        for name, shape in shapes.items()
    }


def _copy_tokenizer(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.suffix == ".jinja" or path.name.startswith(("tokenizer", "special_tokens", "vocab", "merges")):
            shutil.copyfile(path, target / path.name)
