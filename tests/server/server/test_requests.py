"""Policies, lengths and priorities that a request may set, by the server's settings and the tenant's limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inlay.policy import LOGGED, PolicyFields
from inlay.server.limits import Limits
from inlay.server.tenants import editing
from tests.server.server.conftest import CHAT, COMPLETIONS, SCHEMA, Site, running, small_model

PROMPT = {"schema": "trip", "content": [{"import": "miami"}, "Where?"]}
LIMITS = {
    "free": Limits(),
    "exact": Limits(max_reuse="exact"),
    "off": Limits(max_reuse="off"),
    "short": Limits(max_tokens=4),
}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, dict[str, str]]]:
    """A server that reuses modules by default, and API keys by the name of a tenant."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name, admin=name == "root")[0] for name in ("root", *LIMITS)}
        for name, limits in LIMITS.items():
            file.tenants[name].limits = limits
    llm = small_model()
    with running(llm, [SCHEMA], keys_file=path, reuse="anchored") as site:
        yield site, keys
    llm.shutdown()


def ask(keyed: tuple[Site, dict[str, str]], tenant: str, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    site, keys = keyed
    given = {"temperature": 0, "ignore_eos": True, **body}
    status, _, answer = site.call("POST", path, given, Authorization=f"Bearer {keys[tenant]}")
    return status, answer


@pytest.mark.parametrize(
    ("tenant", "allowed", "default"),
    [
        ("free", {"off", "exact", "isolated", "anchored", "modular"}, "modular"),
        ("exact", {"off", "exact"}, "exact"),
        ("off", {"off"}, "off"),
    ],
)
def test_policy_limit_of_a_tenant(keyed, tenant, allowed, default):
    for reuse in ("off", "exact", "isolated", "anchored", "modular"):
        status, answer = ask(keyed, tenant, prompt=PROMPT, max_tokens=2, reuse=reuse)
        assert (status == 200) == (reuse in allowed), answer
        if reuse not in allowed:
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (403, "reuse_not_allowed", "reuse")
            sentence = f"reuse is {reuse!r} and your key allows no more than {tenant!r}; ask for that, or leave it out"
            assert answer["error"]["message"] == sentence
    ask(keyed, tenant, prompt=PROMPT, max_tokens=2)  # stores the text that the next request reads
    reused = ask(keyed, tenant, prompt=PROMPT, max_tokens=2)[1]["inlay"]
    found = {"off": reused["exact_tokens"] == 0, "exact": reused["exact_tokens"] > 0 == reused["module_tokens"]}
    assert found.get(default, reused["exact_tokens"] + reused["module_tokens"] > 15)


def test_policy_limit_of_the_server():
    llm = small_model()
    with running(llm, [SCHEMA], max_reuse="exact") as site:
        status, error = site.refusal(COMPLETIONS, {"prompt": PROMPT, "reuse": "modular"})
        assert (status, error["code"]) == (403, "reuse_not_allowed")
        assert error["message"].startswith("reuse is 'modular' and this server allows no more than 'exact'")
        assert site.post(COMPLETIONS, prompt=PROMPT, max_tokens=2)["inlay"]["module_tokens"] == 0
    llm.shutdown()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_answer_length_limit_of_a_tenant(keyed, field):
    messages = [{"role": "user", "content": "Hello"}]
    status, answer = ask(keyed, "short", CHAT, messages=messages, **{field: 5})
    assert (status, answer["error"]["code"]) == (403, "max_tokens_not_allowed")
    assert answer["error"]["message"] == "max_tokens is 5, but your key allows 4; ask for fewer"
    assert ask(keyed, "short", CHAT, messages=messages, **{field: 4})[0] == 200
    status, answer = ask(keyed, "short", CHAT, messages=messages)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert ask(keyed, "short", prompt="Hello")[1]["usage"]["completion_tokens"] == 4


def test_only_an_admin_may_set_negative_priority(keyed):
    status, answer = ask(keyed, "free", prompt="x", priority=-1)
    assert (status, answer["error"]["code"]) == (403, "priority_not_allowed")
    assert ask(keyed, "free", prompt="x", priority=3)[0] == 200
    assert ask(keyed, "root", prompt="x", priority=-1)[0] == 200


def test_timeout_header_may_exceed_the_default_up_to_the_limit():
    llm = small_model()
    with running(llm, timeout_s=0.05, max_timeout_s=20.0) as site:
        long = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
        assert site.refusal(COMPLETIONS, long)[0] == 504
        assert site.call("POST", COMPLETIONS, long, X_Request_Timeout="20")[0] == 200
        assert site.refusal(COMPLETIONS, long, X_Request_Timeout="21")[0] == 400
    with running(llm, timeout_s=None) as site:
        assert site.call("POST", COMPLETIONS, long, X_Request_Timeout="100000")[0] == 200
    llm.shutdown()


def test_recomputation_is_requested_over_http(keyed):
    text = [{"import": "miami"}, "Where?"]
    behind = {"schema": "trip", "content": ["Well then. ", *text]}  # so that the module is not exact
    plain = ask(keyed, "free", prompt=behind, max_tokens=2, reuse="anchored")[1]["inlay"]
    recomputed = ask(keyed, "free", prompt=behind, max_tokens=2, reuse="anchored+linked:3")[1]["inlay"]
    assert (plain["recomputed_tokens"], recomputed["recomputed_tokens"]) == (0, 3)
    assert ask(keyed, "free", prompt=behind, max_tokens=2, reuse="modular+profiled:0.5")[0] == 200
    status, answer = ask(keyed, "exact", prompt=behind, max_tokens=2, reuse="anchored+linked:3")
    assert (status, answer["error"]["code"]) == (403, "reuse_not_allowed")
    selected = ask(keyed, "free", prompt=behind, max_tokens=2, reuse="anchored+query:0.5")[1]["inlay"]
    assert selected["recomputed_tokens"] > 0 < selected["selecting_tokens"]
    assert (recomputed["linked_tokens"], selected["linked_tokens"]) == (3, 0)
    for fields, code, param in (
        ({"reuse": "anchored+query:2"}, "policy.bad_recompute", "recompute"),
        ({"reuse": "anchored", "recompute": "first:3"}, "policy.bad_recompute", "recompute"),
        ({"reuse": "some"}, "policy.unknown", "reuse"),
        ({"reuse": "linked:3"}, "policy.no_base", "reuse"),
        ({"reuse": "anchored+linked:3", "recompute": "linked:4"}, "policy.conflict", "recompute"),
        ({"reuse": "exact", "across_adapters": True}, "policy.conflict", "across_adapters"),
        ({"reuse": "anchored", "promote": False}, "policy.conflict", "promote"),
        ({"reuse": "exact", "find": "content"}, "policy.conflict", "find"),
        ({"find": "all"}, "policy.bad_find", "find"),
        ({"reuse": "modular", "tolerance": 0.1}, "policy.conflict", "tolerance"),
        ({"reuse": "auto", "tolerance": "x"}, "policy.bad_tolerance", "tolerance"),
    ):
        _, answer = ask(keyed, "free", prompt=behind, max_tokens=2, **fields)
        assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("anchored+linked:3", {"reuse": "anchored", "recompute": "linked:3"}),
        ("modular+linked:3", {"recompute": "linked:3"}),
        ("modular+linked:3+promote:off", {"reuse": "modular", "recompute": "linked:3", "promote": False}),
        ("isolated+across", {"reuse": "isolated", "across_adapters": True}),
        ("modular+content+profiled:0.1", {"recompute": "profiled:0.1", "find": "content"}),
    ],
)
def test_policy_fields_equal_the_deprecated_key(keyed, caplog, key, fields):
    prompt = {"schema": "trip", "content": ["Well then. ", {"import": "miami"}, "Where?"]}
    asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    LOGGED.clear()
    (_, one), (_, other), _ = (
        ask(keyed, "free", **asked, **given) for given in (fields, {"reuse": key}, {"reuse": key})
    )
    assert one["inlay"]["reuse"] == other["inlay"]["reuse"] == key
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert [record.message for record in caplog.records if "deprecated" in record.message] == [
        f"reuse='{key}' is deprecated. Write {PolicyFields(**{'reuse': 'modular', **fields}).written()}."
    ], "once for a process"
