"""The interface of a dialect: its routes, and its form of requests, answers and failures. It has no HTTP.

A new dialect is a package beside ``openai`` with a class like ``OpenAI``, added to DIALECTS. From this class the server
creates the dialect's routes and its part of the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Unpack

from inlay.api.anthropic import Anthropic
from inlay.api.call import AnswerRoute, Call, Level, Named, OfModel
from inlay.api.embeddings import Embeddings
from inlay.api.failures import Failure
from inlay.api.openai import OpenAI
from inlay.api.responses import Responses
from inlay.types import RequestOutput


class AnswerStream(Protocol):
    """The server-sent events of one response, as text. Each ends with its empty line."""

    def update(self, number: int, output: RequestOutput) -> Iterable[str]:
        """Return the events for new output of the call's prompt with this number."""

    def end(self) -> Iterable[str]:
        """Return the events after the last choice has ended."""

    def fail(self, failure: Failure) -> Iterable[str]:
        """Return the events that end the stream with a failure."""


class Dialect(Protocol):
    """The request, answer and failure format of one API. ``routes`` are its paths for requests."""

    routes: tuple[AnswerRoute, ...]

    def components(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the schemas of its routes, by name, for an OpenAPI document.

        Args:
            names: of the served model.
        """

    def read(self, raw: Any, endpoint: str) -> Any:
        """Check and return the body of a request to this path. Raises BodyError, which names every problem."""

    def translate(self, body: Any, **model: Unpack[OfModel]) -> Call:
        """Translate a body, the result of ``read``, into a call.

        Raises:
            BodyError: the body is invalid.
            PMLError: a prompt of a schema cannot be parsed.
        """

    def respond(self, call: Call, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> dict[str, Any]:
        """Return the body of a complete response. ``outputs`` are the finished outputs of its prompts."""

    def stream(self, call: Call, **named: Unpack[Named]) -> AnswerStream:
        """Return the events of a streamed response."""

    def error_body(self, failure: Failure) -> dict[str, Any]:
        """Return the body of an error response."""

    def limit_headers(self, levels: Sequence[Level]) -> dict[str, str]:
        """Return the headers that tell a tenant the state of its rate limits."""


OPENAI: Dialect = OpenAI()

ANTHROPIC: Dialect = Anthropic()

RESPONSES: Dialect = Responses()

EMBEDDINGS: Dialect = Embeddings()

DIALECTS: tuple[Dialect, ...] = (OPENAI, ANTHROPIC, RESPONSES, EMBEDDINGS)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path; OpenAI's for an unknown path."""
    return next((one for one in DIALECTS if any(route.path == path for route in one.routes)), OPENAI)
