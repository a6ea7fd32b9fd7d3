"""What a model publishes of itself: to prepare prompts for it takes no more than this and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from inlay.errors import ParameterError
from inlay.kv.identity import ROUNDED, KeyMaker, fingerprint_under
from inlay.wording import listed, show


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What whoever holds a model's weights publishes of it for those who prepare prompts.

    vocab_size: how many tokens it knows. max_positions: its context, in tokens, answer included.
    bytes_per_token: of its keys and values. keys: what names its segments, with its fingerprint.
    why_not_shift: the reason why its segments cannot be read at a shift, or None.
    adapters: the digests of those that requests may name.
    why_unshared: the reason why nothing is reused, so that every request runs under ``off``; None where it is.
    """

    vocab_size: int
    max_positions: int
    bytes_per_token: int
    keys: KeyMaker
    why_not_shift: str | None
    adapters: Mapping[str, bytes] = field(default_factory=dict)
    why_unshared: str | None = None

    def adapter(self, name: str | None) -> bytes:
        """The digest of an adapter; b"" for None, which is the model alone. Raises ParameterError."""
        if name is None:
            return b""
        if not isinstance(name, str) or name not in self.adapters:
            known = f"use one of {listed(map(repr, self.adapters))}" if self.adapters else "none was given at the start"
            raise ParameterError(f"there is no adapter {show(name)}; {known}")
        return self.adapters[name]

    def measured_as(self, adapter: str | None) -> bytes:
        """What names what is measured of the model with an adapter; rounded keys and values make it another model."""
        fingerprint = self.fingerprint(adapter)
        kept = self.keys.kv_dtype
        return sha256(fingerprint + b" " + kept.encode()).digest() if kept in ROUNDED else fingerprint

    def fingerprint(self, adapter: str | None) -> bytes:
        """What tells the model with this adapter from others. Raises ParameterError."""
        return fingerprint_under(self.keys.fingerprint, self.adapter(adapter))
