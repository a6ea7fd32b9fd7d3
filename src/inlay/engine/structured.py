"""Answers in a given language: JSON under a schema, a regular expression, or one of several texts.

A grammar says before every step which tokens may come next. llguidance does the work (Earley parsing over a lexer of
derivatives, walked down a trie of the vocabulary's bytes); it is an optional dependency.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from inlay.errors import InlayError, ParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 64  # grammars that are kept

# Between the parts of JSON: a space, or a line break with indentation. JSON allows any amount, and models that have
# taken to white space go on with it until max_tokens.
_WHITE_SPACE = r" |\n {0,32}"


class _GrammarError(Exception):
    """What is wrong with a grammar."""


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and no token but end-of-sequence may follow."""
        return bool(self.matcher.is_stopped())

    def copy(self) -> Guide:
        """Another answer at the same place."""
        return Guide(self.matcher.deep_copy())

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
        self._making_trie = threading.Lock()
        # by salt: that a grammar is there already must not tell one tenant what another one has asked for
        self._compile = lru_cache(_COMPILED)(lambda salt, kind, text: self._compile_new(kind, text))

    def guide(self, structure: Mapping[str, Any], salt: str = "") -> Guide:
        """The start of an answer in a language as ``SamplingParams.structured_outputs`` gives it.

        salt: whose request it is; "" for one without an owner.
        Raises ParameterError where the package is missing, and where no answer can be in the language.
        """
        ((kind, value),) = structure.items()
        try:
            return Guide(self._compile(salt, *_as_text(kind, value)).deep_copy())
        except _GrammarError as error:
            raise ParameterError(f"structured_outputs['{kind}'] cannot be used: {error}.") from error

    def _compile_new(self, kind: str, text: str) -> LLMatcher:
        library = _library()
        matcher: LLMatcher = library.LLMatcher(self._vocabulary_trie(), library.grammar_from(kind, text), log_level=0)
        if not matcher.is_error():
            allowed_tokens([Guide(matcher)], self._vocabulary)  # shows whether there is a first token
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise _GrammarError(_sentence(matcher.get_error()))
        return matcher

    def _vocabulary_trie(self) -> LLTokenizer:
        with self._making_trie:  # everybody needs the same one
            if self._trie is None:
                description = _plain(self._tokenizer.backend_tokenizer).to_str()
                ends = self._stop_ids or self._tokenizer.eos_token_id
                self._trie = _library().LLTokenizer(description, n_vocab=self._vocabulary, eos_token=ends)
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


def _plain(backend: Tokenizer) -> Tokenizer:
    """A copy that neither pads nor cuts, nor puts a space in front of what llguidance knows must come."""
    backend = copy.deepcopy(backend)
    backend.no_padding()
    backend.no_truncation()
    first = backend.pre_tokenizer
    steps: Any = first if isinstance(first, pre_tokenizers.Sequence) else (first,)
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = False
    return backend


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


def _as_text(kind: str, value: Any) -> tuple[str, str]:
    """The name of a kind of grammar in llguidance, and its text: JSON for schemas and choices, patterns as they are."""
    if kind == "regex":
        return kind, str(value)
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if kind == "choice":
            return kind, json.dumps(list(parsed))
        schema = {"type": "object"} if kind == "json_object" else parsed
        options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}  # the schema may bring its own
        return "json", json.dumps(options | dict(schema) if isinstance(schema, Mapping) else schema)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"structured_outputs['{kind}'] is no JSON: {error}.") from error


def _sentence(report: str) -> str:
    """The part of one of llguidance's reports that says what is wrong, on one line."""
    if report.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in report.splitlines()]
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (said or lines or ["the grammar is too complex"])[0].rstrip(".")
