"""From token ids to text while they arrive: whole characters only, and stop strings never shown in part."""

from collections.abc import Iterable, Sequence
from typing import Any

_CONTEXT = 5  # prompt tokens that the first piece is decoded behind
# With byte fallback, one for each of up to four bytes of the last whole character and up to three of the next.
_MOST_HELD = 8
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class IncrementalText:
    """Decodes one token at a time; the pieces joined are the text.

    A token's text depends on what stands before it (sentencepiece drops a space at the start), so each is decoded
    behind a few earlier ones. A character may be spread over tokens: byte-level BPE may write "\N{GRINNING FACE}",
    f0 9f 98 80, as the tokens f0 9f | 98 | 80, of which each but the last decodes to replacement characters at the
    end. Those are held back until later tokens complete them, or `flush` says that none will come; so long a row of
    them that no token can complete it is let out, all but the last. Special tokens are left out.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-_CONTEXT:])
        self._pending: list[int] = []
        self._given = len(
            self._decode(self._context)
        )  # characters of the decoded context and pending tokens that are out already

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        whole = text.rstrip(_BROKEN)
        if len(text) - len(whole) > _MOST_HELD:
            whole = text[:-1]
        piece = whole[self._given :]
        self._given += len(piece)
        if piece and not text.endswith(_BROKEN):
            self._context, self._pending = self._pending, []
            self._given = len(self._decode(self._context))
        return piece

    def flush(self) -> str:
        """What was held back; nothing follows."""
        piece = self._decode(self._context + self._pending)[self._given :]
        self._given += len(piece)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        # Cleaning up spaces would change text that is out already ("a ." to "a.").
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Cuts a text where the first of `stops` is complete, and holds back what may be the beginning of one.

    First means ending first (of two that end together, the longer): then the result does not depend on how the text
    was split. Stops "bc" and "abcd" cut "xabcd" behind "xa", all at once or letter by letter.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to stay and was not before."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back; nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may begin `stop`."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
