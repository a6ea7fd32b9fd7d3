"""Splices tell what is exact for a request, what is displaced, and what has to be computed."""

from __future__ import annotations

from inlay import Schema
from inlay.cache.splice import Cached, Fresh
from inlay.engine.request import usage_of

from ..conftest import tiny

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First <param name="p" len="6" default="one"/> module.</module>'
    '<module name="b">Second module.</module> Behind.</schema>'
)


def splice(prompt, reuse: str, positions: str = "packed"):
    from inlay import LLM

    llm = LLM(tiny("llama"), kv_memory="16MiB")
    llm.add_schema(SCHEMA, encode=False)
    policy = llm._policy(reuse, positions)
    return llm._library.splice(llm._library.place(prompt.build(), policy), policy)


def told(parts):
    """Each part as (text, 'exact', 'module', 'displaced' or 'fresh')."""
    named = []
    for part in parts:
        ids = part.ids if isinstance(part, Fresh) else part.spec.ids[: part.length]
        kind = "fresh"
        if isinstance(part, Cached):
            kind = "exact" if part.exact else "displaced" if part.displaced else "module"
        named.append((tiny("llama").tokenizer.decode(list(ids)), kind))
    return named


def test_off_computes_everything():
    assert [kind for _, kind in told(splice(SCHEMA.prompt().use("b").text("Q"), "off"))] == ["fresh"] * 4


def test_exact_caches_up_to_the_first_text_of_the_request():
    assert told(splice(SCHEMA.prompt().use("a", p="two").use("b").text("Q"), "exact")) == [
        ("In front. ", "exact"),
        ("First ", "exact"),
        ("two", "fresh"),
        (" module.", "fresh"),
        ("Second module.", "fresh"),
        (" Behind.", "fresh"),
        ("Q", "fresh"),
    ]


def test_anchored_is_exact_where_the_context_is_what_stands_there():
    assert told(splice(SCHEMA.prompt().use("a", p="two").use("b").text("Q"), "anchored")) == [
        ("In front. ", "exact"),
        ("First ", "exact"),
        ("two", "fresh"),
        (" module.", "displaced"),  # the argument is shorter than its hole
        ("Second module.", "displaced"),  # anchored to the text in front, and read behind module a
        (" Behind.", "displaced"),
        ("Q", "fresh"),
    ]


def test_a_module_right_behind_its_anchor_is_exact():
    assert told(splice(SCHEMA.prompt().use("b").text("Q"), "anchored"))[:2] == [
        ("In front. ", "exact"),
        ("Second module.", "exact"),
    ]


def test_isolated_has_no_context_to_be_displaced_from():
    kinds = dict(told(splice(SCHEMA.prompt().use("b").text("Q"), "isolated")))
    assert kinds["Second module."] == "module"


def test_under_schema_positions_nothing_is_displaced():
    parts = splice(SCHEMA.prompt().use("a", p="two").use("b").text("Q"), "anchored", "schema")
    assert "displaced" not in {kind for _, kind in told(parts)}


def test_a_default_is_a_segment_of_its_own():
    assert told(splice(SCHEMA.prompt().use("a").text("Q"), "anchored"))[2] == ("one", "exact")


def test_the_last_token_is_always_fresh():
    parts = splice(SCHEMA.prompt().use("b"), "anchored")
    assert told(parts)[-2:] == [(" Behind", "displaced"), (".", "fresh")]


def test_usage_counts_hits_alone():
    parts = splice(SCHEMA.prompt().use("b").text("Q"), "anchored")
    first = parts[0].spec.key
    usage = usage_of(parts, frozenset([first]))
    assert (usage.cached_tokens, usage.exact_tokens, usage.module_tokens) == (10, 10, 0)
    everything = usage_of(parts, frozenset(part.spec.key for part in parts if isinstance(part, Cached)))
    assert everything.computed_tokens == 1
