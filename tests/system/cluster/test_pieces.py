"""The pieces of a request match a store's events, for every kind of prompt."""

from __future__ import annotations

from typing import Any

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.cluster.pieces import wanted_by
from inlay.kv.changes import ChangeLog
from inlay.policy import ReusePolicy
from inlay.prompt.request import EngineRequest
from inlay.types import Scope
from tests.conftest import tiny

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First module, which is long enough to be worth its place.</module>'
    '<module name="b">Second module, which begins as nothing else does.</module> Behind it all.</schema>'
)
LONG = "A text that goes on and on, over several borders of its record, until it ends in the middle of a group. " * 3


@pytest.fixture
def llm() -> LLM:
    made = LLM(tiny("llama"), kv_memory="8MiB", chunk_size=8, seed=0)
    made.add_schema(SCHEMA, encode=False)
    return made


def request_of(llm: LLM, prompt: Any, reuse: str | None) -> EngineRequest:
    return llm.processor.process(prompt, SamplingParams(max_tokens=1), llm.policy_for(prompt, reuse))


@pytest.mark.parametrize(
    ("prompt", "reuse"),
    [
        (LONG, None),
        (LONG, "exact"),
        (SCHEMA.prompt().use("b").text("Who?"), None),
        (SCHEMA.prompt().use("a").use("b").text("Who is it?"), "anchored"),
        (SCHEMA.prompt().use("a").use("b").text(LONG), "isolated"),
        (SCHEMA.prompt().use("a").text(LONG), "exact"),
    ],
    ids=["text", "text exact", "modular", "anchored", "isolated", "schema exact"],
)
def test_stored_pieces_of_a_request_equal_its_lookup(llm: LLM, prompt: Any, reuse: str | None):
    log = ChangeLog(llm.client.model.keys)
    llm.store.listen(log)
    request = request_of(llm, prompt, reuse)
    wanted = wanted_by(request, llm.client.model.keys)
    assert not any(key in log.since(0, 0).added for piece in wanted.pieces for key in piece.keys)
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), **({} if reuse is None else {"reuse": reuse}))
    held = set(log.since(0, 0).added)
    found = sum(piece.tokens for piece in wanted.pieces if held & set(piece.keys))
    again = wanted_by(request_of(llm, prompt, reuse), llm.client.model.keys)
    assert again == wanted
    assert found >= 0.8 * len(request.ids)
    assert wanted.tokens == len(request.ids)
    assert sum(piece.tokens for piece in wanted.pieces) <= wanted.tokens


def test_request_without_reuse_has_no_pieces(llm: LLM):
    assert wanted_by(request_of(llm, LONG, "off"), llm.client.model.keys).pieces == ()


def test_different_salts_have_different_pieces(llm: LLM):
    keys, policy = llm.client.model.keys, ReusePolicy.parse("exact", "packed")
    one, other = (
        wanted_by(llm.processor.process(LONG, SamplingParams(), policy, Scope(salt)), keys) for salt in ("ann", "bob")
    )
    assert not {key for piece in one.pieces for key in piece.keys} & {
        key for piece in other.pieces for key in piece.keys
    }
