"""The events of an engine: new tokens, and the ends of answers.

Events are plain data with a versioned byte format, because the listener may be in another process. The engine has no
tokenizer; text is made above it (output.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from inlay import errors
from inlay.diagnostics import SpanRead
from inlay.logprobs import FlatLogprobs, Logprob, RankedLogprob
from inlay.types import RequestMetrics, Usage

_VERSION = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """The failure of a request, as data.

    Args:
        kind, message: of the exception.
        cause: the exception itself, if it was raised in this process.
        code: the code of the mistake, if the exception was given one.
    """

    kind: str
    message: str
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    code: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        return cls(type(error).__name__, str(error), error, vars(error).get("code"))

    def exception(self) -> BaseException:
        """Return the exception for callers that wait for the request."""
        if self.cause is not None:
            return self.cause
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.InlayError) and kind is not errors.PMLError:
            return kind(self.message, code=self.code)
        return RuntimeError(self.message if self.kind == "RuntimeError" else f"{self.kind}: {self.message}")


@dataclass(slots=True)
class TokenEvent:
    """The news of one answer.

    Args:
        request_id, index: the request, and the number of its answer.
        token_ids: the new tokens.
        start: the number of tokens before them.
        logprobs: if requested, a list for each new token: the token first, then the most probable others.
        distributions: for forced tokens, natural log-probabilities of each new one, (vocabulary,), as bytes of
            little-endian fp32.
        finish_reason, stop_reason: set at the end of the answer.
        error: the failure of the request.
        elapsed_s: seconds from the request's arrival to these tokens.
        drafted, accepted: the number of draft tokens that were run for the answer so far, and of those it accepted.
        prompt_logprobs: if requested, for each token of the prompt as in ``logprobs``. None for the first one.
        embedding: if requested, the embedding of the prompt, as bytes of little-endian fp32.
        usage, metrics: of the request, if changed. ``metrics.total_s`` is set by the receiver.
        reads: with these, the sources of the prompt's tokens, if requested.
        orders: with these, the order of the members in the prompt's free sets. See EngineRequest.ordered.
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
    drafted: int = 0
    accepted: int = 0
    prompt_logprobs: FlatLogprobs[dict[int, Logprob] | None] | None = None
    embedding: bytes | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    orders: Sequence[Sequence[int]] = ()
    reads: Sequence[SpanRead] = ()


@dataclass(slots=True)
class EncodeEvent:
    """The progress of an encoding.

    Args:
        done: tokens that are computed or were stored.
        total: all tokens.
        finished: True at the end.
        error: the failure of the encoding.
    """

    request_id: str
    done: int
    total: int
    finished: bool = False
    error: Fault | None = None


Event = TokenEvent | EncodeEvent


def events_to_bytes(events: Sequence[Event]) -> bytes:
    """Write events as UTF-8 JSON for ``events_from_bytes``."""
    document = {"version": _VERSION, "events": [_written(event) for event in events]}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def events_from_bytes(data: bytes) -> list[Event]:
    """Read the output of ``events_to_bytes``. Raises InlayError for anything else."""
    try:
        document = json.loads(data.decode("utf-8", "surrogatepass"))
        if document["version"] != _VERSION:
            raise errors.InlayError(
                f"the events have version {document['version']!r:.40}, and this inlay reads version {_VERSION}; run "
                "the same version of inlay on both sides",
                code="cluster.other_version",
            )
        return [_read(written) for written in document["events"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise errors.InlayError(
            f"events of the engine are damaged ({type(error).__name__}: {error}); send the request again",
            code="cluster.damaged_events",
        ) from error


def _written(event: Event) -> dict[str, Any]:
    written: dict[str, Any] = {
        name: value for name in event.__slots__ if (value := getattr(event, name)) is not None and value != ()
    }
    written["type"] = "encode" if isinstance(event, EncodeEvent) else "token"
    if event.error is not None:
        written["error"] = {"kind": event.error.kind, "message": event.error.message, "code": event.error.code}
    if isinstance(event, TokenEvent):
        if event.distributions:
            written["distributions"] = [base64.b64encode(row).decode() for row in event.distributions]
        if event.embedding is not None:
            written["embedding"] = base64.b64encode(event.embedding).decode()
        if event.prompt_logprobs is not None:
            written["prompt_logprobs"] = list(event.prompt_logprobs.ranked())
        if event.reads:
            written["reads"] = [asdict(read) for read in event.reads]
        for name in ("usage", "metrics"):
            if name in written:
                written[name] = asdict(written[name])
    return written


def _read(written: Mapping[str, Any]) -> Event:
    fields = dict(written)
    kind = fields.pop("type")
    if "error" in fields:
        fields["error"] = Fault(**fields["error"])
    if kind == "encode":
        return EncodeEvent(**fields)
    if "distributions" in fields:
        fields["distributions"] = [base64.b64decode(row) for row in fields["distributions"]]
    if "logprobs" in fields:
        fields["logprobs"] = [[(token, value, rank) for token, value, rank in one] for one in fields["logprobs"]]
    if "embedding" in fields:
        fields["embedding"] = base64.b64decode(fields["embedding"])
    if "prompt_logprobs" in fields:
        fields["prompt_logprobs"] = FlatLogprobs(fields["prompt_logprobs"])
    if "usage" in fields:
        misses = tuple((reason, tokens) for reason, tokens in fields["usage"]["misses"])
        fields["usage"] = Usage(**{**fields["usage"], "misses": misses})
    if "reads" in fields:
        fields["reads"] = [SpanRead(**{**read, "recomputed": tuple(read["recomputed"])}) for read in fields["reads"]]
    if "metrics" in fields:
        fields["metrics"] = RequestMetrics(**fields["metrics"])
    return TokenEvent(**fields)
