"""The teacher and the students of a sweep: one teacher forward gives the law that many students learn from."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from pipeline.drafts import BORROWS, keep_layers
from specdec.pruned import HEAD_IDS, prune_head
from train.losses import Targets, head_columns
from train.sweep_batches import Batch
from train.sweep_losses import TOP, TeacherLaw

TEACHER_CHUNK = 4096  # positions whose full-vocabulary logits exist at a time: 0.8 GB in float32 at 49,152 ids
EMBEDDING = "embed_tokens"


@dataclass(frozen=True, kw_only=True)
class States:
    """Of a batch's positions: the last hidden states; logsumexp of the logits of all ids; the largest log-probabilities
    and their ids."""

    hidden_ND: Tensor
    norm_N1: Tensor
    top_NK: Tensor
    ids_NK: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


class Teacher:
    """The target's law over the ids of the largest head, `head_ids` most frequent first, and its `top` likeliest ids
    (eight of 49,152 take longer to find than all the rest). Of batches that come again, `keep` bytes of states stay."""

    def __init__(self, target: Any, head_ids: Sequence[int], top: int = TOP, keep: float = 0.0) -> None:
        self.target, self.top, self.keep = target, top, keep
        self.weight_VD = target.get_output_embeddings().weight
        device = self.weight_VD.device
        self.head_ids_H = torch.tensor(head_ids, device=device)
        self.columns_V = head_columns(self.head_ids_H.cpu(), len(self.weight_VD)).to(device)
        self.weight_HD = self.weight_VD[self.head_ids_H].clone()
        self._kept: dict[int | None, States] = {}

    @torch.no_grad()
    def law(self, batch: Batch) -> TeacherLaw:
        """Its law at the batch's completion tokens."""
        states = self._kept[batch.number] if batch.number in self._kept else self._states(batch)
        targets = Targets(
            token_n=batch.next_N,
            top_ids_nK=states.ids_NK,
            top_logprobs_nK=states.top_NK,
            tail_n=(1 - states.top_NK.exp().sum(1)).clamp(min=0),
        )
        logp_NH = nn.functional.linear(states.hidden_ND, self.weight_HD).float() - states.norm_N1
        return TeacherLaw(logp_NH=logp_NH, targets=targets, columns_V=self.columns_V)

    def _states(self, batch: Batch) -> States:
        hidden_BTD = self.target.get_decoder()(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1)[batch.at_N]
        parts = [self._chunk(hidden_MD) for hidden_MD in hidden_ND.split(TEACHER_CHUNK)]
        norm_N1, top_NK, ids_NK = (torch.cat(part) for part in zip(*parts, strict=True))
        states = States(hidden_ND=hidden_ND, norm_N1=norm_N1, top_NK=top_NK, ids_NK=ids_NK)
        if batch.number is not None and states.nbytes <= self.keep:
            self._kept[batch.number] = states
            self.keep -= states.nbytes
        return states

    def _chunk(self, hidden_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States' norm_N1, top_NK and ids_NK of some positions."""
        logits_MV = nn.functional.linear(hidden_MD, self.weight_VD).float()
        norm_M1 = torch.logsumexp(logits_MV, 1, keepdim=True)
        top_MK, ids_MK = logits_MV.max(1, keepdim=True) if self.top == 1 else logits_MV.topk(self.top, dim=1)
        return norm_M1, top_MK - norm_M1, ids_MK


def make_student(target: Any, layers: int, head_ids: Sequence[int]) -> Any:
    """The target's first layers, final norm and head rows as trainable float32 copies on its frozen embedding."""
    student = keep_layers(target, layers)
    prune_head(student, head_ids)
    for name, parameter in student.named_parameters():
        trained = EMBEDDING not in name
        if trained:
            parameter.data = parameter.data.float().clone()
        parameter.requires_grad_(trained)
    return student


def student_logits(student: Any, batch: Batch) -> Tensor:
    """The student's logits at the batch's completion tokens [N, H], float32."""
    hidden_BTD = student.get_decoder()(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
    hidden_ND = hidden_BTD.flatten(0, 1)[batch.at_N]
    return student.get_output_embeddings()(hidden_ND).float()


def save_student(student: Any, head_ids: Sequence[int], folder: Path, notes: dict[str, Any]) -> None:
    """Config, head ids, notes, and all weights but the target's embedding, which it borrows (pipeline.drafts), in
    bfloat16, in files under 15 MB."""
    folder.mkdir(parents=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in student.state_dict().items()
        if EMBEDDING not in name
    }
    save_torch_state_dict(weights, folder, max_shard_size="15MB")
    config = copy.deepcopy(student.config)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    (folder / HEAD_IDS).write_text(json.dumps(list(map(int, head_ids))), encoding="utf-8")
    borrowed = {"model": notes["target"], "tensors": [name for name in student.state_dict() if EMBEDDING in name]}
    (folder / BORROWS).write_text(json.dumps(borrowed) + "\n", encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
