"""One prompt being decoded to text: what has come so far (Track), and the iterator a user holds (Stream)."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from specdec.request import Completion, TokenLogprobs
from specdec.stats import AcceptanceStats
from specdec.text import IncrementalText, StopStrings

if TYPE_CHECKING:
    from specdec.decoder import SpecDecoder


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What became of one sample of one prompt.

    index: the prompt's number in the call; sample: 0 to n - 1. text: without special tokens, the stop id and the stop
    string. token_ids: a stop id included, otherwise up to the token that completed the stop string. stats: what the
    engine did, with tokens of the last round behind a stop string counted. logprobs: by token, when the decoder was
    made with top_logprobs.
    """

    index: int
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    stop_string: str | None = None
    error: str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New text, and whether the token that completed it was an accepted draft."""

    text: str
    drafted: bool


class Track:
    """Turns one request's tokens into pieces of text; `result` is set when it is done."""

    def __init__(
        self,
        *,
        index: int,
        sample: int,
        text: IncrementalText | None = None,
        stops: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.index, self.sample = index, sample
        self.ticket = -1
        self.pieces: deque[Piece] = deque()
        self.result: Generation | None = None
        self._text, self._stops = text, StopStrings(stops)
        self._stop_ids, self._min_tokens = frozenset(stop_ids), min_tokens
        self._token_ids: list[int] = []
        self._out: list[str] = []

    @property
    def stopped(self) -> bool:
        """A stop string is complete: what follows does not count."""
        return self._stops.matched is not None

    def take(self, token_ids: Sequence[int], accepted: int) -> None:
        """The tokens of a round, of which the first `accepted` were drafts."""
        assert self._text is not None
        for place, token in enumerate(token_ids):
            if self.stopped:
                return
            self._token_ids.append(token)
            if token not in self._stop_ids:
                self._add(self._text.push(token), drafted=place < accepted)

    def finish(self, completion: Completion) -> None:
        if self._text is not None and not self.stopped:
            self._add(self._text.flush(), drafted=False)
        self._put(self._stops.flush(), drafted=False)
        logprobs = completion.logprobs
        self.result = Generation(
            index=self.index,
            sample=self.sample,
            text="".join(self._out),
            token_ids=self._token_ids,
            finish_reason="stop" if self.stopped else completion.finish_reason,
            stop_string=self._stops.matched,
            error=None if self.stopped else completion.error,
            stats=completion.stats,
            logprobs=None if logprobs is None else _first(logprobs, len(self._token_ids)),
        )

    def _add(self, text: str, *, drafted: bool) -> None:
        """Text of the first min_tokens tokens is not searched, as stop ids do not end it either."""
        if text and len(self._token_ids) > self._min_tokens:
            text = self._stops.push(text)
        self._put(text, drafted=drafted)

    def _put(self, text: str, *, drafted: bool) -> None:
        if text:
            self._out.append(text)
            self.pieces.append(Piece(text=text, drafted=drafted))


def _first(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(**{f.name: getattr(logprobs, f.name)[:count] for f in fields(logprobs)})


class Stream(Iterator[str]):
    """Text pieces of one answer as rounds bring them; `close` (or `cancel`, the end of a `with` block, or letting go
    of the stream) ends the request and frees its place in the engine.

    Several streams of one decoder may be read in turn: each advances all. Reading raises ValueError when the request
    cannot be decoded.
    """

    def __init__(self, decoder: "SpecDecoder", track: Track) -> None:
        self._decoder, self._track = decoder, track
        self._closed = False

    def __next__(self) -> str:
        return next(self.pieces()).text

    def pieces(self) -> Iterator[Piece]:
        """The same with the word whether each piece came from an accepted draft."""
        while self._advanced():
            yield self._track.pieces.popleft()

    def result(self) -> Generation:
        """The whole answer; decodes what is left of it (pieces not yet read stay to be read)."""
        while self._track.result is None:
            self._decoder.advance()
        return self._track.result

    def cancel(self) -> None:
        """End early: `result` then holds what came so far, and no further piece is given out."""
        self._closed = True
        self._decoder.cancel(self._track)

    close = cancel

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._decoder.cancel(self._track)

    def _advanced(self) -> bool:
        """Decode until there is a piece; False at the end."""
        if self._closed:
            return False
        while not self._track.pieces and self._track.result is None:
            self._decoder.advance()
        result = self._track.result
        if result is not None and result.error is not None and not self._track.pieces:
            raise ValueError(result.error)
        return bool(self._track.pieces)
