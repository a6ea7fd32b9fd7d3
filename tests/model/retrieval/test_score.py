"""What texts would find in the cache: in this process, over HTTP, for tenants, and without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay import LLM, SamplingParams
from inlay.errors import ParameterError
from inlay.prompt.seen_pieces import text_hash
from inlay.retrieval import CacheScorer
from inlay.retrieval.rerank import marked_parts
from inlay.types import CachedText
from tests.conftest import tiny
from tests.model.server.site import CHAT, Site, with_keys

SYSTEM = {"role": "system", "content": "Answer from the documents."}
DOCUMENTS = ["Lima lies by the sea. " * 6, "Oslo lies to the north. " * 7, "Rome lies on a river. " * 5]
SCORE = "/v1/cache/score"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from with_keys(tmp_path)


def chat(*texts: str) -> list[dict]:
    return [SYSTEM, {"role": "user", "content": marked_parts(texts, "Where?")}]


@pytest.mark.parametrize("positions", ["packed", "schema"])
@pytest.mark.parametrize("reuse", ["modular", "primed", "isolated"])
def test_stored_texts_are_found_in_the_form_of_the_policy(reuse, positions):
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    policy = {"reuse": reuse, "positions": positions}
    texts = [f"{text}\n" for text in DOCUMENTS]
    assert [one.resident_tokens for one in llm.score_cached(texts, messages=[SYSTEM], **policy)] == [0, 0, 0]
    llm.chat(chat(DOCUMENTS[0], DOCUMENTS[2]), SamplingParams(max_tokens=1), **policy)
    first, second, third = llm.score_cached(texts, messages=[SYSTEM], **policy)
    assert first.resident == {"pool": first.tokens}
    assert second.resident == {}
    assert third.resident == {"pool": third.tokens}
    assert first.saved_s > 0 == first.compute_s
    assert second.compute_s > 0 == second.saved_s
    (output,) = llm.chat(chat(DOCUMENTS[2], DOCUMENTS[1]), SamplingParams(max_tokens=1), **policy)
    assert output.usage.cached_tokens >= third.tokens


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=3, unique=True),
            st.sampled_from(["", "It is Monday. ", "It is Thursday. "]),
            st.sampled_from(["modular", "primed"]),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_scores_equal_the_usage_of_the_next_request(chats):
    llm = LLM(tiny("llama"), kv_memory="16MiB")
    for documents, day, reuse in chats:
        system = {"role": "system", "content": day + SYSTEM["content"]}
        texts = [f"{text}\n" for text in documents]
        scores = llm.score_cached(texts, messages=[system], reuse=reuse, alone=len(texts) == 1)
        messages = [system, {"role": "user", "content": marked_parts(documents, "Where?")}]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), reuse=reuse)
        inexact = sum(one.resident_tokens for one in scores if one.form != "anchored")  # a lone document is exact
        used = output.usage  # the first document may be stored exactly, as in full prefill, too
        assert used.module_tokens <= inexact <= used.module_tokens + used.promoted_tokens, (documents, day, reuse)
        exact = [one.resident_tokens for one in scores if one.form == "anchored"]
        assert output.usage.exact_tokens >= sum(exact)
    llm.shutdown()


def test_text_read_alone_is_not_found_among_other_texts():
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    texts = [f"{text}\n" for text in DOCUMENTS[:2]]
    llm.chat(chat(DOCUMENTS[0]), SamplingParams(max_tokens=1))
    beside, alone = (llm.score_cached(texts, messages=[SYSTEM], alone=alone) for alone in (False, True))
    assert [one.resident_tokens for one in beside] == [0, 0]
    assert [one.resident_tokens for one in alone] == [alone[0].tokens, 0]
    (output,) = llm.chat(chat(*reversed(DOCUMENTS[:2])), SamplingParams(max_tokens=1))
    assert output.usage.module_tokens == 0
    assert [one.resident_tokens > 0 for one in llm.score_cached(texts, messages=[SYSTEM])] == [True, True]


def test_texts_after_another_system_message_or_salt_are_not_found():
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    llm.chat(chat(DOCUMENTS[0]), SamplingParams(max_tokens=1), reuse="anchored")
    texts = [f"{DOCUMENTS[0]}\n"]
    (same,) = llm.score_cached(texts, messages=[SYSTEM], reuse="anchored")
    (other,) = llm.score_cached(texts, messages=[{"role": "system", "content": "Else."}], reuse="anchored")
    (foreign,) = llm.score_cached(texts, messages=[SYSTEM], reuse="anchored", cache_salt="other")
    assert same.resident_tokens == same.tokens > 0
    assert other.resident_tokens == foreign.resident_tokens == 0


def test_text_on_disk_is_counted_as_disk(tmp_path):
    def made() -> LLM:
        return LLM(tiny("llama"), kv_memory="8MiB", store=tmp_path, store_private=True)

    llm = made()
    llm.chat(chat(DOCUMENTS[0]), SamplingParams(max_tokens=1), reuse="anchored")
    llm.shutdown()
    again = made()
    (found,) = again.score_cached([f"{DOCUMENTS[0]}\n"], messages=[SYSTEM], reuse="anchored")
    assert found.resident == {"disk": found.tokens}
    again.shutdown()


@pytest.mark.parametrize(
    ("texts", "reuse", "code"),
    [
        ("one", None, "texts.wrong"),
        (["a"] * 1001, None, "texts.too_many"),
        (["a" * 4_000_001], None, "texts.too_long"),
        (["a"], "exact", "policy.reads_no_modules"),
    ],
)
def test_wrong_texts_are_rejected(texts, reuse, code):
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    with pytest.raises(ParameterError) as error:
        llm.score_cached(texts, reuse=reuse)
    assert error.value.code == code


def test_a_tenant_scores_its_own_texts(site):
    body = {"messages": chat(DOCUMENTS[0]), "max_tokens": 1}
    assert site.call("POST", CHAT, body, key="ann")[0] == 200
    asked = {"texts": [f"{text}\n" for text in DOCUMENTS[:2]], "messages": [SYSTEM]}
    status, _, mine = site.call("POST", SCORE, asked, key="ann")
    assert status == 200, mine
    assert [row["resident_tokens"] > 0 for row in mine["data"]] == [False, False]
    asked["alone"] = True
    status, _, mine = site.call("POST", SCORE, asked, key="ann")
    assert [row["resident_tokens"] > 0 for row in mine["data"]] == [True, False]
    assert mine["data"][0]["resident"] == {"pool": mine["data"][0]["tokens"]}
    _, _, theirs = site.call("POST", SCORE, asked, key="bob")
    assert [row["resident_tokens"] for row in theirs["data"]] == [0, 0]


def test_hashes_of_known_texts_score_like_the_texts():
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    texts = [f"{text}\n" for text in DOCUMENTS]
    hashes = list(map(text_hash, texts))
    assert {one.form for one in llm.score_cached(hashes=hashes, messages=[SYSTEM])} == {"unknown"}
    llm.chat(chat(*DOCUMENTS[:2]), SamplingParams(max_tokens=1))
    by_hash = llm.score_cached(hashes=hashes, messages=[SYSTEM])
    by_text = llm.score_cached(texts[:2], messages=[SYSTEM])
    assert [(one.form, one.tokens, one.resident) for one in by_hash[:2]] == [
        (one.form, one.tokens, one.resident) for one in by_text
    ]
    assert by_hash[0].resident_tokens > 0
    assert by_hash[2] == CachedText.unknown()
    llm.score_cached(texts[2:], messages=[SYSTEM])
    (third,) = llm.score_cached(hashes=hashes[2:], messages=[SYSTEM])
    assert third.tokens > 0 == third.resident_tokens


def test_a_hash_of_another_salt_is_unknown_and_costs_no_work(monkeypatch):
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    llm.chat(chat(*DOCUMENTS[:2]), SamplingParams(max_tokens=1), cache_salt="mine")
    hashes = [text_hash(f"{DOCUMENTS[0]}\n"), text_hash("never seen")]
    mine = llm.score_cached(hashes=hashes, messages=[SYSTEM], cache_salt="mine")
    assert [one.form == "unknown" for one in mine] == [False, True]
    monkeypatch.setattr(llm.processor, "marked_parts", lambda *_, **__: pytest.fail("a text is laid out"))
    for salt in ("theirs", None):
        theirs = llm.score_cached(hashes=hashes, messages=[SYSTEM], cache_salt=salt)
        assert theirs == [CachedText.unknown()] * 2


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"hashes": ["a"]}, "texts.wrong_hash"),
        ({"hashes": "a" * 64}, "texts.wrong_hash"),
        ({"hashes": ["A" * 64]}, "texts.wrong_hash"),
        ({"hashes": ["a" * 64] * 1001}, "texts.too_many"),
        ({"hashes": ["a" * 64], "texts": ["a"]}, "parameter.conflict"),
    ],
)
def test_wrong_hashes_are_rejected(given, code):
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    with pytest.raises(ParameterError) as error:
        llm.score_cached(**given)
    assert error.value.code == code


def test_a_tenant_scores_hashes_of_its_own_texts(site):
    body = {"messages": chat(*DOCUMENTS[:2]), "max_tokens": 1}
    assert site.call("POST", CHAT, body, key="ann")[0] == 200
    asked = {"hashes": [text_hash(f"{DOCUMENTS[0]}\n"), text_hash("else")], "messages": [SYSTEM]}
    status, _, mine = site.call("POST", SCORE, asked, key="ann")
    assert status == 200, mine
    assert mine["data"][0]["resident"] == {"pool": mine["data"][0]["tokens"]}
    assert mine["data"][1]["form"] == "unknown"
    assert mine["compute_s"] == 0
    _, _, theirs = site.call("POST", SCORE, asked, key="bob")
    first, second = (row | {"index": 0} for row in theirs["data"])
    assert first == second == mine["data"][1] | {"index": 0}
    assert site.call("DELETE", "/v1/cache/segments", key="ann")[0] == 200
    _, _, mine = site.call("POST", SCORE, asked, key="ann")
    assert [row["form"] for row in mine["data"]] == ["unknown"] * 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"hashes": []}, "hashes"),
        ({"hashes": ["a"]}, "hashes"),
        ({"hashes": ["a" * 64], "texts": ["a"]}, "hashes"),
        ({"texts": []}, "texts"),
        ({"texts": "one"}, "texts"),
        ({"texts": ["a"], "messages": "b"}, "messages"),
        ({"texts": ["a"], "messages": [{"role": "nobody"}]}, "messages[0].role"),
        ({"texts": ["a"], "epsilon": 1}, "epsilon"),
        ({"texts": ["a"], "alone": 1}, "alone"),
        ([], None),
    ],
)
def test_wrong_bodies_are_rejected_with_their_field(site, body, field):
    status, _, answer = site.call("POST", SCORE, body)
    assert status == 400
    assert answer["error"]["param"] == field


def test_scorer_asks_the_server_and_works_without_it(site):
    assert site.call("POST", CHAT, {"messages": chat(DOCUMENTS[0]), "max_tokens": 1})[0] == 200
    scorer = CacheScorer(f"http://127.0.0.1:{site.port}/v1", api_key=site.keys["ann"], messages=[SYSTEM], alone=True)
    found = scorer([f"{text}\n" for text in DOCUMENTS])
    assert scorer.error is None
    assert found[0] > 0 == found[1]
    wrong = CacheScorer(f"http://127.0.0.1:{site.port}", api_key="none")
    assert wrong(DOCUMENTS) == [0.0] * 3
    assert "401" in wrong.error
    nobody = CacheScorer("http://127.0.0.1:9", timeout_s=0.5)
    assert nobody(DOCUMENTS) == [0.0] * 3
    assert nobody.error


def test_texts_are_scored_together_as_alone():
    """Many texts share a layout. Each has the segment that it would have in a message of two."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    messages = [{"role": "system", "content": "Be brief."}]
    texts = [f"Document {number} is about {number * number}. " * (1 + number % 3) for number in range(20)]
    texts[3] = ""
    texts[7] = texts[5]
    together = llm.processor.marked_parts(texts, messages, llm.policy("modular"))
    for text, part in zip(texts, together, strict=True):
        (alone,) = llm.processor.marked_parts([text], messages, llm.policy("modular"))
        assert (part is None) == (text == "")
        assert part is None or [spec.key for spec in part.candidates] == [spec.key for spec in alone.candidates]


def test_many_texts_after_long_messages_are_rejected_before_any_work(monkeypatch):
    """The messages may be laid out once for each text."""
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    monkeypatch.setattr(llm.processor, "marked_parts", pytest.fail)  # the work would take seconds
    messages = [{"role": "system", "content": "a" * 100_000}]
    with pytest.raises(ParameterError) as error:
        llm.score_cached(["b"] * 1_000, messages=messages, alone=True)
    assert error.value.code == "texts.too_many"


def test_texts_longer_than_the_context_are_scored_separately():
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    texts = [f"{number} " + "long text " * 120 for number in range(4)]
    rated = llm.score_cached(texts, messages=[])
    assert all(each.tokens > 1000 for each in rated)
