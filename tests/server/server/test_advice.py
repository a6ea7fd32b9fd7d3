"""/v1/schemas/{name}/advice: the findings of lint, for the tenants that see the schema."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.server.site import SCHEMAS, Site, refused, with_keys

SMALL = '<schema name="small">\n<module name="a">Yes.</module>\n<union><module name="b">No.</module></union></schema>'
SOUND = f'<schema name="sound"><module name="a">{"The harbour is open from six to nine. " * 3}</module></schema>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    for site in with_keys(tmp_path_factory.mktemp("keys")):
        for pml in (SMALL, SOUND):
            assert site.call("POST", SCHEMAS, {"pml": pml, "encode": False}, key="ann")[0] == 201
        yield site


def test_advice_names_the_rule_and_the_line(site: Site):
    status, _, page = site.call("GET", f"{SCHEMAS}/small/advice", key="ann")
    assert (status, page["schema"], page["version"], page["has_more"]) == (200, "small", 1, False)
    found = {(one["rule"], one["line"]) for one in page["data"]}
    assert found == {("small-module", 2), ("small-module", 3), ("union-of-one", 3)}
    assert all(one["message"] and one["column"] > 0 for one in page["data"])


def test_sound_schema_gets_no_advice(site: Site):
    assert site.call("GET", f"{SCHEMAS}/sound/advice", key="ann")[2]["data"] == []


def test_a_schema_from_json_has_paths(site: Site):
    schema = {"name": "json", "content": [{"module": "a", "content": "Yes."}]}
    assert site.call("POST", SCHEMAS, {"schema": schema, "encode": False}, key="ann")[0] == 201
    (one,) = site.call("GET", f"{SCHEMAS}/json/advice", key="ann")[2]["data"]
    assert (one["rule"], "line" in one) == ("small-module", False)
    assert one["path"]


def test_the_list_of_findings_is_bounded(site: Site):
    many = "".join(f'<module name="m{number}">No.</module>' for number in range(300))
    assert (
        site.call("POST", SCHEMAS, {"pml": f'<schema name="many">{many}</schema>', "encode": False}, key="ann")[0]
        == 201
    )
    page = site.call("GET", f"{SCHEMAS}/many/advice", key="ann")[2]
    assert (len(page["data"]), page["has_more"]) == (200, True)


def test_schema_of_another_tenant_is_not_found(site: Site):
    refused(site.call("GET", f"{SCHEMAS}/small/advice", key="bob"), 404, "not_found")
    refused(site.call("GET", f"{SCHEMAS}/small/advice?x=1", key="ann"), 400, "invalid_value")
