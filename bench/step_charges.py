"""What a run's steps cost by the medians of all its step times: a price list for comparing draft lengths.

On a machine that does other things beside, one step's time varies by more than the lengths differ. So each kind of step
gets one price, a median, and a turn is charged with the sum of its steps' prices. What is left to differ between
controllers is what they chose, and what was accepted. The medians are those of turns in which the lengths alternate
every few steps: of turns with one length each, the one beside which a neighbour was busy would look dear.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from statistics import median
from typing import Any

Kind = tuple[int, int]  # rows, drafts a row


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One step of vLLM: `rows` requests that each verified up to k drafts, then got `drafts` new ones. prompt: it also
    read prompts. seconds: since the step before came back; nan for the first. draft_s, verify_s, caught_up: of the
    round that ended with it, by the worker's clock (vllm_draft_spec's StepTimes), nan and 0 where that did not time it.
    reached, accepted: drafts that were tested and those accepted, over all rows."""

    rows: int
    k: int
    drafts: int
    prompt: bool
    seconds: float
    draft_s: float = nan
    verify_s: float = nan
    caught_up: int = 0
    reached: int = 0
    accepted: int = 0


class Recorder:
    """Writes down what passes the plugin's pilot."""

    def __init__(self, pilot: Any) -> None:
        self.steps: list[Taken] = []
        self._observe, self._came_at = pilot.observe, nan
        pilot.observe = self.observe

    def observe(self, step: Any) -> None:
        now = time.perf_counter()
        self.steps.append(taken(step, now - self._came_at))
        self._came_at = now
        self._observe(step)

    def take(self) -> list[Taken]:
        """The steps since the last call."""
        steps, self.steps, self._came_at = self.steps, [], nan
        return steps


def taken(step: Any, seconds: float) -> Taken:
    """From the plugin's Step. Times that came late, with a step that is not like theirs, are left out."""
    times = step.times
    fits = times is not None and (times.batch, times.k) == (len(step.names), step.k) and not step.prompt_tokens
    timed = {"draft_s": times.draft_s, "verify_s": times.verify_s, "caught_up": times.caught_up} if fits else {}
    return Taken(
        rows=len(step.names),
        k=step.k,
        drafts=step.next_k,
        prompt=step.prompt_tokens > 0,
        seconds=seconds,
        reached=sum(min(drafted, accepted + 1) for drafted, accepted in step.rows),
        accepted=sum(accepted for _, accepted in step.rows),
        **timed,
    )


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds by rows and drafts: making the drafts, verifying them. prompt: a step that reads prompts, by rows,
    without the drafts made after them. catch_up: what the draft takes longer in a round in which it was fed what it had
    missed; between: what a step takes beyond drafting and verifying."""

    draft: Mapping[Kind, float]
    verify: Mapping[Kind, float]
    prompt: Mapping[Kind, float]  # of 0 drafts
    catch_up: float = 0.0
    between: float = 0.0

    def of(self, step: Taken) -> float:
        """Seconds of a step."""
        drafting = nearest(self.draft, (step.rows, step.drafts))
        if step.prompt:
            return nearest(self.prompt, (step.rows, 0)) + drafting
        extra = self.catch_up if step.caught_up else 0.0
        return nearest(self.verify, (step.rows, step.k)) + drafting + self.between + extra

    def records(self) -> list[dict[str, Any]]:
        """Result rows, in milliseconds."""
        return [
            {
                "step_rows": rows,
                "step_k": k,
                "draft_ms": 1e3 * nearest(self.draft, (rows, k)),
                "verify_ms": 1e3 * seconds,
                "between_ms": 1e3 * self.between,
                "catch_up_ms": 1e3 * self.catch_up,
            }
            for (rows, k), seconds in sorted(self.verify.items())
        ]


def prices(alternating: Iterable[Taken], others: Iterable[Taken] = ()) -> Prices:
    """The medians of alternating steps; of prompts, of which there are few, and for lengths that did not alternate,
    those of the others too. ValueError when the worker timed no step."""
    alternating, others = list(alternating), list(others)
    draft, verify = ({**_medians(others, name), **_medians(alternating, name)} for name in ("draft_s", "verify_s"))
    if not verify:
        raise ValueError("no step was timed by vLLM's worker; expected vllm_draft_spec's times in its output")
    prompts: dict[Kind, list[float]] = defaultdict(list)
    for step in alternating + others:
        if step.prompt and isfinite(step.seconds):
            prompts[step.rows, 0].append(step.seconds - nearest(draft, (step.rows, step.drafts)))
    late = [step.draft_s - nearest(draft, (step.rows, step.k)) for step in alternating if step.k and step.caught_up]
    steady = [step for step in alternating if _is_steady(step) and step.k == step.drafts and isfinite(step.seconds)]
    between = [step.seconds - step.draft_s - step.verify_s for step in steady]
    return Prices(
        draft=draft,
        verify=verify,
        prompt={kind: median(each) for kind, each in prompts.items()},
        catch_up=max(0.0, median(late)) if late else 0.0,
        between=max(0.0, median(between)) if between else 0.0,
    )


def _is_steady(step: Taken) -> bool:
    return isfinite(step.verify_s) and not step.caught_up and not step.prompt


def _medians(steps: Iterable[Taken], name: str) -> dict[Kind, float]:
    samples: dict[Kind, list[float]] = defaultdict(list)
    for step in steps:
        if _is_steady(step):
            samples[step.rows, step.k].append(getattr(step, name))
    return {kind: median(each) for kind, each in samples.items()}


def nearest(table: Mapping[Kind, float], kind: Kind) -> float:
    """The price of this kind, or of the most similar one that was met: the same drafts first. 0 for an empty table."""
    if not table:
        return 0.0
    rows, k = kind
    return table[min(table, key=lambda other: (abs(other[1] - k), abs(other[0] - rows)))]
