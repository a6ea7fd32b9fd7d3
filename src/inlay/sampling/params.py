"""Sampling parameters of one request, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from inlay.errors import ParameterError
from inlay.wording import show

# Below this, division by the temperature would amplify rounding errors.
_GREEDY_BELOW = 1e-5
_MAX_TEMPERATURE = 100.0
_MAX_LOGPROBS = 20
_MAX_ANSWERS = 128
_MAX_BIAS = 100
_MAX_STOP_IDS = 1024  # each is checked after every token
_MAX_STOPS = 256  # each is searched after every token
_MAX_BAD_WORDS = 256  # each is searched after every token
_MAX_BAD_WORD = 256  # characters, also of a reasoning mark
_MAX_PENALTY = 2
_MAX_REPETITION = 100.0
_MAX_TOP_K = 2**31 - 1
_SEEDS = 2**64
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request, validated here.

    docs/reference/sampling.md has the order in which they apply, and the differences from vLLM and transformers.

    Args:
        n: the number of answers, 1 to 128. They share the prompt's KV, and each draws with its own seed.
        temperature: divides the logits, 0 to 100. Below 1e-5 the most probable token is taken ("greedy").
        top_p: keep the fewest most probable tokens whose probabilities reach this sum; 1 is off.
        top_k: keep this many most probable tokens; 0 or -1 is off.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 is off.
        typical_p: keep the tokens with surprise nearest to the expected one, up to this probability; 1 is off
            (locally typical sampling, arXiv 2202.00666).
        repetition_penalty: divides positive logits, and multiplies negative ones, of every token of the prompt and
            the answer. Above 0; 1 is off (CTRL, arXiv 1909.05858, section 4.1).
        presence_penalty: subtracted from the logit of every token of the answer, -2 to 2; 0 is off.
        frequency_penalty: subtracted once for each occurrence of the token in the answer, -2 to 2; 0 is off.
        logit_bias: token id → number added to its logit, -100 to 100.
        bad_words: texts that the answer must not contain, at most 256. The last token of one may not follow the others.
        allowed_token_ids: the only tokens that may be generated. None for all.
        seed: of the request's draws, 0 to 2**64 - 1. None takes one from the engine.
        stop: text that ends the answer, one string or several, at most 256. The property ``stops`` has them as a tuple.
        stop_token_ids: tokens that end the answer, at most 1,024. The property ``stop_ids`` has them as a tuple.
        include_stop_str_in_output: if True, the answer keeps the stop string that ended it.
        ignore_eos: if True, generation continues after the model's end-of-sequence token.
        max_tokens: the most tokens to generate. None for up to the model's context. 0 is allowed with prompt_logprobs
            or pooling.
        min_tokens: within this many tokens neither end-of-sequence, stop tokens nor stop strings end the answer.
        logprobs: the number of alternatives to report for every token, 0 to 20. 0 reports the chosen token alone.
        prompt_logprobs: the same for every token of the prompt. None reports nothing. Such a prompt is computed in full
            (``reuse="off"``).
        pooling: the embedding of the prompt to return: the last hidden state of its "last" token, or the "mean" over
            all tokens. None returns none. A prompt with "mean" is computed in full.
        truncate_prompt_tokens: keep only this many tokens at the end of the prompt. None keeps all. -1 keeps as many as
            leave room for ``max_tokens`` (for one token if that is None). Not for prompts that read modules.
        detokenize: if False, the answer has no text, and stop strings are not allowed.
        skip_special_tokens: if True, special tokens are left out of the text.
        structured_outputs: the language of the answer, one of ``{"json": schema}`` (a JSON Schema, as a dict or text),
            ``{"json_object": True}``, ``{"regex": pattern}``, ``{"choice": [text, …]}``, ``{"grammar": text}`` in Lark
            or GBNF, and ``{"structural_tag": {"structures": […], "triggers": […]}}``, as a dict or text.
        reasoning_end: a text such as ``</think>`` after which ``structured_outputs`` applies. The text before it is
            free. If it is None or ends the prompt, ``structured_outputs`` applies from the start.
        reasoning_start: a text such as ``<think>``. An answer is free up to ``reasoning_end`` only if it begins with
            this text. If ``reasoning_start`` is None or ends the prompt, every answer is.

    Raises:
        ParameterError: for a value of the wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Dicts have no hash. Equal parameters still have equal hashes.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)
    reasoning_end: str | None = None
    reasoning_start: str | None = None

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_penalties()
        self._check_ends()
        self._check_structure()
        answers = _is_int(self.n, 1, _MAX_ANSWERS)
        _require(answers, "n", self.n, f"a whole number from 1 to {_MAX_ANSWERS}")
        _require(
            self.n == 1 or not self.greedy, "n", self.n, "1 where temperature is 0, since all answers would be equal"
        )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    def _check_filters(self) -> None:
        warm = _is_number(self.temperature, 0, _MAX_TEMPERATURE)
        _require(warm, "temperature", self.temperature, f"a number from 0 to {_MAX_TEMPERATURE:g}")
        usable = _is_number(self.top_p, 0, 1) and self.top_p > 0
        _require(usable, "top_p", self.top_p, "a number above 0 and at most 1")
        countable = _is_int(self.top_k, -1, _MAX_TOP_K)
        _require(countable, "top_k", self.top_k, "a whole number of tokens below 2**31, or 0 or -1 for all of them")
        _require(_is_number(self.min_p, 0, 1), "min_p", self.min_p, "a number from 0 to 1")
        usable = _is_number(self.typical_p, 0, 1) and self.typical_p > 0
        _require(usable, "typical_p", self.typical_p, "a number above 0 and at most 1")
        seedable = self.seed is None or _is_int(self.seed, 0, _SEEDS - 1)
        _require(seedable, "seed", self.seed, "None or a whole number from 0 to 2**64 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            countable = value is None or _is_int(value, 0, _MAX_LOGPROBS)
            _require(countable, name, value, f"None or a whole number from 0 to {_MAX_LOGPROBS}")
        _require(self.pooling in (None, "last", "mean"), "pooling", self.pooling, "None, 'last' or 'mean'")

    def _check_penalties(self) -> None:
        value = self.repetition_penalty
        usable = _is_number(value, 1 / _MAX_REPETITION, _MAX_REPETITION)  # beyond it, products overflow
        bounds = f"a number from {1 / _MAX_REPETITION:g} to {_MAX_REPETITION:g}"
        _require(usable, "repetition_penalty", value, bounds)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            allowed = _is_number(value, -_MAX_PENALTY, _MAX_PENALTY)
            _require(allowed, name, value, f"a number from -{_MAX_PENALTY} to {_MAX_PENALTY}")
        biases = self.logit_bias is None or (
            isinstance(self.logit_bias, Mapping)
            and all(_is_int(token, 0) for token in self.logit_bias)
            and all(_is_number(bias, -_MAX_BIAS, _MAX_BIAS) for bias in self.logit_bias.values())
        )
        allowed_biases = f"None or a dict of token ids to numbers from -{_MAX_BIAS} to {_MAX_BIAS}"
        _require(biases, "logit_bias", self.logit_bias, allowed_biases)
        self._check_tokens()

    def _check_tokens(self) -> None:
        words = self.bad_words
        usable = _is_list(words) and len(words) <= _MAX_BAD_WORDS
        usable = usable and all(isinstance(one, str) and one.strip() and len(one) <= _MAX_BAD_WORD for one in words)
        allowed = f"a list of at most {_MAX_BAD_WORDS} texts of at most {_MAX_BAD_WORD} characters, none of them empty"
        _require(usable, "bad_words", words, allowed)
        only = self.allowed_token_ids
        usable = only is None or (_is_list(only) and len(only) > 0 and _are_tokens(only))
        _require(usable, "allowed_token_ids", only, "None or a list of token ids, at least one and none negative")
        kept = self.truncate_prompt_tokens
        usable = kept is None or kept == -1 or _is_int(kept, 1)
        _require(usable, "truncate_prompt_tokens", kept, "None, -1 or a whole number of at least 1")

    def _check_structure(self) -> None:
        for name in ("reasoning_end", "reasoning_start"):
            mark = getattr(self, name)
            usable = mark is None or (isinstance(mark, str) and bool(mark.strip()) and len(mark) <= _MAX_BAD_WORD)
            _require(usable, name, mark, f"None or a text of at most {_MAX_BAD_WORD} characters, and not empty")
        given = self.structured_outputs
        if given is None:
            return
        named = isinstance(given, Mapping) and len(given) == 1 and next(iter(given)) in _GRAMMARS
        _require(named, "structured_outputs", given, f"None or a dict with exactly one of {', '.join(_GRAMMARS)}")
        ((kind, value),) = given.items()
        allowed = {
            "json": (isinstance(value, Mapping | str | bool), "a JSON Schema, as a dict or as text"),
            "json_object": (value is True, "True"),
            "regex": (isinstance(value, str) and bool(value), "a pattern, and not an empty one"),
            "choice": (
                _is_list(value) and len(value) > 0 and all(isinstance(one, str) and one for one in value),
                "a list of strings, at least one and none of them empty",
            ),
            "grammar": (isinstance(value, str) and bool(value), "a grammar in Lark or GBNF, and not an empty one"),
            "structural_tag": (isinstance(value, Mapping | str), "a structural tag, as a dict or as text"),
        }
        _require(allowed[kind][0], f"structured_outputs['{kind}']", value, allowed[kind][1])

    def _check_ends(self) -> None:
        texts = self.stop is None or isinstance(self.stop, str) or _is_list(self.stop)
        texts = texts and all(isinstance(text, str) and text for text in self.stops)
        _require(texts, "stop", self.stop, "None, a string or a list of strings, none of them empty")
        if len(self.stops) > _MAX_STOPS:
            raise ParameterError(
                f"stop has {len(self.stops):,} texts, and at most {_MAX_STOPS} may end an answer; give fewer.",
                code="parameter.too_many",
            )
        _require(self.detokenize or not self.stops, "stop", self.stop, "None where detokenize is False")
        if _is_list(self.stop_token_ids) and len(self.stop_token_ids) > _MAX_STOP_IDS:
            raise ParameterError(
                f"stop_token_ids has {len(self.stop_token_ids):,} tokens, and at most {_MAX_STOP_IDS:,} may end an "
                "answer; give fewer.",
                code="parameter.too_many",
            )
        tokens = _is_list(self.stop_token_ids) and _are_tokens(self.stop_token_ids)
        _require(tokens, "stop_token_ids", self.stop_token_ids, "a list of token ids, none of them negative")
        least = 1 if self.prompt_logprobs is None and self.pooling is None else 0  # else no token is of no use
        bounded = self.max_tokens is None or _is_int(self.max_tokens, least)
        allowed = "None or a whole number of at least 1, or 0 with prompt_logprobs or pooling"
        _require(bounded, "max_tokens", self.max_tokens, allowed)
        most = math.inf if self.max_tokens is None else self.max_tokens
        upper = "up" if self.max_tokens is None else f"to max_tokens={most}"
        _require(_is_int(self.min_tokens, 0, most), "min_tokens", self.min_tokens, f"a whole number from 0 {upper}")

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken without a draw."""
        return self.temperature < _GREEDY_BELOW

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop tokens, without the model's own end-of-sequence tokens."""
        return tuple(self.stop_token_ids)

    @cached_property
    def largest_ids(self) -> Mapping[str, int]:
        """The largest token id of every field with token ids, cached for all prompts of a request."""
        fields = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        return {name: max(tokens) for name, tokens in fields.items() if tokens}


def _require(valid: bool, name: str, value: object, allowed: str) -> None:
    if not valid:
        raise ParameterError(f"{name} is {show(value)}; it must be {allowed}.", code="parameter.out_of_range")


def _is_int(value: object, least: float, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object, least: float, most: float) -> bool:
    # NaN fails both comparisons.
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _are_tokens(values: Sequence[object]) -> bool:
    if set(map(type, values)) == {int}:
        return min(values) >= 0  # type: ignore[type-var, operator]  # without a loop of Python's: they may be many
    return all(_is_int(one, 0) for one in values)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
