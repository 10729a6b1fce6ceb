"""Folders of drafts that tests load."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline import models
from specdec.pruned import prune_head, save_pruned

HEAD_IDS = [5, 7, 11, 40, 100]


def load(folder: Path | str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def pruned_draft(folder: Path) -> Path:
    """The tiny model with a head of a few tokens, its last states with a common direction as a trained model's have."""
    model = load(models.resolve("tiny:llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] += 20.0
    model.config.tie_word_embeddings = False
    prune_head(model, HEAD_IDS)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.005)  # logits near 0, so that a row of zeros would be likely
    save_pruned(model, HEAD_IDS, folder)
    return folder
