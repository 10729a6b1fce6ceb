"""`tiny:FAMILY`: a random model with a byte-level tokenizer, made on the spot, for tests and CI without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import local_models
from pipeline.schema import nearest

MAKER = 2  # raise when the folder would come out differently
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
LAYERS = 4
# transformers' Qwen2 tokenizer adds <|endoftext|> when it is not there, past the end of the vocabulary
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder_name(family: str) -> str:
    """The folder's name under models_root(). ValueError for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"tiny:{family}: unknown family; {nearest(family, FAMILIES)}")
    return f"tiny-{family}-v{MAKER}"


def resolve(family: str) -> Path:
    """The model folder; made on first use, the same bytes everywhere with the same torch."""
    return local_models.make_once(folder_name(family), lambda folder: make(family, folder))


def make(family: str, folder: Path) -> None:
    """Write model, config and tokenizer into an empty folder."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family, tokenizer)).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_config(family: str, tokenizer: Any) -> Any:
    """A config of `family`: 4 layers of width 64, 4 query and 2 key/value heads of width 32 (vLLM's CPU kernels
    take none narrower), the tokenizer's vocabulary."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte and four special ones: 260 in all; ends a turn with <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
