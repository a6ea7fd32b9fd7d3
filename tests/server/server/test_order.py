"""The order of sets over HTTP: requested in messages, in prompts of schemas and in the body, and returned in the
answer.
"""

from __future__ import annotations

import pytest

from inlay import Schema
from inlay.prompt import free_order
from tests.server.server.conftest import CHAT, COMPLETIONS, Site, running, small_model

TEXTS = [f"Document {name} says quite something about {name}, and some more of it." for name in "ABC"]
SCHEMA = Schema.from_string(
    '<schema name="files">'
    + "".join(f'<module name="{name}">{name} is a file.</module>' for name in "abc")
    + "</schema>"
)


@pytest.fixture(scope="module")
def site():
    with running(small_model(), [SCHEMA]) as site:
        yield site


def messages(*numbers: int, **more):
    marked = [{"type": "text", "text": TEXTS[n], "cache_control": {"type": "ephemeral"}} for n in numbers]
    return [{"role": "user", "content": [*marked, {"type": "text", "text": "Which?"}], **more}]


def test_parts_of_a_message_are_ordered(site: Site):
    asked = {"max_tokens": 1, "reuse": "exact"}
    first = site.post(CHAT, messages=messages(2, 0, 1), **asked)
    assert "order" not in first["inlay"]
    answer = site.post(CHAT, messages=messages(0, 1, 2, order="any"), **asked)
    assert answer["inlay"]["order"] == [{"members": [f"messages[0].content[{number}]" for number in (2, 0, 1)]}]
    assert answer["inlay"]["computed_tokens"] == 1
    *_, last = site.stream(CHAT, messages=messages(1, 0, 2), order="any", **asked)
    assert last["inlay"]["order"] == [{"members": [f"messages[0].content[{number}]" for number in (2, 1, 0)]}]
    off = site.post(CHAT, messages=messages(0, 1, order="any"), max_tokens=1, reuse="off")
    assert off["inlay"]["order"][0]["why_fixed"] == "reuse 'off' is the same whatever is stored"


def test_imports_of_a_prompt_are_ordered(site: Site):
    pml = '<prompt schema="files"><set><c/><a/></set>So?</prompt>'
    answer = site.post(COMPLETIONS, pml=pml, max_tokens=1, reuse="exact")
    taken = answer["inlay"]["order"]
    short = {"schema": "files", "imports": [{"set": ["a", "c"]}], "text": "So?"}
    assert site.post(COMPLETIONS, prompt=short, max_tokens=1, reuse="exact")["inlay"]["order"] == taken
    whole = {"schema": "files", "imports": ["a", "c"], "text": "So?"}
    assert site.post(COMPLETIONS, prompt=whole, max_tokens=1, reuse="exact", order="any")["inlay"]["order"] == taken


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"messages": messages(0, 1, order="some")}, "messages[0].order"),
        ({"messages": messages(0, 1), "order": 3}, "order"),
        ({"messages": messages(*[0] * 65, order="any")}, "messages[0] has 65 neighbouring marked parts"),
    ],
)
def test_invalid_order_is_rejected(site: Site, body, problem):
    status, _, answer = site.call("POST", CHAT, {**body, "max_tokens": 1})
    assert status == 400
    assert problem in answer["error"]["message"]


def test_more_sets_than_a_prompt_may_have(site: Site, monkeypatch):
    monkeypatch.setattr(free_order, "MAX_SETS", 1)
    body = {"messages": messages(0, 1) * 2, "order": "any", "max_tokens": 1}
    status, _, answer = site.call("POST", CHAT, {**body, "reuse": "exact"})
    assert (status, answer["error"]["message"]) == (
        400,
        "the prompt has 2 sets whose order is free, and may have 1; leave the order of the others as it is written",
    )
    assert site.call("POST", CHAT, {**body, "reuse": "off"})[0] == 200


def test_order_on_a_text_is_rejected(site: Site):
    status, _, answer = site.call("POST", COMPLETIONS, {"prompt": "Well?", "order": "any", "max_tokens": 1})
    assert status == 400
    assert answer["error"]["message"].startswith("order is 'any', and a text or token ids have no modules")
