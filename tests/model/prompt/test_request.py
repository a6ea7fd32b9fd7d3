"""A prepared request is plain data: it goes through bytes, and its segments keep their keys."""

from __future__ import annotations

import gc
import math
import pickle
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import LLM, SamplingParams, Schema, use
from inlay.errors import ContextError, ParameterError
from inlay.kv.identity import KeyMaker, fingerprint_under, specify
from inlay.policy import POSITIONS, WORDS, ReusePolicy
from inlay.prompt.composed import CachedSpan, compose
from inlay.prompt.request import FORMS, EngineRequest, PromptPart
from inlay.types import Scope
from tests.conftest import tiny
from tests.raising import raises

KEYS = KeyMaker(b"model", "float32", "none", b"", positioned=False)
SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First <param name="p" len="6" default="one"/> module.'
    '<module name="in">Inside.</module></module><module name="b">Second.</module> Behind.</schema>'
)
PARTS = [
    {
        "type": "text",
        "text": "A document that is long enough to be looked for.",
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "text", "text": "Another one that nobody marked, and as long."},
    {"type": "text", "text": "Why?"},
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]

ids = st.lists(st.integers(0, 2**17), min_size=1, max_size=6).map(tuple)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    top_p=st.floats(0.1, 1),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=3)),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    stop=st.one_of(st.none(), st.text(min_size=1, max_size=3), st.lists(st.text(min_size=1, max_size=3), max_size=2)),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    max_tokens=st.one_of(st.none(), st.integers(1, 99)),
    structured_outputs=st.sampled_from([None, {"json_object": True}, {"choice": ("a", "b")}, {"regex": "a+"}]),
)


ttls = st.sampled_from([None, 300.0, math.inf])


@st.composite
def requests(draw) -> EngineRequest:
    salt, adapter = draw(st.text(max_size=4)), draw(st.sampled_from([b"", bytes(range(32))]))
    parts, at, chain = [], 0, []
    for tokens in draw(st.lists(ids, min_size=1, max_size=5)):
        at += draw(st.integers(0, 3))
        kind, owned = draw(st.sampled_from(["fresh", "module", "open"])), draw(st.booleans())
        candidates = ()
        if kind != "fresh":
            before, made_with = chain[-1:] * draw(st.integers(0, 1)), draw(st.sampled_from([b"", adapter]))
            spec = specify(tokens, at, before, KEYS, salt.encode() if owned else b"", made_with)
            chain.append(spec)
            candidates = (spec,)
        form = draw(st.sampled_from(FORMS)) if candidates else ""
        encode, ttl_s = kind == "module", draw(ttls)
        copies = () if candidates else draw(st.sampled_from([(), (bytes(range(32)),)]))
        parts.append(PromptPart(tokens, at, owned, candidates, encode=encode, form=form, ttl_s=ttl_s, copies=copies))
        at += len(tokens)
    return EngineRequest(
        request_id="r",
        text=draw(st.one_of(st.none(), st.text())),
        ids=tuple(token for part in parts for token in part.ids),
        positions=tuple(p for part in parts for p in range(part.start, part.start + len(part.ids))),
        parts=tuple(parts),
        policy=ReusePolicy.parse(draw(st.sampled_from(WORDS)), draw(st.sampled_from([None, *POSITIONS]))),
        params=draw(params),
        fingerprint=fingerprint_under(KEYS.fingerprint, adapter),
        scope=Scope(salt, draw(st.text(max_size=3)), draw(st.sampled_from([None, "a"])), draw(st.floats(0.01, 99))),
        adapter=adapter,
        priority=draw(st.integers(-9, 9)),
        deadline=draw(st.one_of(st.none(), st.floats(0, 1e9))),
    )


def keys_of(request: EngineRequest) -> list[list[bytes]]:
    return [[spec.key for spec in part.candidates] for part in request.parts]


def plain(request: EngineRequest) -> EngineRequest:
    """The same without its segments, which compare by identity."""
    return replace(request, parts=tuple(replace(part, candidates=()) for part in request.parts))


@given(requests())
def test_request_round_trips_through_bytes(request):
    data = request.to_bytes()
    read = EngineRequest.from_bytes(data, KEYS)
    assert read.to_bytes() == data
    assert keys_of(read) == keys_of(request)
    assert replace(plain(read), params=request.params) == plain(request)
    assert (read.params.stops, read.params.stop_ids) == (request.params.stops, request.params.stop_ids)
    wanted = frozenset(spec.key for spec in request.open_segments())
    assert [repr_of(part) for part in compose(read, wanted)] == [repr_of(part) for part in compose(request, wanted)]


def repr_of(part):
    if isinstance(part, CachedSpan):
        return part.spec.key, part.spec.record.digest(9), part.start, part.length, part.exact, part.displaced
    return part.ids, part.start, part.run and (part.run.digest, part.run.continues)


@pytest.mark.parametrize("salt", ["", "mine"])
@pytest.mark.parametrize("reuse", ["off", "exact", "isolated", "anchored"])
def test_serialised_prompts_of_all_kinds_are_answered(reuse, salt):
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    llm.add_schema(SCHEMA, encode=False)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = ["Text.", [1, 2, 3], CHAT, SCHEMA.prompt().use("a", use("in"), p="two").use("b").text("Q")]
    for prompt in prompts:
        request = llm.processor.process(prompt, params, llm.policy(reuse), Scope(salt))
        read = EngineRequest.from_bytes(request.to_bytes(), llm.client.model.keys)
        assert keys_of(read) == keys_of(request)
        answers = []
        for one in (request, read):
            llm.store.clear()
            answer = llm.outputs.begin(one)
            llm.client.submit(llm.client.prepare(one), answer.add)
            while not answer.answered:
                llm.client.pump()
            usage = replace(answer.output().usage, misses=())  # the second answer's misses were stored before
            answers.append((answer.output().outputs[0].token_ids, usage))
        assert answers[0] == answers[1]


def test_request_contains_no_other_salt():
    """The serialized request holds its own salt once, and no digest or record derived from it."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, cache_salt="the engine's secret")
    request = llm.processor.process(CHAT, SamplingParams(), llm.policy("anchored"), Scope("the tenant's"))
    written = request.to_bytes()
    assert b"the engine's secret" not in written
    assert written.count(b"the tenant's") == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: b"\x80", "request.damaged"),
        (lambda data: pickle.dumps(1), "request.damaged"),
        (lambda data: b"[]", "request.damaged"),
        (lambda data: data.replace(b'"version":10', b'"version":4'), "request.other_version"),
        (lambda data: b'{"version":10}', "request.damaged"),
        (lambda data: data.replace(b'"parts":[[[1,2],', b'"parts":[[7,'), "request.damaged"),
        (lambda data: data.replace(KEYS.fingerprint.hex().encode(), b"00"), "request.other_model"),
        (lambda data: data.replace(b'"off"', b'"often"'), "policy.unknown"),
    ],
)
def test_invalid_request_bytes_are_rejected(change, code):
    part = PromptPart((1, 2), 0)
    request = EngineRequest(
        request_id="r",
        text="x",
        ids=(1, 2),
        positions=(0, 1),
        parts=(part,),
        policy=ReusePolicy.parse("off"),
        params=SamplingParams(),
        fingerprint=KEYS.fingerprint,
    )
    with raises(code, ParameterError):
        EngineRequest.from_bytes(change(request.to_bytes()), KEYS)


def test_most_exact_stored_candidate_is_chosen():
    exact, other = specify((1, 2), 0, (), KEYS), specify((1, 2), 7, (), replace(KEYS, positioned=True))
    part = PromptPart((1, 2), 0, candidates=(exact, other), encode=True)
    assert part.open
    assert part.segment({exact.key, other.key}) is exact
    assert part.segment({other.key}) is other
    assert part.segment(set()) is other
    unmarked = PromptPart((1, 2), 0, candidates=(exact,))
    assert (unmarked.open, unmarked.segment({exact.key}), unmarked.segment(set())) == (True, exact, None)
    assert not PromptPart((1, 2), 0, candidates=(exact,), encode=True).open


def test_rejected_prompt_leaves_no_memory():
    llm = LLM(tiny("llama"), kv_memory="16MiB")
    prompt = [3] * 300_000

    def refused() -> None:
        with raises("request.too_long", ContextError, names="299999"):
            llm.generate(prompt)

    tracemalloc.start()
    refused()
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 2**20
    assert llm.generate([3], SamplingParams(max_tokens=1))[0].outputs[0].token_ids


@pytest.mark.parametrize("reuse", ["anchored+linked:3", "isolated+profiled:0.25"])
def test_recompute_policy_round_trips_through_bytes(reuse):
    llm = LLM(tiny("llama"), kv_memory="1MiB")
    llm.add_schema(SCHEMA, encode=False)
    policy = llm.policy(reuse)
    request = llm.processor.process(SCHEMA.prompt().use("b").text("Q"), SamplingParams(), policy)
    assert EngineRequest.from_bytes(request.to_bytes(), llm.client.model.keys).policy == policy
