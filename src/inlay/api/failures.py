"""Errors in the form in which OpenAI sends them, with the status that HTTP has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inlay.errors import (
    AbortedError,
    CapacityError,
    ContextError,
    DeadlineError,
    EngineDeadError,
    InlayError,
    ModelError,
    ParameterError,
    PMLError,
    QueueFullError,
)

MAX_PROBLEMS = 20  # that one error names

_NAME = 100  # characters of a name that came from a client
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
    (CapacityError, 507, "kv_memory_exceeded", None),
    (InlayError, 500, None, None),
)


def cut(text: str, most: int = _NAME) -> str:
    """A text as errors repeat it: not longer than so many characters."""
    return text if len(text) <= most else f"{text[:most]}…"


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
        self.param = None if param is None else cut(param)
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as OpenAI describes one. retry_after_s: when to try again, in seconds; None where that won't help."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        """The body of the response: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def failure_of(error: InlayError) -> Failure:
    """What to tell the sender of a request that ended so."""
    if isinstance(error, BodyError):
        return Failure(error.status, _said(error), _kind(error.status), error.param, error.code, error.retry_after_s)
    status, code, retry_after_s = next((s, c, r) for cls, s, c, r in _KINDS if isinstance(error, cls))
    return Failure(status, _said(error), _kind(status), None, code, retry_after_s)


def _said(error: InlayError) -> str:
    """What an error says, on one line."""
    return "; ".join(cut(str(error), _MESSAGE).splitlines())


def _kind(status: int) -> str:
    """OpenAI's ``type`` of an error."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 499 else "invalid_request_error"
