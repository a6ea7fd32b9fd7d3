"""Makes calls of requests for embeddings, and writes their responses."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from inlay.api.call import Call, StoredAnswer
from inlay.api.embeddings.bodies import EmbeddingsBody, Endpoint, PooledBody, RerankBody
from inlay.api.failures import BodyError
from inlay.api.reasoning import ModelReasoning
from inlay.api.tools.formats import ModelTools
from inlay.api.usage import inlay_of
from inlay.prompt.inputs import PromptInput
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput

Vectors = npt.NDArray[np.float32]  # (prompts, dimensions)


def translate(
    body: PooledBody,
    *,
    default_max_tokens: int | None = None,
    tools: ModelTools | None = None,
    reasoning: ModelReasoning | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    stored: Mapping[str, StoredAnswer] = MappingProxyType({}),
) -> Call:
    """Translate a body into a call without answers, whose prompts are its texts. A query is the first one.

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
        reuse=None,
        positions=None,
        priority=body.priority or 0,
        stream=False,
        include_usage=False,
        running_usage=False,
        tools=None,
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


def respond(
    call: Call,
    outputs: Sequence[RequestOutput],
    *,
    name: str,
    created: int,
    model: str,
    fingerprint: str | None = None,
) -> dict[str, Any]:
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
            "id": f"rerank-{name}",
            "model": model,
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
        "model": model,
        "usage": usage,
        "inlay": inlay_of(outputs),
    }


def stream(call: Call, **named: Any) -> NoReturn:
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
