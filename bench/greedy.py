"""Gate G2: greedy text is token-identical to autoregressive decoding, at every draft length.

The references are `transformers`' own generate and the engine at k = 0. In float32: in lower precision a forward
over five tokens rounds differently from five forwards over one, and near-ties flip. A case counts only when it had
at least MIN_EVENTS accepted and MIN_EVENTS rejected drafts, else identity would show little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.draft_model import load_draft
from bench.drafters import fresh
from bench.lossless import cycling
from bench.tiny_models import FAMILIES, noisy_copy, tiny_model
from data.common import encode_prompt, stop_ids_of
from pipeline.config import Config
from pipeline.models import load_target, load_tokenizer
from pipeline.results import gate
from pipeline.sources import load_prompts
from specdec import Completion, Engine, ModelDrafter, Request, SamplingParams

MIN_EVENTS = 50
Texts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class GreedyCase:
    """A pair of models and the prompts that it continues by at most `max_tokens` tokens each."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | ModelDrafter
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    num_slots: int = 24


def run_g2(
    cases: Sequence[GreedyCase], *, ks: Sequence[int], changing: tuple[int, ...] = (4, 0, 1, 3)
) -> list[dict[str, Any]]:
    """One flat row for each case and draft length; `changing` is one more: a cycle of draft lengths, round by round."""
    return [row for case in cases for row in _run_case(case, [(k,) for k in ks if k > 0] + [changing])]


def _run_case(case: GreedyCase, cycles: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    reference = transformers_greedy(case)
    plain = [one.token_ids for one in _decode(case, (0,))]
    return [_compare(case, cycle, reference, plain) for cycle in cycles]


def _decode(case: GreedyCase, ks: tuple[int, ...]) -> list[Completion]:
    engine = Engine(
        case.target,
        fresh(case.draft),
        k=ks[0] if len(ks) == 1 else cycling(ks),
        k_max=max(ks),
        num_slots=case.num_slots,
        capacity=max(len(prompt) for prompt in case.prompts) + case.max_tokens,
    )
    params = SamplingParams(max_tokens=case.max_tokens, stop_ids=case.stop_ids)
    return engine.generate(Request(prompt_ids=prompt, params=params) for prompt in case.prompts)


def _compare(case: GreedyCase, ks: tuple[int, ...], reference: Texts, plain: Texts) -> dict[str, Any]:
    done = _decode(case, ks)
    texts = [one.token_ids for one in done]
    accepts = sum(sum(one.stats.accepted) for one in done)
    rejects = sum(sum(one.stats.reached) for one in done) - accepts
    same_as_transformers, same_as_plain = _identical(texts, reference), _identical(texts, plain)
    return {
        "gate": "G2",
        "case": case.name,
        "k": ",".join(map(str, ks)),
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "same_as_transformers": same_as_transformers,
        "same_as_plain": same_as_plain,
        "accepts": accepts,
        "rejects": rejects,
        "alpha": accepts / max(1, accepts + rejects),
        "passed": same_as_transformers == same_as_plain == len(texts) and min(accepts, rejects) >= MIN_EVENTS,
    }


def _identical(texts: Texts, reference: Texts) -> int:
    return sum(text == other for text, other in zip(texts, reference, strict=True))


@torch.no_grad()
def transformers_greedy(case: GreedyCase, batch: int = 16) -> Texts:
    """The prompts continued by `generate(do_sample=False)`, left-padded, up to and including the first stop id."""
    texts: Texts = []
    for start in range(0, len(case.prompts), batch):
        part = case.prompts[start : start + batch]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in part], device=case.target.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part], device=ids.device)
        out = case.target.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=case.max_tokens,
            do_sample=False,
            eos_token_id=list(case.stop_ids) or None,
            pad_token_id=0,
        )
        texts += [_until_stop(row, case.stop_ids) for row in out[:, width:].tolist()]
    return texts


def _until_stop(tokens: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def config_case(config: Config, *, prompts: int = 24, max_tokens: int = 48, device: str = "cpu") -> GreedyCase:
    """The config's own pair in float32, continuing `prompts` prompts of its bench's sets (as many from each)."""
    target = load_target(config.models, device, "float32")
    tokenizer = load_tokenizer(config.models)
    sources = config.bench_engine.prompts
    each = -(-prompts // len(sources))
    loaded = [p for s in sources for p in load_prompts(s.name, s.source, each, config.bench_engine.seed)]
    return GreedyCase(
        name=config.models.target,
        target=target,
        draft=load_draft(config, target, device, "float32"),
        prompts=[encode_prompt(tokenizer, prompt.messages) for prompt in loaded],
        max_tokens=max_tokens,
        stop_ids=stop_ids_of(target, tokenizer),
    )


def tiny_case(family: str, *, prompts: int = 16, max_tokens: int = 24) -> GreedyCase:
    """A tiny random float32 pair of `family`, 64 tokens, prompts of different length, a stop id that some texts
    meet."""
    target = tiny_model(family, vocab=64, layers=2, hidden=32, seed=11, dtype=torch.float32, logit_std=3.0)
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(0, 64, (1 + 3 * (index % 5),), generator=generator).tolist() for index in range(prompts)]
    draft = noisy_copy(target, noise=0.2, seed=12)
    return GreedyCase(
        name=f"tiny {family}", target=target, draft=draft, prompts=ids, max_tokens=max_tokens, stop_ids=(5,)
    )


def tiny_cases(**size: int) -> list[GreedyCase]:
    return [tiny_case(family, **size) for family in FAMILIES]


def g2_gate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gate G2: value is the share of texts identical to transformers' and to the engine's own at k = 0."""
    if not rows:
        return gate("not run", limit=1.0, reason="no case was decoded")
    texts = sum(row["texts"] for row in rows)
    same = sum(min(row["same_as_transformers"], row["same_as_plain"]) for row in rows)
    failed = [row for row in rows if not row["passed"]]
    reason = (
        f"{same} of {texts} texts ({sum(row['tokens'] for row in rows)} tokens) identical in {len(rows)} cases; "
        f"fewest accepts {min(row['accepts'] for row in rows)}, fewest rejects {min(row['rejects'] for row in rows)}, "
        f"{MIN_EVENTS} needed"
    )
    if failed:
        reason = f"failed: {', '.join(row['case'] + ' k=' + row['k'] for row in failed[:6])}; {reason}"
    return gate("fail" if failed else "pass", value=same / texts, limit=1.0, reason=reason)
