"""OutputProcessor: turns token events into text, log-probabilities and outputs. It has neither weights nor a store.

It is the counterpart of PromptProcessor. It runs where events arrive; in the engine's process this is the engine's
thread, between two passes.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from inlay.diagnostics import Diagnostics, SpanRead
from inlay.events import TokenEvent
from inlay.logprobs import FlatLogprobs, Logprob
from inlay.output.detokenizer import TextStream
from inlay.prompt.diagnosis import NotedPrompt
from inlay.prompt.request import EngineRequest
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, SetOrder, Usage

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
            if event.error is not None:
                answer.error = answer.error or event.error.exception()
            elif answer.add(event):
                self._finish(event.request_id, event.index)
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
