"""OpenAI's prompt_cache_options and prompt_cache_breakpoint: the kept text, its lifetime, and the reported usage."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.api.openai.bodies import read_body, translate
from tests.model.server.site import CHAT, Site, refused, serving

LONG = "A document with quite a few words in it. " * 6
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


@pytest.fixture(scope="module")
def site():
    yield from serving({})


def asked(
    site: Site, *, mark: dict[str, Any] | None, text: str, question: str = "And so?", **body: Any
) -> tuple[int, int, int]:
    """Tokens of the prompt, those that were cached, and those that were written."""
    parts = [{"type": "text", "text": text} | (mark or {}), {"type": "text", "text": question}]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "reuse": "exact"}
    status, _, answer = site.call("POST", CHAT, asked | body, key=None)
    assert status == 200, answer
    details = answer["usage"]["prompt_tokens_details"]
    return answer["usage"]["prompt_tokens"], details["cached_tokens"], details["cache_write_tokens"]


def test_cache_writes_are_reported(site):
    tokens, cached, written = asked(site, mark=None, text="One. " + LONG)
    assert (cached, written) == (0, tokens)
    assert asked(site, mark=None, text="One. " + LONG)[1:] == (tokens - 1, 0)
    tokens, cached, written = asked(site, mark=None, text="One. " + LONG, question="Another question?")
    assert 0 < written == tokens - cached


def test_explicit_keeps_up_to_the_last_breakpoint(site):
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    tokens, cached, written = asked(site, mark=BREAKPOINT, text="Two. " + LONG, **explicit)
    assert 0 < written < tokens - cached
    again = asked(site, mark=BREAKPOINT, text="Two. " + LONG, **explicit)
    assert again[1:] == (cached + written, 0), "what stands behind the breakpoint is computed again"


def test_explicit_without_breakpoints_stores_and_finds_nothing(site):
    asked(site, mark=None, text="Three. " + LONG)
    for _ in range(2):
        assert asked(site, mark=None, text="Three. " + LONG, prompt_cache_options={"mode": "explicit"})[1:] == (0, 0)


def test_lifetime_of_the_request_applies_to_its_breakpoints():
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"} | BREAKPOINT]}]}
    read = read_body(body | {"prompt_cache_options": {"ttl": "12h"}}, CHAT)
    ((message,),) = translate(read).prompts
    assert message["content"][0]["cache_control"] == {"type": "ephemeral", "ttl": "12h"}


def test_implicit_mode_is_the_default(site):
    found = asked(site, mark=None, text="Four. " + LONG, prompt_cache_options={"mode": "implicit"})
    assert found[2] == found[0] - found[1]


@pytest.mark.parametrize("wrong", [{"mode": "none"}, {"ttl": "1w"}, {"lifetime": "30m"}, "explicit"])
def test_invalid_option_is_rejected(site, wrong):
    body = {"messages": [{"role": "user", "content": "Hi."}], "prompt_cache_options": wrong}
    sentence = refused(site.call("POST", CHAT, body, key=None), 400, "invalid_value")
    assert '{"mode": "implicit" or "explicit", "ttl": "30m" or "12h"}' in sentence
