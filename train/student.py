"""The draft to train: where its weights start, which tokens its head keeps, and the folder it becomes.

D is the width of the hidden state, N the number of columns of the head, V the target's (padded) vocabulary.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import files
from pipeline.config_train import LossTerm
from pipeline.drafts import keep_layers
from specdec.pruned import HEAD_IDS, load_pruned_model, prune_head, save_pruned
from train import attention
from train.losses import CHUNK_ELEMENTS, chunk_elements_on, chunked_losses, exact_acceptance, head_columns, token_losses
from train.packing import Batch

PROVENANCE = "provenance.json"
HEAD_ROUND = 64  # matrix products like widths that are multiples of this


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """A pruned head: its target ids, ascending, and the share of the teacher's mass that they hold."""

    ids: tuple[int, ...]
    coverage: float


def frequent_tokens(token_mass: np.ndarray, count: int, keep: Iterable[int] = ()) -> HeadChoice:
    """The `count` ids that the teacher gives the most probability to (`Corpus.token_mass` [V]), `keep` always among
    them: the ids that end a completion belong there.

    The coverage is of the kept top entries' mass. ValueError for a count that the vocabulary cannot fill.
    """
    kept = sorted(set(keep))
    if not len(kept) < count <= len(token_mass):
        raise ValueError(
            f"a head of {count} tokens: expected more than the {len(kept)} that are always kept, "
            f"and at most the vocabulary's {len(token_mass)}"
        )
    by_mass = np.lexsort((np.arange(len(token_mass)), -token_mass))  # ties by id: the same head everywhere
    chosen = set(kept)
    for token in by_mass:
        if len(chosen) == count:
            break
        chosen.add(int(token))
    ids = tuple(sorted(chosen))
    return HeadChoice(ids=ids, coverage=float(token_mass[list(ids)].sum() / token_mass.sum()))


def first_layers(target: Any, layers: int | Sequence[int], head_ids: Sequence[int] | None = None) -> Any:
    """A model of some of the target's layers in float32 on weights of its own, in training mode; with `head_ids` its
    head has only these rows. The target stays as it is."""
    return _ready(copy.deepcopy(keep_layers(target, layers)).float(), head_ids)


def from_checkpoint(folder: Path, head_ids: Sequence[int] | None = None) -> Any:
    """The model in a folder in float32, in training mode, with its head pruned to `head_ids` if given."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return _ready(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True), head_ids)


def _ready(model: Any, head_ids: Sequence[int] | None) -> Any:
    if head_ids is not None:
        prune_head(model, head_ids)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.config.use_cache = False
    return model.train()


def freeze_embedding(model: Any) -> None:
    """Keep the input embedding as it is. A head tied to it becomes a matrix of its own first, so that it can learn."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        model.config.tie_word_embeddings = False
    embedding.weight.requires_grad_(False)


class Student(nn.Module):
    """A draft and its loss as one module, so that sharding gathers every weight inside one forward.

    `model` is a Hugging Face decoder; `head_ids` as in `prune_head`, None for a head over all V ids.
    """

    def __init__(self, model: Any, terms: Sequence[LossTerm], head_ids: Sequence[int] | None = None) -> None:
        super().__init__()
        self.model, self.terms, self.head_ids = model, tuple(terms), None if head_ids is None else tuple(head_ids)
        self._no_split_modules = model._no_split_modules  # accelerate shards by layer with it
        if head_ids is not None:
            vocab_size = model.get_input_embeddings().weight.shape[0]
            self.register_buffer("columns_V", head_columns(head_ids, vocab_size), persistent=False)
        else:
            self.columns_V = None
        self.token_losses = token_losses

    def compile_parts(self) -> None:
        """Compile each layer, and the losses of a chunk, when they are first called. The shapes of both vary."""
        for layer in self.model.get_decoder().layers:
            layer.compile()
        self.token_losses = torch.compile(token_losses, dynamic=True)

    def forward(self, batch: Batch, teacher: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss summed over the batch's loss positions, sums of every value of `losses.token_losses`).

        With a `teacher`, a decoder over all V ids, also the sum of the exact acceptance (no gradient).
        """
        hidden_nD = self.hidden(batch)
        num_columns = self.model.get_output_embeddings().out_features
        loss, sums = chunked_losses(
            hidden_nD,
            self.head,
            batch.targets,
            self.terms,
            self.columns_V,
            num_columns=num_columns,
            chunk_elements=chunk_elements_on(hidden_nD.device),
            losses=self.token_losses,
        )
        if teacher is not None:
            sums["acceptance"] = self._acceptance(hidden_nD, hidden_states(teacher, batch), teacher)
        return loss, sums

    def hidden(self, batch: Batch) -> Tensor:
        """[n, D] last hidden states at the batch's loss positions."""
        return hidden_states(self.model, batch)

    def head(self, hidden_nD: Tensor) -> Tensor:
        """[n, N] logits."""
        return head_logits(self.model, hidden_nD)

    @torch.no_grad()
    def _acceptance(self, hidden_nD: Tensor, teacher_nD: Tensor, teacher: Any) -> Tensor:
        size = max(1, CHUNK_ELEMENTS // teacher.config.get_text_config().vocab_size)
        parts = [
            exact_acceptance(
                self.head(hidden_nD[first : first + size]),
                head_logits(teacher, teacher_nD[first : first + size]),
                self.columns_V,
            ).sum()
            for first in range(0, len(hidden_nD), size)
        ]
        return torch.stack(parts).sum() if parts else hidden_nD.new_zeros((), dtype=torch.float32)


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """[n, D] last hidden states of a decoder at the batch's loss positions.

    flash attention knows packed documents in one row only, and the positions mark where each starts, so one row is all
    it needs; sdpa's mask is S times smaller with a row a sequence; our own is told where documents end.
    """
    input_ids_SL, position_ids_SL = batch.input_ids_SL, batch.position_ids_SL
    chosen = model.config._attn_implementation
    ends = {"ends_E": batch.ends_E} if chosen == attention.NAME else {}
    if "flash" in chosen:
        input_ids_SL, position_ids_SL = input_ids_SL.reshape(1, -1), position_ids_SL.reshape(1, -1)
    output = model.get_decoder()(input_ids=input_ids_SL, position_ids=position_ids_SL, use_cache=False, **ends)
    return output.last_hidden_state.flatten(0, 1)[batch.positions_n]


def head_logits(model: Any, hidden_nD: Tensor) -> Tensor:
    """[n, N] logits of a decoder's head, capped where its family caps them."""
    logits_nN = model.get_output_embeddings()(hidden_nD)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits_nN if softcap is None else torch.tanh(logits_nN / softcap) * softcap


def export(
    model: Any,
    tokenizer: Any,
    folder: Path,
    provenance: Mapping[str, Any],
    head_ids: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the draft as a model folder (specdec/pruned.py's format with `head_ids`), whole or not at all.

    `dtype` is that of the written weights (None: the model's); ValueError when the folder exists.
    """
    if folder.exists():
        raise ValueError(f"{folder}: exists already; move it aside first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = folder.with_name(files.TMP_PREFIX + folder.name)
    shutil.rmtree(tmp, ignore_errors=True)
    draft = copy.deepcopy(model).eval()
    draft.config.use_cache = True
    if dtype is not None:
        draft = draft.to(dtype)
        draft.config.dtype = dtype
    if head_ids is None:
        draft.save_pretrained(tmp)
    else:
        save_pruned(draft, head_ids, tmp)
    tokenizer.save_pretrained(tmp)
    (tmp / PROVENANCE).write_text(json.dumps(dict(provenance), indent=2) + "\n", encoding="utf-8")
    files.publish(tmp, folder)


def load_exported(folder: Path) -> tuple[Any, list[int] | None]:
    """An exported draft in float32 and in training mode, and the ids of its head (None: whole)."""
    if (folder / HEAD_IDS).is_file():
        model, head_ids = load_pruned_model(folder, dtype=torch.float32)
        return _ready(model, None), head_ids
    return from_checkpoint(folder), None


def read_head_ids(folder: Path) -> list[int] | None:
    """The ids of an exported draft's pruned head; None when its head is whole."""
    path = folder / HEAD_IDS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
