"""A small byte-level BPE tokenizer, made here, whose tokens split characters; and a decoder's folder around it."""

from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.tiny_models import tiny_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = ["the cat sat on the mat 日本語 日本 😀😀🎉 the hat", "字 日 語 😀 é ß"] * 3


def byte_tokenizer(size: int = 290, *, texts: list[str] = TEXTS, template: str | None = TEMPLATE) -> Any:
    """256 bytes, <eos>, and merges learned from `texts`, some of which are parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<eos>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
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
    """A folder with a tiny random model of this tokenizer."""
    options = {"layers": 2, "logit_std": 4.0, **model_options}
    model = tiny_model(vocab=len(tokenizer), **options)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
