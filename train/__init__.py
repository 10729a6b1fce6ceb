"""Distillation: a draft trained on the target's own completions and top logprobs, and exported for the engine."""
