"""The learning rate of a step, as a multiple of the recipe's."""

from __future__ import annotations

import math

from pipeline.config_train import RecipeConfig


def rate(recipe: RecipeConfig, step: int, steps: int) -> float:
    """The multiple of `recipe.lr` for step `step` of `steps`, counted from 0.

    Linear warm-up from near 0, then: "cosine" falls to final_lr over all that is left; "wsd" stays at 1 and falls
    linearly over the last `decay` of all steps (Hu et al., MiniCPM, arXiv 2404.06395); "constant" stays.
    """
    warmup = round(recipe.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.schedule == "constant":
        return 1.0
    falling = steps - warmup if recipe.schedule == "cosine" else round(recipe.decay * steps)
    done = max(0.0, (step - (steps - falling)) / max(1, falling - 1))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1 - done
    return recipe.final_lr + (1 - recipe.final_lr) * shape
