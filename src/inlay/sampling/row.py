"""The sampler's state of one answer, and the adjustment of logits before a draw.

The adjustments apply to greedy rows too, in vLLM's order (vllm/v1/sample/sampler.py). First come forbidden tokens
(``allowed_token_ids``, grammars, ``min_tokens``, ``bad_words``), then ``logit_bias``, then the repetition, frequency
and presence penalties.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inlay.errors import InlayError
from inlay.models.device import upload
from inlay.sampling.params import SamplingParams
from inlay.sampling.structured import Guide, LaterGuide, allowed_bits

#: A grammar is slow if it takes more CPU seconds for a draft token. Its answer has no drafts for so many tokens.
_SLOW_S, _PAUSE = 0.002, 32


class BadWords:
    """The state of one answer among forbidden words, given as non-empty lists of token ids.

    As in vLLM, the last token of a word may not follow the word's other tokens.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = np.unique(np.array([word[0] for word in words if len(word) == 1], dtype=np.int64))
        #: Last but one token of a word → (all tokens but the last, last token), so that a step checks few words.
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *head, last in (word for word in words if len(word) > 1):
            self._longer.setdefault(head[-1], []).append((tuple(head), last))
        self._most = max((len(word) - 1 for word in words), default=0)
        self._said: tuple[int, ...] = ()  # the last tokens of the answer
        self.next = self._always

    def copy(self) -> BadWords:
        """A copy for another answer with the same state."""
        return copy.copy(self)

    def take(self, token: int) -> None:
        """Advance behind a token of the answer."""
        if not self._longer:
            return
        self._said = (*self._said, token)[-self._most :]
        begun = [last for head, last in self._longer.get(token, ()) if self._said[-len(head) :] == head]
        self.next = np.union1d(self._always, np.array(begun, dtype=np.int64)) if begun else self._always


def tokenized(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """The token ids of words, each alone and behind a space, as at the start of a text and inside one.

    Other tokenizations of a word, as beside punctuation, are not detected.
    """
    found: dict[tuple[int, ...], None] = {}
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    made = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    for alone, within in zip(made[::2], made[1::2], strict=True):
        found[alone] = None
        # If the space is its own token, the rest equals the word alone, which is included already.
        if len(within) == len(alone) and within[:1] != alone[:1]:
            found[within] = None
    return [ids for ids in found if ids]


Ids = npt.NDArray[np.int64]


class TokenRules:
    """The parameters that name tokens. Rows only read them.

    Args:
        params: the sampling parameters.
        stop_ids: the tokens that end an answer; ``min_tokens`` delays them.
        never: tokens that are forbidden at every step.
        bad_words: the state at the start of an answer; each answer continues with a copy.

    Attributes:
        allowed: the only allowed tokens, ascending and without repeats, or None for all.
        bias_ids, biases: ``logit_bias``.
        never: ascending.
        early: the tokens forbidden before ``min_tokens``.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Collection[int] = (),
        never: Collection[int] = (),
        bad_words: BadWords | None = None,
    ) -> None:
        self.allowed = None if params.allowed_token_ids is None else _each_once(params.allowed_token_ids)
        biases = params.logit_bias or {}
        self.bias_ids: Ids = np.fromiter(biases, np.int64, len(biases))
        self.biases = np.fromiter(biases.values(), np.float32, len(biases))
        self.never: Ids = np.array(sorted(never), dtype=np.int64)
        self.early: Ids = np.array(sorted({*never, *stop_ids, *params.stop_ids}), dtype=np.int64)
        self.bad_words = bad_words
        self._bits: npt.NDArray[np.uint32] | None = None

    def allowed_bits(self, words: int) -> npt.NDArray[np.uint32]:
        """One bit per allowed token, the lowest first, (words,). Only valid if ``allowed`` is not None."""
        if self._bits is None or len(self._bits) != words:
            flags = np.zeros(words * 32, dtype=np.uint8)
            flags[self.allowed] = 1
            self._bits = np.packbits(flags, bitorder="little").view(np.uint32)
        return self._bits


def _each_once(tokens: Sequence[int]) -> Ids:
    """Distinct token ids in ascending order, without sorting: there may be a quarter of a million."""
    ids = np.array(tokens, dtype=np.int64)
    flags = np.zeros(int(ids.max()) + 1, dtype=bool)
    flags[ids] = True
    return np.flatnonzero(flags)


#: One row's numbers, so that a batch becomes an array in one call. inverse: 1 / temperature; 0 for greedy rows.
SETTINGS = np.dtype(
    [
        ("inverse", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ]
)


class Row:
    """One answer in the sampler, with one row of logits per step.

    Args:
        params: the sampling parameters.
        seed: of its draws, 0 to 2**64 - 1; see ``request_seed``.
        prompt_ids: of the prompt; the repetition penalty counts them too.
        stop_ids: the tokens that end an answer; ``min_tokens`` delays them.
        never: tokens that are forbidden at every step.
        guide: the answer's state in its grammar, if it has one.
        later: the guide that applies behind a mark; ``guide`` applies until then.
        rules: the request's token rules; made of ``params``, ``stop_ids`` and ``never`` by default.
        seen: the counts of prompt tokens for the penalties; ``seen_of(params, prompt_ids)`` by default.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        prompt_ids: Sequence[int] = (),
        stop_ids: Collection[int] = (),
        never: Collection[int] = (),
        guide: Guide | None = None,
        later: LaterGuide | None = None,
        rules: TokenRules | None = None,
        seen: SeenTokens | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.guide = guide
        self.later = later
        self.rules = TokenRules(params, stop_ids, never) if rules is None else rules
        self.seen = seen_of(params, prompt_ids) if seen is None else seen.copy()
        self._bad_words = None if self.rules.bad_words is None else self.rules.bad_words.copy()
        self.step = 0  # the number of tokens in the answer
        self._no_draft_before = 0  # this step, because the grammar is slow
        self.settings = (
            0.0 if params.greedy else float(np.float32(1) / np.float32(params.temperature)),
            params.min_p,
            max(params.top_k, 0),
            params.top_p,
            params.typical_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )

    @property
    def forbidden(self) -> Ids:
        """The tokens that are forbidden next."""
        # an answer must not end before its mark, because it would not match its grammar
        early = self.step < self.params.min_tokens or (self.later is not None and self.guide is None)
        never = self.rules.early if early else self.rules.never
        return never if self._bad_words is None else np.union1d(never, self._bad_words.next)

    def ahead(self, tokens: Sequence[int]) -> list[Row]:
        """Return the rows behind draft tokens: for each token, the row if it and those before it are chosen.

        The list is shorter if the grammar does not allow a token, or fails at it. It is empty for a while after a
        grammar took long.
        """
        rows: list[Row] = []
        if self.step < self._no_draft_before:
            return rows
        row, began = self, time.thread_time()
        for token in tokens:
            try:
                row = row._branch()
                row.take(token)
                if row.guide is not None:
                    row.guide.look_ahead()
            except InlayError:
                break
            if row.guide is not None and time.thread_time() - began > (len(rows) + 1) * _SLOW_S:
                self._no_draft_before = self.step + _PAUSE
                break
            rows.append(row)
        return rows

    def _branch(self) -> Row:
        """Return a copy that draws the same tokens. Later changes of one do not affect the other."""
        made = copy.copy(self)
        made.seen = None if self.seen is None else self.seen.branch()
        made._bad_words = None if self._bad_words is None else self._bad_words.copy()
        if self.later is not None:
            made.later = self.later.branch()
            made.guide = made.later.now
        elif self.guide is not None:
            made.guide = self.guide.branch()
        return made

    def take(self, token: int) -> None:
        """Advance behind a chosen token. Raises InlayError if the row's grammar does not allow it."""
        self.step += 1
        if self.seen is not None:
            self.seen.add(token)
        if self._bad_words is not None:
            self._bad_words.take(token)
        if self.later is not None:
            self.guide = self.later.take(token)
            if self.later.over:
                self.later = None
        elif self.guide is not None:
            self.guide.take(token)


class SeenTokens:
    """The tokens that penalties apply to, each once, and how often the answer contains them.

    A list of tokens is short, so a step reads and changes only their logits. All answers of a prompt share its part of
    the list.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = np.unique(np.asarray(prompt_ids, dtype=np.int64))  # never changed
        self._ids = self._prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._places: dict[int, int] = {}  # of tokens that are not in the prompt
        self._owned = False  # True if the counts belong to this answer alone

    def copy(self) -> SeenTokens:
        """A copy for another answer that has not begun."""
        assert not self._owned, "this one has not begun either"
        made = copy.copy(self)
        made._places = {}
        return made

    def branch(self) -> SeenTokens:
        """Return a copy that continues from this state."""
        made = copy.copy(self)
        made._places = self._places.copy()
        if self._ids is not self._prompt:  # the prompt's list is never changed
            made._ids = self._ids.copy()
        made._owned = False
        return made

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often the answer contains each of ``ids``; 0 for tokens that only the prompt contains."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        if not self._owned:
            self._counts, self._owned = self._counts.copy(), True
        place = int(self._prompt.searchsorted(token))
        if place == len(self._prompt) or self._prompt[place] != token:
            place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._grow()
            self._ids[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])


def seen_of(params: SamplingParams, prompt_ids: Sequence[int]) -> SeenTokens | None:
    """The counts at the start of an answer; None without penalties."""
    if params.repetition_penalty != 1:
        return SeenTokens(prompt_ids)
    return SeenTokens(()) if params.presence_penalty or params.frequency_penalty else None


def adjust(scores: Tensor, rows: Sequence[Row], vocabulary: int) -> Tensor:
    """Apply the adjustments of all rows to logits, (rows, width), fp32. Returns ``scores`` itself if nothing changes
    it.

    Args:
        vocabulary: the number of columns that are tokens.
    """
    guided = [place for place, row in enumerate(rows) if row.guide is not None]
    forbidden = [row.forbidden for row in rows]
    biased = any(len(row.rules.bias_ids) for row in rows)
    penalized = [place for place, row in enumerate(rows) if row.seen is not None]
    limited = [place for place, row in enumerate(rows) if row.rules.allowed is not None]
    if not (guided or biased or penalized or limited or any(map(len, forbidden))):
        return scores
    scores = scores.clone()
    for place in limited:
        _limit(scores[place], rows[place].rules.allowed)
    if guided:
        _mask(scores, rows, guided, vocabulary)
    if any(map(len, forbidden)):
        # Ids beyond the vocabulary are skipped: indexing with them would crash the device context.
        scores[_places([ids[ids < vocabulary] for ids in forbidden], scores)] = -math.inf
    if biased:
        places = _places([row.rules.bias_ids for row in rows], scores)
        scores[places] += _tensor(np.concatenate([row.rules.biases for row in rows]), scores)
    if penalized:
        _penalize(scores, rows, penalized)
    return scores


def _mask(scores: Tensor, rows: Sequence[Row], guided: list[int], vocabulary: int) -> None:
    bits = allowed_bits([guide for row in rows if (guide := row.guide) is not None], vocabulary)
    words = _tensor(bits.view(np.int32), scores)
    allowed = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=scores.device)) & 1
    where = _tensor(np.array(guided), scores)
    kept = scores[where, :vocabulary]
    scores[where, :vocabulary] = kept.masked_fill_(allowed.flatten(1)[:, :vocabulary] == 0, -math.inf)


def _limit(row: Tensor, allowed: Ids | None) -> None:
    """Forbid all tokens except ``allowed``. Changes the row, (width,), in place."""
    assert allowed is not None, "it is one of those that are limited"
    columns = _tensor(allowed, row)
    kept = row[columns]
    row.fill_(-math.inf)
    row[columns] = kept


def _penalize(scores: Tensor, rows: Sequence[Row], penalized: list[int]) -> None:
    seen = [found for row in rows if (found := row.seen) is not None]
    lengths = [len(found.ids) for found in seen]
    numbers = np.array([rows[place].settings for place in penalized], dtype=SETTINGS).repeat(lengths)
    counts = _tensor(np.concatenate([found.counts for found in seen]), scores)
    repetition, frequency, presence = (
        _tensor(numbers[name].copy(), scores) for name in ("repetition", "frequency", "presence")
    )
    places = (
        _tensor(np.array(penalized).repeat(lengths), scores),
        _tensor(np.concatenate([found.ids for found in seen]), scores),
    )
    logits = scores[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores[places] = logits - frequency * counts - presence * (counts > 0)


def _places(ids: Sequence[npt.NDArray[np.int64]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column indices of each row's tokens."""
    rows = np.arange(len(ids)).repeat([len(one) for one in ids])
    return _tensor(rows, like), _tensor(np.concatenate(ids), like)


def _tensor(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    return upload(array, like.device)
