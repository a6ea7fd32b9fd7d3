"""Errors in the form in which OpenAI sends them, with the status that HTTP has for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from inlay.errors import (
    AbortedError,
    CapacityError,
    ContextError,
    DeadlineError,
    InlayError,
    ModelError,
    ParameterError,
    PMLError,
    QueueFullError,
)

_REQUEST = "invalid_request_error"
_SERVER = "server_error"

#: In this order: the first class that fits decides. status, type, code.
_KINDS: tuple[tuple[type[InlayError], int, str, str | None], ...] = (
    (ContextError, 400, _REQUEST, "context_length_exceeded"),
    (PMLError, 400, _REQUEST, "invalid_prompt"),
    (ParameterError, 400, _REQUEST, "invalid_value"),
    (ModelError, 400, _REQUEST, "invalid_prompt"),  # of a loaded model: its chat template refuses the turns
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (DeadlineError, 504, _SERVER, "deadline_exceeded"),
    (AbortedError, 499, _SERVER, "aborted"),
    (CapacityError, 507, _SERVER, "kv_memory_exceeded"),
    (InlayError, 500, _SERVER, None),
)


class BodyError(ParameterError):
    """A request's body is wrong. ``param`` is the field, ``code`` the kind of mistake, ``status`` that of HTTP."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as OpenAI describes one."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """The body of the response: ``{"error": {"message", "type", "param", "code"}}``."""
        error = asdict(self)
        del error["status"]
        return {"error": error}


def failure_of(error: InlayError) -> Failure:
    """What to tell the sender of a request that ended so."""
    status, kind, code = next((s, k, c) for cls, s, k, c in _KINDS if isinstance(error, cls))
    if isinstance(error, BodyError):
        return Failure(error.status, str(error), kind, error.param, error.code)
    return Failure(status, "; ".join(str(error).splitlines()), kind, None, code)
