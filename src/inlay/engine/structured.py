"""Answers in a given language: JSON under a schema, a regular expression, or one of several texts.

A grammar says before every step which tokens may come next. llguidance does the work (Earley parsing over a lexer of
derivatives, walked down a trie of the vocabulary's bytes); it is an optional dependency.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from inlay.errors import InlayError, ParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 64  # grammars that are kept


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and no token but end-of-sequence may follow."""
        return bool(self.matcher.is_stopped())

    def take(self, token: int) -> None:
        """Go on behind a token. Raises InlayError where the grammar cannot follow it."""
        if not self.matcher.consume_token(token):
            raise InlayError(f"structured_outputs: {_sentence(self.matcher.get_error())}")


class Grammars:
    """The grammars of one model's answers.

    Arguments:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend.
        vocabulary: the width of the model's logits; ids without a token are never allowed.
        stop_ids: the tokens that end an answer; they are allowed where the grammar is satisfied.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._trie: LLTokenizer | None = None  # made when the first grammar asks for it: 1.6 s at 150,000 tokens
        self._compile = lru_cache(_COMPILED)(self._compile_new)

    def guide(self, structure: Mapping[str, Any]) -> Guide:
        """The start of an answer in a language as ``SamplingParams.structured_outputs`` gives it.

        Raises ParameterError where the package is missing, and where no answer can be in the language.
        """
        ((kind, value),) = structure.items()
        return Guide(self._compile(kind, _as_text(kind, value)).deep_copy())

    def _compile_new(self, kind: str, text: str) -> LLMatcher:
        llguidance = _library()
        matcher = llguidance.LLMatcher(self._vocabulary_trie(), llguidance.grammar_from(kind, text), log_level=0)
        reason = _sentence(matcher.get_error()) if matcher.is_error() else ""
        if not reason and matcher.is_stopped() and not matcher.is_accepting():
            reason = "no text satisfies it"
        if reason:
            raise ParameterError(f"structured_outputs['{kind}'] cannot be used: {reason}.")
        return matcher

    def _vocabulary_trie(self) -> LLTokenizer:
        if self._trie is None:
            from llguidance.hf import from_tokenizer

            ends: Any = self._stop_ids or None
            self._trie = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)  # type: ignore[arg-type]
        return self._trie


def allowed_tokens(guides: Sequence[Guide], vocabulary: int) -> npt.NDArray[np.bool_]:
    """Which tokens may come next, (guides, vocabulary); computed on several threads where there are several guides."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

    bits = allocate_token_bitmask(len(guides), vocabulary)
    if len(guides) == 1:
        fill_next_token_bitmask(guides[0].matcher, bits)
    else:
        places = [(guide.matcher, place) for place, guide in enumerate(guides)]
        fill_next_token_bitmask_par(_executor(), places, bits)
    return np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)


@lru_cache(1)
def _executor() -> Any:
    return _library().LLExecutor()


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ParameterError(
            "structured_outputs needs the package llguidance; install it with pip install 'inlay[structured]'."
        ) from error
    return llguidance


def _as_text(kind: str, value: Any) -> str:
    """What llguidance reads: JSON text for schemas and choices, patterns as they are."""
    if kind == "json_object":
        return '{"type": "object"}'
    if kind == "regex":
        return str(value)
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        return json.dumps(list(parsed) if kind == "choice" else parsed)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"structured_outputs['{kind}'] is no JSON: {error}.") from error


def _sentence(report: str) -> str:
    """The part of one of llguidance's reports that says what is wrong, on one line."""
    lines = [line.strip() for line in report.splitlines()]
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (said or lines or ["the grammar is too complex"])[0].rstrip(".")
