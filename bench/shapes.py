"""Models of given shapes with random weights, made where they will run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its draft; names: of their config files."""

    target: PreTrainedModel
    draft: PreTrainedModel
    target_name: str
    draft_name: str

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def names(self) -> dict[str, Any]:
        """What every row says about the models."""
        dtype = str(self.target.dtype).removeprefix("torch.")
        return {"target": self.target_name, "draft": self.draft_name, "dtype": dtype, "weights": "random"}


def config_of(folder: Path, name: str) -> Any:
    """The config in FOLDER/NAME.json. ValueError naming the file when there is none, or none that can be used."""
    path = folder / f"{name}.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**values)
    except OSError:
        found = ", ".join(sorted(each.stem for each in folder.glob("*.json"))) or "none"
        raise ValueError(f"{path}: no such file; configs in that folder: {found}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: no config of a model that transformers knows ({error})") from None


def random_model(config: Any, device: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Weights as the architecture initialises them, drawn on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def random_pair(folder: Path, target: str, draft: str, device: str, dtype: torch.dtype) -> Pair:
    """ValueError for configs that cannot be used."""
    configs = [config_of(folder, name) for name in (target, draft)]
    models = [random_model(config, device, dtype, seed) for seed, config in enumerate(configs)]
    return Pair(target=models[0], draft=models[1], target_name=target, draft_name=draft)
