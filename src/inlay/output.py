"""Detokenization and stop strings, while tokens are generated.

Released text is never taken back. So text waits while a later token could change it. This holds for the bytes of an
incomplete character, and for text that may be the start of a stop string.

``OutputProcessor`` turns token events into text, log-probabilities and outputs. It has neither weights nor a store. It
is the counterpart of PromptProcessor. It runs where events arrive; in the engine's process this is the engine's thread,
between two passes.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from inlay.diagnostics import Diagnostics, SpanRead
from inlay.events import TokenEvent
from inlay.logprobs import FlatLogprobs, Logprob
from inlay.prompt.diagnosis import NotedPrompt
from inlay.prompt.request import EngineRequest
from inlay.sampling.params import SamplingParams
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, SetOrder, Usage

# A character has at most 4 bytes, so 4 tokens. The rest leaves room for tokens without text.
_CONTEXT = 8
_LONGEST_WINDOW = 4 * _CONTEXT
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one answer, token by token.

    At the end, ``text`` is ``decode(tail + ids)[len(decode(tail)):]``, where ``tail`` is the end of the prompt, without
    clean-up of white space. So a space at the start of the answer is kept, even if the tokenizer strips it at the start
    of a text.

    The text ends at the stop string that is completed first, however the text is split into tokens. If one character
    completes several stop strings, the longest counts. Stop strings that the first ``min_tokens`` tokens complete are
    ignored.

    Args:
        tokenizer: A transformers tokenizer with a ``tokenizers`` backend.
        prompt_ids: Token ids of the prompt. Only the last few matter.
        params: Supplies the stop strings, ``detokenize`` and ``skip_special_tokens``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = _Detokenizer(tokenizer.backend_tokenizer, prompt_ids, params.skip_special_tokens)
        self._stops = params.stops
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._silent = not params.detokenize
        self._pushed = 0
        self._text = ""
        # Decoded finally but not released, because it may be the start of a stop string.
        self._held = ""
        # Stop strings that end at or before this character of the answer are already handled.
        self._searched = 0
        self._stopped: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """All text released so far."""
        return self._text

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Add the next token and return the text that it releases. After a stop string it returns ""."""
        assert not self._finished, "push after finish"
        if self._stopped is not None or self._silent:
            return ""
        self._pushed += 1
        self._detokenizer.push(token_id)
        return self._advance(self._detokenizer.take(looked_at=bool(self._stops)))

    def finish(self) -> str:
        """End the answer and return the held text. An incomplete character becomes U+FFFD."""
        assert not self._finished, "finish comes once"
        self._finished = True
        if self._stopped is not None or self._silent:
            return ""
        released = self._advance(_Decoded(self._detokenizer.flush(), ""))
        return released if self._stopped is not None else released + self._release(self._held, "")

    def _advance(self, new: _Decoded) -> str:
        if not self._stops:
            return self._release(new.settled, "")
        self._held += new.settled
        start = len(self._text)
        visible = self._held + new.tentative
        if self._pushed <= self._min_tokens:
            self._searched = start + len(visible)
        match = _find_first(visible, self._stops, self._searched - start)
        if match is not None:
            self._stopped = match.stop
            return self._release(visible[: match.end if self._include_stop else match.start], "")
        self._searched = max(self._searched, start + len(self._held))
        held = _held_back(self._held, self._stops, self._longest)
        return self._release(self._held[: len(self._held) - held], self._held[len(self._held) - held :])

    def _release(self, text: str, held: str) -> str:
        self._text += text
        self._held = held
        return text


class _Decoded(NamedTuple):
    """New text: ``settled`` never changes, ``tentative`` may change with a later token or may end the answer."""

    settled: str
    tentative: str


class _Detokenizer:
    """Decodes a window over the last tokens and finds the text that is new and settled.

    Unlike ``tokenizers.decoders.DecodeStream`` it accepts any tokens. DecodeStream raises an error if byte tokens that
    form a character become invalid with the next byte token. A decoder with byte fallback renders a run of byte tokens
    as text only if the whole run is valid UTF-8. So no byte token is settled before the run ends.
    """

    def __init__(self, backend: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._backend = backend
        self._skip_special = skip_special
        added = backend.get_added_tokens_decoder() if skip_special else {}
        self._skipped = {token_id for token_id, token in added.items() if token.special}
        decoder = backend.decoder
        self._byte_fallback = decoder is not None and decoder.decode(["<0xC3>", "<0xA9>"]) == "\u00e9"
        self._window: list[int] = []
        self._run = bytearray()  # the byte tokens at the end of the window
        self._before_run: str | None = None  # the text before the run, if known
        for token_id in self._tail(prompt_ids):
            self.push(token_id)
        self._prompt = self._decode()
        self._begun = False
        self._seen = 0  # characters of the window's text that were returned

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if not self._renders(token_id):
                continue
            # Part of a run of byte tokens would decode to another text, so continue to the token before the run.
            if len(tail) >= _CONTEXT and self._byte(tail[-1]) is None:
                break
            tail.append(token_id)
        return tail[::-1]

    def push(self, token_id: int) -> None:
        if not self._renders(token_id):
            return
        self._window.append(token_id)
        byte = self._byte(token_id)
        if byte is None:
            self._run.clear()
            self._before_run = None
        else:
            self._run.append(byte)

    def take(self, *, looked_at: bool) -> _Decoded:
        """Return the text that the last push settled. Tentative text is computed only if ``looked_at``."""
        if self._run:
            run = _utf8(self._run) if looked_at else None
            if run is None:
                return _Decoded("", "")
            text = self._with_run(run)
            return _Decoded("", text[self._start(text) :])
        text = self._decode()
        # Bytes that may become a character are one U+FFFD until they do.
        settled = text.removesuffix(_REPLACEMENT)
        new = settled[self._start(settled) :]
        self._seen = self._start(settled) + len(new)
        self._begun = self._begun or bool(new)
        self._shorten(unsettled=len(text) - len(settled))
        return _Decoded(new, "")

    def _with_run(self, run: str) -> str:
        """Return the window's text, which ends in ``run``.

        A run may be as long as the answer and grows token by token, so the text before it is cached.
        """
        if self._before_run is None:
            text = self._decode()
            if text.endswith(run):
                self._before_run = text.removesuffix(run)
            return text
        return self._before_run + run

    def flush(self) -> str:
        text = self._decode()
        return text[self._start(text) :]

    def _start(self, text: str) -> int:
        # A character that the prompt begins and the answer completes belongs to the answer.
        return self._seen if self._begun else _shared_length(self._prompt, text)

    def _shorten(self, unsettled: int) -> None:
        if self._begun and len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._seen = len(self._decode()) - unsettled

    def _decode(self) -> str:
        return self._backend.decode(self._window, skip_special_tokens=self._skip_special)

    def _renders(self, token_id: int) -> bool:
        # The rows that pad a model's vocabulary are not tokens.
        return token_id not in self._skipped and self._backend.id_to_token(token_id) is not None

    def _byte(self, token_id: int) -> int | None:
        if not self._byte_fallback:
            return None
        token = self._backend.id_to_token(token_id)
        if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None


class _Match(NamedTuple):
    end: int
    start: int
    stop: str


def _find_first(text: str, stops: Sequence[str], searched: int) -> _Match | None:
    """Return the first stop string that is completed after ``searched`` characters, the longest of several."""
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, searched - len(stop) + 1))
        if start >= 0:
            matches.append(_Match(start + len(stop), start, stop))
    return min(matches) if matches else None


def _held_back(text: str, stops: Sequence[str], longest: int) -> int:
    """Return the number of last characters that may be the start of a stop string of at most ``longest`` characters."""
    for length in range(min(len(text), longest - 1), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


def _shared_length(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    if right.startswith(left):
        return len(left)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _utf8(data: bytes | bytearray) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


logger = logging.getLogger(__name__)


class OutputProcessor:
    """Builds the outputs of one model's requests.

    Args:
        tokenizer: A transformers tokenizer with a ``tokenizers`` backend.
        finish: Called with the request_id and index of an answer that a stop string ended before the engine did. It
            must
            not block.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, finish: Callable[[str, int], None]) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._finish = finish

    def begin(
        self, request: EngineRequest, fell_back_from: str | None = None, noted: NotedPrompt | None = None
    ) -> RequestState:
        """Return the initial state of a request. For ``fell_back_from`` see RequestOutput.

        ``noted`` gets the first answer, and makes the diagnostics.
        """
        return RequestState(request, self._tokenizer, self._texts, self._finish, fell_back_from, noted)


class TokenTexts(dict[int, str]):
    """A cache of the texts of tokens within a text, decoded on first use.

    SentencePiece decoders drop the space at the front of a text, although it belongs to the first token. So a token is
    decoded behind a copy of itself.

    The log-probabilities of a long prompt need hundreds of thousands of texts, and many are equal. Without the cache,
    all other requests would wait for them longer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        decoder = tokenizer.backend_tokenizer.decoder
        self._strips = decoder is not None and decoder.decode(["\u2581a", "\u2581a"]) == "a a"

    def __missing__(self, token: int) -> str:
        text = str(self._tokenizer.decode([token]))
        if self._strips:
            behind_itself = str(self._tokenizer.decode([token, token]))
            text = behind_itself[len(text) :] if behind_itself.startswith(text) else text
        self[token] = text
        return text


class AnswerState:
    """One answer for its caller: its tokens, their text up to a stop string, and the reason of its end."""

    def __init__(
        self, request: EngineRequest, index: int, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.distributions: list[bytes] = []
        self.error: BaseException | None = None
        self.elapsed_s = 0.0
        self.drafted = self.accepted = 0
        self._texts = texts
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, request.ids, request.params)
        self._logprob: float | None = None
        told = request.params.logprobs is not None
        self._logprobs: FlatLogprobs[dict[int, Logprob]] | None = FlatLogprobs(texts=texts) if told else None
        self._finish_reason: Literal["stop", "length"] | None = None
        self._stop_reason: int | str | None = None

    @property
    def ended(self) -> bool:
        return self._finish_reason is not None or self.error is not None

    def follow(self, request: EngineRequest) -> None:
        """Restart the text after the prompt was put into another order."""
        if not self.token_ids:
            self._stream = TextStream(self._tokenizer, request.ids, request.params)

    def add(self, event: TokenEvent) -> bool:
        """Add an event, and ignore tokens after the end. Returns True if a stop string ended the answer before the
        engine did.
        """
        if self._finish_reason is not None:
            return False
        self.elapsed_s = event.elapsed_s
        self.drafted, self.accepted = event.drafted, event.accepted
        stream = self._stream
        for at in range(len(self.token_ids) - event.start, len(event.token_ids)):
            self._take(event, at)
            if stream.stopped is not None:
                # Of the tokens behind the stop, the last one is the model's own, and the others are a draft's. An event
                # of several passes, after one that could not be told, counts one too few for each further pass.
                self.accepted = max(0, self.accepted - max(0, len(event.token_ids) - at - 2))
                self._end("stop", stream.stopped)
                return event.finish_reason is None
        if event.finish_reason is not None:
            self._end(event.finish_reason, event.stop_reason)
        return False

    def completion(self) -> CompletionOutput:
        """Return the answer so far."""
        return CompletionOutput(
            index=self.index,
            text=self._stream.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=self._logprob,
            logprobs=None if self._logprobs is None else self._logprobs.so_far(),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )

    def _take(self, event: TokenEvent, at: int) -> None:
        token = event.token_ids[at]
        self.token_ids.append(token)
        if event.logprobs and self._logprobs is not None:
            ranked = event.logprobs[at]
            self._logprob = (self._logprob or 0.0) + ranked[0][1]
            self._logprobs.append(ranked)
        if event.distributions:
            self.distributions.append(event.distributions[at])
        self._stream.push(token)

    def _end(self, reason: Literal["stop", "length"], stop_reason: int | str | None) -> None:
        self._finish_reason, self._stop_reason = reason, stop_reason
        self._stream.finish()  # held text may complete a stop string
        if reason == "length" and self._stream.stopped is not None:
            self._finish_reason, self._stop_reason = "stop", self._stream.stopped


class RequestState:
    """The state of a request. Only one thread at a time may call ``add``. Any thread may read.

    ``failure`` is the error that ended one of the answers early, or None.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: PreTrainedTokenizerBase,
        texts: TokenTexts,
        finish: Callable[[str, int], None],
        fell_back_from: str | None = None,
        noted: NotedPrompt | None = None,
    ) -> None:
        self.request = request
        self._noted = noted
        self._reads: Sequence[SpanRead] = ()
        self._diagnostics: Diagnostics | None = None
        self._fell_back_from = fell_back_from
        self.answers = [AnswerState(request, index, tokenizer, texts) for index in range(request.params.n)]
        self.failure: BaseException | None = None
        self._finish = finish
        self._left = len(self.answers)
        self._usage: Usage | None = None
        self._metrics = RequestMetrics()
        self._texts = texts
        self._prompt_logprobs: FlatLogprobs[dict[int, Logprob] | None] | None = None
        self._embedding: tuple[float, ...] | None = None
        self._ordered = False

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def answered(self) -> bool:
        """True if all its answers have ended."""
        return self._left == 0

    @property
    def tokens(self) -> int:
        """The number of tokens in all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def add(self, events: Sequence[TokenEvent]) -> None:
        """Add events, and tell the engine to end answers that a stop string has ended."""
        for event in events:
            if event.metrics is not None:
                self._usage, self._metrics = event.usage, event.metrics
                self._reads = event.reads or self._reads
            if event.orders and not self._ordered:
                self._ordered = True
                self._take_order(event.orders)
            if event.prompt_logprobs is not None:
                self._prompt_logprobs = event.prompt_logprobs.so_far(self._texts)
            if event.embedding is not None:
                self._embedding = struct.unpack(f"<{len(event.embedding) // 4}f", event.embedding)
            answer = self.answers[event.index]
            # a stop string in the tokens comes before the error
            if (event.token_ids or event.error is None) and answer.add(event):
                self._finish(event.request_id, event.index)
            if event.error is not None and not answer.ended:
                answer.error = event.error.exception()
            if answer.ended:
                self.failure = self.failure or answer.error
                left, self._left = self._left, sum(not each.ended for each in self.answers)
                if left and not self._left and self.failure is None:
                    self._end()

    def _end(self) -> None:
        """Record the first answer for the diagnostics of later prompts, and make those of this one."""
        if self._noted is not None:
            self._noted.answered(self.answers[0].token_ids)
            try:
                self._diagnostics = self._noted.diagnostics(self.request, self._reads)
            except Exception:  # an answer is worth more than its diagnostics
                logger.exception("the diagnostics of request %s failed", self.id)

    def _take_order(self, orders: Sequence[Sequence[int]]) -> None:
        """Put the prompt into the engine's order. No token is generated yet, so the texts restart after the new
        prompt.
        """
        self.request = self.request.ordered(orders)
        for answer in self.answers:
            answer.follow(self.request)

    def output(self) -> RequestOutput:
        """Return the output so far."""
        asked, answered = self.request, self.answered
        metrics = self._metrics
        if answered:
            metrics = replace(metrics, total_s=max(answer.elapsed_s for answer in self.answers))
        # a waiting request has reused nothing yet
        usage = self._usage or Usage(len(asked.ids), 0, len(asked.ids), 0, 0, 0)
        drafted = sum(answer.drafted for answer in self.answers)
        if drafted:
            accepted = sum(answer.accepted for answer in self.answers)
            usage = replace(usage, drafted_tokens=drafted, accepted_tokens=accepted)
        return RequestOutput(
            request_id=asked.request_id,
            prompt=asked.text,
            prompt_token_ids=asked.ids,
            prompt_positions=asked.positions,
            outputs=[answer.completion() for answer in self.answers],
            finished=answered,
            usage=usage,
            metrics=metrics,
            prompt_logprobs=self._prompt_logprobs,
            order=tuple(
                SetOrder(tuple(one.name for one in each.members), each.why_fixed or None) for each in asked.sets
            ),
            reuse=str(asked.policy),
            fell_back_from=self._fell_back_from,
            diagnostics=self._diagnostics,
            embedding=self._embedding,
        )
