"""/v1/requests: the counts and times of a tenant's requests, while they run and after their end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest

from inlay.api.failures import BodyError, failure_of
from inlay.server.limits import Tenant
from inlay.server.live_requests import ENDED, TENANTS, LiveRequests
from tests.model.server.site import COMPLETIONS, JSON, Site, refused, with_keys

PATH = "/v1/requests"
SECRET = "The ferry to Lumen leaves at noon. " * 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from with_keys(tmp_path_factory.mktemp("keys"))


def rows(site: Site, key: str, query: str = "") -> list[dict]:
    status, _, page = site.call("GET", f"{PATH}{query}", key=key)
    assert status == 200, page
    return page["data"]


def test_finished_request_has_counts_and_no_text(site: Site):
    body = {"prompt": SECRET, "max_tokens": 3, "temperature": 0}
    status, _, answer = site.call("POST", COMPLETIONS, body, key="ann")
    assert status == 200
    row = rows(site, "ann")[0]
    assert answer["id"] == f"cmpl-{row['id']}"
    assert (row["endpoint"], row["state"], row["status"]) == (COMPLETIONS, "ended", 200)
    assert row["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert row["generated_tokens"] == answer["usage"]["completion_tokens"]
    for name in ("exact_tokens", "module_tokens", "computed_tokens", "timing", "reuse"):
        assert row[name] == answer["inlay"][name]
    assert row["exact_tokens"] + row["module_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
    assert "ferry" not in json.dumps(row)


def test_a_refused_request_has_its_error(site: Site):
    refused(site.call("POST", COMPLETIONS, {"prompt": "x", "max_tokens": -1}, key="ann"), 400, "invalid_value")
    row = rows(site, "ann")[0]
    assert (row["state"], row["status"], row["error"], row["prompt_tokens"]) == ("ended", 400, "invalid_value", None)


def test_a_running_request_counts_its_tokens(site: Site):
    body = {"prompt": SECRET, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with closing(HTTPConnection("127.0.0.1", site.port, timeout=30)) as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body), {**JSON, **site.headers("ann")})
        connection.getresponse().read(10)
        running = [row for row in rows(site, "ann") if row["state"] == "generating"]
        assert [row["tenant"] for row in running] == ["ann"]
        assert running[0]["stream"] is True
        assert running[0]["generated_tokens"] > 0
        assert running[0]["timing"]["ttft_s"] > 0
        assert [row for row in rows(site, "bob") if row["state"] != "ended"] == []


def test_tenants_see_their_own_requests_and_an_admin_all(site: Site):
    for key in ("ann", "bob"):
        assert site.call("POST", COMPLETIONS, {"prompt": "Who?", "max_tokens": 1}, key=key)[0] == 200
    assert {row["tenant"] for row in rows(site, "ann")} == {"ann"}
    assert {row["tenant"] for row in rows(site, "bob")} == {"bob"}
    assert {row["tenant"] for row in rows(site, "root")} >= {"ann", "bob"}


def test_a_list_is_bounded_and_counts_toward_the_limits(site: Site):
    status, _, page = site.call("GET", f"{PATH}?limit=1", key="root")
    assert (status, len(page["data"]), page["has_more"]) == (200, 1, True)
    refused(site.call("GET", f"{PATH}?page=2", key="ann"), 400, "invalid_value")
    refused(site.call("GET", f"{PATH}?limit=0", key="ann"), 400, "invalid_value")
    for _ in range(2):
        site.call("GET", PATH, key="few")
    refused(site.call("GET", PATH, key="few"), 429, "rate_limit_exceeded")


def test_the_latest_rows_of_the_latest_tenants_are_kept():
    live, usage = LiveRequests(), SimpleNamespace(outputs=[], said=0)
    wrong = failure_of(BodyError("no", code="invalid_value"))
    ann = Tenant("ann", salt="1")
    for number in range(ENDED + 5):
        live.end(live.begin(f"/{number}", ann, usage), wrong)
    kept = list(live.rows(ann))
    assert len(kept) == ENDED
    assert kept[0]["endpoint"] == f"/{ENDED + 4}"
    assert list(live.rows(Tenant("ann", salt="2"))) == [], "another tenant of this name"
    for number in range(TENANTS):
        live.end(live.begin("/", Tenant(f"t{number}", salt=str(number)), usage), wrong)
    assert list(live.rows(ann)) == []
    assert len(list(live.rows(Tenant("root", admin=True)))) == TENANTS
