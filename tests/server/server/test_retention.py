"""Lifetimes, pins, evictions and past versions of schemas over HTTP: within a tenant's budget, and its own alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from inlay import AsyncLLM
from inlay.server.limits import Limits
from inlay.server.schema_catalog import SchemaQuotas
from tests.server.server.test_schemas import TRIP, as_, asking, made, refused
from tests.server.server.watching import TENANTS, model


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = model()
    yield made
    made.shutdown()


@pytest.fixture
def client(llm: AsyncLLM) -> Iterator[TestClient]:
    with asking(llm) as client:
        yield client


def test_schema_gets_its_requested_lifetime(client, llm):
    assert made(client, {"pml": TRIP, "ttl": "1h"})["ttl"] == "1h"
    known = llm.processor.schemas.get("trip", TENANTS["Bearer ann"].salt)
    assert known.ttl_s == 3600, "the encoding ahead has not taken it away"
    assert client.put("/v1/schemas/trip", json={"pml": TRIP}, **as_("ann")).json()["ttl"] is None
    answer = client.put("/v1/schemas/trip", json={"pml": TRIP, "ttl": "soon"}, **as_("ann"))
    assert "write a lifetime such as '5m'" in refused(answer, 400, "invalid_value")


def test_pins_belong_to_their_tenant(client, llm):
    made(client, TRIP)
    pinned = client.put("/v1/schemas/trip/pin", **as_("ann")).json()
    assert pinned["pinned_bytes"] == llm.stats().pinned_bytes > 0
    assert client.get("/v1/schemas/trip", **as_("ann")).json()["pinned"] is True
    refused(client.put("/v1/schemas/trip/pin", **as_("bob")), 404, "not_found")
    assert client.delete("/v1/schemas/trip/pin", **as_("ann")).json()["was_pinned"] is True
    assert client.delete("/v1/schemas/trip/pin", **as_("ann")).json()["was_pinned"] is False
    assert llm.stats().pinned_bytes == 0


def test_pin_over_its_tenants_budget_is_rejected(llm):
    few = {name: replace(tenant, limits=Limits(max_pinned_bytes=1000)) for name, tenant in TENANTS.items()}
    with asking(llm, few) as client:
        made(client, TRIP)
        sentence = refused(client.put("/v1/schemas/trip/pin", **as_("ann")), 403, "pin_limit")
        assert "are yours to pin; unpin something, or pin fewer modules" in sentence
        assert llm.stats().pinned_bytes == 0


def test_a_pin_ends_with_its_version(client, llm):
    made(client, TRIP)
    client.put("/v1/schemas/trip/pin", **as_("ann"))
    changed = client.put("/v1/schemas/trip", json={"pml": TRIP.replace("Miami", "Lima")}, **as_("ann")).json()
    assert changed["pinned"] is False
    assert llm.stats().pinned_bytes == 0


def test_evicted_schema_stays_and_can_be_encoded_again(client):
    encoded = made(client, TRIP)["encoded"]
    answer = client.delete("/v1/schemas/trip/stored", **as_("ann")).json()
    assert answer["evicted_tokens"] >= encoded["tokens"] > 0  # with the primer
    assert client.get("/v1/schemas/trip", **as_("ann")).json()["encoded"]["tokens"] == 0
    warmed = client.post("/v1/schemas/trip/warm", json={}, **as_("ann")).json()
    assert warmed["encoded"] == encoded["tokens"]


def test_public_schema_is_evicted_only_by_admins(client):
    made(client, {"pml": TRIP, "public": True}, tenant="root")
    refused(client.delete("/v1/schemas/trip/stored", **as_("ann")), 403, "admin_only")
    assert client.put("/v1/schemas/trip/pin", **as_("ann")).status_code == 200, "within its own budget anybody may pin"
    assert client.delete("/v1/schemas/trip/stored", **as_("root")).json()["evicted_tokens"] > 0


def test_text_of_a_removed_schema_is_evicted_by_its_owner_alone(client):
    encoded = made(client, TRIP)["encoded"]
    client.delete("/v1/schemas/trip", **as_("ann"))
    for tenant in ("bob", "root"):
        refused(client.delete("/v1/schemas/trip/stored", **as_(tenant)), 404, "not_found")
    answer = client.delete("/v1/schemas/trip/stored", **as_("ann")).json()
    assert answer["public"] is False
    assert answer["evicted_tokens"] >= encoded["tokens"] > 0
    refused(client.delete("/v1/schemas/trip/stored", **as_("ann")), 404, "not_found")
    assert made(client, {"pml": TRIP, "encode": False})["encoded"]["tokens"] == 0


def test_text_of_a_removed_public_schema_is_evicted_by_admins_alone(client):
    made(client, {"pml": TRIP, "public": True}, tenant="root")
    client.delete("/v1/schemas/trip", **as_("root"))
    for query in ("", "?public=true"):
        refused(client.delete(f"/v1/schemas/trip/stored{query}", **as_("ann")), 404, "not_found")
    answer = client.delete("/v1/schemas/trip/stored?public=true", **as_("root")).json()
    assert answer["public"] is True
    assert answer["evicted_tokens"] > 0


def test_own_removed_schema_is_evicted_beside_a_public_one_of_its_name(client):
    encoded = made(client, {"pml": TRIP, "public": True}, tenant="root")["encoded"]["tokens"]
    made(client, TRIP)
    client.delete("/v1/schemas/trip?public=false", **as_("ann"))
    answer = client.delete("/v1/schemas/trip/stored?public=false", **as_("ann")).json()
    assert answer["evicted_tokens"] > 0
    assert client.get("/v1/schemas/trip", **as_("ann")).json()["encoded"]["tokens"] == encoded


def test_only_the_changed_module_is_encoded(client):
    """Siblings after the same text stay as they are encoded."""
    before = made(client, TRIP)
    client.put(
        "/v1/schemas/trip", json={"pml": TRIP.replace("Go to Miami.", "See Lima."), "encode": False}, **as_("ann")
    )
    shown = client.get("/v1/schemas/trip", **as_("ann")).json()
    plan = shown["modules"][0]
    miami, tokyo = plan["modules"][0]["union"]
    assert miami["encoded"]["tokens"] == 0
    assert tokyo["encoded"]["tokens"] == tokyo["encoded"]["of"]
    assert plan["encoded"]["tokens"] == plan["encoded"]["of"]
    assert (
        shown["encoded"]["tokens"]
        == before["encoded"]["tokens"] - before["modules"][0]["modules"][0]["union"][0]["tokens"]
    )


@pytest.mark.parametrize("body", [{"pml": TRIP}, {"schema": {"name": "trip", "content": ["Some text."]}}])
def test_past_versions_keep_their_text(client, body):
    made(client, body)
    client.put("/v1/schemas/trip", json={"pml": TRIP.replace("Miami", "Lima")}, **as_("ann"))
    first = client.get("/v1/schemas/trip/versions/1", **as_("ann")).json()
    assert first["source"] == body
    assert client.get("/v1/schemas/trip/versions/2", **as_("ann")).json()["source"]["pml"].count("Lima") == 1
    refused(client.get("/v1/schemas/trip/versions/3", **as_("ann")), 404, "not_found")
    refused(client.get("/v1/schemas/trip/versions/1", **as_("bob")), 404, "not_found")
    again = client.put("/v1/schemas/trip", json=first["source"], **as_("ann")).json()
    assert again["versions"][2]["sha256"] == again["versions"][0]["sha256"]


def test_past_texts_are_bounded_and_the_oldest_are_dropped_first(llm):
    with asking(llm, limits=SchemaQuotas(past_bytes=2 * len(TRIP.encode()))) as client:
        made(client, TRIP)
        for city in ("Lima", "Oslo!", "Rome."):
            client.put("/v1/schemas/trip", json={"pml": TRIP.replace("Miami", city)}, **as_("ann"))
        kept = [client.get(f"/v1/schemas/trip/versions/{n}", **as_("ann")).json()["source"] for n in (1, 2, 3, 4)]
        assert [one is not None for one in kept] == [False, True, True, True]
