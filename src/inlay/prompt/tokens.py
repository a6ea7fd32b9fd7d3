"""Tokenizes text so that no run of text becomes a special token.

Every run of text is tokenized alone. Some tokenizers put a dummy space in front of a text (SentencePiece) or strip its
ends. Both are switched off here.

A seam marks a place where text must be cut before it is encoded. A chat template may write a user's text anywhere: as
JSON, stripped, inside other text. So the seam is put into the text before rendering, and found again in the rendering.

A lower bound of a text's tokens follows from its length, so that text beyond the context is never tokenized. A token
stands for no more bytes of text than the longest one of the vocabulary. The bound holds for tokenizers that keep all
text: byte-level BPE, and BPE with byte fallback. Other tokenizers may drop text, or make one unknown token of much of
it, so they get no bound.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

from tokenizers import Encoding, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from inlay.errors import ContextError, ModelError

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


_NO_SPACE: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TextEncoder:
    """Encodes runs of text and pieces of a chat template with a model's tokenizer, which is not changed.

    Attributes:
        plain_tokenizer: for runs of text, with special tokens off.
        template_tokenizer: for pieces of templates.
        unk_id: the token for unknown text, or None.
        bos: the tokens that the tokenizer puts in front of a text: BOS, or nothing.
        bound: rejects text that cannot fit into ``positions`` (None for any) before it is tokenized.

    Raises:
        ModelError: for a tokenizer that is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, positions: int | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            kind = type(tokenizer).__name__
            raise ModelError(
                f"the model's tokenizer is a {kind}, not a fast tokenizer; save it with a tokenizer.json",
                code="model.no_fast_tokenizer",
            )
        parts = json.loads(backend.to_str())
        parts.update(truncation=None, padding=None)
        self.bound = TextBound(parts, positions)
        for step in ("normalizer", "pre_tokenizer"):
            parts[step] = _without_edges(parts[step])
        self.template_tokenizer = Tokenizer.from_str(json.dumps(parts))
        self.plain_tokenizer = _without_special_tokens(parts)
        self.unk_id: int | None = tokenizer.unk_token_id
        self.bos = _in_front(self.template_tokenizer)
        unknown = _unknown(parts["model"])
        self._reserved = _reserved(tokenizer, unknown)
        # These tokens stand for other text than their names, so the names must not become them.
        vocabulary = self.plain_tokenizer.get_vocab().items()
        self._named = {i: n for n, i in vocabulary if (i == unknown and len(n) > 1) or _BYTE.fullmatch(n)}
        self._guarded = self._reserved.union(self._named)

    def text(self, text: str) -> tuple[int, ...]:
        """Return the ids of a run of text. The text of a special token is spelled out."""
        pieces = [text]
        while True:
            encodings = self.plain_tokenizer.encode_batch(pieces, add_special_tokens=False)
            cut = [part for pair in zip(pieces, encodings, strict=True) for part in self._cut(*pair)]
            if len(cut) == len(pieces):
                break
            pieces = cut
        # A single character that is a special token is left out.
        return tuple(i for encoding in encodings for i in encoding.ids if i not in self._reserved)

    def template(self, text: str) -> tuple[int, ...]:
        """Return the ids of a piece of a chat template, special tokens included."""
        return tuple(self._template(text).ids)

    def template_offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the characters of each token of ``template``, as first and last-plus-one."""
        return self._template(text).offsets

    def _template(self, text: str) -> Encoding:
        # unlike encode, this releases the GIL
        return self.template_tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def name(self, token: int) -> str | None:
        """Return the tokenizer's name of a token; None for an unknown one."""
        return self.template_tokenizer.id_to_token(token)

    def _cut(self, text: str, encoding: Encoding) -> list[str]:
        """Cut the text wherever it became a token that text must not become."""
        ids = encoding.ids
        if self._guarded.isdisjoint(ids):
            return [text]
        cuts = []
        for token_id, (first, last) in zip(ids, encoding.offsets, strict=True):
            if name := self._named.get(token_id):
                cuts += [first + found.start() + 1 for found in re.finditer(re.escape(name), text[first:last])]
            elif token_id in self._reserved and last - first > 1:
                cuts.append(first + 1)
        return [text[first:last] for first, last in pairwise([0, *sorted(set(cuts)), len(text)])]


def beyond_vocabulary(ids: Sequence[int], vocabulary: int, name: Callable[[int], object]) -> str | None:
    """Return a description of the first id that the model does not know, for a message. None if it knows all ids.

    Args:
        vocabulary: the number of tokens that the model knows.
        name: returns the tokenizer's name of a token.
    """
    if not ids or max(ids) < vocabulary:
        return None
    token = next(i for i in ids if i >= vocabulary)
    return (
        f"token {token} ({name(token)!r}), and the model knows tokens 0 to {vocabulary - 1}: the tokenizer does not "
        "belong to this model; use the model's own, or resize the model's embeddings to the tokenizer"
    )


def _without_special_tokens(parts: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer that treats added tokens as text, except white space, which models need for code."""
    added = [
        {**token, "special": token["special"] or not _is_white(token["content"])} for token in parts["added_tokens"]
    ]
    text = Tokenizer.from_str(json.dumps({**parts, "added_tokens": added, "post_processor": None}))
    text.encode_special_tokens = True
    return text


def _unknown(model: dict[str, Any]) -> int | None:
    """Return the id of the unknown token."""
    name = model.get("unk_token")
    return model.get("unk_id") if name is None else model["vocab"].get(name)


def _reserved(tokenizer: PreTrainedTokenizerBase, unknown: int | None) -> frozenset[int]:
    """Return all added tokens except white space and a plain unknown token."""
    roles = [token for role, token in tokenizer.special_tokens_map.items() if role != "unk_token"]
    names = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    names.update(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return frozenset(i for i, name in names.items() if not _is_white(name) and (i != unknown or name in roles))


def _in_front(template: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts in front of a text."""
    encoding = template.encode("a", add_special_tokens=True)
    marked = takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
    return tuple(token_id for token_id, _ in marked)


def _is_white(token: str) -> bool:
    return not token.replace("▁", " ").strip()  # ▁ is how SentencePiece writes a space


def _without_edges(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a tokenizer step that neither adds a space in front of a text nor strips its ends."""
    if step is None or step["type"] in ("Prepend", "Strip"):
        return None
    inner = next((key for key in ("normalizers", "pretokenizers") if key in step), None)
    if inner is not None:
        return {**step, inner: [kept for one in step[inner] if (kept := _without_edges(one))]}
    return {**step, **_NO_SPACE.get(step["type"], {})}


# Outsiders cannot guess these digits, and digits survive any template.
_SEAM = f"{secrets.randbelow(10**24):024d}"


class Seams:
    """Puts seams into texts that spell a special token.

    The seam stands behind the first character of such a spelling. A special token of one character is left out.
    ``names`` are the special tokens as the tokenizer finds them in text.
    """

    def __init__(self, names: Iterable[str]) -> None:
        # White space cannot open a role, and models have such tokens for code.
        self._names = [name for name in names if name.strip()]
        self._initials = {name[0] for name in self._names}

    def put(self, value: Any) -> Any:
        """Put seams into the texts of a JSON value, keys included."""
        if isinstance(value, str):
            return self._in_text(value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(inner) for key, inner in value.items()}
        return [self.put(inner) for inner in value] if isinstance(value, Sequence) else value

    def _in_text(self, text: str) -> str:
        if not any(initial in text for initial in self._initials):
            return text  # the usual case; some models have a thousand special tokens
        spelled = [name for name in self._names if name in text]
        for name in (name for name in spelled if len(name) == 1):
            text = text.replace(name, _SEAM)
        longer = [name for name in spelled if len(name) > 1]
        if not longer:
            return text
        # A lookahead also finds overlapping spellings.
        cuts = {found.start() + 1 for name in longer for found in re.finditer(f"(?={re.escape(name)})", text)}
        edges = [0, *sorted(cuts), len(text)]
        return _SEAM.join(text[first:last] for first, last in pairwise(edges))


def at_seams(text: str) -> list[str]:
    """Split a rendering at its seams."""
    return text.split(_SEAM)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many characters or tokens two sequences begin with. Bisection keeps this fast for millions."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
