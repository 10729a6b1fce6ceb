"""The filter's second pass: rows that are still in are compared with all before them, split and counted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from data.checks import Drop
from data.common import stable_seed
from data.dedup import Deduplicator
from data.filter_report import Counts
from data.filtered import Fate
from data.row_checks import Checked
from data.rows import is_generated, prompt_text
from pipeline.config import FilterConfig

_COLUMNS = ("prompt_id", "completion", "temperature", "source", "messages", "verifier", "finish_reason")


class Sorter:
    """Gives every row its fate. Rows must come in the order of the shards, all of them, also after a resume."""

    def __init__(self, config: FilterConfig) -> None:
        self.config, self.counts = config, Counts()
        self.duplicates = Deduplicator(config.shingle_words, config.near_threshold)

    def sort(self, table: pa.Table, checked: Sequence[Checked]) -> list[Fate]:
        """The fates of a table's rows; `checked` is what the first pass found of each."""
        columns = [table.column(name).to_pylist() for name in _COLUMNS]
        return [self._fate(line, *row) for line, row in zip(checked, zip(*columns, strict=True), strict=True)]

    def _fate(
        self,
        checked: Checked,
        prompt_id: str,
        completion: int,
        temperature: float,
        source: str,
        messages: str,
        verifier: str | None,
        finish_reason: str,
    ) -> Fate:
        drop = checked.drop or self._duplicate(checked.key, prompt_id, messages, verifier)
        split = "dropped" if drop else split_of(prompt_id, self.config)
        self.counts.add(
            split=split,
            row_id=f"{prompt_id}, completion {completion} at T = {temperature}",
            source=source,
            label=checked.label,
            finish_reason=finish_reason,
            drop=drop,
        )
        detail = json.dumps(drop.detail, ensure_ascii=False) if drop else None
        return Fate(split=split, label=checked.label, reason=drop.reason if drop else None, detail=detail)

    def _duplicate(self, key: bytes, prompt_id: str, messages: str, verifier: str | None) -> Drop | None:
        generated = is_generated(None if verifier is None else json.loads(verifier))
        return self.duplicates.check(key, prompt_id, prompt_text(json.loads(messages)), generated)


def split_of(prompt_id: str, config: FilterConfig) -> str:
    """ "train" or "heldout", from the prompt's id and the seed alone: all completions of a prompt stay together."""
    return "heldout" if stable_seed("heldout", config.seed, prompt_id) < config.heldout * (1 << 63) else "train"
