"""Requests for embeddings and for reranking: their fields, their rules, and their description."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic.json_schema import models_json_schema

from inlay.api.call import AnswerRoute
from inlay.api.describing import INTEGER, STRING, of_object
from inlay.api.failures import BodyError
from inlay.api.foreign import IGNORED
from inlay.api.forms import SWITCH, WHOLE, PartForms, RequestForm, StrictForm
from inlay.api.forms import TEXT as A_TEXT
from inlay.api.reading import BodyRules, all_of, read_fields
from inlay.api.values import all_of as all_are
from inlay.wording import shown

MAX_INPUTS = 1_024  # as many as the queue of a server holds by default
MAX_DIMENSIONS = 65_536
_POOLING = '"last" or "mean"'


class Endpoint(StrEnum):
    """The paths of the API. Cohere's newer client sends to the last one."""

    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"


def _inputs(value: Any) -> Any:
    """Return a text, token ids, or a list of either. Raises ValueError for any other value."""
    if isinstance(value, str) or (isinstance(value, list) and (all_are(str, value) or all_are(int, value))):
        return value
    if isinstance(value, list) and all_are(list, value) and all(all_are(int, ids) for ids in value):
        return value
    raise ValueError("no input")


_Inputs = str | list[str] | list[int] | list[list[int]]


class PooledBody(RequestForm):
    """The fields of both kinds of requests."""

    pooling: Literal["last", "mean"] | None = Field(None, description=_POOLING)
    truncate_prompt_tokens: int | None = Field(None, description=f"{WHOLE} of at least 1", ge=1)
    priority: int | None = Field(None, description=f"{WHOLE} of 32 bits; lower goes first", ge=-(2**31), lt=2**31)


class EmbeddingsBody(PooledBody):
    """The body of /v1/embeddings. ``normalize`` is inlay's own: false returns the hidden states as they are."""

    input: Annotated[_Inputs, PlainValidator(_inputs, json_schema_input_type=_Inputs)] = Field(
        description=f"a text, token ids, or a list of at most {MAX_INPUTS:,} of either"
    )
    encoding_format: Literal["float", "base64"] | None = Field(None, description='"float" or "base64"')
    dimensions: int | None = Field(None, description=f"{WHOLE} of at least 1", ge=1, le=MAX_DIMENSIONS)
    normalize: bool | None = Field(None, description=SWITCH)


class RankedDocument(StrictForm):
    """A document to rank."""

    text: str = Field(description=A_TEXT)


class RerankBody(PooledBody):
    """The body of /v1/rerank and /v2/rerank."""

    inside: ClassVar[PartForms] = {}

    query: str = Field(description=A_TEXT)
    documents: Annotated[list[str | RankedDocument], Field(fail_fast=True, max_length=MAX_INPUTS)] = Field(
        description=f'a list of at most {MAX_INPUTS:,} texts, or objects {{"text": "…"}}'
    )
    top_n: int | None = Field(None, description=f"{WHOLE} of at least 1", ge=1)
    return_documents: bool | None = Field(None, description=SWITCH)


RULES = BodyRules(
    forms={
        Endpoint.EMBEDDINGS: EmbeddingsBody,
        Endpoint.RERANK: RerankBody,
        Endpoint.RERANK_V2: RerankBody,
    },
    no_effect=("user", "metadata"),
    ignored=IGNORED,
    unsupported={
        "embedding_types": ((["float"],), 'write "encoding_format"'),
        "input_type": ((), "the model reads every text alike; leave it out"),
        "max_chunks_per_doc": ((), "a document is read whole; leave it out"),
        "max_tokens_per_doc": ((), "write truncate_prompt_tokens"),
        "rank_fields": ((), 'documents are texts, or {"text": "…"}; leave it out'),
        "stream": ((False,), "the answer comes whole; leave it out"),
        "task": ((), "the model reads every text alike; leave it out"),
    },
    longest={"documents": MAX_INPUTS},
    largest={},
    members={},
    kinds={},
)


def read_body(raw: Any, endpoint: str) -> PooledBody:
    """Check a request and return its body. Raises BodyError, which names its problems."""
    given = raw.get("input") if isinstance(raw, dict) else None
    if isinstance(given, list) and len(given) > MAX_INPUTS and not isinstance(given[0], int):
        raise BodyError(f"input is {shown(given)}; one request takes at most {MAX_INPUTS:,} inputs", param="input")
    body, problems = read_fields(raw, endpoint, RULES)
    if problems or body is None:
        raise all_of(problems)
    assert isinstance(body, PooledBody), "the rules have no other form"
    return body


_NUMBERS = {"type": "array", "items": {"type": "number"}}
_EMBEDDING = of_object(
    object=STRING, index=INTEGER, embedding={"anyOf": [_NUMBERS, {"type": "string", "description": "base64 of fp32"}]}
)
_LIST = of_object(
    object=STRING,
    data={"type": "array", "items": _EMBEDDING},
    model=STRING,
    usage=of_object(prompt_tokens=INTEGER, total_tokens=INTEGER),
)
_RANKED = of_object(
    id=STRING,
    model=STRING,
    results={"type": "array", "items": of_object(index=INTEGER, relevance_score={"type": "number"})},
    usage=of_object(prompt_tokens=INTEGER, total_tokens=INTEGER),
)
ROUTES = (
    AnswerRoute(
        Endpoint.EMBEDDINGS, "embeddings", "Embeddings of texts, in OpenAI's form.", "EmbeddingsBody", "Error", _LIST
    ),
    AnswerRoute(
        Endpoint.RERANK, "rerank", "Documents in the order of their relevance.", "RerankBody", "Error", _RANKED
    ),
    AnswerRoute(
        Endpoint.RERANK_V2, "rerank_v2", "Documents in the order of their relevance.", "RerankBody", "Error", _RANKED
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of its bodies. See ``Dialect.components``."""
    forms = (EmbeddingsBody, RerankBody)
    _, made = models_json_schema([(form, "validation") for form in forms], ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = made["$defs"]
    for form in forms:
        fields = schemas[form.__name__]["properties"]
        fields["model"]["anyOf"] = [{"enum": list(names)}, {"type": "null"}]
        fields.update({name: {"description": "Accepted, and without effect."} for name in RULES.no_effect})
        fields.update({name: {"description": f"Of {known}; ignored."} for name, known in IGNORED.items()})
    return schemas
