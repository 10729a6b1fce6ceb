"""The host's record of one row: its request, its text so far, and how far each cache has come."""

from dataclasses import dataclass, field

from specdec.feed import Feed
from specdec.report import RowReport, join_logprobs
from specdec.request import Completion, Request, TokenLogprobs
from specdec.stats import Tally


@dataclass(kw_only=True)
class Slot:
    """tokens: prompt and output; target_len: how many of them the target's cache holds (the host's copy of its
    length, kept in step by arithmetic alone); draft_bad: the draft's logits were not finite in the last round;
    draft_failures: in how many rounds so far."""

    row: int
    ticket: int
    request: Request
    tokens: list[int]
    target_len: int = 0
    decoding: bool = False
    draft_bad: bool = False
    draft_failures: int = 0
    finish_reason: str | None = None
    error: str | None = None
    tally: Tally = field(default_factory=Tally)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def undrafted(self) -> bool:
        """The draft failed again after it had read the row's text anew: the row decodes without it from here on."""
        return self.draft_failures > 1

    def next_target_feed(self, chunk: int) -> Feed | None:
        """The next prompt tokens for the target, all but the last one."""
        start = self.target_len
        end = self.target_len = min(self.length - 1, start + chunk)
        return Feed(row=self.row, start=start, tokens=self.tokens[start:end]) if end > start else None

    def commit(self, report: RowReport, k: int, own: int) -> None:
        """Take over what a round of k drafts, `own` of them for this row, did to it."""
        self.tokens.extend(report.token_ids)
        self.target_len = self.length - 1
        self.tally.add(
            tokens=report.committed, drafted=report.drafted, reached=report.reached, accepted=report.accepted, k=k
        )
        self.draft_bad = own > 0 and bool(report.draft_bad)
        self.draft_failures += self.draft_bad
        if report.logprobs is not None:
            self.logprobs.append(report.logprobs)
        if report.target_bad:
            self.finish_reason = "error"
            self.error = (
                f"the target produced NaN or infinite logits at token {self.length}, or -inf for every allowed id; "
                f"check its weights and dtype (float16 overflows where bfloat16 does not) and allowed_ids"
            )
        elif report.stopped:
            self.finish_reason = "stop"
        elif self.length - len(self.request.prompt_ids) >= self.request.params.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            id=self.request.id,
            token_ids=self.tokens[len(self.request.prompt_ids) :],
            finish_reason=self.finish_reason,
            error=self.error,
            stats=self.tally.stats,
            logprobs=join_logprobs(self.logprobs),
        )


def check_sizes(**sizes: int) -> None:
    """ValueError for a size that is no whole number from 1 on."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a whole number from 1 on")
