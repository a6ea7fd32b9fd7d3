"""The facts about a model that prompts are prepared with, beside its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from inlay.errors import ParameterError
from inlay.kv.identity import ROUNDED, KeyMaker, fingerprint_under
from inlay.wording import listed, show


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts about a model that the holder of its weights publishes.

    Args:
        vocab_size: the number of tokens that it knows.
        max_positions: its context in tokens, answer included.
        bytes_per_token: of its KV.
        keys: makes segment keys with the model's fingerprint.
        why_not_shift: the reason why segments cannot be read at a shift, or None.
        adapters: name → digest of each adapter.
        why_unshared: the reason why every request runs under ``off``, or None.
        why_exact: the reason why requests reuse exact prefixes and no modules, or None.
    """

    vocab_size: int
    max_positions: int
    bytes_per_token: int
    keys: KeyMaker
    why_not_shift: str | None
    adapters: Mapping[str, bytes] = field(default_factory=dict)
    why_unshared: str | None = None
    why_exact: str | None = None

    @property
    def highest(self) -> str | None:
        """The highest reuse policy that the model allows. None if it allows all."""
        if self.why_unshared is not None:
            return "off"
        return None if self.why_exact is None else "exact"

    @property
    def why_limited(self) -> str | None:
        """The reason against policies above ``highest``."""
        return self.why_unshared or self.why_exact

    def adapter(self, name: str | None) -> bytes:
        """Return the digest of an adapter; b"" for None, the model alone. Raises ParameterError."""
        if name is None:
            return b""
        if not isinstance(name, str) or name not in self.adapters:
            known = f"use one of {listed(map(repr, self.adapters))}" if self.adapters else "none was given at the start"
            raise ParameterError(f"there is no adapter {show(name)}; {known}", code="adapter.unknown")
        return self.adapters[name]

    def measured_as(self, adapter: str | None) -> bytes:
        """Return the key of measurements of the model with an adapter. Rounded KV counts as another model."""
        fingerprint = self.fingerprint(adapter)
        kept = self.keys.kv_dtype
        return sha256(fingerprint + b" " + kept.encode()).digest() if kept in ROUNDED else fingerprint

    def fingerprint(self, adapter: str | None) -> bytes:
        """Return the fingerprint of the model with this adapter. Raises ParameterError."""
        return fingerprint_under(self.keys.fingerprint, self.adapter(adapter))
