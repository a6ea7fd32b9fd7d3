"""The interface of a dialect: its routes, and its form of requests, answers and failures. It has no HTTP.

A new dialect is a package beside ``openai`` with such an object, added to DIALECTS. The server creates its routes and
its part of the OpenAPI document from that object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from inlay.api.anthropic import Anthropic
from inlay.api.call import AnswerRoute, Call, Level, StoredAnswer
from inlay.api.embeddings import Embeddings
from inlay.api.failures import Failure
from inlay.api.openai import OpenAI
from inlay.api.reasoning import ModelReasoning
from inlay.api.responses import Responses
from inlay.api.tools.formats import ModelTools
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

    def translate(
        self,
        body: Any,
        *,
        default_max_tokens: int | None = None,
        tools: ModelTools | None = None,
        reasoning: ModelReasoning | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        stored: Mapping[str, StoredAnswer] = MappingProxyType({}),
    ) -> Call:
        """Translate a checked body into a call.

        Args:
            body: the result of ``read``.
            default_max_tokens: for requests without max_tokens.
            tools: the model's format of tool calls; None for a model without tools.
            reasoning: the model's format of reasoning.
            defaults: ``llm.sampling_defaults``, for SamplingParams that the body does not set.
            stored: the caller's stored answers by id, for dialects that continue them.

        Raises:
            BodyError: the body is invalid.
            PMLError: a prompt of a schema cannot be parsed.
        """

    def respond(
        self,
        call: Call,
        outputs: Sequence[RequestOutput],
        *,
        name: str,
        created: int,
        model: str,
        fingerprint: str | None = None,
    ) -> dict[str, Any]:
        """Return the body of a complete response.

        Args:
            call: the request.
            outputs: the finished output of each prompt.
            name: the unique id of the response.
            created: seconds since 1970.
            model: the model's name.
            fingerprint: see ``system_fingerprint``.
        """

    def stream(
        self, call: Call, *, name: str, created: int, model: str, fingerprint: str | None = None
    ) -> AnswerStream:
        """Return the events of a streamed response. For the arguments, see ``respond``."""

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
