"""Divergence over HTTP: each tenant sees and lifts only the fallbacks that its own answers have caused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inlay.engine.background import divergence
from tests.model.server.site import CHAT, COMPLETIONS, SCHEMAS, Site, refused, serving, with_keys

DIVERGENCE = "/v1/divergence"
PML = (
    '<schema name="trip">Plan. <module name="sea">By the sea.</module><module name="hill">In the hills.</module>'
    "</schema>"
)
PROMPT = {
    "pml": '<prompt schema="trip"><sea/><hill/>Where to?</prompt>',
    "max_tokens": 3,
    "reuse": "anchored",
    "temperature": 0,
}


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Site]:
    """A server whose model has random weights, so that its answers are always too far."""
    monkeypatch.setattr(divergence, "LOOK", 2)
    for site in with_keys(tmp_path, shadow=1.0, shadow_threshold=1e-7, profile="off"):
        assert site.call("POST", SCHEMAS, {"pml": PML, "public": True}, key="root")[0] == 201
        yield site


def ask(site: Site, key: str, path: str = COMPLETIONS, **fields):
    """The fallbacks of an answer; waits until the answer is compared, if it is."""
    compared = site.app.state.service.llm.stats
    status, _, answer = site.call("POST", path, {**PROMPT, **fields}, key=key)
    assert status == 200, answer
    end = time.monotonic() + 10
    while compared().shadow.waiting and time.monotonic() < end:
        time.sleep(0.002)
    return answer["inlay"].get("fallbacks")


def known(site: Site, key: str):
    status, _, answer = site.call("GET", DIVERGENCE, key=key)
    assert (status, answer["shadow"], answer["threshold"]) == (200, 1.0, 1e-7)
    return answer["data"]


def test_a_tenants_requests_fall_back_and_are_lifted(site: Site):
    assert [ask(site, "ann") for _ in range(3)] == [None, None, [{"asked": "anchored", "taken": "exact"}]]
    assert ask(site, "bob") is None
    (one,) = known(site, "ann")
    assert (one["schema"], one["reuse"], one["samples"], one["taken"]) == ("trip", "anchored", 2, "exact")
    assert one["low"] <= one["kl"] <= one["high"]
    (other,) = known(site, "bob")
    assert (other["samples"], other["high"], other["taken"]) == (1, None, None)
    assert known(site, "root") == []
    assert ask(site, "ann", CHAT) == [{"asked": "anchored", "taken": "exact"}]

    metrics = site.call("GET", "/metrics", key="root")[2].decode()
    assert 'inlay:drift_fallbacks{engine="0",model_name="demo",policy="anchored",schema="trip"} 1.0' in metrics
    assert 'inlay:prompts_fell_back_total{engine="0",model_name="demo"} 2.0' in metrics

    lifted = site.call("DELETE", f"{DIVERGENCE}?schema=other", key="ann")[2]
    assert lifted == {"object": "divergence.deleted", "schema": "other", "lifted": 0}
    assert site.call("GET", "/v1/drift", key="ann")[2] == site.call("GET", DIVERGENCE, key="ann")[2], (
        "its deprecated name"
    )
    assert site.call("DELETE", "/v1/drift?schema=other", key="ann")[2]["object"] == "drift.deleted"
    assert site.call("DELETE", DIVERGENCE, key="bob")[2]["lifted"] == 0
    assert site.call("DELETE", f"{DIVERGENCE}?schema=trip", key="ann")[2]["lifted"] == 1
    assert known(site, "ann") == []
    assert ask(site, "ann") is None


def test_streams_report_fallbacks(site: Site):
    for _ in range(2):
        ask(site, "ann")
    status, _, text = site.call("POST", COMPLETIONS, {**PROMPT, "stream": True}, key="ann")
    assert status == 200
    assert b'"fallbacks":[{"asked":"anchored","taken":"exact"}]' in text


def test_new_schema_version_starts_without_fallback(site: Site):
    for _ in range(3):
        fell = ask(site, "ann")
    assert fell is not None
    changed = {"pml": PML.replace("By the sea", "Behind the sea"), "public": True}
    assert site.call("PUT", f"{SCHEMAS}/trip", changed, key="root")[0] == 200
    assert ask(site, "ann") is None


def test_invalid_requests_are_rejected(site: Site):
    assert "it may hold schema" in refused(site.call("DELETE", f"{DIVERGENCE}?name=trip"), 400, "invalid_value")
    refused(site.call("GET", f"{DIVERGENCE}?schema=trip"), 400, "invalid_value")
    refused(site.call("GET", DIVERGENCE, key=None), 401, "invalid_api_key")


def test_without_shadow_the_list_is_empty():
    for site in serving({}):
        assert site.call("GET", DIVERGENCE, key=None)[2] == {
            "object": "list",
            "shadow": 0.0,
            "threshold": 0.1,
            "data": [],
        }
        assert site.call("DELETE", DIVERGENCE, key=None)[2]["lifted"] == 0
