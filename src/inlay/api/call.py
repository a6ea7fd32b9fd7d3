"""A request for answers in a form that is independent of the dialect, and the routes that take such requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from inlay.api.reasoning import ModelReasoning, ReasoningUse
from inlay.api.tools import ToolUse
from inlay.api.tools.formats import ModelTools
from inlay.prompt.inputs import PromptInput
from inlay.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class AnswerRoute:
    """A path that takes requests for answers, with its description for the OpenAPI document.

    Args:
        path: the path to POST to.
        name: the name of the operation, like a function's name.
        summary: one sentence that describes it.
        body: the dialect's component for the request body.
        error: the dialect's component for an error.
        answer: the JSON Schema of a complete answer.
    """

    path: str
    name: str
    summary: str
    body: str
    error: str
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Level:
    """The state of one rate limit of a tenant, for the headers of answers.

    Args:
        name: "requests" or "tokens".
        limit: the most in a minute.
        remaining: the rest now.
        full_in_s: seconds until the limit is whole again.
    """

    name: str
    limit: int
    remaining: int
    full_in_s: float


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer that a server keeps for its tenant.

    Args:
        document: the answer, as its dialect wrote it.
        input: the input of its request in the dialect's form, with the stored answers that it continues.
    """

    document: Mapping[str, Any]
    input: tuple[Mapping[str, Any], ...]


class OfModel(TypedDict, total=False):
    """What a dialect needs to know to translate a body.

    Attributes:
        default_max_tokens: for requests without max_tokens. None for the dialect's own default.
        tools: the model's format of tool calls (``model_tools``); None for a model without tools.
        reasoning: the model's format of reasoning (``model_reasoning``).
        defaults: ``llm.sampling_defaults``, for SamplingParams that the body does not set.
        stored: the caller's stored answers by id, for dialects that continue them.
    """

    default_max_tokens: int | None
    tools: ModelTools | None
    reasoning: ModelReasoning | None
    defaults: Mapping[str, Any]
    stored: Mapping[str, StoredAnswer]


class Named(TypedDict):
    """The fields that identify a response.

    Attributes:
        name: unique to the response; a part of its id and of the ids of its tool calls.
        created: seconds since 1970.
        model: the model's name.
        fingerprint: see ``system_fingerprint``.
    """

    name: str
    created: int
    model: str
    fingerprint: NotRequired[str | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One request for answers.

    Args:
        endpoint: the path of the request, which decides the form of the answer.
        model: the requested model, or None.
        prompts: as ``LLM.generate`` takes them. Only completions may have several. Each gets ``params.n`` answers.
        params: the sampling parameters; ``seed`` is None if the request has none.
        said_max_tokens: the request sets the most tokens of an answer.
        reuse: the reuse policy; None for the default.
        positions: the positions of modules; None for the engine's default.
        priority: lower values run first if not all requests can run.
        stream: send the answer in pieces.
        include_usage: send the usage at the end of the stream.
        running_usage: send the usage so far with every piece.
        tools: the use of tools in its answers; None for no tools.
        echo: answers start with their prompt.
        scores: the number of alternatives to return for every prompt token; None for no scores.
        reasoning: the form of reasoning in its answers; None for no reasoning.
        keep_marked_alone: text after the last marked part is neither stored nor looked up in the cache.
        structure_field: the field that constrains the form of the answer.
        ignored: the ignored fields of the request, which the response names.
        diagnostics: the answer says why prompt tokens were computed.
        order: "any" if neighboring modules may change places; None to keep the order.
        store: the input to keep with its answer; None if the answer is not kept.
        repeated: fields of the request that its dialect needs for the answer.
    """

    endpoint: str
    model: str | None
    prompts: tuple[PromptInput, ...]
    params: SamplingParams
    said_max_tokens: bool
    reuse: str | None = None
    positions: str | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    tools: ToolUse | None = None
    echo: bool = False
    scores: int | None = None
    reasoning: ReasoningUse | None = None
    keep_marked_alone: bool = False
    structure_field: str = "structured_outputs"
    ignored: tuple[str, ...] = ()
    order: str | None = None
    diagnostics: bool = False
    store: tuple[Mapping[str, Any], ...] | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def harmony(self) -> bool:
        """True if its answers are in OpenAI's harmony format."""
        tools = self.tools is not None and self.tools.model.format.harmony
        return tools or (self.reasoning is not None and self.reasoning.format.harmony)

    @property
    def answers(self) -> int:
        """The number of answers: every prompt gets ``params.n``."""
        return len(self.prompts) * self.params.n


def system_fingerprint(fingerprint: bytes) -> str:
    """Return OpenAI's system fingerprint, which identifies the weights of an answer and their format.

    Args:
        fingerprint: from ``LoadedModel.fingerprint``.
    """
    return f"fp_{fingerprint.hex()[:10]}"
