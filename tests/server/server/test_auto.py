"""'auto' on a server, as the default of requests and as a ceiling: it follows the measurements of a prompt's schema."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inlay import Schema
from inlay.errors import ParameterError
from inlay.measured import Measurements
from inlay.server.settings import ServerSettings
from inlay.tolerance import Measured
from tests.conftest import tiny
from tests.server.server.conftest import COMPLETIONS, Site, running, small_model

WRITTEN = '<schema name="NAME">Plan. <module name="miami">Miami.</module><module name="oslo">Oslo.</module></schema>'
KNOWN, OTHER = (Schema.from_string(WRITTEN.replace("NAME", name)) for name in ("known", "other"))


def row(policy: str, kl_high: float, recomputed: float = 0.0) -> Measured:
    return Measured(policy, "packed", 50, kl_high / 2, kl_high, 1.0, 1.0, 0.9, recomputed, 1.0)


@pytest.fixture
def measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path))
    Measurements.of(tiny("llama").fingerprint).keep(KNOWN, [row("modular", 0.3), row("modular+linked:1", 0.04, 0.2)])


@pytest.fixture
def ceiled(measured) -> Iterator[Site]:
    llm = small_model(reuse=None, tolerance=0.05)
    with running(llm, [KNOWN, OTHER], max_reuse="auto") as site:
        yield site
    llm.shutdown()


def prompt(schema: str) -> dict:
    return {"schema": schema, "content": [{"import": "miami"}, {"import": "oslo"}, "Where?"]}


def taken(site: Site, schema: str | None, **body) -> str:
    given = "Where?" if schema is None else prompt(schema)
    return site.post(COMPLETIONS, prompt=given, max_tokens=1, **body)["inlay"]["reuse"]


def test_a_ceiling_of_auto(ceiled):
    assert taken(ceiled, "known") == "modular+linked:1"
    assert taken(ceiled, "other") == taken(ceiled, None) == "exact"  # nothing was measured of the one
    for reuse in ("off", "exact", "modular+linked:1"):
        assert taken(ceiled, "known", reuse=reuse) == reuse
    assert taken(ceiled, "known", reuse="auto") == "modular+linked:1"
    assert taken(ceiled, "known", reuse="auto:0.01") == "exact"
    for schema, reuse in (("known", "modular"), ("known", "auto:0.5"), ("other", "modular+linked:1")):
        status, error = ceiled.refusal(COMPLETIONS, {"prompt": prompt(schema), "reuse": reuse})
        assert (status, error["code"], error["param"]) == (403, "reuse_not_allowed", "reuse")
        assert error["message"] == (
            f"reuse is {reuse!r} and this server allows no more than 'auto:0.05'; ask for that, or leave it out"
        )
    status, error = ceiled.refusal(COMPLETIONS, {"prompt": prompt("known"), "reuse": "auto", "tolerance": "x"})
    assert (status, error["code"], error["param"]) == (400, "policy.bad_tolerance", "tolerance")


def test_a_ceiling_of_auto_holds_for_the_positions_that_were_measured(ceiled):
    asked = {"prompt": prompt("known"), "reuse": "modular+linked:1"}
    assert taken(ceiled, "known", reuse=asked["reuse"], positions="packed") == "modular+linked:1"
    status, error = ceiled.refusal(COMPLETIONS, {**asked, "positions": "schema"})
    assert (status, error["code"]) == (403, "reuse_not_allowed")
    assert error["message"] == (
        "reuse is 'modular+linked:1' with positions 'schema' and this server allows no more than 'auto:0.05'; ask for "
        "that, or leave it out"
    )
    assert taken(ceiled, "known", positions="schema") == "exact"
    assert taken(ceiled, "known", reuse="auto", positions="schema") == "exact"
    assert taken(ceiled, "known", reuse="exact", positions="schema") == "exact"


def test_a_ceiling_of_auto_holds_for_the_engines_positions(measured):
    llm = small_model(reuse=None, tolerance=0.05, positions="schema")
    with running(llm, [KNOWN], max_reuse="auto", reuse="auto") as site:
        assert taken(site, "known") == "exact"
        status, error = site.refusal(COMPLETIONS, {"prompt": prompt("known"), "reuse": "modular+linked:1"})
        assert (status, error["code"]) == (403, "reuse_not_allowed")
        assert taken(site, "known", reuse="modular+linked:1", positions="packed") == "modular+linked:1"
    llm.shutdown()


def test_auto_as_the_default(measured):
    llm = small_model(reuse=None)
    with running(llm, [KNOWN, OTHER], reuse="auto") as site:
        assert taken(site, "known") == "modular+linked:1"
        assert taken(site, "other") == "exact"
        assert taken(site, "other", reuse="modular") == "modular"
        status, _, answer = site.call("GET", "/v1/schemas/known")
        assert (status, answer["reuse"]) == (200, "auto")
        last = site.stream(COMPLETIONS, prompt=prompt("known"), max_tokens=2, stream_options={"include_usage": True})[
            -1
        ]
        assert last["inlay"]["reuse"] == "modular+linked:1"
    llm.shutdown()


def test_a_default_above_a_ceiling_of_auto_is_refused():
    with pytest.raises(ParameterError, match="reuse is 'modular' and max_reuse is 'auto'"):
        ServerSettings(reuse="modular", max_reuse="auto")
    assert ServerSettings(reuse="auto", max_reuse="auto").reuse == "auto"
