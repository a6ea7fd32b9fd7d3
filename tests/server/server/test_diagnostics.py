"""Diagnostics over HTTP: a field of every dialect's body, in whole answers and in the last event of streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inlay.cli import main as command_line
from tests.server.server.conftest import CHAT, COMPLETIONS, Site, running, small_model

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TEXT = "The island lies far out in the sea, behind the fog, and no ship calls there in winter. "


def user(begin: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"A {begin}. {TEXT}"}]


BODIES = {
    CHAT: lambda day: {"messages": user(f"chat, day {day}"), "max_tokens": 1},
    COMPLETIONS: lambda day: {"prompt": f"Completion on day {day}. {TEXT}", "max_tokens": 1},
    MESSAGES: lambda day: {"messages": user(f"message, day {day}"), "max_tokens": 1, "model": "tiny"},
    RESPONSES: lambda day: {"input": user(f"response, day {day}"), "max_output_tokens": 16, "store": False},
}


@pytest.fixture(scope="module")
def site():
    llm = small_model()
    with running(llm) as one:
        yield one
    llm.shutdown()


@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_explains_its_requests(site: Site, path: str):
    asked = {"diagnostics": True, "reuse": "exact"}
    site.post(path, **BODIES[path](25), **asked)
    (found,) = site.post(path, **BODIES[path](26), **asked)["inlay"]["diagnostics"]
    assert found.keys() == {"modules", "departure", "causes"}
    assert found["departure"]["lost_tokens"] > 50
    first, *_ = found["causes"]
    assert first["kind"] == ("date or number" if path == COMPLETIONS else "changed message")
    assert first.keys() == {"kind", "tokens", "place", "message", "remedy"}
    assert "diagnostics" not in site.post(path, **BODIES[path](27))["inlay"]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_has_diagnostics_in_its_last_chunk(site: Site, usage: bool):
    body = {**BODIES[CHAT](30 + usage), "max_tokens": 4, "diagnostics": True}
    *earlier, last = site.stream(CHAT, **body, **({"stream_options": {"include_usage": True}} if usage else {}))
    assert last["inlay"]["diagnostics"][0]["causes"]
    assert all("diagnostics" not in event.get("inlay", {}) for event in earlier)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_other_dialects_have_diagnostics_in_their_last_events(site: Site, path: str):
    body = {**BODIES[path](60), "diagnostics": True, "stream": True}
    status, _, text = site.call("POST", path, body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found = [event for event in events if '"diagnostics"' in json.dumps(event)]
    assert status == 200
    assert found
    assert found[0] in events[-2:]


def test_after_an_eviction_of_everything_no_earlier_text_is_shown(site: Site):
    asked = {"diagnostics": True, "reuse": "exact"}
    site.post(CHAT, **BODIES[CHAT](70), **asked)
    status, _, _ = site.call("DELETE", "/v1/cache/segments")
    assert status == 200
    (found,) = site.post(CHAT, **BODIES[CHAT](71), **asked)["inlay"]["diagnostics"]
    assert found["departure"] is None
    assert [cause["kind"] for cause in found["causes"]] == ["new"]


def test_diagnostics_of_anthropics_form_have_no_effect(site: Site):
    answer = site.post(MESSAGES, **BODIES[MESSAGES](50), diagnostics={"previous_message_id": None})
    assert "diagnostics" not in answer["inlay"]


def test_invalid_value_is_rejected(site: Site):
    status, _, answer = site.call("POST", CHAT, {**BODIES[CHAT](1), "diagnostics": "yes"})
    assert (status, answer["error"]["param"]) == (400, "diagnostics")


def test_the_command_explains_a_request_to_a_server(site: Site, tmp_path, capsys):
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**BODIES[CHAT](40), "stream": True}))
    assert command_line.main(["explain", "--url", site.base, str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["causes"]
    assert sum(cause["tokens"] for cause in report["causes"]) <= report["requests"][0]["tokens"]
