"""Prompts and completions as token ids, by the hundred thousand in one compressed file.

For sweeps, which need nothing of a trace but its tokens: the teacher is in memory there and gives its law again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt of the set `source` and one completion of it (empty: a prompt alone), int32 ids."""

    source: str
    prompt: np.ndarray
    completion: np.ndarray
    temperature: float = 0.0


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write texts as flat arrays with the lengths of their parts."""
    sources = sorted({text.source for text in texts})
    numbers = {source: number for number, source in enumerate(sources)}
    parts = [part for text in texts for part in (text.prompt, text.completion)]
    np.savez_compressed(
        path,
        sources=np.array(sources),
        source=np.array([numbers[text.source] for text in texts], dtype=np.int32),
        temperature=np.array([text.temperature for text in texts], dtype=np.float32),
        lengths=np.array([len(part) for part in parts], dtype=np.int32),
        tokens=np.concatenate([np.asarray(part, dtype=np.int32) for part in parts] or [np.zeros(0, np.int32)]),
    )


def load_texts(paths: Iterable[Path]) -> list[Text]:
    """The texts of several files, in order. ValueError for a file that `save_texts` did not write."""
    texts = []
    for path in paths:
        with np.load(path) as arrays:
            if "tokens" not in arrays or "lengths" not in arrays:
                raise ValueError(f"{path}: holds {sorted(arrays)}; expected a file written by save_texts")
            names = [str(name) for name in arrays["sources"]]
            parts = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
            for number, (source, temperature) in enumerate(zip(arrays["source"], arrays["temperature"], strict=True)):
                prompt, completion = parts[2 * number : 2 * number + 2]
                texts.append(
                    Text(
                        source=names[source],
                        prompt=prompt,
                        completion=completion,
                        temperature=round(float(temperature), 6),
                    )
                )
    return texts
