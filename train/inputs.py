"""What stage 03 trains on: the filter's rows, checked to be of this config's target, as corpora."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from data.common import TraceRecord, encode_prompt
from data.filtered import iter_rows
from pipeline import files
from pipeline.config import Config
from train.corpus import Corpus

PROMPTS_COMPARED = 8


def build_corpora(
    config: Config,
    filtered: Path,
    revision: str,
    tokenizer: Any,
    work: Path,
    check_stop: Callable[[], None] = lambda: None,
) -> None:
    """Write work/train and work/heldout from the filter's folder, each whole or not at all, if they are not there.

    The held-out corpus is at most train.heldout completions; when the filter held nothing out it is missing.
    ValueError for rows of another teacher or tokenizer, and for a split without rows; `check_stop` may raise.
    """
    if not (work / "train").is_dir():
        rows = _until(check_stop, checked(iter_rows(filtered, "train"), config, revision, tokenizer))
        save_corpus(Corpus.from_records(rows), work / "train")
    if not (work / "heldout").is_dir():
        heldout = list(itertools.islice(iter_rows(filtered, "heldout"), config.train.heldout))
        if heldout:
            save_corpus(Corpus.from_records(checked(heldout, config, revision, tokenizer)), work / "heldout")


def save_corpus(corpus: Corpus, folder: Path) -> None:
    """Write it under another name first, so that a folder of this name is whole."""
    tmp = folder.with_name(files.TMP_PREFIX + folder.name)
    tmp.mkdir(parents=True, exist_ok=True)
    corpus.save(tmp)
    files.publish(tmp, folder)


def checked(rows: Iterable[TraceRecord], config: Config, revision: str, tokenizer: Any) -> Iterator[TraceRecord]:
    """The rows; ValueError at one that another teacher made, or whose ids another tokenizer gave."""
    same_prompts: list[bool] = []
    for row in rows:
        _check_teacher(row, config.models.target, revision)
        if len(same_prompts) < PROMPTS_COMPARED:
            same_prompts.append(_same_prompt(row, tokenizer))
        yield row
    if same_prompts and not any(same_prompts):
        raise ValueError(
            f"the first {len(same_prompts)} prompts of the traces have other token ids than {config.models.target}'s "
            "tokenizer gives for their messages: another tokenizer or chat template made them; generate them again"
        )


def _until(check_stop: Callable[[], None], rows: Iterable[TraceRecord]) -> Iterator[TraceRecord]:
    for row in rows:
        check_stop()
        yield row


def _check_teacher(row: TraceRecord, target: str, revision: str) -> None:
    where = f"trace {row.prompt_id}/{row.completion}"
    if row.teacher != target:
        raise ValueError(
            f"{where}: its teacher is {row.teacher}, models.target is {target}; a draft learns from its own target: "
            "generate traces with it, or name that model as the target"
        )
    if row.teacher_revision != revision:
        raise ValueError(
            f"{where}: made by revision {row.teacher_revision} of {target}, here it is {revision}; generate again"
        )


def _same_prompt(row: TraceRecord, tokenizer: Any) -> bool:
    try:
        ids = encode_prompt(tokenizer, json.loads(row.messages), row.thinking)
    except (ValueError, TemplateError):  # a template without the switch, or one that refuses these messages
        return False
    return ids == row.prompt_ids.tolist()
