"""Embeddings in OpenAI's form, and reranking in Cohere's and Jina's, without HTTP."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator
from pydantic.json_schema import models_json_schema

from inlay.api.call import AnswerRoute, Call, Named, OfModel
from inlay.api.failures import BodyError
from inlay.api.foreign import IGNORED
from inlay.api.openai.respond import error_body, limit_headers
from inlay.api.pieces import inlay_of
from inlay.api.reading import (
    INTEGER,
    STRING,
    SWITCH,
    WHOLE,
    BodyRules,
    PartForms,
    RequestForm,
    StrictForm,
    all_are,
    all_of,
    of_object,
    read_fields,
)
from inlay.api.reading import TEXT as A_TEXT
from inlay.prompt.inputs import PromptInput
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput
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
    """The fields that requests for embeddings and for reranking share."""

    pooling: Literal["last", "mean"] | None = Field(None, description=_POOLING)
    truncate_prompt_tokens: int | None = Field(None, description=f"{WHOLE} of at least 1", ge=1)
    priority: int | None = Field(None, description=f"{WHOLE} of 32 bits; lower goes first", ge=-(2**31), lt=2**31)


class EmbeddingsBody(PooledBody):
    """The body of /v1/embeddings. ``normalize`` is inlay's own: false returns the hidden states as they are."""

    example: ClassVar[str] = '{"input": "…"}'

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
    example: ClassVar[str] = '{"query": "…", "documents": […]}'

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


Vectors = npt.NDArray[np.float32]  # (prompts, dimensions)


def translate(body: PooledBody, **model: Unpack[OfModel]) -> Call:
    """Translate a body into a call without answers, whose prompts are the texts. A query is the first prompt.

    See ``Dialect.translate``. Raises BodyError.
    """
    prompts, repeated = _of_embeddings(body) if isinstance(body, EmbeddingsBody) else _of_ranking(body)
    return Call(
        endpoint=Endpoint.EMBEDDINGS if isinstance(body, EmbeddingsBody) else Endpoint.RERANK,
        model=body.model,
        prompts=prompts,
        params=SamplingParams(
            max_tokens=0, pooling=body.pooling or "last", truncate_prompt_tokens=body.truncate_prompt_tokens
        ),
        said_max_tokens=True,
        priority=body.priority or 0,
        ignored=body.ignored,
        repeated=repeated,
    )


def _of_embeddings(body: EmbeddingsBody) -> tuple[tuple[PromptInput, ...], dict[str, Any]]:
    given: Any = body.input
    one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = tuple([given] if one else given)
    if not prompts or not all(map(len, prompts)):
        raise BodyError("input is empty, or holds an empty text; give at least one token each", param="input")
    return prompts, {
        "encoding_format": body.encoding_format or "float",
        "dimensions": body.dimensions,
        "normalize": body.normalize is not False,
        "pooling": body.pooling,
    }


def _of_ranking(body: PooledBody) -> tuple[tuple[PromptInput, ...], dict[str, Any]]:
    assert isinstance(body, RerankBody), "there is no other body"
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    for field, given in (("query", [body.query]), ("documents", texts)):
        if not given or not all(given):
            raise BodyError(f"{field} is empty, or holds an empty text; give at least one token each", param=field)
    return (body.query, *texts), {
        "top_n": body.top_n,
        "return_documents": bool(body.return_documents),
        "pooling": body.pooling,
    }


def respond(call: Call, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> dict[str, Any]:
    """Return the body of the response. See ``Dialect.respond``. Raises BodyError for too many dimensions."""
    vectors = np.array([output.embedding for output in outputs], dtype=np.float32)
    tokens = sum(output.usage.prompt_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    usage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if call.endpoint == Endpoint.RERANK:
        return {
            "id": f"rerank-{named['name']}",
            "model": named["model"],
            "results": _ranked(call, normalized(vectors)),
            "usage": usage,
            "meta": {"tokens": {"input_tokens": tokens, "output_tokens": 0}},
            "inlay": inlay_of(outputs),
        }
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(_written(call, vectors))
        ],
        "model": named["model"],
        "usage": usage,
        "inlay": inlay_of(outputs),
    }


def stream(call: Call, **named: Unpack[Named]) -> NoReturn:
    """Embeddings are not streamed: bodies refuse the field."""
    raise AssertionError("no request of this dialect is streamed")


def normalized(vectors: Vectors) -> Vectors:
    """Return vectors of length 1. A vector of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
    return scaled


def _written(call: Call, vectors: Vectors) -> list[Any]:
    """Return embeddings in the requested form. Fewer dimensions are the first ones, normalized again."""
    wanted = call.repeated["dimensions"]
    if wanted is not None and wanted > vectors.shape[1]:
        message = f"dimensions is {wanted:,}, and this model has {vectors.shape[1]:,}; ask for at most that many"
        raise BodyError(message, param="dimensions")
    vectors = vectors[:, :wanted]
    if call.repeated["normalize"]:
        vectors = normalized(vectors)
    if call.repeated["encoding_format"] == "base64":
        return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    written: list[Any] = vectors.tolist()
    return written


def _ranked(call: Call, vectors: Vectors) -> list[dict[str, Any]]:
    """Return documents by the cosine of the angle to the query, the highest first. Equal ones keep their order."""
    scores = vectors[1:] @ vectors[0]
    order = np.argsort(-scores, kind="stable")[: call.repeated["top_n"]].tolist()
    made = []
    for index in order:
        document = {"document": {"text": call.prompts[1 + index]}} if call.repeated["return_documents"] else {}
        made.append({"index": index, "relevance_score": float(scores[index]), **document})
    return made


__all__ = ["Embeddings", "Endpoint", "is_embedding"]


def is_embedding(call: Call) -> bool:
    """True if a call asks for embeddings, or for a ranking by them."""
    return call.params.pooling is not None


class Embeddings:
    """The dialect of embeddings: see ``inlay.api.dialect.Dialect``. Its errors are OpenAI's."""

    routes: tuple[AnswerRoute, ...] = ROUTES
    components = staticmethod(components)
    read = staticmethod(read_body)
    translate = staticmethod(translate)
    respond = staticmethod(respond)
    stream = staticmethod(stream)
    error_body = staticmethod(error_body)
    limit_headers = staticmethod(limit_headers)
