"""How many tokens a text has at least, told from its length alone, so that what can never fit is never tokenized.

A token stands for no more bytes of text than the longest one of the vocabulary. That bounds the tokens of a text from
below wherever a tokenizer keeps all of it: byte-level BPE, and BPE that falls back to bytes. Others may drop text, or
make one unknown token of much of it; of them nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from inlay.errors import ContextError

#: NFC can shorten text: a letter and its accents become one character, and some characters have shorter equals. In
#: UTF-8 each of the two makes a third of it at most, over all of Unicode; ASCII stays as it is.
_COMPOSED = 9

#: More tokens than are kept of the end of a text, so that the cut changes none of those that are.
_MARGIN = 64

_SPACE = re.compile(r"\s")
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_KEEP_ALL = frozenset({"ByteLevel", "Metaspace", "Digits"})  # pre-tokenizers that drop nothing


class TextBound:
    """What a tokenizer and a model's context allow.

    tokenizer: as in ``tokenizer.json``. positions: of the model's context; None for no bound.
    """

    def __init__(self, tokenizer: Mapping[str, Any], positions: int | None) -> None:
        self._positions = positions
        self._token_bytes = _longest_token(tokenizer)
        self._composes = "NFC" in [step["type"] for step in _steps(tokenizer["normalizer"])]

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text does not fall below, whatever it says."""
        if self._token_bytes is None:
            return 0
        if text.isascii():
            return -(-len(text) // self._token_bytes)
        most = self._token_bytes * (_COMPOSED if self._composes else 1)
        return -(-len(text.encode(errors="surrogatepass")) // most)

    def check(self, texts: Iterable[str], where: str = "") -> None:
        """Refuse texts that cannot all be tokens of one prompt. Raises ContextError, with ``where`` in front of it."""
        if self._positions is None or self._token_bytes is None:
            return
        texts = list(texts)
        least = sum(map(self.least_tokens, texts))
        if least >= self._positions:
            size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
            raise ContextError(
                f"{where}the text has {size:,} bytes, which are {least:,} tokens at least, and the model's context is "
                f"{self._positions:,} tokens long, answer included; shorten the text"
            )

    def ending(self, texts: Sequence[str], tokens: int) -> Sequence[str] | None:
        """The end of texts that are too long for the context, with more than ``tokens`` tokens, or None.

        None for texts that may fit, and where so many tokens do not fit either.
        """
        if self._positions is None or self._token_bytes is None or tokens >= self._positions:
            return None
        if sum(map(self.least_tokens, texts)) < self._positions:
            return None
        margin = _MARGIN * self._bytes_per_token
        left = tokens * self._bytes_per_token + margin  # as characters, of which each has a byte at least
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
        """The most bytes of a text that a token stands for."""
        return (self._token_bytes or 1) * (_COMPOSED if self._composes else 1)

    def check_count(self, count: int, what: str) -> None:
        """Refuse more pieces of text than there are positions. what: as in "messages". Raises ContextError."""
        if self._positions is not None and count >= self._positions:
            raise ContextError(
                f"the prompt has {count:,} {what} and the model's context is {self._positions:,} tokens long, answer "
                "included; send fewer"
            )


def _longest_token(tokenizer: Mapping[str, Any]) -> int | None:
    """The most bytes of text that a token stands for, or None where text can vanish."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    normalizers, splits = _steps(tokenizer["normalizer"]), _steps(tokenizer["pre_tokenizer"])
    vocabulary = model["vocab"] if model["type"] == "BPE" else {}
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else _BYTE_TOKENS
    has_all_bytes = (byte_level or model.get("byte_fallback")) and all(token in vocabulary for token in alphabet)
    if not has_all_bytes or not all(map(_grows, normalizers)) or not all(map(_keeps, splits)):
        return None
    if any(token["lstrip"] or token["rstrip"] or len(token["content"]) == 1 for token in added):
        return None  # white space beside it goes, or it is left out of texts
    # of byte-level tokens each character is a byte; of others, a mark for a space is longer than the space
    longest = max(map(len, vocabulary)) if byte_level else max(len(token.encode()) for token in vocabulary)
    return max(longest, *(len(token["content"].encode()) for token in added), 1)


def _grows(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer leaves at least as many bytes as there were; NFC counts apart."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in ("NFC", "Prepend", "ByteLevel")


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves all of the text."""
    return step["type"] in _KEEP_ALL or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")


def _steps(step: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """A step of a tokenizer's description, or those that it is a sequence of."""
    if step is None:
        return ()
    inner = step.get("normalizers") or step.get("pretokenizers")
    return (step,) if inner is None else [one for each in inner for one in _steps(each)]
