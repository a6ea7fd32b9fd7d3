"""/v1/schemas over HTTP: each tenant creates and sees its own schemas, and errors are sentences."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from inlay import AsyncLLM, SamplingParams, Schema
from inlay.api.dialect import OPENAI
from inlay.server import body as body_module
from inlay.server.limits import Limits, Tenant
from inlay.server.schema_catalog import SchemaCatalog, SchemaQuotas
from inlay.server.schema_record import MAX_TAGS, MAX_VALUES
from inlay.server.schemas import progress_events
from tests.conftest import tiny
from tests.server.server.watching import TENANTS, model, server, service
from tests.unit.pml.node_strategies import schemas

_KEYS = st.text() | st.sampled_from(["name", "content", "module", "src", "union", "param", "len", "role"])
_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)
BODIES = (
    JSON | st.fixed_dictionaries({"pml": st.text()}) | st.fixed_dictionaries({"schema": JSON, "encode": st.booleans()})
)

TRIP = """<schema name="trip">You plan trips.
  <module name="plan">Plan a trip of <param name="duration" len="8" default="a day"/>.
    <union><module name="miami">Go to Miami.</module><module name="tokyo">To Tokyo.</module></union>
  </module>
</schema>"""


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = model()
    yield made
    made.shutdown()


@contextmanager
def asking(
    llm: AsyncLLM, tenants: Any = TENANTS, limits: SchemaQuotas | None = None, **given: Any
) -> Iterator[TestClient]:
    """A client of a new server around a model with an empty store; the schemas that it makes are gone at the end."""
    llm.client.call(llm.store.clear).result()
    made = service(llm, tenants, **given)
    made.schemas = SchemaCatalog(llm, limits)
    with TestClient(server(made), raise_server_exceptions=False) as client:
        yield client
    for known in llm.processor.schemas:
        llm.remove_schema(known.layout.schema.name, cache_salt=known.owner or None)


@pytest.fixture
def client(llm: AsyncLLM) -> Iterator[TestClient]:
    with asking(llm) as client:
        yield client


def as_(tenant: str, **more: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {tenant}", **{name.replace("_", "-"): more[name] for name in more}}}


def made(client: TestClient, body: Any, tenant: str = "ann") -> dict[str, Any]:
    response = client.post("/v1/schemas", json={"pml": body} if isinstance(body, str) else body, **as_(tenant))
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(response: Any, status: int, code: str) -> str:
    """The sentence of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] == code
    message: str = error["message"]
    assert message
    assert "\n" not in message
    return message


class TestMaking:
    def test_created_schema_is_returned(self, client, llm):
        """The tiny model has a token a byte, so tokens can be counted by hand; BOS is the one before all."""
        response = client.post("/v1/schemas", json={"pml": TRIP}, **as_("ann"))
        assert response.status_code == 201
        shown = response.json()
        (plan,) = shown["modules"]
        ((miami, tokyo),) = (union["union"] for union in plan["modules"])
        row = llm.store.pool.bytes_per_token
        bos = len(llm.encoder.bos)
        assert shown["always"]["tokens"] == len("You plan trips.\n") + bos
        assert plan["tokens"] == len("Plan a trip of .\n")
        assert plan["length"] == plan["tokens"] + 8 + len("Go to Miami.")
        assert plan["encoded"]["of"] == plan["tokens"] + len("a day")
        assert plan["params"] == [{"param": "duration", "len": 8, "default": "a day"}]
        assert (miami["module"], miami["length"], tokyo["length"]) == ("plan/miami", 12, 9)
        for node in (plan, miami, tokyo, shown["always"], shown):
            encoded = node["encoded"]
            assert encoded["tokens"] == encoded["of"] > 0
            assert encoded["bytes"] == encoded["tokens"] * row
        assert shown["tokens"] == shown["encoded"]["of"] - len("a day")
        assert shown["encoding"] == {"state": "done", "done": shown["encoded"]["of"], "total": shown["encoded"]["of"]}
        assert (shown["version"], len(shown["versions"]), shown["public"]) == (1, 1, False)
        assert response.headers["etag"] == shown["etag"]
        again = client.get(response.headers["location"], **as_("ann"))
        assert again.headers["etag"] == shown["etag"]
        assert again.json() == shown

    def test_three_body_forms_create_the_same_schema(self, client):
        schema = Schema.from_string(TRIP)
        document = json.loads(schema.to_json())
        forms = {
            "ann": {"json": {"pml": TRIP, "encode": False}},
            "bob": {"json": {"schema": document, "encode": False}},
            "root": {"content": TRIP},
        }
        found, sources = [], {}
        for tenant, body in forms.items():
            kind = {"Content_Type": "application/xml"} if tenant == "root" else {}
            response = client.post("/v1/schemas" + "?encode=false" * bool(kind), **body, **as_(tenant, **kind))
            assert response.status_code == 201, response.text
            one = response.json()
            found.append({key: one[key] for key in ("name", "modules", "tokens", "length", "always", "encoding")})
            shown = client.get("/v1/schemas/trip?source=true", **as_(tenant)).json()
            sources[tenant] = shown["source"]
        assert found[0] == found[1] == found[2]
        assert found[0]["encoding"] == {"state": "none", "done": 0, "total": 0}
        assert sources == {"ann": {"pml": TRIP}, "bob": {"schema": document}, "root": {"pml": TRIP}}

    def test_background_encoding_completes(self, client):
        made(client, {"pml": TRIP, "encode": "background"})
        assert client.post("/v1/schemas/trip/warm", **as_("ann")).json()["state"] == "done"
        shown = client.get("/v1/schemas/trip", **as_("ann")).json()
        assert shown["encoded"]["tokens"] == shown["encoded"]["of"]

    def test_prompt_reads_encoded_modules(self, client, llm):
        made(client, TRIP)
        prompt = Schema.from_string(TRIP).prompt().use("plan", duration="long").text("?").build()

        async def ask() -> list[Any]:
            params = SamplingParams(max_tokens=1)
            return [one async for one in llm.generate(prompt, params, reuse="modular", cache_salt="salt of ann")]

        usage = client.portal.call(ask)[-1].usage
        assert usage.cached_tokens == usage.prompt_tokens - len("long?")

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(schemas())
    def test_any_schema_is_created_or_rejected_in_sentences(self, client, schema):
        response = client.post("/v1/schemas", json={"schema": json.loads(schema.to_json())}, **as_("ann"))
        if response.status_code == 201:
            shown = response.json()
            names: list[str] = []
            _collect(shown["modules"], names)
            assert sorted(names) == sorted(schema.modules)
            assert shown["encoded"]["tokens"] == shown["encoded"]["of"]
            path = f"/v1/schemas/{quote(schema.name)}"
            assert client.delete(path, **as_("ann")).status_code == 200
        else:
            refused(response, 400, response.json()["error"]["code"])


def _collect(nodes: list[dict[str, Any]], names: list[str]) -> None:
    for node in nodes:
        if "module" in node:
            names.append(node["module"])
        _collect(node.get("union", []) + node.get("modules", []), names)


class TestWrong:
    def test_all_problems_are_returned_with_their_places(self, client):
        pml = '<schema name="x">\n  <module/>\n  <module name="a"><param name="p" len="0"/></module>\n</schema>'
        response = client.post("/v1/schemas", json={"pml": pml}, **as_("ann"))
        message = refused(response, 400, "invalid_schema")
        error = response.json()["error"]
        assert error["param"] == "pml"
        assert [(one["line"], one["column"]) for one in error["problems"]] == [(2, 3), (3, 36)]
        assert all(one["message"] in message for one in error["problems"])
        body = {"schema": {"name": "x", "content": [{"module": "a", "kontent": ""}, {"param": "p", "len": 1}]}}
        response = client.post("/v1/schemas", json=body, **as_("ann"))
        refused(response, 400, "invalid_schema")
        error = response.json()["error"]
        assert error["param"] == "schema"
        assert [one["path"] for one in error["problems"]] == ['content[0].module "a"', "content[1]"]

    def test_too_long_default_is_a_problem(self, client):
        pml = '<schema name="x"><module name="a"><param name="p" len="2" default="too long"/></module></schema>'
        response = client.post("/v1/schemas", json={"pml": pml}, **as_("ann"))
        assert "is 8 tokens long and its len is 2" in refused(response, 400, "invalid_schema")
        assert client.get("/v1/schemas", **as_("ann")).json()["data"] == []

    def test_no_file_of_the_server_is_read(self, client, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("here.txt").write_text("canary")
        sentence = "src names a file, but the server reads no files for requests; put the text into the module"
        for src in ("here.txt", "./here.txt", str(tmp_path / "here.txt"), "../x", "/etc/passwd", ""):
            pml = f'<schema name="x"><module name="a" src="{src}"/></schema>'
            for body in ({"pml": pml}, {"schema": {"name": "x", "content": [{"module": "a", "src": src}]}}):
                response = client.post("/v1/schemas", json=body, **as_("ann"))
                assert sentence in refused(response, 400, "invalid_schema")
                assert "canary" not in response.text

    @pytest.mark.parametrize(
        "pml",
        [
            '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><schema name="x">&b;</schema>',
            '<!DOCTYPE x SYSTEM "http://127.0.0.1/x"><schema name="x"/>',
            '<schema name="x">&unknown;</schema>',
            "<schema " * 100,
            "<schema>" * 1000,
            '<schema name="x">\ud800</schema>',
            '<schema name="x">\0</schema>',
            "",
            "no tags",
        ],
    )
    def test_hostile_markup_is_one_sentence(self, client, pml):
        content = json.dumps({"pml": pml})
        response = client.post("/v1/schemas", content=content, **as_("ann", Content_Type="application/json"))
        refused(response, 400, response.json()["error"]["code"])

    @pytest.mark.parametrize(
        ("body", "param", "says"),
        [
            ([], None, "the body is an empty list; it must be an object"),
            ({}, "pml", 'give one of "pml" and "schema"'),
            ({"pml": TRIP, "schema": {"name": "x"}}, "pml", "there are two"),
            ({"pml": 1}, "pml", "pml is 1; it must be a schema as PML"),
            ({"schema": "x"}, "schema", "schema is 'x'; it must be a schema as JSON"),
            ({"pml": TRIP, "public": "yes"}, "public", "public is 'yes'; it must be true or false"),
            ({"pml": TRIP, "encode": "later"}, "encode", 'it must be true, false or "background"'),
            ({"pml": TRIP, "reuse": "exact"}, "reuse", "Write reuse='isolated' or reuse='anchored'"),
            ({"pml": TRIP, "reuse": "x"}, "reuse", "reuse='x' is not a reuse policy"),
            ({"pml": TRIP, "reuse": "modular+query:0.1"}, "reuse", "Write reuse='modular', and give recompute"),
            ({"pml": TRIP, "reuse": "isolated+linked:4"}, "reuse", "Write reuse='isolated', and give recompute"),
            ({"pml": TRIP, "reuse": "modular+promote:off"}, "reuse", "Write reuse='modular', and give"),
            ({"pml": TRIP, "recompute": "linked:4"}, "recompute", "Give recompute with each request"),
            ({"pml": TRIP, "promote": False}, "promote", "Give promote with each request"),
            ({"pml": TRIP, "across_adapters": True}, "across_adapters", "Give across_adapters with each request"),
            ({"pml": TRIP, "tolerance": 1}, "tolerance", "Write reuse='auto'"),
            ({"pml": TRIP, "positions": "x"}, "positions", "positions is 'x'; use one of"),
            ({"pml": TRIP, "pubic": True}, "pubic", "a schema takes no field 'pubic'; it takes public, encode"),
            ({"pml": '<schema name="a b"/>'}, "name", '"a b" is not a name'),
            ({"pml": f'<schema name="{"a" * 257}"/>'}, "name", "257 characters; write at most 256"),
        ],
    )
    def test_invalid_body_is_one_sentence_about_a_field(self, client, body, param, says):
        response = client.post("/v1/schemas", json=body, **as_("ann"))
        assert says in refused(response, 400, response.json()["error"]["code"])
        assert response.json()["error"]["param"] == param

    @pytest.mark.parametrize(
        ("method", "path", "rest"),
        [
            ("GET", "/v1/schemas?limits=3", {}),
            ("GET", "/v1/schemas?limit=0", {}),
            ("GET", "/v1/schemas?limit=x", {}),
            ("GET", "/v1/schemas/trip?public=maybe", {}),
            ("GET", "/v1/schemas/trip?version=1", {}),
            ("DELETE", "/v1/schemas/trip?force=true", {}),
            ("DELETE", "/v1/schemas/trip", {"json": {}}),
            ("POST", "/v1/schemas/trip/warm", {"json": {"reuse": "isolated"}}),
            ("POST", "/v1/schemas?encode=false", {"json": {"pml": TRIP}}),
            ("POST", "/v1/schemas?pml=x", {"content": TRIP, "kind": "application/xml"}),
            ("POST", "/v1/schemas?x=y", {"content": TRIP, "kind": "application/xml"}),
            ("PUT", "/v1/schemas/trip", {"json": {"pml": '<schema name="other"/>'}}),
        ],
    )
    def test_unknown_parameters_are_rejected(self, client, method, path, rest):
        made(client, {"pml": TRIP, "encode": False})
        kind = {"Content_Type": rest["kind"]} if "kind" in rest else {}
        body = {key: value for key, value in rest.items() if key != "kind"}
        response = client.request(method, path, **body, **as_("ann", **kind))
        refused(response, 400, response.json()["error"]["code"])
        assert client.get("/v1/schemas/trip", **as_("ann")).json()["version"] == 1

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.sampled_from(["POST", "PUT"]), BODIES)
    def test_any_body_gets_a_valid_status(self, client, method, body):
        path = "/v1/schemas" if method == "POST" else "/v1/schemas/trip"
        response = client.request(method, path, json=body, **as_("ann"))
        assert response.status_code in (201, 400, 404, 409), response.text
        if response.status_code >= 400:
            refused(response, response.status_code, response.json()["error"]["code"])


class TestOwners:
    def test_private_schema_is_visible_only_to_its_tenant(self, client, llm):
        made(client, TRIP)
        for method, path in (("GET", ""), ("PUT", ""), ("DELETE", ""), ("POST", "/warm")):
            body = {"pml": TRIP.replace("trip", "{}")} if method == "PUT" else {}
            answers = []
            for name in ("trip", "none"):
                text = json.dumps(body).replace("{}", name) if body else None
                kind = {"Content_Type": "application/json"} if body else {}
                found = client.request(method, f"/v1/schemas/{name}{path}", content=text, **as_("bob", **kind))
                answers.append(refused(found, 404, "not_found").replace(name, "NAME"))
            assert answers[0] == answers[1], "that somebody has it cannot be told"
        assert client.get("/v1/schemas", **as_("bob")).json()["data"] == []
        made(client, {"pml": TRIP.replace("Miami", "Milan")}, "bob")
        assert [one["name"] for one in client.get("/v1/schemas", **as_("bob")).json()["data"]] == ["trip"]
        assert "Miami" in client.get("/v1/schemas/trip?source=true", **as_("ann")).text
        assert client.delete("/v1/schemas/trip", **as_("bob")).status_code == 200
        assert client.get("/v1/schemas/trip", **as_("ann")).status_code == 200
        assert llm.schema("trip", cache_salt="salt of bob") is None
        assert llm.schema("trip") is None

    def test_encoding_is_not_shared_between_tenants(self, client):
        made(client, TRIP)
        shown = made(client, {"pml": TRIP, "encode": False}, "bob")
        assert shown["encoded"]["tokens"] == 0

    def test_public_schema_is_readable_by_all_and_changed_by_admins(self, client):
        made(client, {"pml": TRIP, "public": True}, "root")
        shown = client.get("/v1/schemas/trip", **as_("ann")).json()
        assert (shown["public"], shown["encoded"]["tokens"]) == (True, shown["encoded"]["of"])
        body = {"json": {"pml": TRIP.replace("Miami", "Milan")}}
        for response in (
            client.post("/v1/schemas", json={"pml": TRIP, "public": True}, **as_("ann")),
            client.put("/v1/schemas/trip", **body, **as_("ann")),
            client.delete("/v1/schemas/trip", **as_("ann")),
        ):
            refused(response, 403, "admin_only")
        assert client.post("/v1/schemas/trip/warm", **as_("ann")).status_code == 200
        assert client.put("/v1/schemas/trip", **body, **as_("root")).json()["version"] == 2

    def test_private_schema_precedes_a_public_one(self, client):
        made(client, {"pml": TRIP, "public": True}, "root")
        made(client, {"pml": TRIP.replace("Miami", "Milan"), "encode": False}, "ann")
        for query, public in (("", False), ("?public=true", True), ("?public=false", False)):
            assert client.get(f"/v1/schemas/trip{query}", **as_("ann")).json()["public"] is public
        (listed,) = client.get("/v1/schemas", **as_("ann")).json()["data"]
        assert not listed["public"]
        assert client.delete("/v1/schemas/trip", **as_("ann")).json()["public"] is False
        assert client.get("/v1/schemas/trip", **as_("ann")).json()["public"]

    def test_without_keys_everything_is_public(self, llm):
        with asking(llm, {}) as client:
            assert client.post("/v1/schemas", json={"pml": TRIP}).json()["public"]
            assert client.put("/v1/schemas/trip", json={"pml": TRIP, "public": True}).json()["version"] == 2
            response = client.post("/v1/schemas", json={"pml": TRIP, "public": False})
            assert "this server has no keys" in refused(response, 400, "invalid_value")

    def test_schemas_of_the_start_are_listed_as_public(self, llm):
        made_ = service(llm)
        with TestClient(server(made_)) as client:
            client.portal.call(made_.schemas.publish, Schema.from_string(TRIP))
            (listed,) = client.get("/v1/schemas", **as_("ann")).json()["data"]
            assert (listed["name"], listed["public"], listed["modules"]) == ("trip", True, 3)
            source = client.get("/v1/schemas/trip?source=true", **as_("ann")).json()["source"]["schema"]
            assert Schema.from_json(source).to_json() == Schema.from_string(TRIP).to_json()
        llm.remove_schema("trip")


class TestChanging:
    def test_versions_are_consecutive_and_if_match_is_enforced(self, client):
        first = made(client, TRIP)
        milan = {"pml": TRIP.replace("Miami", "Milan")}
        response = client.put("/v1/schemas/trip", json=milan, **as_("ann", If_Match=first["etag"]))
        second = response.json()
        assert (second["version"], [one["version"] for one in second["versions"]]) == (2, [1, 2])
        assert second["versions"][0] == first["versions"][0]
        assert response.headers["etag"] == second["etag"] != first["etag"]
        for method, body in (("PUT", {"json": milan}), ("DELETE", {})):
            stale = client.request(method, "/v1/schemas/trip", **body, **as_("ann", If_Match=first["etag"]))
            assert "which is 2" in refused(stale, 412, "version_mismatch")
        assert client.delete("/v1/schemas/trip", **as_("ann", If_Match="2")).status_code == 200

    def test_unchanged_modules_stay_encoded(self, client):
        made(client, TRIP)
        milan = {"pml": TRIP.replace("Miami", "Milan"), "encode": False}
        encoded = client.put("/v1/schemas/trip", json=milan, **as_("ann")).json()["encoded"]
        assert encoded["of"] - encoded["tokens"] == len("Go to Milan.")

    def test_invalid_version_keeps_the_old_one(self, client):
        before = made(client, TRIP)
        too_long = '<module name="a"><param name="p" len="1" default="ab"/></module>'
        for pml in ("<schema", f'<schema name="trip">{too_long}</schema>'):
            refused(client.put("/v1/schemas/trip", json={"pml": pml}, **as_("ann")), 400, "invalid_schema")
        assert client.get("/v1/schemas/trip", **as_("ann")).json() == before
        assert "already" in refused(client.post("/v1/schemas", json={"pml": TRIP}, **as_("ann")), 409, "already_exists")

    @pytest.mark.parametrize("change", ["PUT", "DELETE"])
    def test_running_requests_finish_on_their_version(self, client, llm, change):
        made(client, TRIP)
        prompt = Schema.from_string(TRIP).prompt().use("plan").text("And?").build()
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        began, changed = asyncio.Event(), asyncio.Event()

        async def ask(wait: bool) -> list[int]:
            said: list[int] = []
            async for output in llm.generate(prompt, params, reuse="primed", cache_salt="salt of ann"):
                said = list(output.outputs[0].token_ids)
                if wait:
                    began.set()
                    await changed.wait()
            return said

        expected = client.portal.call(ask, False)
        asked = client.portal.start_task_soon(ask, True)
        client.portal.call(began.wait)
        body = {"json": {"pml": TRIP.replace("a trip", "no trip")}} if change == "PUT" else {}
        assert client.request(change, "/v1/schemas/trip", **body, **as_("ann")).status_code == 200
        client.portal.call(changed.set)
        assert asked.result() == expected

    def test_names_in_other_scripts_are_valid_paths(self, client):
        made(client, '<schema name="città.1"/>')
        path = f"/v1/schemas/{quote('città.1')}"
        assert client.get(path, **as_("ann")).json()["name"] == "città.1"
        assert client.delete(path, **as_("ann")).json()["name"] == "città.1"


class TestListing:
    @pytest.mark.parametrize("count", [4, 11])
    def test_pages_add_up_to_the_whole_list(self, client, count):
        names = [f"s{n:02}" for n in range(count)]
        for name in reversed(names):
            made(client, {"pml": f'<schema name="{name}">Text.</schema>', "encode": False})
        seen: list[str] = []
        after, more = "", True
        while more:
            page = client.get("/v1/schemas", params={"limit": 4, "after": after}, **as_("ann")).json()
            found = [one["name"] for one in page["data"]]
            assert (page["first_id"], page["last_id"]) == (found[0], found[-1])
            seen += found
            after, more = page["last_id"], page["has_more"]
        assert seen == names

    def test_empty_list_has_no_first_and_last_id(self, client):
        page = client.get("/v1/schemas", **as_("ann")).json()
        assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


class TestPages:
    NESTED = """<schema name="big">Text.
      <module name="a">A <module name="a1">1</module><module name="a2">2</module></module>
      <union><module name="u1">U</module><module name="u2">V</module></union><module name="z">Z</module></schema>"""

    def test_modules_are_paged_in_their_tree(self, client):
        whole = made(client, {"pml": self.NESTED, "encode": False})
        names: list[str] = []
        _collect(whole["modules"], names)
        assert (names, whole["last_id"], whole["has_more"]) == (["a", "a/a1", "a/a2", "u1", "u2", "z"], "z", False)
        seen, after, more = [], "", True
        while more:
            page = client.get("/v1/schemas/big", params={"limit": 2, "after": after}, **as_("ann")).json()
            seen.append(page["modules"])
            after, more = page["last_id"], page["has_more"]
            assert page["encoded"] == whole["encoded"], "which is of all modules"
        first, second, third = seen
        (a,) = whole["modules"][:1]
        assert first == [{**a, "modules": a["modules"][:1]}]
        assert second == [{**a, "modules": a["modules"][1:]}, {"union": whole["modules"][1]["union"][:1]}]
        assert third == [{"union": whole["modules"][1]["union"][1:]}, whole["modules"][2]]

    def test_large_schema_is_shown_in_pages(self, client):
        modules = "".join(f'<module name="m{n}"/>' for n in range(1001))
        shown = made(client, {"pml": f'<schema name="many">{modules}</schema>', "encode": False})
        assert (len(shown["modules"]), shown["last_id"], shown["has_more"]) == (1000, "m999", True)
        rest = client.get("/v1/schemas/many?after=m999", **as_("ann")).json()
        assert ([one["module"] for one in rest["modules"]], rest["has_more"]) == (["m1000"], False)
        assert client.get("/v1/schemas/many?after=m1000", **as_("ann")).json()["modules"] == []

    def test_invalid_page_parameters_are_rejected(self, client):
        made(client, {"pml": TRIP, "encode": False})
        response = client.get("/v1/schemas/trip?after=none", **as_("ann"))
        assert "after is 'none', and the schema has no such module" in refused(response, 400, "invalid_value")
        for limit in (0, 1001, "x"):
            refused(client.get(f"/v1/schemas/trip?limit={limit}", **as_("ann")), 400, "invalid_value")


def events(text: str) -> list[Any]:
    """The data of server-sent events but the last, which ends them."""
    *data, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in data]


class TestWarming:
    def test_progress_is_sent_as_events(self, client, llm):
        modules = "".join(f'<module name="m{n}">{"Some text. " * 40}</module>' for n in range(6))
        made(client, {"pml": f'<schema name="long">{modules}</schema>', "encode": False})
        for ask in ({"params": {"stream": "true"}, **as_("ann")}, as_("ann", Accept="text/event-stream")):
            client.portal.call(lambda: asyncio.wrap_future(llm.client.call(llm.store.clear)))
            assert client.get("/v1/schemas/long", **as_("ann")).json()["encoded"]["tokens"] == 0
            response = client.post("/v1/schemas/long/warm", **ask)
            assert response.headers["content-type"].startswith("text/event-stream")
            *progress, result = events(response.text)
            total = result["of"]
            assert [one["total"] for one in progress] == [total] * len(progress)
            dones = [one["done"] for one in progress]
            assert dones == sorted(set(dones))
            assert dones[-1] == total
            assert (result["object"], result["state"], result["encoded"]) == ("schema.encoding", "done", total)

    def test_without_a_stream_the_result_is_returned(self, client):
        shown = made(client, {"pml": TRIP, "encode": False})
        result = client.post("/v1/schemas/trip/warm", **as_("ann")).json()
        of = shown["encoded"]["of"]
        assert result == {
            "object": "schema.encoding", "name": "trip", "version": 1, "state": "done",
            "done": of, "total": of, "encoded": of, "of": of,
        }  # fmt: skip

    def test_cross_site_post_is_rejected(self, llm):
        """A browser sends a POST without a body, or with a simple type of one, to any server without asking it."""
        with asking(llm, {}) as client:
            client.post("/v1/schemas", json={"pml": TRIP, "encode": False})
            for body in ({}, {"headers": {"Content-Type": "text/plain"}}, {"data": {"a": "b"}}, {"content": "{}"}):
                refused(client.post("/v1/schemas/trip/warm", **body), 415, "unsupported_media_type")
            assert client.get("/v1/schemas/trip").json()["encoding"]["state"] == "none"
            refused(client.post("/v1/schemas/trip/warm", json={"all": True}), 400, "unexpected_body")
            for body in ({"json": {}}, {"headers": {"Content-Type": "application/json"}}):
                assert client.post("/v1/schemas/trip/warm", **body).json()["state"] == "done"

    def test_progress_stream_ends_when_the_schema_is_deleted(self, client):
        modules = "".join(f'<module name="m{n}">{f"Text {n}. " * 100}</module>' for n in range(20))
        made(client, {"pml": f'<schema name="trip">{modules}</schema>', "encode": False})
        registry = client.app.state.service.schemas

        async def watch() -> bytes:
            entry = registry.find("trip", TENANTS["Bearer ann"])
            task = await registry.prewarm(entry)
            await registry.remove(entry, if_match=None)
            return b"".join([event async for event in progress_events(registry, task, OPENAI)])

        *_, result = events(client.portal.call(watch).decode())
        assert result["error"]["code"] == "encoding_ended"
        assert "schema 'trip' was removed or replaced while it was encoded" in result["error"]["message"]

    def test_full_pool_is_an_error_and_the_schema_stays(self):
        llm = AsyncLLM(tiny("llama"), kv_memory="100KiB", chunk_size=8)
        with asking(llm) as client:
            long = f'<schema name="long"><module name="m">{"Some text. " * 150}</module></schema>'
            shown = made(client, long)
            assert shown["encoding"]["state"] == "failed"
            assert shown["encoding"]["error"]["code"] == "kv_memory_exceeded"
            refused(client.post("/v1/schemas/long/warm", **as_("ann")), 400, "kv_memory_exceeded")
            (failed,) = events(client.post("/v1/schemas/long/warm?stream=true", **as_("ann")).text)
            assert failed["error"]["code"] == "kv_memory_exceeded"
            assert client.get("/v1/schemas/long", **as_("ann")).json()["encoded"]["tokens"] == 0
        llm.shutdown()

    @pytest.mark.parametrize("change", ["delete", "put"])
    def test_deleted_or_replaced_schema_stops_encoding(self, client, llm, change):
        modules = "".join(f'<module name="m{n}">{f"Text {n}. " * 100}</module>' for n in range(20))
        pml = f'<schema name="long">{modules}</schema>'
        shown = made(client, {"pml": pml, "encode": "background"})
        if change == "delete":
            client.delete("/v1/schemas/long", **as_("ann"))
        else:
            client.put("/v1/schemas/long", json={"pml": '<schema name="long">Other.</schema>'}, **as_("ann"))
        assert client.portal.call(llm.stats).running == 0
        client.portal.call(wait_for, lambda: not llm.schemas.encodings)
        if change == "delete":
            shown = made(client, {"pml": pml, "encode": False})
            assert shown["encoded"]["tokens"] < shown["encoded"]["of"]

    def test_module_longer_than_the_context_is_a_located_problem(self, client):
        pml = f'<schema name="long"><module name="m">{"Some text. " * 400}</module></schema>'
        response = client.post("/v1/schemas", json={"pml": pml}, **as_("ann"))
        refused(response, 400, "invalid_schema")
        (problem,) = response.json()["error"]["problems"]
        assert (problem["line"], problem["column"]) == (1, 21)
        assert "module 'm' is 4400 tokens long and the model's context is 2048" in problem["message"]


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class TestLimits:
    def test_tenant_without_modules_has_none_encoded(self, client):
        shown = made(client, TRIP, "eve")
        assert (shown["reuse"], shown["encoded"]["of"], shown["encoding"]["state"]) == (None, 0, "none")
        result = client.post("/v1/schemas/trip/warm", **as_("eve")).json()
        assert (result["state"], result["encoded"]) == ("done", 0)
        for asked in ({"encode": True}, {"reuse": "anchored"}, {"positions": "packed"}, {"encode": "background"}):
            response = client.put("/v1/schemas/trip", json={"pml": TRIP, **asked}, **as_("eve"))
            assert "at most reuse 'exact'" in refused(response, 403, "reuse_not_allowed")

    def test_server_without_modules_encodes_none(self, llm):
        with asking(llm, max_reuse="exact") as client:
            assert made(client, TRIP)["reuse"] is None

    def test_a_tenants_schemas_are_bounded(self, llm):
        with asking(llm, limits=SchemaQuotas(schemas=1)) as client:
            made(client, TRIP)
            response = client.post("/v1/schemas", json={"pml": '<schema name="b"/>'}, **as_("ann"))
            assert "you have 1 schemas" in refused(response, 403, "schema_limit")
            made(client, TRIP, "bob")

    def test_warming_is_charged(self, llm):
        limits = Limits(tokens_per_minute=40)
        with asking(llm, {"Bearer ann": Tenant("ann", "salt of ann's own", limits)}) as client:
            assert made(client, {"pml": TRIP, "encode": False})["encoded"]["of"] > 40
            assert client.post("/v1/schemas/trip/warm", **as_("ann")).status_code == 200
            refused(client.post("/v1/schemas/trip/warm", **as_("ann")), 429, "rate_limit_exceeded")

    def test_encoding_is_charged_once(self, llm):
        limits = Limits(requests_per_minute=4, tokens_per_minute=60)
        with asking(llm, {"Bearer ann": Tenant("ann", "salt of ann's own", limits)}) as client:
            shown = made(client, TRIP)
            assert shown["encoded"]["of"] > 60 // 2
            assert client.post("/v1/schemas/trip/warm", **as_("ann")).status_code == 200
            made(client, {"pml": f'<schema name="more"><module name="m">{"x" * 40}</module></schema>'})
            response = client.post("/v1/schemas/more/warm", **as_("ann"))
            assert "60 tokens a minute are used up" in refused(response, 429, "rate_limit_exceeded")
            assert client.get("/v1/schemas/trip", **as_("ann")).status_code == 200


class TestBounds:
    def test_schema_slow_to_parse_is_rejected(self, client):
        text = f'<schema name="many">{"<module/>" * MAX_TAGS}</schema>'
        assert "50,000 tags" in refused(
            client.post("/v1/schemas", json={"pml": text}, **as_("ann")), 400, "invalid_value"
        )
        schema = {"name": "many", "content": ["x"] * MAX_VALUES}
        sentence = refused(client.post("/v1/schemas", json={"schema": schema}, **as_("ann")), 400, "invalid_value")
        assert "200,000 values" in sentence

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    def test_request_body_is_freed_during_encoding(self, client, llm, monkeypatch, method: str):
        seen: list[weakref.ref[Kept]] = []
        gone: list[bool] = []
        add_schema, parse = llm.add_schema, body_module.parse_json

        def parsed(*given: Any) -> Any:
            value = parse(*given)
            value["schema"]["content"] = kept = Kept(value["schema"]["content"])
            seen.append(weakref.ref(kept))
            return value

        async def adding(*given: Any, **named: Any) -> Any:
            end = time.monotonic() + 10  # a thread may still be on its way back from it
            while seen[-1]() is not None and time.monotonic() < end:
                gc.collect()
                await asyncio.sleep(0.001)
            gone.append(seen[-1]() is None)
            return await add_schema(*given, **named)

        content = [{"module": "m", "content": ["Some text."]}]
        if method == "PUT":
            made(client, {"schema": {"name": "one", "content": ["Text."]}, "encode": False})
        monkeypatch.setattr(body_module, "parse_json", parsed)
        monkeypatch.setattr(llm, "add_schema", adding)
        path = "/v1/schemas" if method == "POST" else "/v1/schemas/one"
        response = client.request(method, path, json={"schema": {"name": "one", "content": content}}, **as_("ann"))
        assert response.status_code in (200, 201), response.text
        assert gone == [True, True]  # when it is laid out, and when it is encoded


class Kept(list[Any]):
    """Part of a body that can be asked whether it is still there."""
