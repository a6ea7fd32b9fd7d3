"""Requests with different salts never find each other's text, and all of them find that of public schemas."""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, ParameterError, PMLError, Prompt, SamplingParams, Schema
from tests.conftest import tiny
from tests.raising import raises

ONE = SamplingParams(temperature=0, max_tokens=1)
TEXT = "A private text that two callers happen to have in common, word for word."
PML = (
    '<schema name="s">Before everything. <module name="a">The first module of it.</module>'
    '<module name="b">Another one.</module></schema>'
)
PROMPT = Prompt.from_string('<prompt schema="s"><b/><a/>A question of their own?</prompt>')
POLICIES = ("exact", "isolated", "anchored")


@pytest.fixture
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0)


def cached(llm: LLM, prompt, reuse: str, salt: str | None) -> int:
    return llm.generate(prompt, ONE, reuse=reuse, cache_salt=salt)[0].usage.cached_tokens


@pytest.mark.parametrize("reuse", POLICIES)
def test_the_same_text_under_two_salts(llm, reuse):
    conversation = [{"role": "user", "content": TEXT}]
    for prompt in (TEXT, conversation):
        length = len(llm.lay_out(prompt).ids)
        for salt in ("one", "two", None):
            assert cached(llm, prompt, reuse, salt) == 0, salt
        for salt in ("one", "two", None):
            assert cached(llm, prompt, reuse, salt) == length - 1, salt


@pytest.mark.parametrize("reuse", POLICIES)
def test_private_schema_is_invisible_to_other_salts(llm, reuse):
    llm.add_schema(Schema.from_string(PML), cache_salt="one", reuse=reuse)
    with raises("schema.unknown", PMLError, names="'s'"):
        llm.generate(PROMPT, ONE, reuse=reuse, cache_salt="two")
    with raises("schema.unknown", PMLError, names="'s'"):
        llm.generate(PROMPT, ONE, reuse=reuse)
    cached(llm, PROMPT, reuse, "one")
    llm.add_schema(Schema.from_string(PML), cache_salt="two", encode=False)
    assert cached(llm, PROMPT, reuse, "two") == 0
    length = len(llm.lay_out(PROMPT, reuse=reuse, cache_salt="two").ids)
    assert cached(llm, PROMPT, reuse, "two") == length - 1


@pytest.mark.parametrize("reuse", POLICIES)
def test_public_schema_is_shared_and_text_after_it_is_not(llm, reuse):
    llm.add_schema(Schema.from_string(PML), encode=False)
    length = len(llm.lay_out(PROMPT, reuse=reuse).ids)
    own = len(llm.encoder.text("A question of their own?"))
    assert cached(llm, PROMPT, reuse, "one") == 0
    assert cached(llm, PROMPT, reuse, "two") == length - own
    assert cached(llm, PROMPT, reuse, "one") == length - 1
    assert cached(llm, PROMPT, reuse, None) == length - own


def test_text_after_an_argument_is_private(llm):
    module = '<module name="m">name <param name="who" len="8" default="nobody"/> and more text.</module>'
    schema = f'<schema name="p">Here: {module}</schema>'
    llm.add_schema(Schema.from_string(schema), encode=False)
    mine = Prompt.from_string('<prompt schema="p"><m who="Rosa"/>Well?</prompt>')
    head = len(llm.encoder.text("Here: ")) + len(llm.encoder.text("name ")) + len(llm.encoder.bos)
    cached(llm, mine, "exact", "one")
    assert cached(llm, mine, "exact", "two") == head


def test_private_schema_precedes_a_public_one_of_that_name(llm):
    llm.add_schema(Schema.from_string(PML))
    llm.add_schema(Schema.from_string(PML.replace("Another one.", "Something else.")), cache_salt="one")
    theirs, everybodys = (llm.generate(PROMPT, ONE, cache_salt=salt)[0].prompt for salt in ("one", "two"))
    assert "Something else." in theirs
    assert "Another one." in everybodys
    assert llm.remove_schema("s", cache_salt="one")
    assert not llm.remove_schema("s", cache_salt="one")
    assert "Another one." in llm.generate(PROMPT, ONE, cache_salt="one")[0].prompt
    assert llm.schema("s") is llm.schema("s", cache_salt="one")
    assert llm.remove_schema("s")
    assert llm.schema("s") is None


@pytest.mark.parametrize("reuse", POLICIES)
def test_a_salt_changes_no_answer(llm, reuse):
    llm.add_schema(Schema.from_string(PML))
    for prompt in (TEXT, PROMPT):
        plain, salted = (
            llm.distributions([prompt], [[5, 6]], reuse=reuse),
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2, logprobs=3), reuse=reuse, cache_salt="x"),
        )
        first = salted[0].outputs[0].logprobs[0]
        for token, said in first.items():
            assert abs(plain[0][0, token].item() - said.logprob) < 1e-4
    torch.testing.assert_close(*(llm.distributions([TEXT], [[5]], reuse=reuse)[0] for _ in range(2)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("salt", ["", 3, b"x"])
def test_salt_must_be_a_string(llm, salt):
    with raises("parameter.invalid_cache_salt", ParameterError):
        llm.generate(TEXT, ONE, cache_salt=salt)


@pytest.mark.parametrize(
    ("salt", "says"),
    [
        ("tenant\ud800", "cache_salt holds a lone surrogate at index 6; decode the text properly or leave it out"),
        ("x" * 1025, "cache_salt has 1,025 characters; give at most 1,024"),
    ],
)
def test_invalid_salt_is_rejected_before_anything_is_done(llm, salt, says):
    with raises("parameter.invalid_cache_salt", ParameterError, names=says):
        llm.generate(TEXT, ONE, cache_salt=salt)
    with raises("parameter.invalid_cache_salt", ParameterError, names=says):
        llm.add_schema(Schema.from_string(PML), cache_salt=salt)
    assert llm.generate(TEXT, ONE, cache_salt="x" * 1024)[0].outputs[0].token_ids


def test_stats_count_requests_and_segments(llm):
    before = llm.stats()
    assert (before.running, before.waiting, before.segments, before.held_chunks, before.used_chunks) == (0, 0, 0, 0, 0)
    stream = llm.stream(TEXT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    next(stream)
    during = llm.stats()
    assert (during.running, during.waiting) == (1, 0)
    assert 0 < during.held_chunks <= during.used_chunks < during.chunks
    list(stream)
    after = llm.stats()
    assert (after.running, after.held_chunks) == (0, 0)
    assert after.segments == len(list(llm.store)) == len(llm.store)
    assert after.stored_tokens == sum(segment.tokens for segment in llm.store)
    assert after.steps > during.steps
