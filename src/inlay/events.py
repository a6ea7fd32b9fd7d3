"""What an engine tells of the requests that it answers: tokens as they come, and the ends of answers.

Plain data, with a versioned form in bytes: whoever listens may be in another process. Text is made of it above the
engine, which has no tokenizer (output/).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from inlay import errors
from inlay.logprobs import FlatLogprobs, Logprob, RankedLogprob
from inlay.types import RequestMetrics, Usage

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended a request before its time, as data.

    kind, message: of the exception. cause: the exception itself, where it was raised in this process.
    """

    kind: str
    message: str
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        return cls(type(error).__name__, str(error), error)

    def exception(self) -> BaseException:
        """What is raised to those who wait for the request."""
        if self.cause is not None:
            return self.cause
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.InlayError) and kind is not errors.PMLError:
            return kind(self.message)
        return RuntimeError(self.message if self.kind == "RuntimeError" else f"{self.kind}: {self.message}")


@dataclass(slots=True)
class TokenEvent:
    """What is new of one answer.

    request_id, index: of which request, and which of its answers.
    token_ids: the new tokens. start: how many the answer had before them.
    logprobs: where they were asked for, for each new token: itself first, then the most probable others.
    distributions: where tokens are forced, for each new one: natural log-probabilities, (vocabulary,), as bytes of
        little-endian fp32.
    finish_reason, stop_reason: where the answer has ended. error: what ended it before its time.
    elapsed_s: from the request's arrival to the last of this.
    prompt_logprobs: where they were asked for, of each token of the prompt as in ``logprobs``; None for the first one.
    usage, metrics: of the request, where they have changed; ``metrics.total_s`` is left to those who know its end.
    orders: with these, in which order the members of the prompt's free sets stand; see EngineRequest.ordered.
    """

    request_id: str
    index: int
    token_ids: Sequence[int] = ()
    start: int = 0
    logprobs: Sequence[Sequence[RankedLogprob]] = ()
    distributions: Sequence[bytes] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | None = None
    error: Fault | None = None
    elapsed_s: float = 0.0
    prompt_logprobs: FlatLogprobs[dict[int, Logprob] | None] | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    orders: Sequence[Sequence[int]] = ()


@dataclass(slots=True)
class EncodeEvent:
    """How far an encoding is.

    done, total: how many of its tokens are computed or were stored, and how many there are.
    finished: whether that was all of it, or it has ended. error: what ended it before its time.
    """

    request_id: str
    done: int
    total: int
    finished: bool = False
    error: Fault | None = None


Event = TokenEvent | EncodeEvent


def events_to_bytes(events: Sequence[Event]) -> bytes:
    """JSON, in UTF-8, that ``events_from_bytes`` reads."""
    document = {"version": _VERSION, "events": [_written(event) for event in events]}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def events_from_bytes(data: bytes) -> list[Event]:
    """Read what ``events_to_bytes`` wrote. Raises InlayError for what it did not write."""
    try:
        document = json.loads(data.decode("utf-8", "surrogatepass"))
        if document["version"] != _VERSION:
            raise errors.InlayError(
                f"the events are of version {document['version']!r:.40} and this reads version {_VERSION}"
            )
        return [_read(written) for written in document["events"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise errors.InlayError(f"events of the engine are damaged ({type(error).__name__}: {error})") from error


def _written(event: Event) -> dict[str, Any]:
    written: dict[str, Any] = {
        name: value for name in event.__slots__ if (value := getattr(event, name)) is not None and value != ()
    }
    written["type"] = "encode" if isinstance(event, EncodeEvent) else "token"
    if event.error is not None:
        written["error"] = [event.error.kind, event.error.message]
    if isinstance(event, TokenEvent):
        if event.distributions:
            written["distributions"] = [base64.b64encode(row).decode() for row in event.distributions]
        if event.prompt_logprobs is not None:
            written["prompt_logprobs"] = list(event.prompt_logprobs.ranked())
        for name in ("usage", "metrics"):
            if name in written:
                written[name] = asdict(written[name])
    return written


def _read(written: Mapping[str, Any]) -> Event:
    fields = dict(written)
    kind = fields.pop("type")
    if "error" in fields:
        fields["error"] = Fault(*fields["error"])
    if kind == "encode":
        return EncodeEvent(**fields)
    if "distributions" in fields:
        fields["distributions"] = [base64.b64decode(row) for row in fields["distributions"]]
    if "logprobs" in fields:
        fields["logprobs"] = [[(token, value, rank) for token, value, rank in one] for one in fields["logprobs"]]
    if "prompt_logprobs" in fields:
        fields["prompt_logprobs"] = FlatLogprobs(fields["prompt_logprobs"])
    if "usage" in fields:
        misses = tuple((reason, tokens) for reason, tokens in fields["usage"]["misses"])
        fields["usage"] = Usage(**{**fields["usage"], "misses": misses})
    if "metrics" in fields:
        fields["metrics"] = RequestMetrics(**fields["metrics"])
    return TokenEvent(**fields)
