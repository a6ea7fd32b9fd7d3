"""Answers in a given language: JSON under a schema, a regular expression, one of several texts, or a grammar.

A grammar says before every step which tokens may come next. llguidance does the work (Earley parsing over a lexer of
derivatives, walked down a trie of the vocabulary's bytes).
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from inlay.errors import InlayError, ParameterError, StructureError
from inlay.sampling.grammar_forms import (
    GrammarError,
    as_text,
    lark_of,
    lark_of_tags,
    least_work,
    read_tags,
)
from inlay.sampling.json_schemas import place_of, referred, subschemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_NO_TOKEN = 2**31  # an id that no vocabulary has
_MOST_TRIED = 64  # parts of a schema, to find the one that is wrong
_REASON = 300  # characters of what llguidance reports
_TOO_LARGE = "following it takes too much work; write smaller counts, shorter lists or fewer alternatives"
_OUT_OF_RESOURCES = ("too big", "too large", "too many", "precomputation failed", "unable to determine", "panic")


class Allowance(NamedTuple):
    """How much work one grammar may take to compile.

    fuel: of llguidance's lexer, for regular expressions. symbols: of the grammar's rules.
    size: bytes that a grammar may take which needs no more; it is what such a grammar counts as.
    """

    fuel: int
    symbols: int
    size: int


#: A grammar is compiled with the first of these that suffices, which measures its size. The last bounds all grammars.
ALLOWANCES = tuple(Allowance(3_000 * 4**step, 800 * 4**step, 2**19 * 4**step) for step in range(4))


class CompilerError(InlayError):
    """llguidance has failed at a grammar, where it should have said what is wrong with it."""


class Guide:
    """Where one answer stands in its grammar.

    Args:
        matcher: llguidance's state of the answer.
        forget: called when the library fails at the grammar, so that it is not kept for other answers.

    ``failure`` is the error of a library that cannot tell which tokens may come next; see ``allowed_bits``.
    ``beside`` is another guide that the answer may follow instead, until a token decides between the two.
    """

    def __init__(self, matcher: LLMatcher, forget: Callable[[], None] | None = None) -> None:
        self.matcher = matcher
        self.failure: CompilerError | None = None
        self.beside: Guide | None = None
        self._forget = forget

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and no token but end-of-sequence may follow."""
        return bool(self.matcher.is_stopped())

    def copy(self) -> Guide:
        """Another answer at the same place."""
        return Guide(self.matcher.deep_copy(), self._forget)

    def follows(self, token: int) -> bool:
        """Go on behind a token where the grammar allows it; a guide that does not is of no more use."""
        try:
            with panics_told():
                return bool(self.matcher.consume_token(token))
        except CompilerError:
            self.forget()
            raise

    def take(self, token: int) -> None:
        """Go on behind a token. Raises ParameterError where the grammar cannot follow it, or is too complex to."""
        if not self.follows(token):
            self.forget()
            raise ParameterError(
                f"structured_outputs: {_sentence(self.matcher.get_error())}", code="structured.failed_grammar"
            )

    def fail(self, error: CompilerError) -> None:
        """Note that the library failed at this answer."""
        self.failure = error
        self.forget()

    def forget(self) -> None:
        """Keep the grammar for no other answer."""
        if self._forget is not None:
            self._forget()


class Grammars:
    """The grammars of one model's answers. Compiled ones are kept, each for the tenant that asked for it.

    Args:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend.
        vocabulary: the width of the model's logits; ids without a token are never allowed.
        stop_ids: the tokens that end an answer; they are allowed where the grammar is satisfied.
        most_bytes: of kept grammars, of all tenants together.
        each_bytes: of kept grammars, of one tenant.
        unused_s: seconds after which a grammar that no answer used is dropped, when the next one is compiled.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        stop_ids: Collection[int],
        *,
        most_bytes: int = 2**28,
        each_bytes: int = 2**26,
        unused_s: float = 300.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._trie: LLTokenizer | None = None  # made when the first grammar asks for it: 1.6 s at 150,000 tokens
        self._kept = _Kept(most_bytes, each_bytes, unused_s)
        self._making_trie = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes that the kept grammars count as."""
        return self._kept.size

    def guide(self, structure: Mapping[str, Any], salt: str = "") -> Guide:
        """The start of an answer in a language as ``SamplingParams.structured_outputs`` gives it.

        Args:
            structure: one kind of language, and its value.
            salt: of the request's tenant. A grammar that was compiled for one tenant is not used for another, as the
                time that it takes would tell that somebody else asked for it.

        Raises:
            StructureError: no answer can be in the language, or compiling it takes too much.
        """
        ((kind, value),) = structure.items()
        name = text = ""
        try:
            name, text = as_text(kind, value)
            forget = partial(self._forget, salt, (name, text))
            matcher = self._kept.get(salt, (name, text))
            if matcher is None:
                made, size = self._compile(name, text)
                matcher = made.deep_copy()
                self._free(self._kept.put(salt, (name, text), made, size))
        except (GrammarError, CompilerError) as error:
            place = _place_in(text, str(error)) if name == "json" else ()
            at = f"at {place_of(place)}, " if place else ""
            raise StructureError(
                f"structured_outputs['{kind}'] cannot be used: {at}{error}.",
                str(error),
                place,
                code="structured.invalid",
            ) from error
        return Guide(matcher, forget)

    def _forget(self, salt: str, key: tuple[str, str]) -> None:
        self._free(self._kept.drop(salt, key))

    def _free(self, matchers: list[LLMatcher]) -> None:
        """Give back the memory of matchers that nobody else uses, without the interpreter's lock.

        A matcher that fails frees what it holds. Two or more take their tokens on other threads, without the lock.
        """
        if matchers:
            spare = _library().LLMatcher(self.vocabulary_trie(), "", log_level=0)
            with suppress(CompilerError), panics_told():
                _executor().consume_token_par([(one, _NO_TOKEN) for one in (spare, *matchers)])

    def _compile(self, kind: str, text: str) -> tuple[LLMatcher, int]:
        """A grammar before its first token, and the bytes that it counts as. Raises GrammarError and CompilerError."""
        trie = self.vocabulary_trie()
        with panics_told():
            grammar = self._grammar(kind, text)
        least = least_work(kind, text)
        allowances = [one for one in ALLOWANCES if one.fuel >= least] or ALLOWANCES[-1:]
        report: str | None = None
        for allowance in allowances:
            with panics_told():
                matcher = _library().LLMatcher(trie, grammar, log_level=0, limits=parser_limits(allowance))
            report = self._first_failure(matcher)
            if report is None:
                return matcher, allowance.size
            self._free([matcher])
            if not _is_out_of_resources(report):
                break
        raise GrammarError(_sentence(report or ""))

    def _first_failure(self, matcher: LLMatcher) -> str | None:
        """The report of a matcher that fails before its second token; None if it does not."""
        if not matcher.is_error():
            bits = _bits([matcher], self._vocabulary)  # shows whether there is a first token
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            return str(matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        first = next((int(token) for token in allowed if token not in self._stop_ids), None)
        if first is None:
            return None
        ahead = matcher.deep_copy()  # a lexer that is out of fuel says so behind a token
        with panics_told():
            follows = ahead.consume_token(first)
        return None if follows else str(ahead.get_error())

    def _grammar(self, kind: str, text: str) -> str:
        """A grammar as llguidance compiles it. Raises GrammarError."""
        if kind == "structural_tag":
            special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
            return str(_library().grammar_from("lark", lark_of_tags(*read_tags(json.loads(text)), special)))
        if kind == "grammar":
            return str(_library().grammar_from("lark", lark_of(text)))
        return str(_library().grammar_from(kind, text))

    def vocabulary_trie(self) -> LLTokenizer:
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
                        "use the model's own",
                        code="structured.wrong_tokenizer",
                    ) from error
            return self._trie


class _Grammar(NamedTuple):
    """A compiled grammar that is kept: no answer has gone through it. size: bytes. used_at: seconds, monotonic."""

    matcher: LLMatcher
    size: int
    used_at: float


class _Kept:
    """Compiled grammars by the salt of their tenant and their text, least recently used first. From any thread.

    Args:
        most: bytes of all tenants together; beyond it, the tenant with the most loses its least recently used one.
        each: bytes of one tenant.
        unused_s: see Grammars.
    """

    def __init__(self, most: int, each: int, unused_s: float) -> None:
        self._most = most
        self._each = each
        self._unused_s = unused_s
        self._sizes = Counter[str]()  # bytes by salt
        self._by_salt: dict[str, OrderedDict[tuple[str, str], _Grammar]] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all."""
        with self._lock:
            return self._sizes.total()

    def get(self, salt: str, key: tuple[str, str]) -> LLMatcher | None:
        """A copy of a kept grammar, for one answer; None if it is not kept."""
        with self._lock:
            own = self._by_salt.get(salt)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            own[key] = own[key]._replace(used_at=time.monotonic())
            return own[key].matcher.deep_copy()  # in the lock: nobody frees it meanwhile

    def put(self, salt: str, key: tuple[str, str], matcher: LLMatcher, size: int) -> list[LLMatcher]:
        """Keep a grammar; returns those that are dropped for it. One larger than a tenant's share is kept alone."""
        now = time.monotonic()
        with self._lock:
            dropped = self._drop_unused(now)
            own = self._by_salt.setdefault(salt, OrderedDict())
            if key in own:  # two requests compiled it at once
                dropped.append(own.pop(key).matcher)
                self._sizes[salt] -= size
            own[key] = _Grammar(matcher, size, now)
            self._sizes[salt] += size
            while self._sizes[salt] > self._each and len(own) > 1:
                dropped.append(self._drop_oldest(salt))
            while self._sizes.total() > self._most and len(self._by_salt) > 1:
                dropped.append(self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__)))
        return dropped

    def drop(self, salt: str, key: tuple[str, str]) -> list[LLMatcher]:
        """Keep a grammar no longer; returns it, if it was kept."""
        with self._lock:
            return [self._take(salt, key)] if key in self._by_salt.get(salt, ()) else []

    def _drop_unused(self, now: float) -> list[LLMatcher]:
        dropped = []
        for salt, own in list(self._by_salt.items()):
            while own and next(iter(own.values())).used_at + self._unused_s < now:
                dropped.append(self._drop_oldest(salt))
        return dropped

    def _drop_oldest(self, salt: str) -> LLMatcher:
        return self._take(salt, next(iter(self._by_salt[salt])))

    def _take(self, salt: str, key: tuple[str, str]) -> LLMatcher:
        own = self._by_salt[salt]
        grammar = own.pop(key)
        self._sizes[salt] -= grammar.size
        if not own:
            del self._by_salt[salt], self._sizes[salt]
        return grammar.matcher


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
            guides[0].fail(error)
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


@cache
def _executor() -> Any:
    return _library().LLExecutor()


def _library() -> Any:
    import llguidance  # takes a while, and few processes need it

    return llguidance


@contextmanager
def panics_told() -> Iterator[None]:
    """Turns a panic of llguidance's Rust, which is no Exception and would end the engine, into a CompilerError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its class cannot be imported
            raise
        raise CompilerError(
            "the library of grammars failed at it; ask for something simpler", code="structured.compiler_failed"
        ) from error


@cache
def parser_limits(allowance: Allowance = ALLOWANCES[-1]) -> LLParserLimits:
    """How much work and memory one grammar may take, while it is compiled and in each step of an answer."""
    limits: LLParserLimits = _library().LLParserLimits(
        max_items_in_row=20_000,  # of them, as many as a choice has texts
        initial_lexer_fuel=allowance.fuel,
        max_grammar_size=allowance.symbols,
        step_lexer_fuel=100_000,  # 0.1 s
        max_lexer_states=20_000,  # of 2 kB
        verbose_errors=False,
    )
    return limits


def _place_in(text: str, reason: str) -> tuple[str | int, ...]:
    """The way to the smallest part of a JSON Schema that fails for this reason; empty where that is all of it."""
    place: tuple[str | int, ...] = ()
    schema, left = json.loads(text), _MOST_TRIED
    if reason == _TOO_LARGE or not isinstance(schema, Mapping):
        return place
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    inner: Mapping[str, Any] | None = schema
    while inner is not None and left > 0:
        parts = [((*place, *way), part) for way, part in subschemas(inner)]
        if isinstance(inner.get("$ref"), str):
            parts.append(referred(schema, inner["$ref"]))
        inner = None
        for way, part in parts[:left]:
            left -= 1
            if isinstance(part, Mapping) and way != place and _why_not({**definitions, **part}) == reason:
                place, inner = way, part
                break
    return place


def _why_not(schema: Mapping[str, Any]) -> str | None:
    """The sentence on a JSON Schema that is no grammar for any vocabulary; None where it is one."""
    matcher = _library().LLMatcher
    try:
        with panics_told():
            grammar = matcher.grammar_from_json_schema(json.dumps(schema))
            wrong, reports = matcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    except CompilerError as error:
        return str(error)
    return _sentence(reports[0]) if wrong else None


def _is_out_of_resources(report: str) -> bool:
    return any(said in report.lower() for said in _OUT_OF_RESOURCES)


def _sentence(report: str) -> str:
    """The part of one of llguidance's reports that says what is wrong, on one line."""
    if report.startswith(("NoExtension", "Unsatisfiable schema: Regex is empty")):
        return "no text satisfies it"
    if report.startswith("oneOf constraints"):
        return "nothing shows that no value fits two schemas of oneOf; write anyOf"
    if not report or _is_out_of_resources(report):
        return _TOO_LARGE
    lines = [line.strip() for line in report.splitlines()]
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (said or lines)[0][:_REASON].rstrip(".")
