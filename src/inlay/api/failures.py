"""What went wrong with a request, in no API's words: each dialect writes its own error objects of it.

Errors of the rest of the package become failures here, with the status that HTTP has for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
from inlay.wording import clip

MAX_PROBLEMS = 20  # that one error names

MAX_NAME = 100  # characters of a name that came from a client, as errors repeat it
_MESSAGE = 6_000  # of what one error says, whatever it is made of
_QUEUE_RETRY_S = 1.0  # a place in the line is free again as soon as any request ends

#: In this order: the first class that fits decides. status, code, when to try again in seconds.
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
    (CapacityError, 400, "kv_memory_exceeded", None),  # however idle the server is: who asks has to ask for less
    (InlayError, 500, None, None),
)


class BodyError(ParameterError):
    """A request is not answered, and why.

    param: the field that is wrong, shortened where its name is long. code: the kind of mistake. status: that of HTTP.
    retry_after_s: when to send the same request again, where that may help.
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
        self.param = None if param is None else clip(param, MAX_NAME)
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


class FailureKind(StrEnum):
    """Whose fault a failure is, by its status."""

    INVALID_REQUEST = "invalid_request_error"
    RATE_LIMIT = "rate_limit_error"
    SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """What the sender of a request is told instead of an answer.

    status: that of HTTP. message: one sentence, on one line. param: the field that is wrong. code: the kind of mistake.
    retry_after_s: when to try again, in seconds; None where that won't help. problems: all that is wrong with a text.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def kind(self) -> FailureKind:
        """Whose fault it is."""
        if self.status == 429:
            return FailureKind.RATE_LIMIT
        return FailureKind.SERVER if self.status >= 499 else FailureKind.INVALID_REQUEST

    @property
    def name(self) -> str:
        """What logs and metrics call it: its code, else its kind."""
        return self.code or self.kind.value


#: What is said of a fault of the server's own; its log says more.
INTERNAL_ERROR = Failure(500, "the server failed at this; its log says why", code="internal_error")


def failure_of(error: InlayError) -> Failure:
    """What to tell the sender of a request that ended so."""
    message = "; ".join(clip(str(error), _MESSAGE).splitlines())
    if isinstance(error, BodyError):
        return Failure(error.status, message, error.param, error.code, error.retry_after_s)
    status, code, retry_after_s = next((s, c, r) for cls, s, c, r in _KINDS if isinstance(error, cls))
    given = None if isinstance(error, ContextError) else vars(error).get("code")  # clients know context_length_exceeded
    param = error.field if isinstance(error, PolicyError) else None
    return Failure(status, message, param, given or code, retry_after_s)
