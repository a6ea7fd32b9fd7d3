"""A lower bound of a text's tokens from its length, so that text beyond the context is never tokenized.

A token stands for no more bytes of text than the longest one of the vocabulary. That gives a bound for tokenizers that
keep all text: byte-level BPE, and BPE with byte fallback. Other tokenizers may drop text, or make one unknown token of
much of it, so they get no bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from inlay.errors import ContextError

#: NFC can shorten text: it composes accents, and replaces some characters by shorter ones. In UTF-8 each of the two
#: leaves at least a third of it, over all of Unicode. ASCII is unchanged.
_COMPOSED = 9

#: Extra tokens kept at the end of a shortened text, so that the cut does not change the wanted ones.
_MARGIN = 64

_SPACE = re.compile(r"\s")
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_KEEP_ALL = frozenset({"ByteLevel", "Metaspace", "Digits"})  # pre-tokenizers that drop nothing


class TextBound:
    """The bounds of a tokenizer and a model's context.

    Args:
        tokenizer: the content of ``tokenizer.json``.
        positions: of the model's context. None for no bound.
    """

    def __init__(self, tokenizer: Mapping[str, Any], positions: int | None) -> None:
        self._positions = positions
        self._token_bytes = _longest_token(tokenizer)
        self._composes = "NFC" in [step["type"] for step in _steps(tokenizer["normalizer"])]

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the text's number of tokens."""
        if self._token_bytes is None:
            return 0
        if text.isascii():
            return -(-len(text) // self._token_bytes)
        most = self._token_bytes * (_COMPOSED if self._composes else 1)
        return -(-len(text.encode(errors="surrogatepass")) // most)

    def check(self, texts: Iterable[str], where: str = "") -> None:
        """Raise ContextError, with ``where`` in front, if the texts cannot fit into one prompt."""
        if self._positions is None or self._token_bytes is None:
            return
        texts = list(texts)
        least = sum(map(self.least_tokens, texts))
        if least >= self._positions:
            size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
            raise ContextError(
                f"{where}the text has {size:,} bytes, which are {least:,} tokens at least, and the model's context is "
                f"{self._positions:,} tokens long, answer included; shorten the text",
                code="request.too_long",
            )

    def ending(self, texts: Sequence[str], tokens: int) -> Sequence[str] | None:
        """Return the end of texts that exceed the context, with more than ``tokens`` tokens.

        None for texts that may fit, and if ``tokens`` exceeds the context.
        """
        if self._positions is None or self._token_bytes is None or tokens >= self._positions:
            return None
        if sum(map(self.least_tokens, texts)) < self._positions:
            return None
        margin = _MARGIN * self._bytes_per_token
        left = tokens * self._bytes_per_token + margin  # in characters, each of at least one byte
        kept: list[str] = []
        for text in reversed(texts):
            kept.append(text[-left:])
            left -= len(text)
            if left <= 0:
                break
        first = kept[-1]
        word = _SPACE.search(first, 0, margin) if len(first) > margin else None
        kept[-1] = first if word is None else first[word.start() :]
        return kept[::-1]

    @property
    def _bytes_per_token(self) -> int:
        """The most bytes of text in one token."""
        return (self._token_bytes or 1) * (_COMPOSED if self._composes else 1)

    def check_count(self, count: int, what: str) -> None:
        """Raise ContextError for more pieces of text than positions. ``what`` names them, as in "messages"."""
        if self._positions is not None and count >= self._positions:
            raise ContextError(
                f"the prompt has {count:,} {what} and the model's context is {self._positions:,} tokens long, answer "
                "included; send fewer",
                code="request.too_long",
            )


def _longest_token(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the most bytes of text in one token; None if the tokenizer can drop text."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    normalizers, splits = _steps(tokenizer["normalizer"]), _steps(tokenizer["pre_tokenizer"])
    vocabulary = model["vocab"] if model["type"] == "BPE" else {}
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else _BYTE_TOKENS
    has_all_bytes = (byte_level or model.get("byte_fallback")) and all(token in vocabulary for token in alphabet)
    if not has_all_bytes or not all(map(_grows, normalizers)) or not all(map(_keeps, splits)):
        return None
    if any(token["lstrip"] or token["rstrip"] or len(token["content"]) == 1 for token in added):
        return None  # the token strips white space beside it, or is left out of texts
    # In byte-level tokens each character is a byte. Elsewhere the mark for a space is longer than the space.
    longest = max(map(len, vocabulary)) if byte_level else max(len(token.encode()) for token in vocabulary)
    return max(longest, *(len(token["content"].encode()) for token in added), 1)


def _grows(step: Mapping[str, Any]) -> bool:
    """True if a normalizer never shortens text in bytes. NFC counts separately."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in ("NFC", "Prepend", "ByteLevel")


def _keeps(step: Mapping[str, Any]) -> bool:
    """True if a pre-tokenizer keeps all text."""
    return step["type"] in _KEEP_ALL or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")


def _steps(step: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return a step of a tokenizer's description, or the steps of a sequence."""
    if step is None:
        return ()
    inner = step.get("normalizers") or step.get("pretokenizers")
    return (step,) if inner is None else [one for each in inner for one in _steps(each)]
