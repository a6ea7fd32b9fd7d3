"""Failures of requests in a form that is independent of the dialect. Each dialect writes its own error objects.

It maps the package's errors to failures with an HTTP status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inlay.errors import (
    AbortedError,
    CapacityError,
    ContextError,
    DeadlineError,
    DeviceMemoryError,
    EngineDeadError,
    InlayError,
    ModelError,
    ParameterError,
    PMLError,
    PolicyError,
    Problem,
    QueueFullError,
)
from inlay.wording import clip, printable, shown

MAX_PROBLEMS = 20  # in one error

#: The code of a request with an image or other content that is no text.
NO_TEXT = "unsupported_content"

MAX_NAME = 100  # characters of a client's name in an error
_MESSAGE = 6_000  # characters of one error's message
_QUEUE_RETRY_S = 1.0  # a slot in the queue is free as soon as any request ends

#: The first matching class decides: status, code, seconds until a retry.
_KINDS: tuple[tuple[type[InlayError], int, str | None, float | None], ...] = (
    (ContextError, 400, "context_length_exceeded", None),
    (PMLError, 400, "invalid_prompt", None),
    (ParameterError, 400, "invalid_value", None),
    (ModelError, 400, "invalid_prompt", None),  # of a loaded model: its chat template refuses the turns
    (QueueFullError, 429, "queue_full", _QUEUE_RETRY_S),
    (DeadlineError, 504, "deadline_exceeded", None),
    (AbortedError, 499, "aborted", None),
    (EngineDeadError, 503, "engine_dead", None),
    (DeviceMemoryError, 507, "device_memory_exceeded", None),
    (CapacityError, 400, "kv_memory_exceeded", None),  # a retry never helps, so the request must be smaller
    (InlayError, 500, None, None),
)


class BodyError(ParameterError):
    """A request is refused.

    Args:
        message: the reason and the remedy.
        param: the invalid field. A long name is shortened.
        code: the kind of error.
        status: the HTTP status.
        retry_after_s: seconds until the same request may succeed; None if a retry does not help.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = "invalid_value",
        status: int = 400,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = None if param is None else printable(clip(param, MAX_NAME))
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


def not_an_object(body: Any, example: str) -> BodyError:
    """Return the refusal of a body that is no JSON object.

    Args:
        example: the form of a body.
    """
    if body is None:
        return BodyError(f"the body is missing or null; send a JSON object, like {example}")
    return BodyError(f"the body is {shown(body)}; it must be an object, like {example}")


@contextmanager
def naming_text_model(text_model: str | None) -> Iterator[None]:
    """Run a block. If it refuses content other than text, the error names the text model that is served.

    Args:
        text_model: See ``ModelInfo.text_model``. None: the error stays as it is.
    """
    try:
        yield
    except BodyError as error:
        if error.code != NO_TEXT or text_model is None:
            raise
        reason = f"{error}; {text_model}"
        raise BodyError(reason, param=error.param, code=error.code, status=error.status) from error


class FailureKind(StrEnum):
    """Who caused a failure: the client, its limits, or the server. Derived from the status."""

    INVALID_REQUEST = "invalid_request_error"
    RATE_LIMIT = "rate_limit_error"
    SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure, as the client receives it.

    Args:
        status: the HTTP status.
        message: one sentence on one line.
        param: the invalid field.
        code: the kind of error.
        retry_after_s: seconds until a retry; None if it does not help.
        problems: all problems of a text.
        request_id: of the request, for dialects whose errors name it.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    problems: tuple[Problem, ...] = ()
    request_id: str | None = None

    @property
    def kind(self) -> FailureKind:
        """The side that caused it."""
        if self.status == 429:
            return FailureKind.RATE_LIMIT
        return FailureKind.SERVER if self.status >= 499 else FailureKind.INVALID_REQUEST

    @property
    def name(self) -> str:
        """Its name in logs and metrics: the code, else the kind."""
        return self.code or self.kind.value


#: The answer to a server fault. The details are in the server's log.
INTERNAL_ERROR = Failure(500, "the server failed at this request; its log says why", code="internal_error")


def failure_of(error: InlayError) -> Failure:
    """Return the failure for a request that ended with this error."""
    message = printable("; ".join(clip(str(error), _MESSAGE).splitlines()))
    if isinstance(error, BodyError):
        return Failure(error.status, message, error.param, error.code, error.retry_after_s)
    status, code, retry_after_s = next((s, c, r) for cls, s, c, r in _KINDS if isinstance(error, cls))
    given = None if isinstance(error, ContextError) else vars(error).get("code")  # clients know context_length_exceeded
    param = error.field if isinstance(error, PolicyError) else None
    return Failure(status, message, param, given or code, retry_after_s)
