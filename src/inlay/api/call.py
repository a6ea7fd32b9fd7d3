"""Requests for answers, whichever dialect they come in: where they are sent, and one as a model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inlay.api.reasoning import ReasoningUse
from inlay.api.tools import ToolUse
from inlay.prompt.inputs import PromptInput
from inlay.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class AnswerRoute:
    """A path that takes requests for answers, and what the OpenAPI document says of it.

    Arguments:
        path: where they are POSTed.
        name: of the operation, in words of a function's name. summary: what it does, in a sentence.
        body, error: the names of two of the dialect's ``components``: of a request, and of what went wrong.
        answer: the JSON Schema of a whole answer.
    """

    path: str
    name: str
    summary: str
    body: str
    error: str
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One request for answers.

    Arguments:
        endpoint: the path that it was sent to; the answer has that path's form.
        model: the model that it asks for, or None.
        prompts: as ``LLM.generate`` takes them; one, but for completions of several. Each gets ``params.n`` answers.
        params: how tokens are chosen; ``seed`` is None where the request brings none.
        said_max_tokens: whether the request says how many tokens an answer may have.
        reuse, positions: its policy; None for the engine's defaults. order: "any" where modules that are neighbours may
            change places; None for the order of the prompts.
        priority: who goes first where not all can run; a lower one does.
        stream: whether the answer is wanted piece by piece. include_usage: whether its end is to tell the usage;
            running_usage: and every piece what it is so far.
        tools: how its answers call tools; None where they cannot.
        echo: whether answers begin with their prompt. scores: how many alternatives to tell for every token of the
            prompt; None for nothing.
        reasoning: how its answers reason; None where they do not.
        keep_marked_alone: whether what stands behind the last marked part is neither kept for others nor found.
        structure_field: the field that says which form the answer has.
        ignored: the fields that the request has and that mean nothing here; the sender is told of them.
    """

    endpoint: str
    model: str | None
    prompts: tuple[PromptInput, ...]
    params: SamplingParams
    said_max_tokens: bool
    reuse: str | None
    positions: str | None
    priority: int
    stream: bool
    include_usage: bool
    running_usage: bool
    tools: ToolUse | None
    echo: bool = False
    scores: int | None = None
    reasoning: ReasoningUse | None = None
    keep_marked_alone: bool = False
    structure_field: str = "structured_outputs"
    ignored: tuple[str, ...] = ()
    order: str | None = None

    @property
    def answers(self) -> int:
        """How many answers it asks for: every prompt gets ``params.n``."""
        return len(self.prompts) * self.params.n


def system_fingerprint(fingerprint: bytes) -> str:
    """What answers call the weights that they came from, and how these are kept.

    fingerprint: ``LoadedModel.fingerprint``.
    """
    return f"fp_{fingerprint.hex()[:10]}"
