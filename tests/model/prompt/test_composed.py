"""Composed prompts: their exact, displaced and recomputed parts, and the record of each."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay import LLM, SamplingParams, Schema
from inlay.engine.prompt_state import usage_of
from inlay.kv.identity import KeyMaker, specify
from inlay.prompt.composed import CachedSpan, NewSpan, compose, compose_parts
from inlay.prompt.request import PromptPart
from tests.conftest import tiny

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)
SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First <param name="p" len="6" default="one"/> module.</module>'
    '<module name="b">Second module.</module> Behind.</schema>'
)


def composed(prompt, reuse: str, positions: str = "packed"):
    llm = LLM(tiny("llama"), kv_memory="1MiB")
    policy = llm.policy(reuse, positions)
    llm.add_schema(SCHEMA, encode=False)
    return compose(llm.processor.process(prompt, SamplingParams(), policy))


def described(parts):
    """Each part as (text, 'exact', 'module', 'displaced' or 'fresh')."""
    named = []
    for part in parts:
        ids = part.ids if isinstance(part, NewSpan) else part.spec.ids[: part.length]
        kind = "fresh"
        if isinstance(part, CachedSpan):
            kind = "exact" if part.exact else "displaced" if part.displaced else "module"
        named.append((tiny("llama").tokenizer.decode(list(ids)), kind))
    return named


def test_off_computes_everything_and_stores_nothing():
    prompt = SCHEMA.prompt().use("b").text("Q")
    (part,) = composed(prompt, "off")
    assert isinstance(part, NewSpan)
    assert part.run is None
    whole = [each for ids, kind in described(composed(prompt, "anchored")) for each in ids]
    assert described([part]) == [("".join(whole), "fresh")]


def test_off_with_schema_positions_has_a_span_between_gaps():
    parts = composed(SCHEMA.prompt().use("b").text("Q"), "off", "schema")
    assert len(parts) == 2
    assert parts[0].start + len(parts[0].ids) < parts[1].start


def test_exact_is_one_span_of_new_tokens():
    parts = composed(SCHEMA.prompt().use("a", p="two").use("b").text("Q"), "exact")
    assert described(parts) == [("In front. First two module.Second module. Behind.Q", "fresh")]
    assert (parts[0].run.start, parts[0].run.before.tokens) == (0, 0)


def test_exact_with_gaps_has_one_span_per_side():
    parts = composed(SCHEMA.prompt().use("b").text("Q"), "exact", "schema")
    assert described(parts) == [("In front. ", "fresh"), ("Second module. Behind.Q", "fresh")]
    first, second = (part.run for part in parts)
    assert second.digest == first.after(len(first.ids)).digest(second.start)
    assert second.start > len(first.ids)


def test_anchored_module_is_exact_where_its_context_matches():
    assert described(composed(SCHEMA.prompt().use("a", p="two").use("b").text("Q"), "anchored")) == [
        ("In front. ", "exact"),
        ("First ", "exact"),
        ("two", "fresh"),
        (" module.", "displaced"),  # the argument is shorter than its hole
        ("Second module.", "displaced"),  # anchored to the text in front, and read after module a
        (" Behind.", "displaced"),
        ("Q", "fresh"),
    ]


def test_module_right_after_its_anchor_is_exact():
    assert described(composed(SCHEMA.prompt().use("b").text("Q"), "anchored"))[:2] == [
        ("In front. ", "exact"),
        ("Second module.", "exact"),
    ]


def test_isolated_module_is_not_displaced():
    kinds = dict(described(composed(SCHEMA.prompt().use("b").text("Q"), "isolated")))
    assert kinds["Second module."] == "module"


def test_schema_positions_displace_nothing():
    parts = composed(SCHEMA.prompt().use("a", p="two").use("b").text("Q"), "anchored", "schema")
    assert "displaced" not in {kind for _, kind in described(parts)}


def test_default_argument_is_its_own_segment():
    assert described(composed(SCHEMA.prompt().use("a").text("Q"), "anchored"))[2] == ("one", "exact")


def test_last_token_is_always_new():
    parts = composed(SCHEMA.prompt().use("b"), "anchored")
    assert described(parts)[-2:] == [(" Behind", "displaced"), (".", "fresh")]


def test_usage_counts_only_hits():
    parts = composed(SCHEMA.prompt().use("b").text("Q"), "anchored")
    first = parts[0].spec
    usage = usage_of(parts, {first.key: len(first.ids)}, [0] * len(parts))
    assert (usage.cached_tokens, usage.exact_tokens, usage.module_tokens) == (10, 10, 0)
    half = usage_of(parts, {first.key: 4}, [0] * len(parts))
    assert (half.cached_tokens, half.exact_tokens, half.module_tokens) == (4, 4, 0)
    everything = {part.spec.key: len(part.spec.ids) for part in parts if isinstance(part, CachedSpan)}
    assert usage_of(parts, everything, [0] * len(parts)).computed_tokens == 1


def test_usage_counts_stored_prefixes_of_new_spans_as_exact():
    (part,) = composed(SCHEMA.prompt().use("b").text("Q"), "exact")
    usage = usage_of((part,), {}, [7])
    assert (usage.cached_tokens, usage.exact_tokens, usage.computed_tokens) == (7, 7, len(part.ids) - 7)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.sets(st.integers(1, 19), max_size=5), st.integers(0, 9))
def test_exact_ignores_module_borders(tokens, cuts, start):
    """However a prompt's text is cut into parts, its exact composed prompt is the same."""
    borders = [0, *sorted(c for c in cuts if c < len(tokens)), len(tokens)]
    parts = [PromptPart(tuple(tokens[a:b]), start + a) for a, b in pairwise(borders)]
    (part,) = compose_parts(parts)
    assert (part.ids, part.start, part.run.digest) == (tuple(tokens), start, b"")


def test_text_after_two_modules_is_not_an_exact_continuation():
    """The record says how each token was made: two modules side by side are not the same text in one go."""
    llm = LLM(tiny("llama"), kv_memory="1MiB")
    llm.add_schema(SCHEMA, encode=False)
    runs = {}
    for reuse in ("isolated", "anchored", "exact"):
        policy = llm.policy(reuse, "packed")
        prompt = SCHEMA.prompt().use("a", p="two").use("b").text("Q")
        runs[reuse] = compose(llm.processor.process(prompt, SamplingParams(), policy))[-1].run
    whole = runs["exact"].rest(len(runs["exact"].ids) - 1)
    digests = {runs["isolated"].digest, runs["anchored"].digest, whole.digest}
    assert len(digests) == 3


CHAINED = [specify((9,), 0, (), KEYS)]
for token in range(5):
    CHAINED.append(specify((token,), token + 1, CHAINED[: token + 1], KEYS))
CHAINED += [specify((token,), 3, CHAINED[:3], KEYS) for token in (7, 8)]  # beside the fourth


@given(st.permutations(range(len(CHAINED))), st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_segment_is_displaced_if_its_context_is_shifted_differently(order, gaps):
    parts, at = [], 0
    for number, gap in zip(order, gaps, strict=True):
        spec = CHAINED[number]
        parts.append((PromptPart(spec.ids, at + gap, candidates=(spec,), encode=True), spec))
        at += 1 + gap
    told = compose_parts([part for part, _ in parts])
    shifts: dict[bytes, int] = {}
    for (part, spec), cached in zip(parts, told, strict=True):
        shift = part.start - spec.start
        assert cached.displaced == any(shifts.get(other.key, shift) != shift for other in spec.context)
        shifts[spec.key] = shift
