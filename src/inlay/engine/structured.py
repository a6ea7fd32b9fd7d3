"""Answers in a given language: JSON under a schema, a regular expression, one of several texts, or a grammar.

A grammar says before every step which tokens may come next. llguidance does the work (Earley parsing over a lexer of
derivatives, walked down a trie of the vocabulary's bytes); it is an optional dependency.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from inlay.engine.grammar_forms import GrammarError, as_text, lark_of, lark_of_tags, read_tags
from inlay.errors import InlayError, ParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_REASON = 300  # characters of what llguidance reports


class CompilerError(InlayError):
    """llguidance has failed at a grammar, where it should have said what is wrong with it."""


class Guide:
    """Where one answer stands in its grammar.

    failure: why there is no telling what may come next, once the library has failed at it; see ``allowed_bits``.
    beside: another one that the answer may follow in its place, as long as nothing has told which it does.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.failure: CompilerError | None = None
        self.beside: Guide | None = None

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and no token but end-of-sequence may follow."""
        return bool(self.matcher.is_stopped())

    def copy(self) -> Guide:
        """Another answer at the same place."""
        return Guide(self.matcher.deep_copy())

    def follows(self, token: int) -> bool:
        """Go on behind a token where the grammar allows it; a guide that does not is of no more use."""
        with panics_told():
            return bool(self.matcher.consume_token(token))

    def take(self, token: int) -> None:
        """Go on behind a token. Raises ParameterError where the grammar cannot follow it, or is too complex to."""
        if not self.follows(token):
            raise ParameterError(f"structured_outputs: {_sentence(self.matcher.get_error())}")


class Grammars:
    """The grammars of one model's answers.

    Arguments:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend.
        vocabulary: the width of the model's logits; ids without a token are never allowed.
        stop_ids: the tokens that end an answer; they are allowed where the grammar is satisfied.
        most, each: how many grammars are kept compiled, of all tenants and of one.
        counted_once: a grammar counts once, and once more for each so many characters of its text; compiled, it takes
            some 70 times the bytes that its text has, and up to 250 times when answers have gone through it.
        unused_s: after so many seconds without an answer in it a grammar is let go, when another one is compiled.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        stop_ids: Collection[int],
        *,
        most: int = 256,
        each: int = 64,
        counted_once: int = 2**11,
        unused_s: float = 300.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._trie: LLTokenizer | None = None  # made when the first grammar asks for it: 1.6 s at 150,000 tokens
        self._kept = _Kept(most, each, counted_once, unused_s)
        self._making_trie = threading.Lock()

    def guide(self, structure: Mapping[str, Any], salt: str = "") -> Guide:
        """The start of an answer in a language as ``SamplingParams.structured_outputs`` gives it.

        salt: of the request's tenant. What was compiled for one is not found by others, whom its time would tell that.
        Raises ParameterError where the package is missing, and where no answer can be in the language.
        """
        ((kind, value),) = structure.items()
        try:
            return Guide(self._compiled(*as_text(kind, value), salt).deep_copy())
        except (GrammarError, CompilerError) as error:
            raise ParameterError(f"structured_outputs['{kind}'] cannot be used: {error}.") from error

    def _compiled(self, kind: str, text: str, salt: str) -> LLMatcher:
        matcher = self._kept.get(salt, (kind, text))
        if matcher is None:
            matcher = self._compile(kind, text)
            self._kept.put(salt, (kind, text), matcher)
        return matcher

    def _compile(self, kind: str, text: str) -> LLMatcher:
        trie = self._vocabulary_trie()
        with panics_told():
            grammar = self._grammar(kind, text)
            matcher: LLMatcher = _library().LLMatcher(trie, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            _bits([matcher], self._vocabulary)  # shows whether there is a first token
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(_sentence(matcher.get_error()))
        return matcher

    def _grammar(self, kind: str, text: str) -> str:
        """A grammar as llguidance compiles it. Raises GrammarError."""
        if kind == "structural_tag":
            special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
            return str(_library().grammar_from("lark", lark_of_tags(*read_tags(json.loads(text)), special)))
        if kind == "grammar":
            return str(_library().grammar_from("lark", lark_of(text)))
        return str(_library().grammar_from(kind, text))

    def _vocabulary_trie(self) -> LLTokenizer:
        with self._making_trie:  # everybody needs the same one
            if self._trie is None:
                description = _plain(self._tokenizer.backend_tokenizer).to_str()
                ends = self._stop_ids or self._tokenizer.eos_token_id
                library = _library()
                try:
                    self._trie = library.LLTokenizer(description, n_vocab=self._vocabulary, eos_token=ends)
                except ValueError as error:
                    raise ParameterError(
                        f"structured_outputs cannot be used: the tokenizer does not belong to this model ({error}); "
                        "use the model's own"
                    ) from error
            return self._trie


class _Kept:
    """Compiled grammars by the salt of their tenant and their text, those used last. From any thread.

    most: of all tenants together; beyond it, the one who has the most loses the one that it has not used for longest.
    each: of one tenant. counted_once, unused_s: see Grammars.
    """

    def __init__(self, most: int, each: int, counted_once: int, unused_s: float) -> None:
        self._most = most
        self._each = each
        self._counted_once = counted_once
        self._unused_s = unused_s
        self._counts = Counter[str]()  # by salt
        self._by_salt: dict[str, OrderedDict[tuple[str, str], tuple[LLMatcher, float]]] = {}  # and when it was used
        self._lock = threading.Lock()

    def get(self, salt: str, key: tuple[str, str]) -> LLMatcher | None:
        with self._lock:
            own = self._by_salt.get(salt)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            own[key] = own[key][0], time.monotonic()
            return own[key][0]

    def put(self, salt: str, key: tuple[str, str], matcher: LLMatcher) -> None:
        now = time.monotonic()
        with self._lock:
            self._drop_unused(now)
            own = self._by_salt.setdefault(salt, OrderedDict())
            self._counts[salt] += 0 if key in own else self._count(key)
            own[key] = matcher, now
            own.move_to_end(key)
            while self._counts[salt] > self._each and len(own) > 1:
                self._drop(salt)
            while self._counts.total() > self._most and len(self._by_salt) > 1:
                self._drop(max(self._counts, key=self._counts.__getitem__))

    def _drop_unused(self, now: float) -> None:
        for salt, own in list(self._by_salt.items()):
            while own and next(iter(own.values()))[1] + self._unused_s < now:
                self._drop(salt)

    def _drop(self, salt: str) -> None:
        own = self._by_salt[salt]
        key, _ = own.popitem(last=False)
        self._counts[salt] -= self._count(key)
        if not own:
            del self._by_salt[salt], self._counts[salt]

    def _count(self, key: tuple[str, str]) -> int:
        return 1 + len(key[1]) // self._counted_once


def allowed_bits(guides: Sequence[Guide], vocabulary: int) -> npt.NDArray[np.uint32]:
    """Which tokens may come next, (guides, words), a bit each, the lowest first; several guides on several threads.

    A guide that the library fails at allows none, and has the reason as its ``failure``: it is one answer's, and others
    are in the same pass.
    """
    bits = _bits_of(guides, vocabulary)
    either = [place for place, guide in enumerate(guides) if guide.beside is not None]
    if either:
        bits[either] |= _bits_of([guide.beside for guide in guides if guide.beside is not None], vocabulary)
    return bits


def _bits_of(guides: Sequence[Guide], vocabulary: int) -> npt.NDArray[np.uint32]:
    """The same of each guide alone."""
    try:
        return _bits([guide.matcher for guide in guides], vocabulary)
    except CompilerError as error:
        if len(guides) == 1:
            guides[0].failure = error
            return np.zeros((1, -(-vocabulary // 32)), dtype=np.uint32)
        return np.concatenate([_bits_of([guide], vocabulary) for guide in guides])  # shows at which


def _bits(matchers: Sequence[LLMatcher], vocabulary: int) -> npt.NDArray[np.uint32]:
    """Raises CompilerError where the library fails at any of them."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

    bits = allocate_token_bitmask(len(matchers), vocabulary)
    with panics_told():
        if len(matchers) == 1:
            fill_next_token_bitmask(matchers[0], bits)
        else:
            places = [(matcher, place) for place, matcher in enumerate(matchers)]
            fill_next_token_bitmask_par(_executor(), places, bits)
    return np.asarray(bits.view(np.uint32))


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
            "structured_outputs needs the package llguidance; install it with pip install 'inlay-llm[structured]'."
        ) from error
    return llguidance


@contextmanager
def panics_told() -> Iterator[None]:
    """Turns a panic of llguidance's Rust, which is no Exception and would end the engine, into a CompilerError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its class cannot be imported
            raise
        raise CompilerError("the library of grammars failed at it; ask for something simpler") from error


@lru_cache(1)
def parser_limits() -> LLParserLimits:
    """How much work and memory one grammar may take, while it is compiled and in each step of an answer."""
    limits: LLParserLimits = _library().LLParserLimits(
        max_items_in_row=20_000,  # of them, as many as a choice has texts
        step_lexer_fuel=100_000,  # 0.1 s
        max_lexer_states=20_000,  # of 2 kB
        verbose_errors=False,
    )
    return limits


def _sentence(report: str) -> str:
    """The part of one of llguidance's reports that says what is wrong, on one line."""
    if report.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in report.splitlines()]
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (said or lines or ["the grammar is too complex"])[0][:_REASON].rstrip(".")
