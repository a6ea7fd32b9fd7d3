"""Text to token ids, so that text stays text: no run of it can turn into a special token.

Every run of text is tokenized alone. Tokenizers that put a dummy space in front of a text (SentencePiece) would put
one in front of every run, so they are told not to.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase


class TextEncoder:
    """Encodes runs of text and pieces of a chat template with a model's tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.update(truncation=None, padding=None, post_processor=None)
        _drop_dummy_space(parts)
        self._template = Tokenizer.from_str(json.dumps(parts))
        parts["added_tokens"] = []
        self._text = Tokenizer.from_str(json.dumps(parts))
        self._special = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        ) | frozenset(tokenizer.all_special_ids)
        self.unk_id: int | None = tokenizer.unk_token_id
        self.bos = _leading_bos(tokenizer)

    def text(self, text: str) -> tuple[int, ...]:
        """The ids of a run of text; what looks like a special token is spelled out."""
        encoding = self._text.encode(text, add_special_tokens=False)
        for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._special and token_id != self.unk_id and last - first > 1:
                return self.text(text[: first + 1]) + self.text(text[first + 1 :])
        return tuple(encoding.ids)

    def template(self, text: str) -> tuple[int, ...]:
        """The ids of a piece of a chat template, special tokens included."""
        return tuple(self._template.encode(text, add_special_tokens=False).ids)


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer itself puts in front of a text: BOS, or nothing."""
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else ()


def _drop_dummy_space(part: Any) -> None:
    """Switch off every setting of a tokenizer's description that puts a space in front of a text."""
    if isinstance(part, list):
        part[:] = [p for p in part if not (isinstance(p, dict) and p.get("type") == "Prepend")]
        for inner in part:
            _drop_dummy_space(inner)
    elif isinstance(part, dict):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
        if part.get("type") == "ByteLevel" and "add_prefix_space" in part:
            part["add_prefix_space"] = False
        for key, inner in part.items():
            if isinstance(inner, dict) and inner.get("type") == "Prepend":
                part[key] = None
            elif key not in ("model", "added_tokens"):
                _drop_dummy_space(inner)
