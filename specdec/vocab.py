"""Drafts whose output vocabulary is not the target's: another tokenizer, or a head pruned to frequent tokens.

Exactness asks only that every draft was drawn from the q it is judged by. So q is built over the target's ids: a
draft logit moves to the id it stands for, every other id gets -inf (q is zero there), and the processing that
follows is the same as ever. Token-level intersection: Timor et al., arXiv 2502.05202, section 4.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VocabularyMap:
    """input_ids_V: for each target id, the id that the draft is fed; source_V: for each target id, the column of the
    draft's num_columns logits that stands for it, or num_columns where none does."""

    input_ids_V: Tensor
    source_V: Tensor
    num_columns: int

    def check(self, target_size: int, draft_size: int) -> None:
        """ValueError unless the map leads from `target_size` ids to `draft_size` columns."""
        if (len(self.source_V), self.num_columns) != (target_size, draft_size):
            raise ValueError(
                f"the vocabulary map leads from {len(self.source_V)} target ids to {self.num_columns} draft columns; "
                f"the target has {target_size} ids, the draft {draft_size} columns"
            )

    @property
    def shared(self) -> int:
        """How many target ids the draft can propose."""
        return int((self.source_V < self.num_columns).sum())

    def to(self, device: torch.device) -> "VocabularyMap":
        ids_V, source_V = self.input_ids_V.to(device), self.source_V.to(device)
        return VocabularyMap(input_ids_V=ids_V, source_V=source_V, num_columns=self.num_columns)

    def expand(self, logits_BqN: Tensor) -> Tensor:
        """Draft logits over the draft's N columns as logits over the target's ids [B, q, V]."""
        nowhere = logits_BqN.new_full((*logits_BqN.shape[:-1], 1), float("-inf"))
        return torch.cat([logits_BqN, nowhere], -1).index_select(-1, self.source_V)


def pruned_head_map(head_ids: "Tensor | list[int]", vocab_size: int) -> VocabularyMap:
    """For a draft whose output column i stands for the target id head_ids[i] and which reads the target's ids.

    Raises ValueError for ids outside the vocabulary or named twice.
    """
    ids_N = torch.as_tensor(head_ids, dtype=torch.int64)
    if ids_N.numel() == 0 or ids_N.min() < 0 or ids_N.max() >= vocab_size:
        raise ValueError(f"head ids must lie from 0 to {vocab_size - 1}, and there must be at least one")
    if len(ids_N.unique()) != len(ids_N):
        raise ValueError("head ids name a token twice; each output column must stand for another token")
    source_V = torch.full((vocab_size,), len(ids_N), dtype=torch.int64)
    source_V[ids_N] = torch.arange(len(ids_N))
    return VocabularyMap(input_ids_V=torch.arange(vocab_size), source_V=source_V, num_columns=len(ids_N))


def intersection_map(
    target_tokenizer: Any, draft_tokenizer: Any, *, target_size: int, draft_size: int
) -> VocabularyMap:
    """For a draft with another tokenizer: tokens that stand for the same bytes are shared.

    A target token that the draft does not have is fed as the last piece of its text in the draft's tokenization
    (one id, so that positions stay in step); only the draft's guess suffers. Raises ValueError when no token is
    shared.
    """
    target_bytes, draft_bytes = token_bytes(target_tokenizer), token_bytes(draft_tokenizer)
    by_bytes = {text: index for index, text in draft_bytes.items() if index < draft_size}
    source_V = torch.full((target_size,), draft_size, dtype=torch.int64)
    input_ids_V = torch.zeros(target_size, dtype=torch.int64)
    for index, text in target_bytes.items():
        if index >= target_size:
            continue
        match = by_bytes.get(text)
        if match is not None:
            source_V[index] = input_ids_V[index] = match
        else:
            input_ids_V[index] = _last_piece(draft_tokenizer, text, draft_size)
    if bool((source_V == draft_size).all()):
        raise ValueError("the two tokenizers share no token: a draft of this vocabulary cannot propose anything")
    return VocabularyMap(input_ids_V=input_ids_V, source_V=source_V, num_columns=draft_size)


def _last_piece(tokenizer: Any, text: "bytes | tuple[str, str]", size: int) -> int:
    if isinstance(text, tuple):
        return 0
    pieces = tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
    return pieces[-1] if pieces and pieces[-1] < size else 0


def token_bytes(tokenizer: Any) -> "dict[int, bytes | tuple[str, str]]":
    """What each id stands for: its bytes, or ("special", content) for a special token, so that a special token never
    equals ordinary text. The end-of-text tokens of both sides count as one, whatever they are called."""
    special = {index: ("special", token.content) for index, token in tokenizer.added_tokens_decoder.items()}
    if tokenizer.eos_token_id is not None:
        special[tokenizer.eos_token_id] = ("special", "end of text")
    vocab = tokenizer.get_vocab()
    byte_level = any(token.startswith("Ġ") for token in vocab)
    read = _bytes_of_byte_level if byte_level else _bytes_of_sentencepiece
    return {index: special.get(index) or read(token) for token, index in vocab.items()}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode()


def _bytes_of_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
