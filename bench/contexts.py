"""Prompts brought to a given number of tokens, so that the cost of a context can be measured on text that is real."""

from collections.abc import Sequence

from data.common import encode_prompt
from pipeline.sources import Prompt


def token_ids(tokenizer: object, prompts: Sequence[Prompt], context: int) -> list[list[int]]:
    """The prompts by the chat template; with a `context` above 0 each is exactly that long, see `stretched`."""
    encoded = [encode_prompt(tokenizer, prompt.messages) for prompt in prompts]
    if not context:
        return encoded
    answers = [_plain_ids(tokenizer, prompt.reference or "") for prompt in prompts]
    return [stretched(index, encoded, answers, context) for index in range(len(prompts))]


def stretched(index: int, prompts: Sequence[list[int]], answers: Sequence[list[int]], length: int) -> list[int]:
    """`length` tokens that end with prompt `index`.

    Before it stand the set's other prompts with their known answers, as earlier turns of a conversation: from the one
    before it backwards, and over again where they do not suffice. Its own answer is never there. A prompt that is
    longer than `length` loses its beginning.
    """
    others = [(index - back) % len(prompts) for back in range(1, len(prompts))]
    turns = [prompts[other] + answers[other] for other in others] or [prompts[index]]
    text, turn = prompts[index], 0
    while len(text) < length:
        text = turns[turn % len(turns)] + text
        turn += 1
    return text[-length:]


def _plain_ids(tokenizer: object, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]
