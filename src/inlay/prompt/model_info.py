"""The facts about a model that prompts are prepared with, and the checks of prompts against its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from transformers import PreTrainedTokenizerBase

from inlay.errors import ContextError, ParameterError, Place, PMLError, Problem
from inlay.kv.choices import ROUNDED
from inlay.kv.identity import KeyMaker, fingerprint_under
from inlay.pml.rules import path_of
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.placement import PromptLayout
from inlay.prompt.tokens import beyond_vocabulary
from inlay.sampling.params import SamplingParams
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
        limit: the reason why the context is shorter than the configuration says, or None.
        text_model: a sentence about a model that is the text model of a multimodal checkpoint. None for other models.
        why_exact: the reason why requests reuse exact prefixes and no modules, or None.
        recurrent: True if the model has recurrent layers. Its text is then read only up to stored states.
        first_tokens: the first tokens of a module that are recomputed by default, if the model has recurrent layers.
        pool_tokens: the tokens that its KV pool holds. None if that is not known.
    """

    vocab_size: int
    max_positions: int
    bytes_per_token: int
    keys: KeyMaker
    why_not_shift: str | None
    adapters: Mapping[str, bytes] = field(default_factory=dict)
    why_unshared: str | None = None
    limit: str | None = None
    text_model: str | None = None
    why_exact: str | None = None
    recurrent: bool = False
    first_tokens: int = 0
    pool_tokens: int | None = None

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


def check_prompt(layout: PromptLayout, model: ModelInfo, tokenizer: PreTrainedTokenizerBase, *, answered: bool) -> None:
    """Check the length and the ids of a prompt. An id beyond the vocabulary would fail the pass of all requests.

    ``answered`` is True if the prompt needs room for a token behind it. Raises ContextError and ParameterError.
    """
    where = f"{layout.place}: " if layout.place else ""
    longest, end = model.max_positions, layout.end - 1
    if end + answered >= longest:  # before the ids, because the prompt may have any length
        raise ContextError(
            f"{where}the prompt ends at position {end} and the model's context is {longest} tokens long, "
            f"answer included{_because(model)}; shorten the prompt, or import fewer modules",
            code="request.too_long",
        )
    if unknown := beyond_vocabulary(layout.ids, model.vocab_size, tokenizer.convert_ids_to_tokens):
        raise ParameterError(f"{where}the prompt holds {unknown}", code="prompt.unknown_token")
    if not layout.ids:
        raise ParameterError("a prompt is empty; give at least one token", code="prompt.empty")


def _because(model: ModelInfo) -> str:
    """Return the reason for a context that is shorter than the configuration's, in brackets, or an empty text."""
    return f" ({model.limit})" if model.limit else ""


def check_forced(layout: PromptLayout, model: ModelInfo, forced: Sequence[int]) -> None:
    """Raise ContextError if the context has no room for a forced continuation."""
    limit = model.max_positions - layout.positions[-1] - 1
    if limit < len(forced):
        raise ContextError(
            f"a prompt of {len(layout.ids)} tokens and its continuation of {len(forced)} are "
            f"{len(forced) - limit} too long for the model's context; shorten one of them",
            code="request.too_long",
        )


def check_tokens(params: SamplingParams, model: ModelInfo) -> None:
    """Raise ParameterError if sampling parameters name tokens that the model does not know."""
    last = model.vocab_size - 1
    for name, token in params.largest_ids.items():
        if token > last:
            raise ParameterError(
                f"{name} holds token {show(token)}, and the model knows tokens 0 to {last}", code="prompt.unknown_token"
            )


def check_weight(weight: float) -> float:
    """Return the weight. Raises ParameterError unless it is a positive finite number."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ParameterError(f"weight is {weight!r:.100}; it must be a number above 0", code="parameter.out_of_range")
    return weight


def check_lengths(layout: SchemaLayout, longest: int) -> None:
    """Raise PMLError for modules that exceed the model's context of ``longest`` tokens."""
    tokens: dict[str, int] = {}
    for run in layout.runs:
        path = path_of(run.owner)
        tokens[path] = tokens.get(path, 0) + len(run.ids)
    problems = []
    for path, count in tokens.items():
        place = layout.schema.modules[path].place if path else Place(layout.schema.source)
        what = f"module '{path}'" if path else "the text outside modules"
        if count >= longest:
            message = (
                f"{what} is {count} tokens long and the model's context is {longest} tokens long, answer included; "
                "shorten it, or cut it into modules of which prompts import some"
            )
            problems.append(Problem(place, message, code="schema.too_long"))
    if problems:
        raise PMLError(problems)
