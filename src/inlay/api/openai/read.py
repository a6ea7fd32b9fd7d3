"""Checks the JSON of a request and returns its body, by OpenAI's rules for chats and completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay.api.openai.bodies import (
    LARGEST,
    LONGEST,
    MAX_PROMPTS,
    MAX_TAGS,
    NO_EFFECT,
    UNSUPPORTED,
    Body,
    ChatBody,
    CompletionBody,
    Endpoint,
    Tool,
)
from inlay.api.openai.foreign import IGNORED
from inlay.api.openai.messages import form_of, problems_of
from inlay.api.reading import BodyRules, Members, all_of, read_fields
from inlay.api.values import check_values
from inlay.wording import shown

RULES = BodyRules(
    forms={Endpoint.CHAT: ChatBody, Endpoint.COMPLETIONS: CompletionBody},
    no_effect=NO_EFFECT,
    ignored=IGNORED,
    unsupported=UNSUPPORTED,
    longest=LONGEST,
    largest=LARGEST,
    members={
        "messages": Members(form_of, "message", 'a message {"role": "user", "content": "…"}'),
        "tools": Members(lambda _: Tool, "tool", 'a tool {"type": "function", "function": {…}}'),
    },
    kinds={
        "messages": {"content": "part", "tool_calls": "call", "cache_control": "mark"},
        "part": {"cache_control": "mark", "prompt_cache_breakpoint": "mark"},
        "mark": {},
        "call": {"function": "function"},
        "tools": {"function": "function", "cache_control": "mark"},
        "tool_choice": {"function": "function", "allowed_tools": "allowed"},
        "allowed": {"tools": "tools"},
        "function": {"cache_control": "mark"},
        "response_format": {"json_schema": "json_schema"},
        "json_schema": {},
        "stream_options": {},
        "prompt_cache_options": {},
    },
)


def read_body(raw: Any, endpoint: str) -> Body:
    """Check a request and return its body, without the fields that have no effect.

    Raises BodyError, which names up to MAX_PROBLEMS problems.
    """
    prompt = raw.get("prompt") if isinstance(raw, Mapping) else None
    if isinstance(prompt, Mapping):
        check_values("prompt", prompt, MAX_TAGS)
    many = isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int)
    body, problems = read_fields({**raw, "prompt": None} if many else raw, endpoint, RULES)
    if many:
        sentence = f"prompt is {shown(prompt)}; one request takes at most {MAX_PROMPTS:,} prompts"
        problems.append(("prompt", "invalid_value", sentence))
    if isinstance(body, ChatBody) and not problems:
        problems += problems_of(body.messages or ())
    if problems or body is None:
        raise all_of(problems)
    assert isinstance(body, Body), "the rules have no other form"
    return body
