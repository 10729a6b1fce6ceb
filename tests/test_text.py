"""Text from tokens: whole characters, stop strings, both whatever the splits."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_text import byte_tokenizer, split_into_tokens

from specdec.request import Completion
from specdec.stream import Track
from specdec.text import IncrementalText, StopStrings

TOKENIZER = byte_tokenizer()
BROKEN = "\N{REPLACEMENT CHARACTER}"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one sign on screen, five characters, 18 bytes
assert len(TOKENIZER("日").input_ids) > 1  # a character over several tokens
WRITING = st.text(st.sampled_from("ab .\n日本語字😀🎉é\u0301ß" + FAMILY), max_size=14)


@settings(max_examples=150, deadline=None)
@given(text=WRITING, prompt=WRITING, cuts=st.randoms(use_true_random=False))
def test_pieces_are_whole_characters_and_join_to_the_text(text, prompt, cuts) -> None:
    ids = split_into_tokens(TOKENIZER, text, cuts)
    incremental = IncrementalText(TOKENIZER, TOKENIZER(prompt).input_ids)
    pieces = [incremental.push(token) for token in ids]
    assert BROKEN not in "".join(pieces)
    assert "".join(pieces) == text
    assert incremental.flush() == ""


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_any_tokens_join_to_what_the_tokenizer_decodes(ids) -> None:
    """Random bytes, special tokens among them; what never becomes a character comes out in the end as U+FFFD."""
    incremental = IncrementalText(TOKENIZER)
    text = "".join(incremental.push(token) for token in ids) + incremental.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class SpaceDropping:
    """Decodes as sentencepiece does: the first space of what it is given is dropped."""

    words = ("", " a", " b", "c", " ")

    def decode(self, ids, **_: object) -> str:
        return "".join(self.words[i] for i in ids).removeprefix(" ")


@given(ids=st.lists(st.integers(0, 4), max_size=12), prompt=st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_spaces_between_words_stay_when_a_tokenizer_drops_the_first(ids, prompt) -> None:
    incremental = IncrementalText(SpaceDropping(), prompt)
    text = "".join(incremental.push(token) for token in ids)
    assert text == "".join(SpaceDropping.words[i] for i in ids)


def ends_first(text: str, stops: list[str]) -> str:
    """The reference: letter by letter, until the text ends with a stop; the longest of those that do."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


def through(parts: list[str], stops: list[str]) -> tuple[str, list[str]]:
    searcher = StopStrings(stops)
    out: list[str] = []
    for part in parts:
        out.append(searcher.push(part))
        if searcher.matched:
            return "".join(out), out
    return "".join(out) + searcher.flush(), out


@pytest.mark.parametrize("stops", [["bcd"], ["abab"], ["bc", "abcd"], ["aa", "aab"], ["d", "cd", "x"], []])
def test_stop_strings_at_every_split(stops: list[str]) -> None:
    for text in ("xabcdy", "ababab", "aaab", "xx", "bcbcd", "ab"):
        for cuts in itertools.product([False, True], repeat=len(text) - 1):
            parts = [text[0]]
            for letter, cut in zip(text[1:], cuts, strict=True):
                parts = [*parts, letter] if cut else [*parts[:-1], parts[-1] + letter]
            whole, out = through(parts, stops)
            expected = ends_first(text, stops)
            assert whole == expected, (parts, stops)
            assert expected.startswith("".join(out))  # nothing was shown that had to be taken back


@settings(max_examples=200, deadline=None)
@given(
    text=WRITING,
    stops=st.lists(st.text(st.sampled_from("ab 日😀"), min_size=1, max_size=3), max_size=3),
    cuts=st.randoms(use_true_random=False),
)
def test_a_track_gives_the_same_text_whatever_the_tokens_and_rounds(text, stops, cuts) -> None:
    ids = split_into_tokens(TOKENIZER, text, cuts)
    track = Track(index=0, sample=0, text=IncrementalText(TOKENIZER), stops=stops)
    left = list(ids)
    while left:
        size = cuts.randint(1, 6)
        track.take(left[:size], accepted=size - 1)
        left = left[size:]
    track.finish(Completion(id=None, token_ids=ids, finish_reason="length"))
    assert track.result is not None
    assert track.result.text == ends_first(text, stops) == "".join(piece.text for piece in track.pieces)
    assert track.result.finish_reason == ("stop" if track.result.stop_string else "length")
    assert track.result.token_ids == ids[: len(track.result.token_ids)]
    if track.result.stop_string:
        assert TOKENIZER.decode(track.result.token_ids).rstrip(BROKEN).find(track.result.stop_string) >= 0


def test_stop_id_is_a_token_but_no_text_and_min_tokens_are_not_searched() -> None:
    a, b = (TOKENIZER(letter).input_ids[0] for letter in "ab")
    track = Track(index=0, sample=0, text=IncrementalText(TOKENIZER), stops=["a"], stop_ids=[b], min_tokens=2)
    track.take([a, a, a, b], accepted=2)
    assert track.stopped
    assert [piece.text for piece in track.pieces] == ["a", "a"]
    track = Track(index=0, sample=0, text=IncrementalText(TOKENIZER), stops=["aaa"], stop_ids=[b], min_tokens=0)
    track.take([a, a, b], accepted=2)
    track.finish(Completion(id=None, token_ids=[], finish_reason="stop"))
    assert track.result is not None
    assert (track.result.text, track.result.token_ids) == ("aa", [a, a, b])
    assert [(piece.text, piece.drafted) for piece in track.pieces] == [("aa", False)]


def test_broken_bytes_without_end_are_not_held_without_end() -> None:
    """A model that writes nothing else would seem to hang."""
    [half] = TOKENIZER.convert_tokens_to_ids(["ð"])
    incremental = IncrementalText(TOKENIZER)
    out = "".join(incremental.push(half) for _ in range(50))
    assert out == BROKEN * 49
    assert [incremental.push(token) for token in TOKENIZER("a日").input_ids][-1] == "日"
