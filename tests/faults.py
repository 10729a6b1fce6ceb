"""Faults that speculative decoders really had, each as a small edit of the engine's source.

A fault swaps the code object of the functions it edits, so every import of them sees it, and puts it back
afterwards. The edited text must occur exactly once: when the engine changes, a fault that no longer applies says so
instead of passing.

Families: LAW changes the output's distribution; DRAFT leaves the text exact and makes q worse, or miscounts it; RULE
needs a single value of the coin or of the logits that no sample shows.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from specdec import drafter, engine, feed, kvcache, rng, sampling, slots, state, stats
from specdec import round as rounds

Edit = tuple[Callable[..., Any], str, str]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """edits: (function, text, text to put in its place)."""

    name: str
    symptom: str
    edits: tuple[Edit, ...]

    def __str__(self) -> str:
        return self.name


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The engine has `fault` inside the with block."""
    replaced: list[tuple[Any, CodeType]] = []
    try:
        for function in dict.fromkeys(edit[0] for edit in fault.edits):
            changes = [(old, new) for target, old, new in fault.edits if target is function]
            replaced.append((function, function.__code__))
            function.__code__ = _edited(function, changes)  # type: ignore[attr-defined]
        yield
    finally:
        for function, code in replaced:
            function.__code__ = code


def _edited(function: Any, changes: list[tuple[str, str]]) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(
                f"{function.__qualname__} holds {old!r} {source.count(old)} times, expected once: "
                f"adapt the fault to the engine"
            )
        source = source.replace(old, new)
    module = compile(source, f"<fault in {function.__qualname__}>", "exec")
    return next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)


def _fault(name: str, symptom: str, *edits: Edit) -> Fault:
    return Fault(name=name, symptom=symptom, edits=edits)


_PROPOSE, _DRAW, _RULE = drafter.ModelDrafter.propose, drafter.ModelDrafter._draw, rounds._apply_rule
_FIRST_STEP = "last_tokens(state, self.window), lengths_B - self.window"
_Q_LAW = "law_of(constrained_B1V, state.law, features)"
_P_LAW = "law_of(constrained_BJV, state.law, features)"


def _without(law: str, **off: str) -> str:
    """The text of `law` with some features or parameters switched off."""
    changed = ", ".join(f'"{name}": {value}' for name, value in off.items())
    if next(iter(off)).endswith("_B"):
        return law.replace("state.law", f"type(state.law)(**(vars(state.law) | {{{changed}}}))")
    return law.replace("features", f"type(features)(**(vars(features) | {{{changed}}}))")


def _recorded(law: str) -> Edit:
    """The draft samples as before and records `law` as its q."""
    return (
        _DRAW,
        "return sample(law_BV, uniform_B), law_BV, bad_B",
        f"return sample(law_BV, uniform_B), {law}, bad_B",
    )


_NO_TEMPERATURE = {"temperature_B": "torch.ones_like(state.law.temperature_B)"}
_HOTTER = {"temperature_B": "state.law.temperature_B * 1.8"}

LAW = (
    _fault(
        "no accept test",
        "the draft's law comes out instead of the target's",
        (sampling.verify_drafts, "accept_uniform_BK * q_BK < p_BK", "p_BK > -1"),
    ),
    _fault(
        "resample from p",
        "tokens that the draft likes too much stay too likely",
        (sampling._residual, "(p_BV - q_BV).clamp(min=0)", "p_BV"),
    ),
    _fault(
        "bonus token from the residual",
        "the token after a fully accepted draft avoids what the draft likes",
        (sampling._residual, "q_BV.masked_fill((num_accepted_B >= num_drafts_B).unsqueeze(1), 0.0)", "q_BV"),
    ),
    _fault(
        "q of the next position",
        "acceptance and residual use probabilities of another context",
        (_PROPOSE, "torch.stack(laws, 1)", "torch.stack(laws, 1).roll(-1, 1)"),
    ),
    _fault(
        "p of the next position",
        "a draft is judged by the law that follows it",
        (sampling.verify_drafts, "target_probs_BJV[:, :K].gather", "target_probs_BJV[:, 1:].gather"),
    ),
    _fault(
        "p unfiltered", "temperature and filters bind the draft only", (_RULE, _P_LAW, "constrained_BJV.softmax(-1)")
    ),
    _fault("p without top-p", "tokens outside the nucleus appear", (_RULE, _P_LAW, _without(_P_LAW, top_p="False"))),
    _fault("p without top-k", "tokens outside the top k appear", (_RULE, _P_LAW, _without(_P_LAW, max_top_k="0"))),
    _fault("p without min-p", "tokens below the floor appear", (_RULE, _P_LAW, _without(_P_LAW, min_p="False"))),
    _fault(
        "p without temperature",
        "the target is sampled at temperature 1",
        (_RULE, _P_LAW, _without(_P_LAW, **_NO_TEMPERATURE)),
    ),
    _fault(
        "top-p without renormalising",
        "top-p after top-k cuts by probabilities from before it: filtered, but not as asked",
        (sampling._keep_top_p, "before_BJV < top_p_B", "0.8 * before_BJV < top_p_B"),
    ),
    _fault(
        "p without allowed ids",
        "banned tokens appear",
        (
            rounds.decide,
            "positions_BJ, counts_BJV, features)\n",
            "positions_BJ, counts_BJV, type(features)(**(vars(features) | {'allowed': False})))\n",
        ),
    ),
    _fault(
        "temperature of the first row",
        "every row is sampled at the first row's temperature",
        (
            sampling._tempered_and_filtered,
            "law.temperature_B == 0, 1.0, law.temperature_B)",
            "law.temperature_B[:1] == 0, 1.0, law.temperature_B[:1])",
        ),
    ),
    _fault(
        "top-p of the first row",
        "every row is cut at the first row's nucleus",
        (sampling._keep_top_p, "top_p_B.view(-1, 1, 1)", "top_p_B[:1].view(-1, 1, 1)"),
    ),
    _fault(
        "q recorded before the temperature",
        "q tested is not the q sampled from",
        _recorded(_without(_Q_LAW, **_NO_TEMPERATURE) + ".squeeze(1)"),
    ),
    _fault(
        "q recorded before top-p",
        "q tested is not the q sampled from",
        _recorded(_without(_Q_LAW, top_p="False") + ".squeeze(1)"),
    ),
    _fault(
        "q recorded before the penalties",
        "q tested is not the q sampled from",
        _recorded("law_of(logits_B1V, state.law, features).squeeze(1)"),
    ),
    _fault(
        "draft sampled hotter than recorded",
        "q tested is not the q sampled from",
        (
            _DRAW,
            "return sample(law_BV, uniform_B)",
            f"return sample({_without(_Q_LAW, **_HOTTER)}.squeeze(1), uniform_B)",
        ),
    ),
    _fault(
        "q missing in the test only",
        "q counts as 1 in the accept test, the residual takes the q that is there",
        (
            sampling.verify_drafts,
            "draft_probs_BKV.gather(-1, drafts_BK.unsqueeze(-1)).squeeze(-1).double()",
            "torch.ones_like(p_BK)",
        ),
    ),
    _fault(
        "late veto",
        "a draft token dropped after it is sampled because its own q is low: unlikely tokens become rarer",
        (
            _PROPOSE,
            "num_drafts_B=torch.minimum(usable_B, ",
            "num_drafts_B=torch.minimum(torch.minimum(usable_B, (torch.stack(laws, 1).gather(-1, torch.stack(drafts, 1)"
            ".unsqueeze(-1)).squeeze(-1) > 0.3).long().cumprod(1).sum(1)), ",
        ),
    ),
    _fault(
        "phantom drafts with a real q",
        "the last draft is read from a buffer of an earlier round, its q from this one",
        (
            _PROPOSE,
            "drafts_BK=torch.stack(drafts, 1)",
            "drafts_BK=torch.stack([*drafts[:-1], last_tokens(state, 1).squeeze(1)], 1)",
        ),
    ),
    _fault(
        "target cache rolled back one too few",
        "after a rejection the target reads one token that is not there, and all positions shift",
        (
            rounds.score,
            "target.cache.plan(start_B,",
            "target.cache.plan(target.cache.lengths_B[: len(lengths_B)].clone(),",
        ),
        (rounds.score, "slice(0, len(lengths_B)), live)", "slice(0, len(lengths_B)), None)"),
        (rounds._commit, "J - committed_B, 0)", "(J - committed_B - 1).clamp(min=0), 0)"),
    ),
    _fault(
        "stale tail visible",
        "a rolled-back slot can still be attended to",
        (kvcache.Plan.visible, "slots_S <= position_Bq1", "slots_S <= position_Bq1 + 1"),
    ),
    _fault(
        "wrong row at refill",
        "a prompt's keys and values go to the slot of another request",
        (
            feed._feed_group,
            "_row_index([item.row for item in group], device)",
            "torch.tensor([item.row for item in group][::-1])",
        ),
    ),
    _fault(
        "another request's pending token at refill",
        "a request starts from the last token of another prompt",
        (
            state.RowState.write_rows,
            "for request in requests])\n    put(self.lengths_B",
            "for request in requests[::-1]])\n    put(self.lengths_B",
        ),
    ),
    _fault(
        "seed kept at refill",
        "a slot goes on with the first request's stream: its requests repeat each other",
        (
            state.RowState.write_rows,
            "put(self.seeds_B, [p.seed for p in params])",
            "put(self.seeds_B, [row for row in rows])",
        ),
    ),
    _fault(
        "stop ids kept at refill",
        "a request ends at the former request's stop id",
        (
            state.RowState._write_optional,
            "torch.tensor(stops, dtype=torch.int64, device=device)",
            "torch.tensor(stops, dtype=torch.int64, device=device).maximum(self.law.stop_BS[index])",
        ),
    ),
    _fault(
        "penalty counts kept at refill",
        "a request is penalised for the former request's tokens",
        (state.RowState._write_masks, "law.counts_BV[row] = 0", "pass"),
    ),
    _fault(
        "prompt mask kept at refill",
        "a request is penalised for the former request's prompt",
        (state.RowState._write_masks, "law.in_prompt_BV[row] = False", "pass"),
    ),
    _fault(
        "rows in step",
        "the smallest accepted count of the batch is applied to every row",
        (
            sampling.verify_drafts,
            "accepted_BK.long().cumprod(1).sum(1)",
            "(n := accepted_BK.long().cumprod(1).sum(1)).minimum(torch.where(num_drafts_B > 0, n, K).amin())",
        ),
    ),
    _fault(
        "text past a stop id",
        "tokens accepted after the stop id are kept",
        (
            rounds._commit,
            "torch.minimum(accepted_B, stop_at_B) + 1\n    committed_B",
            "accepted_B + 1\n    committed_B",
        ),
    ),
    _fault(
        "text past max_tokens",
        "a round commits more tokens than the request asked for",
        (rounds._wanted, "state.limit_B - state.lengths_B - 1", "state.lengths_B + 1000"),
    ),
    _fault(
        "min_tokens ignored by p",
        "stop ids come too early",
        (
            rounds.decide,
            "constrain_logits(logits_BJV, state.law, positions_BJ,",
            "constrain_logits(logits_BJV, state.law, positions_BJ + 9,",
        ),
    ),
    _fault(
        "penalties once a round",
        "tokens drafted earlier in the same round are not counted",
        (rounds._counts_with_drafts, "added_BJV.cumsum(1, dtype=torch.int32)", "added_BJV * 0"),
    ),
    _fault(
        "penalties count the last token of a round",
        "a repetition penalty of about 1 / L of the one asked for",
        (rounds._commit, "real_BJ.to(torch.int32)", "(column_J == committed_B.unsqueeze(1) - 1).to(torch.int32)"),
    ),
    _fault(
        "seeds shared",
        "one stream for the batch: rows repeat each other",
        (rng.uniforms, "_mix(seeds_B + _GOLDEN)", "_mix(seeds_B[:1].expand(len(seeds_B)) + _GOLDEN)"),
    ),
    _fault(
        "one stream for all purposes",
        "the coin knows which token was drafted",
        (rng.uniforms, "positions_BN * 4 + int(purpose)", "positions_BN * 4"),
    ),
    _fault(
        "ends on the longest row",
        "when one row reaches its length all rows end, and come back short",
        (
            engine.Engine._round,
            "self._finish_round(slots, reports, lengths)",
            "self._finish_round(slots, reports, lengths)\n"
            "    if any(slot.finish_reason == 'length' for slot in slots):\n"
            "        for slot in (slot for slot in slots if slot.finish_reason is None):\n"
            "            slot.finish_reason = 'length'\n"
            "            self._done.append((slot.ticket, slot.completion()))\n"
            "            self._slots[slot.row] = None\n"
            "            state.active_B[slot.row] = False",
        ),
    ),
)

# The draft samples through a bfloat16 cumulative sum and records float64: harmless at 8 tokens, ruinous at 256.
PRECISION = _fault(
    "draft sampled in bfloat16",
    "q is recorded in another precision than it was sampled from: late tokens of a large vocabulary are never drafted",
    (
        _DRAW,
        "return sample(law_BV, uniform_B)",
        "return (law_BV.bfloat16().cumsum(-1) > uniform_B.bfloat16().unsqueeze(1)).to(torch.uint8).argmax(-1)",
    ),
)

DRAFT = (
    _fault(
        "no draft KV for the last accepted token",
        "after a fully accepted round the draft never sees its last draft",
        (_PROPOSE, _FIRST_STEP, "last_tokens(state, 1), lengths_B - 1"),
    ),
    _fault(
        "last accepted token twice in the draft cache",
        "positions after a round are off by one in the draft",
        (_PROPOSE, _FIRST_STEP, "last_tokens(state, self.window), lengths_B - 1"),
        (_PROPOSE, "drawn_B.unsqueeze(1), lengths_B + i", "drawn_B.unsqueeze(1), lengths_B + i + 1"),
        (engine.Engine._round, "max(slot.length for slot in slots) + k", "None"),
    ),
    _fault(
        "hole after k = 0",
        "the draft never sees what was committed in rounds without drafts",
        (engine.Engine._round, "drafter.prepare(drafting, k, self._chunk) if drafter else 0", "0"),
    ),
    _fault(
        "stale draft tail",
        "from its second step on the draft skips a slot: rejected drafts of the last round stay visible",
        (_PROPOSE, "drawn_B.unsqueeze(1), lengths_B + i", "drawn_B.unsqueeze(1), lengths_B + i + 1"),
    ),
    _fault(
        "phantom drafts recorded as certain",
        "the last draft is read from a buffer of an earlier round",
        (
            _PROPOSE,
            "usable_B = torch.stack(",
            "drafts[-1] = last_tokens(state, 1).squeeze(1)\n"
            "    laws[-1] = torch.zeros_like(laws[-1]).scatter_(1, drafts[-1].unsqueeze(1), 1.0)\n"
            "    usable_B = torch.stack(",
        ),
    ),
    _fault(
        "q missing: one-hot fallback",
        "the sampler gets no draft probabilities and takes a sampled draft for a certain one",
        (_RULE, "proposal.draft_probs_BKV,", "None,"),
    ),
    _fault(
        "draft ignores its own drafts in penalties",
        "q's penalties count only what was committed before the round",
        (
            _PROPOSE,
            "if counts_BV is not None:\n            counts_BV.scatter_add_",
            "if False:\n            counts_BV.scatter_add_",
        ),
    ),
    _fault(
        "reached counts all drafts",
        "acceptance by position divides by rounds that never came that far",
        (
            rounds._commit,
            "torch.minimum(proposal.num_drafts_B, tested_B)",
            "proposal.num_drafts_B",
        ),
    ),
    _fault(
        "bonus token counts as accepted",
        "acceptance looks higher than it is",
        (
            slots.Slot.commit,
            "accepted=report.accepted,",
            "accepted=min(report.accepted + 1, report.reached),",
        ),
    ),
)

SHORT_ROPE = _fault(
    "short RoPE cache of the draft",
    "the draft goes on past the positions it was built for, with the last one's rotation",
    (
        _PROPOSE,
        "torch.minimum(usable_B, self.model.max_positions - lengths_B)",
        "usable_B",
    ),
    (
        drafter.ModelDrafter._step,
        "if self.vocabulary is None:",
        "plan.positions_Bq.clamp_(max=self.model.max_positions - 1)\n    if self.vocabulary is None:",
    ),
)

MEAN_OF_A_SUM = _fault(
    "accepted length not divided by the batch",
    "tokens a round come out too high by the number of rows",
    (stats.RoundStats.acceptance.fget, "rounds=self.rows", "rounds=1"),
)

RULE = (
    _fault(
        "coin equals zero",
        "u <= p / q accepts a token of target probability 0 when the coin is 0",
        (sampling.verify_drafts, "accept_uniform_BK * q_BK < p_BK", "accept_uniform_BK * q_BK <= p_BK"),
    ),
    _fault(
        "zero residual not handled",
        "p == q leaves no mass to resample: token 0 comes out",
        (sampling._residual, "torch.where(empty_B1, p_BV, residual_BV)", "residual_BV"),
    ),
    _fault(
        "draw from a token of weight zero",
        "inverse-CDF sampling without the positive-weight mask: >= instead of >",
        (sampling.sample, "cdf_BV > threshold_B1", "cdf_BV >= threshold_B1"),
    ),
    _fault(
        "NaN row not flattened",
        "a NaN row reaches the rule: token 0 or the rejected token leaks",
        (sampling.constrain_logits, "torch.where(bad_BJ.unsqueeze(-1), 0.0, logits_BJV)", "logits_BJV"),
    ),
    _fault(
        "bad target row not reported",
        "a request with NaN logits goes on with made-up text",
        (
            sampling.constrain_logits,
            "~torch.isfinite(logits_BJV.amax(-1))",
            "torch.zeros_like(logits_BJV.amax(-1), dtype=torch.bool)",
        ),
    ),
)

LOGPROBS = (
    _fault(
        "logits edited in place",
        "reported log-probabilities are the processed law's, not the model's",
        (sampling.constrain_logits, "torch.where(bad_BJ.unsqueeze(-1), 0.0, logits_BJV)", "logits_BJV"),
        (
            sampling.constrain_logits,
            "logits_BJV.masked_fill(~law.allowed_BV.unsqueeze(1), _NEG_INF)",
            "logits_BJV.masked_fill_(~law.allowed_BV.unsqueeze(1), _NEG_INF)",
        ),
    ),
    _fault(
        "log-probabilities of the next position",
        "an offset that forgets the rejected positions",
        (rounds._raw_logprobs, "logits_BJV = logits_BJV.double()", "logits_BJV = logits_BJV.double().roll(-1, 1)"),
    ),
)

HONEST = (
    (
        _fault(
            "a hotter draft, recorded as it is",
            "none: q may be any law as long as it is the one sampled from",
            (_DRAW, "law_BV = " + _Q_LAW, "law_BV = " + _without(_Q_LAW, **_HOTTER)),
        ),
        {"temperature": 1.8},
    ),
    (
        _fault(
            "a draft without top-p, recorded as it is",
            "none: q may be any law as long as it is the one sampled from",
            (_DRAW, "law_BV = " + _Q_LAW, "law_BV = " + _without(_Q_LAW, top_p="False")),
        ),
        {"top_p": 1.0},
    ),
)
