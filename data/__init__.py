"""Traces: what the target says to real prompts, with its top-8 probabilities, for a draft to learn from."""
