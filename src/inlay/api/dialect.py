"""What one API puts around the neutral call: its paths, and how it writes requests, answers and failures. No HTTP.

A new dialect is a package beside ``openai`` with an object of this kind, and one more in DIALECTS; the server makes its
routes and its part of the OpenAPI document of what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from inlay.api.call import AnswerRoute, Call
from inlay.api.failures import Failure
from inlay.api.openai import OpenAI
from inlay.api.reasoning import ModelReasoning
from inlay.api.tools.formats import ModelTools
from inlay.types import RequestOutput


class AnswerStream(Protocol):
    """The server-sent events of one response, as text; each ends with its empty line."""

    def update(self, number: int, output: RequestOutput) -> Iterable[str]:
        """The events that say what is new in the answers to the call's prompt of this number."""

    def end(self) -> Iterable[str]:
        """The events behind the last choice's last one."""

    def fail(self, failure: Failure) -> Iterable[str]:
        """The events that end the stream before its time."""


class Dialect(Protocol):
    """One API's way to write requests, answers and failures. routes: where its requests for answers are sent."""

    routes: tuple[AnswerRoute, ...]

    def components(self, names: Sequence[str]) -> dict[str, Any]:
        """The schemas that its routes name, by name, as an OpenAPI document has them. names: of the served model."""

    def read(self, raw: Any, endpoint: str) -> Any:
        """The checked body of a request. endpoint: its path. Raises BodyError, which names every problem."""

    def translate(
        self,
        body: Any,
        *,
        default_max_tokens: int | None = None,
        tools: ModelTools | None = None,
        reasoning: ModelReasoning | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> Call:
        """A checked body as a call. Raises BodyError, and PMLError for a prompt of a schema that cannot be read.

        default_max_tokens: for requests that don't say. tools, reasoning: what the model does with these.
        defaults: ``llm.sampling_defaults``, for fields of SamplingParams that the body does not say.
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
        """The body of a whole response.

        outputs: one for each of the call's prompts, finished. name: what tells this response from others.
        created: seconds since 1970. model: what it is called. fingerprint: see ``system_fingerprint``.
        """

    def stream(
        self, call: Call, *, name: str, created: int, model: str, fingerprint: str | None = None
    ) -> AnswerStream:
        """The events of a streamed response; for the arguments, see ``respond``."""

    def error_body(self, failure: Failure) -> dict[str, Any]:
        """The body of a response that says what went wrong."""


OPENAI: Dialect = OpenAI()

DIALECTS: tuple[Dialect, ...] = (OPENAI,)


def dialect_of(path: str) -> Dialect:
    """The dialect of a path; OpenAI's where no dialect has such a route."""
    return next((one for one in DIALECTS if any(route.path == path for route in one.routes)), OPENAI)
