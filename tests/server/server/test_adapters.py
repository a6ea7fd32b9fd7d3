"""Adapters over HTTP: models of their own by name, as vLLM serves them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inlay.errors import ParameterError
from inlay.server.app import build_app
from inlay.server.settings import ServerSettings
from tests.adapters import ALL, write_adapter
from tests.conftest import tiny
from tests.raising import raises
from tests.server.server.conftest import CHAT, COMPLETIONS, SCHEMA, Site, running, small_model

PROMPT = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}
PML = {"pml": '<prompt schema="trip"><miami/>How?</prompt>', "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: write_adapter(folder / name, tiny("llama"), ALL, seed=seed) for seed, name in enumerate("ab")}
    llm = small_model(adapters=adapters, reuse=None)
    with running(llm, [SCHEMA]) as site:
        yield site
    llm.shutdown()


def answer(site: Site, **body):
    status, _, said = site.call("POST", COMPLETIONS, body)
    assert status == 200, said
    return said


def test_adapter_is_listed_as_a_model_with_its_parent(adapted: Site):
    listed = {one["id"]: one for one in adapted.call("GET", "/v1/models")[2]["data"]}
    assert list(listed) == ["tiny", "other", "a", "b"]
    assert [one["parent"] for one in listed.values()] == [None, None, "tiny", "tiny"]
    assert listed["a"]["root"] == "a"
    assert adapted.call("GET", "/v1/models/b")[2] == listed["b"]
    names = adapted.call("GET", "/openapi.json")[2]["components"]["schemas"]["CompletionBody"]["properties"]["model"]
    assert {"enum": ["tiny", "other", "a", "b"]} in names["anyOf"]


def test_each_adapter_gives_its_own_answers(adapted: Site):
    said = {name: answer(adapted, model=name, **PROMPT) for name in ("tiny", "a", "b", "other")}
    texts = {name: one["choices"][0]["text"] for name, one in said.items()}
    assert texts["tiny"] == texts["other"] == answer(adapted, **PROMPT)["choices"][0]["text"]
    assert len(set(texts.values())) == 3
    assert [one["model"] for one in said.values()] == ["tiny", "a", "b", "other"]
    prints = [one["system_fingerprint"] for one in said.values()]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3
    events = adapted.stream(COMPLETIONS, model="a", **PROMPT)
    assert "".join(event["choices"][0]["text"] for event in events) == texts["a"]
    assert {event["model"] for event in events} == {"a"}
    chat = adapted.call("POST", CHAT, {"model": "b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    assert (chat[0], chat[2]["model"]) == (200, "b")


def test_adapters_do_not_share_cached_text(adapted: Site):
    prompt = {**PROMPT, "prompt": "One prompt that several adapters are asked in turn, of some length."}
    cached = [answer(adapted, model=name, **prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for name in "ab"]
    assert cached == [0, 0]
    again = answer(adapted, model="a", **prompt)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_modules_are_shared_across_adapters_only_on_request(adapted: Site):
    own = answer(adapted, model="a", **PML)["inlay"]
    assert (own["module_tokens"], own.get("across_tokens")) == (0, None), "the server encoded them for the model alone"
    across = answer(adapted, model="b", reuse="modular", across_adapters=True, **PML)["inlay"]
    assert across["across_tokens"] == across["module_tokens"] > 0
    assert answer(adapted, model="b", **PML)["inlay"].get("across_tokens") is None
    status, error = adapted.refusal(COMPLETIONS, {"model": "b", "reuse": "exact", "across_adapters": True, **PML})
    assert (status, error["code"], error["param"]) == (400, "policy.conflict", "across_adapters")


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/detokenize"])
def test_unknown_model_name_is_not_found(adapted: Site, path):
    body = {"tokens": [1]} if path == "/detokenize" else {"prompt": "x"}
    status, error = adapted.refusal(path, {"model": "c", **body})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "there is no model 'c'; this server has 'tiny' or 'other' or 'a' or 'b'"
    assert adapted.call("POST", path, {"model": "a", **body})[0] == 200


def test_adapter_must_not_have_the_models_name(tmp_path):
    llm = small_model(adapters={"same": write_adapter(tmp_path, tiny("llama"))})
    with raises("adapter.invalid_name", ParameterError, names="same"):
        build_app(llm, ServerSettings(served_names=("same",)))
    llm.shutdown()
