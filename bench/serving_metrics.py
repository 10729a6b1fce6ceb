"""What a vLLM server says of itself: the counters on /metrics, and its log on memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_POOL = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_DRAFTER = re.compile(r"Loading drafter model")
_SPEC, _PLUGIN = "vllm:spec_decode_num_", "vllm:specdec_"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Sums over the server's engines since it started.

    rounds: steps of one request in which draft tokens were verified. accepted_by_position[j]: how often draft token j
    of a round was accepted. generated: tokens given to clients; requests: those that finished. Only our plugin counts
    plain_steps, the decoding steps of a request without drafts, and reached_by_position, how often draft token j was
    tested; of other methods they are 0 and ().
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    generated: int = 0
    requests: int = 0
    plain_steps: int = 0
    reached_by_position: tuple[int, ...] = ()

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        return Counters(
            rounds=self.rounds - before.rounds,
            drafted=self.drafted - before.drafted,
            accepted=self.accepted - before.accepted,
            accepted_by_position=_less(self.accepted_by_position, before.accepted_by_position),
            generated=self.generated - before.generated,
            requests=self.requests - before.requests,
            plain_steps=self.plain_steps - before.plain_steps,
            reached_by_position=_less(self.reached_by_position, before.reached_by_position),
        )


def _less(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(after - before for after, before in zip_longest(now, then, fillvalue=0))


def parse_counters(text: str) -> Counters:
    """Counters from the text of /metrics. Names that are missing count as 0: no speculation, none of its counters."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    positions: dict[str, dict[int, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if "position" in sample.labels:
                counts = positions.setdefault(sample.name, {})
                position = int(sample.labels["position"])
                counts[position] = counts.get(position, 0.0) + sample.value
    return Counters(
        rounds=int(sums.get(f"{_SPEC}drafts_total", 0)),
        drafted=int(sums.get(f"{_SPEC}draft_tokens_total", 0)),
        accepted=int(sums.get(f"{_SPEC}accepted_tokens_total", 0)),
        accepted_by_position=_in_order(positions.get(f"{_SPEC}accepted_tokens_per_pos_total", {})),
        generated=int(sums.get("vllm:generation_tokens_total", 0)),
        requests=int(sums.get("vllm:request_success_total", 0)),
        plain_steps=int(sums.get(f"{_PLUGIN}plain_rounds_total", 0)),
        reached_by_position=_in_order(positions.get(f"{_PLUGIN}position_reached_total", {})),
    )


def _in_order(counts: Mapping[int, float]) -> tuple[int, ...]:
    return tuple(int(counts[position]) for position in sorted(counts))


def has_plugin(text: str) -> bool:
    """Whether /metrics shows our plugin's figures, which come from the scheduler through to the server's process."""
    return f"{_PLUGIN}steps" in text


def acceptance(counters: Counters) -> dict[str, Any]:
    """Row fields: alpha over all positions and by position, given that the position was reached; accepted over
    drafted; tokens a round.

    Only our plugin tells positions that were not reached from those that a shorter round did not draft. For others
    such a position counts as reached and not accepted, so that where the draft length changes both alphas are lower
    bounds. All are None where nothing was drafted.
    """
    if counters.rounds == 0:
        return dict.fromkeys(("alpha", "alpha_by_position", "accepted_share", "tokens_per_round"))
    reached = counters.reached_by_position or (counters.rounds, *counters.accepted_by_position[:-1])
    by_position = [
        accepted / before for accepted, before in zip(counters.accepted_by_position, reached, strict=False) if before
    ]
    return {
        "alpha": counters.accepted / sum(reached),
        "alpha_by_position": by_position,
        "accepted_share": counters.accepted / counters.drafted if counters.drafted else None,
        "tokens_per_round": 1 + counters.accepted / counters.rounds,
    }


def memory(log: str) -> dict[str, Any]:
    """Row fields from a server's log: tokens that its KV pool holds, and how many requests of `context_limit` tokens
    fit into it at once. None where the log does not say."""
    pool, concurrency = _POOL.search(log), _CONCURRENCY.search(log)
    return {
        "kv_tokens": _whole(pool.group(1)) if pool else None,
        "context_limit": _whole(concurrency.group(1)) if concurrency else None,
        "max_concurrency": float(concurrency.group(2)) if concurrency else None,
    }


def drafter_loaded(log: str) -> bool:
    """Whether the server says that it loaded a draft model."""
    return _DRAFTER.search(log) is not None


def consistent(counters: Mapping[str, int], k_max: int) -> tuple[bool, str]:
    """Whether the counts of Counters, as a mapping, add up.

    Every step gives one token and those it accepted, and so does the prefill of a request; the last step of a request
    may have accepted up to `k_max` tokens more than its limit let through.
    """
    accepted, drafted, generated = counters["accepted"], counters["drafted"], counters["generated"]
    made = accepted + counters["rounds"] + counters["requests"] + counters["plain_steps"]
    cut, most = made - generated, counters["requests"] * k_max
    told = (
        f"accepted {accepted} of {drafted} drafted; {generated} tokens = {accepted} accepted + {counters['rounds']} "
        f"drafting rounds + {counters['requests']} prefills + {counters['plain_steps']} steps without drafts "
        f"- {cut} cut off at a request's end (at most {most})"
    )
    return accepted <= drafted and 0 <= cut <= most, told


def _whole(text: str) -> int:
    return int(text.replace(",", ""))
