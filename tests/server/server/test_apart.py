"""The whole server over HTTP: tenants cannot read each other's text, nor exceed their limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from inlay.server.tenants import editing
from tests.model.server.site import CHAT, COMPLETIONS, JSON, PAGE, SCHEMAS, Site, refused, serving, with_keys


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    yield from with_keys(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def open_site() -> Iterator[Site]:
    yield from serving({}, cors_origins=(PAGE,))


def test_private_text_is_found_only_within_a_tenant(site: Site):
    prompt = "The number of the account is four eight fifteen sixteen twenty three forty two."
    assert site.cached(prompt) == 0
    assert site.cached(prompt) > 60
    assert site.cached(prompt, key="bob") == 0
    assert site.cached(prompt, key="root") == 0
    assert site.cached(prompt, key="bob") > 60
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
    usages = [site.call("POST", CHAT, chat, key=key)[2]["usage"] for key in ("ann", "bob", "ann", "bob")]
    hits = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert hits[:2] == [0, 0]
    assert min(hits[2:]) > 60


def test_modular_policy_does_not_find_text_of_other_tenants(site: Site):
    """Parts of messages are found by their content, at any position: among the tenant's own."""
    secret = "The number of the account is a hundred and eight, and its password is the word that we agreed on."

    def hits(key: str, question: str) -> int:
        marked = {"type": "text", "text": secret, "cache_control": {"type": "ephemeral"}}
        parts = [{"type": "text", "text": question}, marked]
        chat = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "reuse": "isolated"}
        status, _, answer = site.call("POST", CHAT, chat, key=key)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert hits("ann", "What is the password?") < 60  # the turn begins like others
    assert hits("ann", "And how many are they, once more?") > 60
    assert hits("bob", "Well, do you know anything?") < 60


def test_public_schema_is_shared_and_private_schema_is_not(site: Site):
    text = "The ferry leaves the island at nine and comes back at noon, in winter at ten, on Sundays not at all."
    for name, key in (("ferry", "root"), ("mine", "ann")):
        pml = f'<schema name="{name}"><module name="times">{text} It is called {name}.</module></schema>'
        body = {"pml": pml, "public": key == "root", "encode": True, "reuse": "isolated"}
        status, _, answer = site.call("POST", SCHEMAS, body, key=key)
        assert status == 201, answer
    ferry = {"schema": "ferry", "content": [{"import": "times"}, "When?"]}
    for key in ("ann", "bob", "root"):
        assert site.cached(ferry, key=key, reuse="isolated") > 100
    mine = {"schema": "mine", "content": [{"import": "times"}, "When?"]}
    assert site.cached(mine, reuse="isolated") > 100
    for schema in ("mine", "none"):
        body = {"prompt": {**mine, "schema": schema}, "reuse": "isolated", "max_tokens": 1}
        answers = [site.call("POST", COMPLETIONS, body, key="bob"), site.call("GET", f"{SCHEMAS}/{schema}", key="bob")]
        assert [status for status, _, _ in answers] == [404, 404]


def test_limits_of_a_tenant_are_enforced(site: Site):
    body = {"prompt": "Hello", "max_tokens": 1}
    answers = [site.call("POST", COMPLETIONS, body, key="few") for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 429]
    sentence = refused(answers[2], 429, "rate_limit_exceeded")
    assert sentence.startswith("your 2 requests a minute are used up; wait ")
    headers = answers[2][1]
    assert 1 <= int(headers["retry-after"]) <= 30
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("2", "0")
    assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 1000
    assert "x-ratelimit-limit-requests" not in site.call("POST", COMPLETIONS, body)[1]
    refused(site.call("POST", COMPLETIONS, {**body, "reuse": "anchored"}, key="plain"), 403, "reuse_not_allowed")
    refused(site.call("POST", COMPLETIONS, {**body, "max_tokens": 5}, key="plain"), 403, "max_tokens_not_allowed")


def test_requests_at_the_same_time_are_bounded(site: Site):
    body = {"prompt": "Hello", "max_tokens": 1}
    with closing(HTTPConnection("127.0.0.1", site.port, timeout=30)) as held:
        long = {**body, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        held.request("POST", COMPLETIONS, json.dumps(long), {**JSON, **site.headers("one")})
        response = held.getresponse()
        assert (response.status, response.readline()[:6]) == (200, b"data: ")
        sentence = refused(site.call("POST", COMPLETIONS, body, key="one"), 429, "rate_limit_exceeded")
        assert sentence.startswith("your key allows 1 answers at the same time, and all are running;")
        assert site.call("POST", COMPLETIONS, body)[0] == 200
        response.close()
    deadline = time.monotonic() + 10
    while site.call("POST", COMPLETIONS, body, key="one")[0] == 429:  # until the server has seen the client leave
        assert time.monotonic() < deadline


def test_without_keys_all_requests_share_the_cache(open_site: Site):
    prompt = "The ferry leaves the island at nine and comes back at noon, in winter at ten."
    assert open_site.cached(prompt, key=None) == 0
    assert open_site.cached(prompt, key="sk-anything") > 60


def test_keys_can_be_added_and_removed_at_run_time(site: Site):
    path = site.app.state.service.settings.keys_file
    assert isinstance(path, Path)
    with editing(path) as file:
        key, key_id = file.add("late")
    time.sleep(1.1)
    assert site.call("GET", "/v1/models", key=key)[0] == 200
    with editing(path) as file:
        del file.keys[key_id]
    time.sleep(1.1)
    refused(site.call("GET", "/v1/models", key=key), 401, "invalid_api_key")


def test_repeated_combination_is_promoted_for_its_tenant_only(site: Site):
    """This holds for public schemas too: no counts, forms or hits reveal the requests of another tenant."""
    texts = {"a": "The ferry leaves the island at nine.", "b": "It comes back at noon.", "c": "Not on Sundays at all."}
    modules = "".join(f'<module name="{name}">{text}</module>' for name, text in texts.items())
    body = {"pml": f'<schema name="combined">{modules}</schema>', "public": True, "encode": True}
    assert site.call("POST", SCHEMAS, body, key="root")[0] == 201
    content = [{"import": name} for name in texts]

    def asked(key: str, question: str, **fields) -> dict[str, int]:
        prompt = {"schema": "combined", "content": [*content, question]}
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        status, _, answer = site.call("POST", COMPLETIONS, body, key=key)
        assert status == 200, answer
        counted = {name: count for name, count in answer["inlay"].items() if name != "timing"}
        return {**counted, "cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}

    forms = [asked("bob", "Once?"), *(asked("ann", question) for question in ("Once?", "When?"))]
    assert forms[0] == forms[1]
    assert forms[0]["primed_tokens"] == len("".join(texts.values()))
    deadline = time.monotonic() + 30
    while not (healed := asked("ann", "Well, when?"))["promoted_tokens"]:
        assert time.monotonic() < deadline
    assert healed["promoted_tokens"] <= healed["exact_tokens"]
    while asked("ann", "Well, when?").get("primed_tokens"):
        assert time.monotonic() < deadline
    told = site.call("GET", "/metrics", key="root")[2].decode()
    promoted = next(line for line in told.splitlines() if line.startswith("inlay:promoted_tokens_total"))
    assert float(promoted.split()[-1]) >= forms[0]["anchored_tokens"]
    assert asked("bob", "Else?") == forms[0]
    assert asked("bob", "Other", reuse="exact")["promoted_tokens"] == 0
    off = asked("ann", "Once?", reuse="modular+promote:off")
    assert (off["promoted_tokens"], off["anchored_tokens"]) == (0, forms[0]["anchored_tokens"])
