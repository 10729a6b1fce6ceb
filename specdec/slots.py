"""The host's record of one row: its request, its text so far, and how far each cache has come."""

from dataclasses import dataclass, field

from specdec.feed import Feed
from specdec.report import RowReport, join_logprobs
from specdec.request import Completion, Request, TokenLogprobs
from specdec.stats import AcceptanceStats


@dataclass(kw_only=True)
class Slot:
    """tokens: prompt and output; target_len / draft_len: how many of them each cache holds (the host's copy of the
    caches' lengths, kept in step by arithmetic alone)."""

    row: int
    ticket: int
    request: Request
    tokens: list[int]
    target_len: int = 0
    draft_len: int = 0
    decoding: bool = False
    draft_bad: bool = False
    finish_reason: str | None = None
    error: str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def draft_lag(self) -> int:
        """Committed tokens that the draft has not seen; its first step feeds up to two."""
        return self.length - self.draft_len

    def next_target_feed(self, chunk: int) -> Feed | None:
        start = self.target_len
        self.target_len = min(self.length - 1, start + chunk)
        return self._feed(start, self.target_len)

    def next_draft_feed(self, chunk: int) -> Feed | None:
        start = self.draft_len
        self.draft_len = max(start, min(self.length - 1, start + chunk))
        return self._feed(start, self.draft_len)

    def _feed(self, start: int, end: int) -> Feed | None:
        return Feed(row=self.row, start=start, tokens=self.tokens[start:end]) if end > start else None

    def commit(self, report: RowReport, k: int) -> None:
        """Take over what a round of k drafts did to this row."""
        before = self.length
        self.tokens.extend(report.token_ids)
        self.target_len = self.length - 1
        if k > 0:
            self.draft_len = min(before + k - 1, self.length - 1)
        self.stats = self.stats + report.acceptance(k)
        if report.logprobs is not None:
            self.logprobs.append(report.logprobs)
        if report.target_bad:
            self.finish_reason = "error"
            self.error = (
                f"the target produced NaN or infinite logits at token {self.length}; expected finite numbers. "
                f"Check its weights and dtype (float16 overflows where bfloat16 does not)"
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
            stats=self.stats,
            logprobs=join_logprobs(self.logprobs),
        )
