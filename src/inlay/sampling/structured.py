"""Answers in a given language: JSON under a schema, a regular expression, one of several texts, or a grammar.

Before every step, a grammar gives the tokens that may come next. llguidance does the work: Earley parsing over a lexer
of derivatives, walked down a trie of the vocabulary's bytes.
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
    lark_of_text,
    least_work,
    read_tags,
)
from inlay.sampling.json_schemas import place_of, referred, subschemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


_NO_TOKEN = 2**31  # an id beyond every vocabulary
_MOST_TRIED = 64  # parts of a schema that are tried to locate an error
_REASON = 300  # characters of a report in an error message
_TOO_LARGE = "following it takes too much work; write smaller counts, shorter lists or fewer alternatives"
_OUT_OF_RESOURCES = ("too big", "too large", "too many", "precomputation failed", "unable to determine", "panic")


class Allowance(NamedTuple):
    """Limits for compiling one grammar.

    Attributes:
        fuel: for regular expressions in llguidance's lexer.
        symbols: of the grammar's rules.
        size: the bytes that a grammar within these limits counts as, an upper bound.
    """

    fuel: int
    symbols: int
    size: int


#: Grammars are compiled under the first sufficient limits, which give their size. The last ones bound all grammars.
ALLOWANCES = tuple(Allowance(3_000 * 4**step, 800 * 4**step, 2**19 * 4**step) for step in range(4))


class CompilerError(InlayError):
    """llguidance failed at a grammar without a report."""


class Guide:
    """The state of one answer in its grammar.

    All copies of a compiled grammar share its lexer. Its work between two computations of the allowed tokens is
    limited. If one copy exceeds a limit, all of them fail. An answer then goes on with a newly compiled grammar, once.

    Args:
        matcher: llguidance's state of the answer.
        forget: called if the library fails at the grammar, so that it is not cached for other answers.
        remake: compiles the grammar again. None for a guide of draft tokens.
        vocabulary: the width of the model's logits.

    Attributes:
        failure: the error if the next tokens could not be computed; see ``allowed_bits``.
        bits: the next tokens, if they were computed ahead; see ``look_ahead``.
        beside: a second guide that the answer may follow instead. A token that only one of the two allows decides.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        forget: Callable[[], None] | None = None,
        remake: Callable[[], LLMatcher] | None = None,
        vocabulary: int = 0,
    ) -> None:
        self.matcher = matcher
        self.bits: npt.NDArray[np.uint32] | None = None
        self.failure: InlayError | None = None
        self.beside: Guide | None = None
        self._forget = forget
        self._remake = remake
        self._vocabulary = vocabulary
        self._taken: list[int] = []

    @property
    def complete(self) -> bool:
        """True if the answer is complete and only end-of-sequence may follow."""
        return bool(self.matcher.is_stopped() and not self.matcher.is_error())

    def copy(self) -> Guide:
        """Return a copy for another answer."""
        made = Guide(self.matcher.deep_copy(), self._forget, self._remake, self._vocabulary)
        made._taken = self._taken.copy()
        return made

    def branch(self) -> Guide:
        """Return a copy for tokens that the answer may not have. Its errors leave the cached grammar alone.

        Raises:
            InlayError: if the library fails, or has failed before.
        """
        if self._remake is None and self._forget is not None:
            raise _failed(_TOO_LARGE)
        with panics_told():
            made = Guide(self.matcher.deep_copy(), vocabulary=self._vocabulary)
        made.failure = self.failure
        return made

    def look_ahead(self) -> None:
        """Compute the next tokens now, and those of the guide beside. Raises InlayError.

        Several draft tokens without it would exceed the lexer's limit.
        """
        for guide in (self, self.beside):
            if guide is not None:
                guide.bits = _bits([guide.matcher], self._vocabulary)[0]
                if guide.matcher.is_error():
                    raise _failed(_TOO_LARGE)

    def follows(self, token: int) -> bool:
        """Advance by a token. Returns False if the grammar forbids it. Then the guide must not be used again."""
        self.bits = None
        try:
            with panics_told():
                allowed = bool(self.matcher.consume_token(token))
        except CompilerError:
            self.forget()
            raise
        if allowed and self._forget is not None:
            self._taken.append(token)
        return allowed

    def take(self, token: int) -> None:
        """Advance by a token.

        Raises:
            ParameterError: if the grammar does not allow the token, or is too complex.
        """
        if not self.follows(token) and not (self.recover() and self.follows(token)):
            self.forget()
            raise _failed(_sentence(self.matcher.get_error()))

    def recover(self) -> bool:
        """Compile the grammar again and return to the same place. Returns False if that fails, or was done before."""
        remake, self._remake = self._remake, None
        if remake is None:
            return False
        self.forget()
        until = time.monotonic() + _MOST_REPLAY_S
        try:
            matcher = remake()
            for token in self._taken:
                _bits([matcher], self._vocabulary)  # so that the lexer may go on
                with panics_told():
                    if not matcher.consume_token(token) or time.monotonic() > until:
                        return False
        except (GrammarError, CompilerError):
            return False
        self.matcher = matcher
        return True

    def fail(self, error: InlayError) -> None:
        """Record that the library failed at this answer."""
        self.failure = error
        self.forget()

    def forget(self) -> None:
        """Remove the grammar from the cache."""
        if self._forget is not None:
            self._forget()


class Grammars:
    """The grammars of one model's answers, with a cache of compiled grammars per tenant.

    Args:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend.
        vocabulary: the width of the model's logits. Ids without a token are never allowed.
        stop_ids: the tokens that end an answer. They are allowed once the grammar is satisfied.
        most_bytes: the size limit of all cached grammars.
        each_bytes: the size limit of one tenant's cached grammars.
        unused_s: seconds after which an unused grammar is dropped, when the next one is compiled.
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
        self._trie: LLTokenizer | None = None  # made on first use: 1.6 s at 150,000 tokens
        self._kept = _Kept(most_bytes, each_bytes, unused_s)
        self._making_trie = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """The size of the cached grammars, in bytes."""
        return self._kept.size

    def guide(self, structure: Mapping[str, Any], salt: str = "") -> Guide:
        """Return the guide of an answer in a language of ``SamplingParams.structured_outputs``.

        Args:
            structure: one kind of language, and its value.
            salt: the request's cache_salt. Tenants share no compiled grammar, because the saved time would
                reveal the requests of others.

        Raises:
            StructureError: if no answer can be in the language, or compiling it takes too much work.
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
        return Guide(matcher, forget, lambda: self._compile(name, text)[0], self._vocabulary)

    def _forget(self, salt: str, key: tuple[str, str]) -> None:
        self._free(self._kept.drop(salt, key))

    def _free(self, matchers: list[LLMatcher]) -> None:
        """Free matchers that nothing else references, without the interpreter's lock.

        A failing matcher frees its memory. With two or more, tokens are consumed on other threads without the lock.
        """
        if matchers:
            spare = _library().LLMatcher(self.vocabulary_trie(), "", log_level=0)
            with suppress(CompilerError), panics_told():
                _executor().consume_token_par([(one, _NO_TOKEN) for one in (spare, *matchers)])

    def _compile(self, kind: str, text: str) -> tuple[LLMatcher, int]:
        """Compile a grammar: its first matcher and size in bytes. Raises GrammarError and CompilerError."""
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
        """The report of a matcher that fails before its second token; None if it does not fail."""
        if not matcher.is_error():
            bits = _bits([matcher], self._vocabulary)  # fails if there is no first token
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            return str(matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        first = next((int(token) for token in allowed if token not in self._stop_ids), None)
        if first is None:
            return None
        ahead = matcher.deep_copy()  # a lexer without fuel fails only after a token
        with panics_told():
            follows = ahead.consume_token(first)
        return None if follows else str(ahead.get_error())

    def _grammar(self, kind: str, text: str) -> str:
        """Convert a grammar to llguidance's form. Raises GrammarError."""
        if kind in ("structural_tag", "text"):
            added = self._tokenizer.added_tokens_decoder.items()
            special = {token.content: number for number, token in added if token.special}
            if kind == "text":
                return str(_library().grammar_from("lark", f"start: {lark_of_text(text, special)}"))
            return str(_library().grammar_from("lark", lark_of_tags(read_tags(json.loads(text)), special)))
        if kind == "grammar":
            return str(_library().grammar_from("lark", lark_of(text)))
        return str(_library().grammar_from(kind, text))

    def vocabulary_trie(self) -> LLTokenizer:
        with self._making_trie:  # one trie serves all threads
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
    """A cached grammar in its initial state. size: bytes. used_at: seconds, monotonic."""

    matcher: LLMatcher
    size: int
    used_at: float


class _Kept:
    """Compiled grammars by salt and text, least recently used first. Thread-safe.

    Args:
        most: the limit of all tenants together, in bytes. Beyond it, the largest tenant's least recently used is
            dropped.
        each: the limit of one tenant, in bytes.
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
        """The size of all grammars, in bytes."""
        with self._lock:
            return self._sizes.total()

    def get(self, salt: str, key: tuple[str, str]) -> LLMatcher | None:
        """A copy of a cached grammar for one answer; None if it is not cached."""
        with self._lock:
            own = self._by_salt.get(salt)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            own[key] = own[key]._replace(used_at=time.monotonic())
            return own[key].matcher.deep_copy()  # under the lock, so no other thread frees it

    def put(self, salt: str, key: tuple[str, str], matcher: LLMatcher, size: int) -> list[LLMatcher]:
        """Cache a grammar, and return the dropped ones. One larger than a tenant's limit stays as the tenant's only
        one.
        """
        now = time.monotonic()
        with self._lock:
            dropped = self._drop_unused(now)
            own = self._by_salt.setdefault(salt, OrderedDict())
            if key in own:  # two requests compiled it at the same time
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
        """Remove a grammar from the cache, and return it if it was there."""
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
    """The tokens that may come next, (guides, words), one bit each, the lowest first. Runs guides on several threads.

    If the library fails at a guide, and again at a newly compiled one, it allows no token and stores the error as
    ``failure``. Others in the pass go on.
    """
    bits = _bits_of(guides, vocabulary)
    either = [place for place, guide in enumerate(guides) if guide.beside is not None]
    if either:
        bits[either] |= _bits_of([guide.beside for guide in guides if guide.beside is not None], vocabulary)
    return bits


def _bits_of(guides: Sequence[Guide], vocabulary: int) -> npt.NDArray[np.uint32]:
    """``allowed_bits`` without the guides beside."""
    known = [guide.bits for guide in guides if guide.bits is not None]
    if known:
        bits = np.empty((len(guides), known[0].size), dtype=np.uint32)
        bits[[guide.bits is not None for guide in guides]] = known
        others = [guide for guide in guides if guide.bits is None]
        if others:
            bits[[guide.bits is None for guide in guides]] = _bits_of(others, vocabulary)
        return bits
    try:
        bits = _bits([guide.matcher for guide in guides], vocabulary)
    except CompilerError as error:
        if len(guides) == 1:
            guides[0].fail(error)
            return np.zeros((1, -(-vocabulary // 32)), dtype=np.uint32)
        return np.concatenate([_bits_of([guide], vocabulary) for guide in guides])  # finds the failing guide
    for place, guide in enumerate(guides):
        if not guide.matcher.is_error():
            continue
        if guide.recover():
            bits[place] = _bits_of([guide], vocabulary)[0]
        else:  # the library allows end-of-sequence, which would end the answer as if it were complete
            guide.fail(_failed(_TOO_LARGE))
            bits[place] = 0
    return bits


def _bits(matchers: Sequence[LLMatcher], vocabulary: int) -> npt.NDArray[np.uint32]:
    """Raises CompilerError if the library fails at any matcher."""
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
    """Return a copy without padding, truncation or a prefix space, as llguidance requires."""
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
    import llguidance  # a slow import that few processes need

    return llguidance


@contextmanager
def panics_told() -> Iterator[None]:
    """Raise a CompilerError for a panic of llguidance's Rust code. A PanicException is no Exception and would end
    the engine.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        raise CompilerError(
            "the grammar compiler failed; give a simpler grammar or schema", code="structured.compiler_failed"
        ) from error


@cache
def parser_limits(allowance: Allowance = ALLOWANCES[-1]) -> LLParserLimits:
    """Limits on the work and memory of one grammar, for compiling it and for each step of an answer."""
    limits: LLParserLimits = _library().LLParserLimits(
        max_items_in_row=20_000,  # a choice needs one per text
        initial_lexer_fuel=allowance.fuel,
        max_grammar_size=allowance.symbols,
        step_lexer_fuel=100_000,  # 0.1 s
        max_lexer_states=20_000,  # 2 kB each
        verbose_errors=False,
    )
    return limits


def _place_in(text: str, reason: str) -> tuple[str | int, ...]:
    """The path to the smallest part of a JSON Schema that fails for this reason; empty for the whole schema."""
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
    """The reason why a JSON Schema fails with every vocabulary; None if it is valid."""
    matcher = _library().LLMatcher
    try:
        with panics_told():
            grammar = matcher.grammar_from_json_schema(json.dumps(schema))
            wrong, reports = matcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    except CompilerError as error:
        return str(error)
    return _sentence(reports[0]) if wrong else None


def _failed(reason: str) -> ParameterError:
    return ParameterError(f"structured_outputs: {reason}", code="structured.failed_grammar")


def _is_out_of_resources(report: str) -> bool:
    return any(said in report.lower() for said in _OUT_OF_RESOURCES)


def _sentence(report: str) -> str:
    """Extract the error of one of llguidance's reports, as one line."""
    if report.startswith(("NoExtension", "Unsatisfiable schema: Regex is empty")):
        return "no text satisfies it"
    if report.startswith("oneOf constraints"):
        return "nothing shows that no value fits two schemas of oneOf; write anyOf"
    if not report or _is_out_of_resources(report):
        return _TOO_LARGE
    lines = [line.strip() for line in report.splitlines()]
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (said or lines)[0][:_REASON].rstrip(".")


_MOST_REPLAY_S = 0.2  # for the tokens of an answer in a newly compiled grammar
_BEFORE = 8  # tokens decoded in addition to the mark's own length


class LaterGuide:
    """The start of a grammar, for an answer that has not reached the mark.

    Args:
        guide: for this answer alone.
        mark: the text behind which the grammar applies.
        opening: the grammar of the mark that opens the reasoning. An answer without it follows ``guide`` from its first
            token. None if every answer starts inside the reasoning.
    """

    def __init__(
        self, guide: Guide, mark: str, tokenizer: PreTrainedTokenizerBase, opening: Guide | None = None
    ) -> None:
        self._guide = guide
        self._mark = mark
        self._tokenizer = tokenizer
        self._kept = _BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))
        self._said: list[int] = []
        self._opening = opening
        self._direct = None if opening is None else guide.copy()
        self.over = False  # True once the grammar applies up to the end

    def branch(self) -> LaterGuide:
        """Return a copy for tokens that the answer may not have."""
        made = copy.copy(self)
        made._guide = self._guide.branch()
        made._opening = None if self._opening is None else self._opening.branch()
        made._direct = None if self._direct is None else self._direct.branch()
        return made

    @property
    def now(self) -> Guide | None:
        """The guide for the next token; None for no restriction."""
        if self._direct is None:
            return self._opening
        self._direct.beside = self._opening
        return self._direct

    def take(self, token: int) -> Guide | None:
        """Advance behind a token. Returns the guide for the next one, or None for no restriction before the mark.

        Raises like Guide.take. Text behind the mark in the same token belongs to the grammar, except white space.
        """
        if self._opening is not None:
            return self._begin(token, self._opening)
        self._said = [*self._said, token][-self._kept :]
        text = str(self._tokenizer.decode(self._said, skip_special_tokens=False))
        at = text.rfind(self._mark)
        if at < 0:
            return None
        self.over = True
        rest = text[at + len(self._mark) :].strip()
        for each in self._tokenizer.encode(rest, add_special_tokens=False) if rest else ():
            self._guide.take(each)
        return self._guide

    def _begin(self, token: int, opening: Guide) -> Guide | None:
        """Advance while the answer may still start with the opening mark or follow the grammar directly."""
        if not opening.follows(token):
            self.over = True
            direct = self._guide if self._direct is None else self._direct
            direct.beside = None
            direct.take(token)
            return direct
        if self._direct is not None and not self._direct.follows(token):
            self._direct = None
        if opening.complete:
            self._direct = self._opening = None
        return self.now


def ends_with(tokens: tuple[int, ...], mark: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the prompt's text ends with the mark, ignoring trailing white space."""
    last = tokens[-(_BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))) :]
    return str(tokenizer.decode(list(last), skip_special_tokens=False)).rstrip().endswith(mark)
