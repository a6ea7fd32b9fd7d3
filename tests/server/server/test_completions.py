"""The completion routes over HTTP: whole and streamed answers, policies, deadlines, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay import LLM, AsyncLLM, SamplingParams
from tests.conftest import tiny
from tests.model.hooks import failing
from tests.server.server.conftest import CHAT, COMPLETIONS, Site, running, small_model

MESSAGES = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
#: The steps that an engine may run before a busy event loop reacts; an endless answer has 1,900.
AT_ONCE = 500
ENDLESS = {"prompt": "Once", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}


def texts(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


@contextmanager
def asking(site: Site, body: dict[str, Any], path: str = COMPLETIONS) -> Iterator[socket.socket]:
    """A connection on which a request has been sent and nothing was read."""
    data = json.dumps(body).encode()
    length = f"Content-Length: {len(data)}"
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", length, "", "")
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        connection.sendall("\r\n".join(lines).encode() + data)
        yield connection


def counted(site: Site, name: str) -> float:
    _, _, text = site.call("GET", "/metrics")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"inlay:{name}"))


def until(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def test_answers_equal_the_models(site: Site):
    solo = LLM(tiny("llama"), kv_memory="16MiB", reuse="off")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (text,), (chat,) = solo.generate("Hello", params), solo.chat(MESSAGES, params)
    assert site.post(COMPLETIONS, prompt="Hello", **GREEDY)["choices"][0]["text"] == text.outputs[0].text
    assert texts(site.stream(COMPLETIONS, prompt="Hello", **GREEDY)) == {0: text.outputs[0].text}
    said = site.post(CHAT, messages=MESSAGES, **GREEDY)["choices"][0]["message"]
    assert said["content"] == chat.outputs[0].text
    assert texts(site.stream(CHAT, messages=MESSAGES, **GREEDY)) == {0: chat.outputs[0].text}


def test_several_prompts_with_several_answers(site: Site):
    body = {"prompt": ["One", "Two", "Three"], "n": 2, "seed": 5, "max_tokens": 10, "ignore_eos": True}
    whole = site.post(COMPLETIONS, **body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    events = site.stream(COMPLETIONS, **body)
    assert texts(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert whole["usage"]["prompt_tokens"] == len("OneTwoThree")
    assert whole["usage"]["completion_tokens"] == 60
    assert "inlay" in events[-1]


def test_reuse_counts_are_in_every_reply(site: Site):
    prompt = "A prompt that nobody else in these tests begins with."
    first, again = (site.post(COMPLETIONS, prompt=prompt, **GREEDY) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert again["inlay"]["duplicate_tokens"] == again["inlay"]["computed_tokens"] == 1
    timing = again["inlay"]["timing"]
    assert set(timing) == {"queue_s", "fetch_s", "compute_s", "ttft_s", "total_s"}
    assert timing["ttft_s"] == pytest.approx(timing["queue_s"] + timing["fetch_s"] + timing["compute_s"], abs=1e-4)
    assert 0 < timing["ttft_s"] <= timing["total_s"]
    streamed = site.stream(COMPLETIONS, prompt=prompt, **GREEDY)[-1]
    assert streamed["inlay"]["exact_tokens"] == len(prompt) - 1
    usage = site.stream(COMPLETIONS, prompt=prompt, stream_options={"include_usage": True}, **GREEDY)[-1]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert usage["inlay"]["exact_tokens"] == len(prompt) - 1


def test_prompts_of_schemas(site: Site):
    prompt = {"schema": "trip", "content": [{"import": "miami"}, "Where?"]}
    for path in (COMPLETIONS, CHAT):
        site.post(path, prompt=prompt, reuse="modular", **GREEDY)
        again = site.post(path, prompt=prompt, reuse="modular", **GREEDY)["inlay"]
        assert again["exact_tokens"] + again["module_tokens"] > 15
        exact = site.post(path, prompt=prompt, **GREEDY)["inlay"]
        assert exact["module_tokens"] == 0
    pml = '<prompt schema="trip"><miami/>Where?</prompt>'
    assert (
        site.post(COMPLETIONS, pml=pml, **GREEDY)["choices"]
        == site.post(COMPLETIONS, prompt=prompt, **GREEDY)["choices"]
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "sentence"),
    [
        (
            COMPLETIONS,
            {"prompt": "x", "model": "gpt"},
            404,
            "model_not_found",
            "there is no model 'gpt'; this",
        ),
        (
            COMPLETIONS,
            {"prompt": {"schema": "none", "content": []}},
            404,
            "schema_not_found",
            "there is no schema 'none'",
        ),
        (COMPLETIONS, {"prompt": "x" * 3000}, 400, "context_length_exceeded", "the prompt ends at position 2999"),
        (COMPLETIONS, {"prompt": [999]}, 400, "prompt.unknown_token", "a prompt holds the token id 999"),
        (COMPLETIONS, {"prompt": ["x"] * 65}, 400, "invalid_value", "the request asks for 65 answers, but"),
        (
            COMPLETIONS,
            {"prompt": "x", "n": 65},
            400,
            "invalid_value",
            "the request asks for 65 answers, but",
        ),
        (COMPLETIONS, {"prompt": "x", "tools": [1]}, 400, "unsupported_field", "tools is not supported"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": "a"}, 400, "unsupported_field", "cache_salt is not supported"),
        (COMPLETIONS, {"prompt": "x", "reuse": "some"}, 400, "policy.unknown", "reuse='some' is not a reuse policy"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "invalid_value", "temperature is -1.0; it must be"),
        (CHAT, [], 400, "invalid_value", "the body is an empty list; it must be an object"),
        (CHAT, None, 400, "invalid_value", "the body is missing or null; send a JSON object"),
        (CHAT, {"messages": []}, 400, "invalid_value", "there is no prompt; give messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_requests_get_one_sentence_and_a_status(site: Site, path, body, status, code, sentence, stream):
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    found, error = site.refusal(path, body)
    assert (found, error["code"]) == (status, code)
    assert error["message"].startswith(sentence)


@pytest.mark.parametrize("body", [b"", b"null"])
@pytest.mark.parametrize(
    ("path", "example"),
    [
        (CHAT, '{"messages": […]}'),
        (COMPLETIONS, '{"prompt": "…"}'),
        ("/v1/responses", '{"input": "…"}'),
        ("/v1/messages", '{"max_tokens": 100, "messages": […]}'),
        ("/v1/messages/count_tokens", '{"messages": […]}'),
        ("/v1/embeddings", '{"input": "…"}'),
        ("/v1/rerank", '{"query": "…", "documents": […]}'),
        ("/tokenize", '{"prompt": "…"}'),
        ("/detokenize", '{"tokens": […]}'),
        ("/v1/cache/score", '{"texts": […]} or {"hashes": […]}'),
        ("/v1/schemas", '{"pml": "…"} or {"schema": {…}}'),
    ],
)
def test_refusal_of_an_absent_body_shows_a_right_one(site: Site, path: str, example: str, body: bytes):
    with closing(site.open()) as connection:
        connection.request("POST", path, body or None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == f"the body is missing or null; send a JSON object, like {example}"


def test_unknown_paths_and_methods(site: Site):
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ):
        found, heads, answer = site.call(method, path)
        assert (found, answer["error"]["code"]) == (status, code)
        assert path in answer["error"]["message"]
        assert status != 405 or heads["allow"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/schemas", "GET, HEAD, POST"), ("/v1/schemas/x", "DELETE, GET, HEAD, PUT"), ("/v1/schemas/x/warm", "POST")],
)
def test_unsupported_method_lists_all_allowed_methods(site: Site, path: str, methods: str):
    """The framework names those of the first route with such a path."""
    status, heads, answer = site.call("PATCH", path)
    assert (status, heads["allow"]) == (405, methods)
    assert answer["error"]["message"] == f"'{path}' does not take PATCH; it takes {methods}"


def test_disconnect_frees_the_slot_within_a_step(site: Site, monkeypatch: pytest.MonkeyPatch):
    llm = site.service.llm
    noticed: list[int] = []
    cancel = llm.client.cancel
    monkeypatch.setattr(llm.client, "cancel", lambda one: (noticed.append(llm.stats().steps), cancel(one))[1])
    for stream in (True, False):
        with asking(site, {**ENDLESS, "stream": stream}) as connection:
            assert until(lambda: llm.stats().held_chunks > 1)
            if stream:
                assert connection.recv(4000)
            steps = llm.stats().steps
        assert site.quiet()
        assert llm.stats().steps <= noticed[-1] + 1
        assert noticed[-1] < steps + AT_ONCE, "the request goes on without its client"


def test_larger_stream_interval_gives_fewer_events_and_the_same_text():
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 64, "ignore_eos": True, "logprobs": 0}
    with closing_model() as llm, running(llm, stream_interval=16) as site:
        events = site.stream(COMPLETIONS, **body)
        whole = site.post(COMPLETIONS, **body)
    assert texts(events)[0] == whole["choices"][0]["text"]
    assert len(events) <= 1 + 64 // 16 + 1
    choices = [choice for event in events for choice in event["choices"] if choice["logprobs"]]
    found = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert found == whole["choices"][0]["logprobs"]["tokens"]


def test_disconnected_client_is_charged_for_generated_tokens(site: Site):
    told = "generation_tokens_total"
    before = counted(site, told)
    with asking(site, ENDLESS) as _:
        assert until(lambda: counted(site, told) - before >= 64), "tokens are counted when the answer is whole"


def test_disconnected_waiting_request_is_removed():
    with closing_model(max_num_seqs=1) as llm, running(llm) as site, asking(site, ENDLESS):
        assert until(lambda: llm.stats().running == 1)
        with asking(site, {**ENDLESS, "prompt": ["Once", "Twice"], "stream": True}):
            assert until(lambda: llm.stats().waiting == 2)
            steps = llm.stats().steps
        assert until(lambda: llm.stats().waiting == 0)
        assert llm.stats().steps < steps + AT_ONCE, "it waits without its client"


def test_client_that_does_not_read_is_disconnected_and_blocks_no_request():
    with closing_model() as llm, running(llm, slow_client_s=0.4) as site:
        body = {"prompt": ["Once"] * 8, "n": 4, "max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 3}
        with asking(site, body) as sleeper:
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            assert until(lambda: llm.stats().running > 0)
            assert len(site.post(COMPLETIONS, prompt="Hello", **GREEDY)["choices"][0]["text"]) > 0
            assert site.quiet(15), "nobody reads, and the engine goes on"
            assert (
                'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0'
                in site.call("GET", "/metrics")[2]
            )
            assert until(lambda: not site.server.server_state.connections), "what nobody reads is kept"


def test_deadlines(site: Site):
    found, error = site.refusal(COMPLETIONS, ENDLESS, X_Request_Timeout="0.05")
    assert (found, error["code"]) == (504, "deadline_exceeded")
    for wrong in ("0", "-1", "nan", "inf", "soon", "301"):
        found, error = site.refusal(COMPLETIONS, ENDLESS, X_Request_Timeout=wrong)
        assert (found, error["param"]) == (400, "X-Request-Timeout")
        assert error["message"].endswith("it must be a number of seconds above 0 and at most 300")
    status, heads, text = site.call("POST", COMPLETIONS, {**ENDLESS, "stream": True}, X_Request_Timeout="0.2")
    assert status == 200, "it has begun before the deadline"
    events = text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in text
    assert site.quiet()
    status, heads, _ = site.call("POST", COMPLETIONS, ENDLESS, X_Request_Timeout="0.01")
    assert (status, heads["x-should-retry"]) == (504, "false")


def test_full_queue_gives_retry_after():
    with closing_model(max_num_seqs=1, max_waiting=2) as llm, running(llm) as site, asking(site, ENDLESS):
        assert until(lambda: llm.stats().running == 1)
        with asking(site, {**ENDLESS, "prompt": ["a", "b"]}):
            assert until(lambda: llm.stats().waiting == 2)
            for body in ({"prompt": "x"}, {"prompt": ["x", "y"], "n": 1, "stream": True}):
                status, heads, answer = site.call("POST", COMPLETIONS, body)
                assert (status, answer["error"]["code"], heads["retry-after"]) == (429, "queue_full", "1")
            assert llm.stats().waiting == 2


def test_engine_failure_is_a_500_without_details():
    secret = RuntimeError("a secret of the engine")
    with closing_model() as llm, running(llm) as site:
        with failing(llm.loaded, secret):
            status, _, answer = site.call("POST", COMPLETIONS, {"prompt": "x"})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "secret" not in json.dumps(answer)
        with asking(site, {**ENDLESS, "stream": True}) as connection:
            assert b"200" in connection.recv(4000)
            text = b""
            with failing(llm.loaded, secret):
                while not text.endswith(b"0\r\n\r\n"):
                    text += connection.recv(65536)
        assert b"server_error" in text
        assert b"secret" not in text
        assert b"[DONE]" not in text
        assert site.post(COMPLETIONS, prompt="x", **GREEDY)["choices"]


@contextmanager
def closing_model(**settings: Any) -> Iterator[AsyncLLM]:
    llm = small_model(**settings)
    try:
        yield llm
    finally:
        llm.shutdown()


VALID: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "stop": st.sampled_from(["e", ["a", "zz"]]),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "temperature": st.floats(0.1, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0.01, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "logit_bias": st.dictionaries(st.integers(0, 255).map(str), st.floats(-100, 100), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 261), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 2),
    "logprobs": st.integers(0, 20),
    "structured_outputs": st.sampled_from([{"choice": ["yes", "no"]}, {"regex": "[a-c]*"}]),
    "priority": st.integers(0, 9),
    "reuse": st.sampled_from(["off", "exact", "isolated", "anchored", "modular", "anchored+linked:3"]),
    "user": st.text(max_size=5),
}


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text(min_size=1, max_size=9) | st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=3),
    given_fields=st.fixed_dictionaries({"max_tokens": st.integers(2, 6)}, optional=VALID),
)
def test_valid_fields_are_valid_together(site: Site, prompt: Any, given_fields: dict[str, Any]):
    body = {"prompt": prompt, "seed": 1, **given_fields}
    whole = site.post(COMPLETIONS, **body)
    assert texts(site.stream(COMPLETIONS, **body)) == {one["index"]: one["text"] for one in whole["choices"]}
    answers = (1 if isinstance(prompt, str) else len(prompt)) * body.get("n", 1)
    assert [one["index"] for one in whole["choices"]] == list(range(answers))
    assert whole["usage"]["completion_tokens"] <= answers * body["max_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hello"})])
def test_ignored_fields_are_named_in_a_header(site: Site, path: str, asked: dict[str, Any], stream: bool):
    body = {**asked, **GREEDY, "stream": stream}
    status, headers, _ = site.call("POST", path, {**body, "num_ctx": 8192, "keep_alive": "5m"})
    assert (status, headers["x-inlay-ignored-fields"]) == (200, "keep_alive, num_ctx")
    assert "x-inlay-ignored-fields" not in site.call("POST", path, body)[1]


def test_unsupported_grammar_error_names_its_field(site: Site):
    wrong = {"type": "object", "properties": {"when": {"type": "string", "pattern": "(?!a)b"}}}
    for field, value, start in (
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}},
            "response_format cannot be used: at properties.when, look-around",
        ),
        ("structured_outputs", {"json": wrong}, "structured_outputs['json'] cannot be used: at properties.when, look-"),
        ("structured_outputs", {"regex": "("}, "structured_outputs['regex'] cannot be used: unclosed group"),
    ):
        for stream in (False, True):
            status, _, answer = site.call("POST", COMPLETIONS, {"prompt": "x", field: value, "stream": stream})
            assert (status, answer["error"]["param"]) == (400, field)
            assert answer["error"]["message"].startswith(start)
