"""Embeddings by a second model, ``--embedding-model``: tiny random encoders and decoders against transformers."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from tokenizers import processors
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
)

from inlay.errors import ModelError, ParameterError
from inlay.models.embedding import EmbeddingModel
from inlay.server.embedding import BATCH_TOKENS, batches
from inlay.server.settings import ServerSettings
from tests.conftest import tiny
from tests.server.server.conftest import CHAT, Site, running, small_model
from tests.tokenizers_for_tests import gpt2

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = ["The ferry leaves at nine.", "Rome.", "The museum is open from ten to five, and the oldest room has charts."]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.5,
}


def saved(folder: Path, kind: str) -> Path:
    """A checkpoint of this kind with random weights. Its tokenizer frames texts with two special tokens."""
    tokenizer = copy.deepcopy(gpt2())  # other tests share it
    if kind != "llama":
        tokenizer.add_special_tokens({"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})
        ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
        tokenizer.backend_tokenizer.enable_truncation(8)  # as checkpoints of sentence-transformers have it
    words, pad = len(tokenizer), tokenizer.pad_token_id
    torch.manual_seed(7)
    made: dict[str, Any] = {
        "bert": lambda: BertModel(BertConfig(**SIZES, vocab_size=words, max_position_embeddings=64, pad_token_id=pad)),
        "masked": lambda: BertForMaskedLM(BertConfig(**SIZES, vocab_size=words, pad_token_id=pad)),
        "roberta": lambda: RobertaModel(
            RobertaConfig(**SIZES, vocab_size=words, max_position_embeddings=600, pad_token_id=pad)
        ),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=words, max_position_embeddings=64)),
        "t5": lambda: T5Model(T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=4, vocab_size=words)),
    }
    model: PreTrainedModel = made[kind]()
    place = folder / f"tiny-{kind}"
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def stock(place: Path, text: str, pooling: str) -> np.ndarray:
    """The normalized vector of a text by transformers alone."""
    model = AutoModel.from_pretrained(place, dtype=torch.float32).eval()
    given = AutoTokenizer.from_pretrained(place)(text, return_tensors="pt", truncation=False)
    with torch.inference_mode():
        hidden = model(input_ids=given.input_ids, attention_mask=given.attention_mask).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling].numpy()
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("embedding"), "bert")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    llm = small_model()
    with running(llm, embedding_model=str(folder)) as found:
        yield found
    llm.shutdown()


def embedded(site: Site, **body: Any) -> list[np.ndarray]:
    return [np.array(one["embedding"]) for one in site.post(EMBEDDINGS, **body)["data"]]


def test_vectors_equal_transformers_mean(site: Site, folder: Path) -> None:
    answer = site.post(EMBEDDINGS, input=TEXTS)
    assert answer["model"] == "tiny-bert"
    for text, one in zip(TEXTS, answer["data"], strict=True):
        np.testing.assert_allclose(one["embedding"], stock(folder, text, "mean"), atol=1e-5)
    tokens = sum(map(len, AutoTokenizer.from_pretrained(folder)(TEXTS, truncation=False).input_ids))
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_batched_vectors_equal_those_of_single_texts(site: Site) -> None:
    for text, vector in zip(TEXTS, embedded(site, input=TEXTS), strict=True):
        np.testing.assert_allclose(vector, embedded(site, input=text)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "pooling", "expected"),
    [
        ("bert", None, "mean"),
        ("bert", "cls", "cls"),
        ("masked", None, "mean"),
        ("roberta", "last", "last"),
        ("llama", None, "last"),
        ("llama", "mean", "mean"),
    ],
)
def test_every_kind_of_model_and_pooling(tmp_path: Path, kind: str, pooling: Any, expected: str) -> None:
    place = saved(tmp_path, kind)
    model = EmbeddingModel(str(place), pooling)
    assert model.pooling == expected
    vectors = model.vectors([model.tokenize(text) for text in TEXTS], model.pooling).numpy()
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(vector / np.linalg.norm(vector), stock(place, text, expected), atol=1e-5)


def test_the_longest_text_of_roberta_can_be_embedded(tmp_path: Path) -> None:
    model = EmbeddingModel(str(saved(tmp_path, "roberta")))
    assert model.max_tokens < 600
    assert model.vectors([[5] * model.max_tokens], "mean").shape == (1, 32)


def test_the_checkpoint_declares_its_pooling(tmp_path: Path) -> None:
    place = saved(tmp_path, "bert")
    declaration = place / "1_Pooling" / "config.json"
    declaration.parent.mkdir()
    declaration.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    assert EmbeddingModel(str(place)).pooling == "cls"
    assert EmbeddingModel(str(place), "mean").pooling == "mean"
    for text in (json.dumps({"pooling_mode_max_tokens": True}), "{", "[]"):
        declaration.write_text(text)
        with pytest.raises(ModelError) as caught:
            EmbeddingModel(str(place))
        assert caught.value.code == "model.unreadable_config"


def test_request_can_choose_the_pooling(site: Site, folder: Path) -> None:
    (vector,) = embedded(site, input=TEXTS[0], pooling="last")
    np.testing.assert_allclose(vector, stock(folder, TEXTS[0], "last"), atol=1e-5)


def test_openais_client_reads_them(site: Site, folder: Path) -> None:
    client = OpenAI(base_url=site.base, api_key="any", max_retries=0)
    answer = client.embeddings.create(model="tiny-bert", input=TEXTS)
    for text, one in zip(TEXTS, answer.data, strict=True):
        np.testing.assert_allclose(one.embedding, stock(folder, text, "mean"), atol=1e-5)


def test_documents_are_ranked_by_the_embedding_model(site: Site, folder: Path) -> None:
    query = "When does the ferry leave?"
    scores = [float(stock(folder, query, "mean") @ stock(folder, text, "mean")) for text in TEXTS]
    for path in (RERANK, "/v2/rerank"):
        answer = site.post(path, query=query, documents=TEXTS)
        assert answer["model"] == "tiny-bert"
        found = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert list(found) == sorted(found, key=lambda index: -scores[index])
        for index, score in found.items():
            assert score == pytest.approx(scores[index], abs=1e-5)


def test_models_answer_only_on_their_routes(site: Site) -> None:
    listed = {one["id"]: one for one in site.call("GET", "/v1/models")[2]["data"]}
    assert list(listed) == ["tiny", "other", "tiny-bert"]
    assert listed["tiny-bert"]["max_model_len"] == 64
    assert site.call("GET", "/v1/models/tiny-bert")[2] == listed["tiny-bert"]
    served = site.post(EMBEDDINGS, input=TEXTS[0], model="tiny")
    assert served["model"] == "tiny"
    assert len(served["data"][0]["embedding"]) == tiny("llama").model.config.hidden_size
    message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for path, body in ((EMBEDDINGS, {"input": "a", "model": "nobody"}), (CHAT, {**message, "model": "tiny-bert"})):
        status, error = site.refusal(path, body)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_token_ids_and_truncation(site: Site, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXTS[0], truncation=False).input_ids
    np.testing.assert_allclose(embedded(site, input=ids)[0], stock(folder, TEXTS[0], "mean"), atol=1e-5)
    (cut,) = embedded(site, input=TEXTS[0], truncate_prompt_tokens=6)  # keeps both special tokens
    np.testing.assert_allclose(cut, embedded(site, input=[ids[0], *ids[-5:]])[0], atol=1e-5)
    long = "ferry " * 2_000
    answer = site.post(EMBEDDINGS, input=long, truncate_prompt_tokens=64)
    assert answer["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("The ferry leaves. " * 64, "context_length_exceeded"),
        ([5] * 65, "context_length_exceeded"),
        ([100_000], "prompt.unknown_token"),
    ],
)
def test_wrong_inputs(site: Site, given: Any, code: str) -> None:
    status, error = site.refusal(EMBEDDINGS, {"input": given})
    assert (status, error["code"]) == (400, code)


def test_chats_are_answered_during_embedding(site: Site) -> None:
    texts = [f"Text {number} of many. {TEXTS[number % 3]}" for number in range(1_000)]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(site.post(EMBEDDINGS, input=texts)))
    thread.start()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    answers = [site.post(CHAT, **chat)["choices"][0]["message"]["content"] for _ in range(3)]
    assert len(set(answers)) == 1
    assert results or thread.is_alive()
    thread.join(60)
    vectors = [np.array(one["embedding"]) for one in results[0]["data"]]
    for number in (0, 700, 999):
        np.testing.assert_allclose(vectors[number], embedded(site, input=texts[number])[0], atol=1e-5)


def test_a_pass_has_bounded_tokens() -> None:
    lengths = [3, 5_000, 60, 60, 1, *[500] * 20]
    made = list(batches(lengths))
    assert sorted(number for batch in made for number in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(lengths[number] for number in batch) <= BATCH_TOKENS
    assert len(made) < 6


def test_a_late_request_gets_no_vectors(site: Site) -> None:
    status, error = site.refusal(EMBEDDINGS, {"input": ["ferry " * 30] * 1_000}, X_Request_Timeout="0.02")
    assert (status, error["code"]) == (504, "deadline_exceeded")


def test_ignored_priority_is_named(site: Site) -> None:
    heads = site.call("POST", EMBEDDINGS, {"input": "a", "priority": 3})[1]
    assert heads["x-inlay-ignored-fields"] == "priority"
    assert (
        "x-inlay-ignored-fields" not in site.call("POST", EMBEDDINGS, {"input": "a", "model": "tiny", "priority": 3})[1]
    )


def test_a_stopping_server_ends_a_long_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, vectors = threading.Event(), EmbeddingModel.vectors

    def slow(*given: Any) -> torch.Tensor:
        began.set()
        time.sleep(0.3)
        return vectors(*given)

    llm, results = small_model(), []
    try:
        with running(llm, embedding_model=str(folder), drain_s=0.1) as site:
            monkeypatch.setattr(EmbeddingModel, "vectors", slow)  # tiny models are too fast to stop
            body = {"input": ["ferry " * 30] * 1_000}
            thread = threading.Thread(target=lambda: results.append(site.call("POST", EMBEDDINGS, body)))
            thread.start()
            assert began.wait(30)
        thread.join(30)
    finally:
        llm.shutdown()
    status, _, answer = results[0]
    assert (status, answer["error"]["code"]) == (503, "server_stopping")


def test_models_that_cannot_embed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        EmbeddingModel(str(saved(tmp_path, "t5")))
    assert caught.value.code == "model.no_embeddings"
    with pytest.raises(ModelError) as caught:
        ServerSettings(embedding_model=str(tmp_path / "missing"))
    assert caught.value.code == "model.not_found"
    assert str(caught.value).startswith("embedding_model: "), "it names the option"


def test_wrong_settings_are_refused(folder: Path) -> None:
    with pytest.raises(ParameterError):
        ServerSettings(embedding_model=str(folder), served_names=("tiny-bert",))
    with pytest.raises(ParameterError):
        ServerSettings(embedding_pooling="mean")
    with pytest.raises(ParameterError):
        ServerSettings(embedding_model=str(folder), embedding_pooling="max")
