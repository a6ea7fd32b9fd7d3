"""Answers with drafts over HTTP: the same text, whole and as a stream, and their counts in usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inlay import AsyncLLM
from inlay.engine.speculator import Speculator
from tests.conftest import tiny
from tests.model.engine.speculation.planted import FREE
from tests.server.server.conftest import Site, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tiny("llama"), kv_memory="16MiB", seed=0)
    llm.local.engine.speculator = Speculator(FREE)
    with running(llm) as made:
        yield made


def test_accepted_and_rejected_tokens_are_reported(site: Site):
    first = site.post(COMPLETIONS, prompt="Say it.", **ASKED)
    again = site.post(COMPLETIONS, prompt="Say it.", **ASKED)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    details, counts = again["usage"]["completion_tokens_details"], again["inlay"]
    assert details["accepted_prediction_tokens"] == counts["accepted_tokens"] > 30
    assert details["rejected_prediction_tokens"] == counts["drafted_tokens"] - counts["accepted_tokens"]


def test_a_stream_has_the_same_text(site: Site):
    whole = site.post(CHAT, messages=[{"role": "user", "content": "Say it."}], logprobs=True, **ASKED)
    events = site.stream(
        CHAT,
        messages=[{"role": "user", "content": "Say it."}],
        logprobs=True,
        stream_options={"include_usage": True},
        **ASKED,
    )
    pieces = [choice for event in events for choice in event["choices"]]
    said: list[Any] = [piece["logprobs"]["content"] for piece in pieces if piece.get("logprobs")]
    assert sum(map(len, said)) == 60
    assert max(map(len, said)) > 1, "an accepted draft gives several tokens at once"
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
