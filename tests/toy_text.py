"""A small byte-level BPE tokenizer, made here, whose tokens split characters; and a decoder's folder around it."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from bench.tiny_models import tiny_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Each is merged from the left; "日"[:2] stands for the first two of its three bytes.
WORDS = ("the", "hat", " cat", " on", " mat", "at", "語")
PARTS = (("日", 2), ("😀", 2), ("😀", 3), ("本", 3))


def byte_tokenizer(words: Sequence[str] = WORDS, *, template: str | None = TEMPLATE) -> Any:
    """256 bytes, <eos>, and the tokens on the way to `words` and PARTS: some end within a character."""
    alphabet = bytes_to_unicode()
    strings = [word.encode() for word in words] + [sign.encode()[:size] for sign, size in PARTS]
    vocab = {"<eos>": 0} | {letter: 1 + byte for byte, letter in sorted(alphabet.items())}
    merges: dict[tuple[str, str], None] = {}
    for string in strings:
        letters = [alphabet[byte] for byte in string]
        for size in range(1, len(letters)):
            merges["".join(letters[:size]), letters[size]] = None
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = template
    return fast


def split_into_tokens(tokenizer: Any, text: str, cuts: Random) -> list[int]:
    """Some tokenization of `text`, not the merged one only: each token is broken into its bytes or not."""
    ids: list[int] = []
    for token in tokenizer(text).input_ids:
        letters = list(tokenizer.convert_ids_to_tokens(token))
        ids += tokenizer.convert_tokens_to_ids(letters) if cuts.random() < 0.5 else [token]
    return ids


def save_toy(folder: Path, tokenizer: Any, **model_options: Any) -> Path:
    """A folder with a tiny random model of this tokenizer, whose greedy text never ends by itself."""
    options = {"layers": 2, "logit_std": 4.0, **model_options}
    model = tiny_model(vocab=len(tokenizer), **options)
    model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
