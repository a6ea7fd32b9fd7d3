"""The table of paths: it and the application have the same ones."""

from __future__ import annotations

import pytest
from fastapi.routing import iter_route_contexts

from inlay.server.routes import ROUTES, route_of
from tests.server.server.conftest import Site


def test_every_route_of_the_app_is_in_the_table(site: Site):
    found: dict[str, set[str]] = {}
    for route in iter_route_contexts(site.server.config.app.routes):
        found.setdefault(route.path, set()).update(route.methods)
    assert {route.path: set(route.methods) for route in ROUTES} == {
        path: methods - {"HEAD"} for path, methods in found.items()
    }


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("/v1/schemas/trip", "/v1/schemas/{name}"),
        ("/v1/schemas/trip/warm", "/v1/schemas/{name}/warm"),
        ("/v1/models/org/name", "/v1/models/{name:path}"),
        ("/health", "/health"),
    ],
)
def test_a_path_has_one_row(path: str, row: str):
    assert route_of(path).path == row


@pytest.mark.parametrize("path", ["", "/page", "/healthy", "/health/", "/v1/schemas/a/b", "*"])
def test_a_path_without_a_row_has_no_privileges(path: str):
    row = route_of(path)
    assert row.needs_key
    assert row.uses_tokens
    assert (row.always_open, row.takes_xml, row.probe) == (False, False, False)
