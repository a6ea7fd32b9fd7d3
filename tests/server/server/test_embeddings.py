"""Embeddings and reranking over HTTP, by OpenAI's own client and raw requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI

from inlay import AsyncLLM
from tests.model.api.tool_templates import tool_model
from tests.server.server.conftest import Site, running

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = ["The cat sat on the mat.", "A dog barked.", "Rome is sunny."]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=4, seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


def stock(text: str, pooling: str = "last") -> np.ndarray:
    """The normalized embedding by the stock model."""
    loaded = tool_model("qwen")
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        hidden = loaded.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    vector = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
    return vector / np.linalg.norm(vector)


def embedded(site: Site, **body: Any) -> list[np.ndarray]:
    answer = site.post(EMBEDDINGS, **body)
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(one["embedding"]) for one in answer["data"]]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_the_stock_models_hidden_states(site: Site, pooling: str) -> None:
    for text, vector in zip(TEXTS, embedded(site, input=TEXTS, pooling=pooling), strict=True):
        np.testing.assert_allclose(vector, stock(text, pooling), atol=1e-4)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_openais_client_reads_them(site: Site) -> None:
    client = OpenAI(base_url=site.base, api_key="any", max_retries=0)
    answer = client.embeddings.create(model="tiny", input=TEXTS[0])  # it asks for base64
    np.testing.assert_allclose(answer.data[0].embedding, stock(TEXTS[0]), atol=1e-4)
    assert answer.usage.prompt_tokens == len(TEXTS[0])
    shorter = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=4, encoding_format="float")
    expected = stock(TEXTS[0])[:4]
    np.testing.assert_allclose(shorter.data[0].embedding, expected / np.linalg.norm(expected), atol=1e-4)


def test_all_input_forms_give_the_same_embedding(site: Site) -> None:
    ids = tool_model("qwen").tokenizer.encode(TEXTS[0])
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        (vector,) = embedded(site, input=given)
        np.testing.assert_allclose(vector, stock(TEXTS[0]), atol=1e-4)
    coded = site.post(EMBEDDINGS, input=ids, encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), stock(TEXTS[0]), atol=1e-4)
    (raw,) = embedded(site, input=ids, normalize=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), stock(TEXTS[0]), atol=1e-4)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-3)


def test_a_known_text_is_read_from_the_cache(site: Site) -> None:
    text = "A text that only this test sends, long enough for some chunks."
    for cached in (False, True):
        usage = site.post(EMBEDDINGS, input=text)["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 40) == cached
    assert site.post(EMBEDDINGS, input=text, pooling="mean")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_documents_are_ranked_by_their_cosine(site: Site) -> None:
    query = "Where is the cat?"
    expected = [float(stock(query) @ stock(text)) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    for path in (RERANK, "/v2/rerank"):
        answer = site.post(path, query=query, documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
        assert [one["index"] for one in answer["results"]] == order
        for one in answer["results"]:
            assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-4)
    first = site.post(RERANK, query=query, documents=TEXTS, top_n=1, return_documents=True)["results"]
    assert [one["document"] for one in first] == [{"text": TEXTS[order[0]]}]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (EMBEDDINGS, {}, "input", "missing_field"),
        (EMBEDDINGS, {"input": []}, "input", "invalid_value"),
        (EMBEDDINGS, {"input": [""]}, "input", "invalid_value"),
        (EMBEDDINGS, {"input": 3}, "input", "invalid_value"),
        (EMBEDDINGS, {"input": ["a", 3]}, "input", "invalid_value"),
        (EMBEDDINGS, {"input": ["a"] * 2_049}, "input", "invalid_value"),
        (EMBEDDINGS, {"input": "a", "dimensions": 60_000}, "dimensions", "invalid_value"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        (EMBEDDINGS, {"input": "a", "pooling": "max"}, "pooling", "invalid_value"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream", "unsupported_field"),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "temperature", "unknown_field"),
        (EMBEDDINGS, {"input": "a", "model": "nobody"}, "model", "model_not_found"),
        (RERANK, {"query": "a"}, "documents", "missing_field"),
        (RERANK, {"query": "", "documents": ["a"]}, "query", "invalid_value"),
        (RERANK, {"query": "a", "documents": []}, "documents", "invalid_value"),
        (RERANK, {"query": "a", "documents": [{"title": "a"}]}, "documents", "invalid_value"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "invalid_value"),
    ],
)
def test_wrong_requests(site: Site, path: str, body: dict[str, Any], param: str, code: str) -> None:
    status, _, answer = site.call("POST", path, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (404 if "model" in body else 400, param, code)


def test_overlong_list_is_reported_once(site: Site) -> None:
    for path, body in (
        (RERANK, {"query": "a", "documents": ["a"] * 100_000}),
        (EMBEDDINGS, {"input": ["a"] * 100_000}),
    ):
        status, _, answer = site.call("POST", path, body)
        assert status == 400
        assert "Also" not in answer["error"]["message"]


def test_embeddings_are_counted_and_described(site: Site) -> None:
    site.post(EMBEDDINGS, input="counted")
    metrics = site.call("GET", "/metrics")[2]
    assert f'endpoint="{EMBEDDINGS}"' in metrics or EMBEDDINGS in metrics
    document = site.call("GET", "/openapi.json")[2]
    for path, body in ((EMBEDDINGS, "EmbeddingsBody"), (RERANK, "RerankBody"), ("/v2/rerank", "RerankBody")):
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.endswith(f"/{body}")
        assert body in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (EMBEDDINGS, {"input": ["a"] * 9}, "input"),
        (RERANK, {"query": "a", "documents": ["a"] * 9}, "documents"),
    ],
)
def test_more_texts_than_the_queue_holds_are_refused_with_the_field(
    path: str, body: dict[str, Any], field: str
) -> None:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=4, seed=1, max_waiting=8)
    with running(llm) as site:
        status, error = site.refusal(path, body)
    llm.shutdown()
    assert (status, error["code"], error["param"]) == (400, "invalid_value", field)
