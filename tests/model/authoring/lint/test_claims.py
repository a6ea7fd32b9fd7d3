"""The advice's claims about the engine, tested on the engine: a tiny model, one token a character."""

from __future__ import annotations

from inlay import LLM, Prompt, SamplingParams, Schema
from inlay.authoring.lint import lint_schema
from inlay.types import Usage
from tests.conftest import tiny
from tests.unit.authoring.lint.test_rules import HOLE, module, text

ONE = SamplingParams(max_tokens=1, temperature=0)


def usage(body: str, prompt: str, **policy: str) -> Usage:
    """The counts of the second time that a prompt is asked, after its modules have been encoded."""
    llm = LLM(tiny("llama"), kv_memory="8MiB", reuse="anchored")
    schema = Schema.from_string(f'<schema name="s">{body}</schema>')
    llm.add_schema(schema, **policy)
    asked = Prompt.from_string(f'<prompt schema="s">{prompt}?</prompt>')
    llm.generate(asked, ONE, **policy)
    return llm.generate(asked, ONE, **policy)[0].usage


def rules(body: str) -> list[str]:
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    layout = llm.add_schema(Schema.from_string(f'<schema name="s">{body}</schema>'), encode=False)
    return [finding.rule for finding in lint_schema(layout, llm.encoder)]


def stored(body: str) -> tuple[int, int]:
    """How many tokens are stored once a schema is encoded, and how many slots of the pool that takes."""
    llm = LLM(tiny("llama"), kv_memory="8MiB", reuse="anchored")
    pool = llm.store.pool
    llm.add_schema(Schema.from_string(f'<schema name="s">{body}</schema>'))
    return llm.store.tokens, (pool.chunks - pool.free_chunks) * pool.chunk_size


def test_each_small_module_is_its_own_segment():
    both = module("a", 3) + module("b", 3, "")
    assert rules(both) == ["small-module", "small-module"]
    assert stored(both) == (6, 64)  # they share a chunk, and are still two segments
    assert usage(both, "<a/><b/>").module_tokens + usage(both, "<a/><b/>").exact_tokens == 6


def test_text_after_a_module_is_shifted():
    late = text(40, "y") + module("a", 50) + text(40, "z")
    early = text(40, "y") + text(40, "z") + module("a", 50)
    assert (rules(late), rules(early)) == (["late-text"], [])
    assert usage(late, "<a/>").shifted_tokens == 40
    assert usage(late, "").shifted_tokens == 0
    assert usage(early, "<a/>").shifted_tokens == 0


def test_text_after_a_short_argument_is_shifted():
    early = f'{text(20)}<module name="a">{text(20)}{HOLE.format(8)}{text(40, "z")}</module>'
    late = f'{text(20)}<module name="a">{text(20)}{text(40, "z")}{HOLE.format(8)}</module>'
    assert (rules(early), rules(late)) == (["early-parameter"], [])
    assert usage(early, '<a n="1234567"/>').shifted_tokens == 40
    assert usage(early, '<a n="12345678"/>').shifted_tokens == 0
    assert usage(late, '<a n="1"/>').shifted_tokens == 0


def test_exact_reuse_ends_at_a_different_argument():
    first, last = module("a", 20, HOLE.format(8)), module("b", 50)
    assert (rules(first + last), rules(last + first)) == (["argument-first"], [])
    assert after(first + last, '<a n="1"/><b/>', '<a n="2"/><b/>') == 20
    assert after(last + first, '<b/><a n="1"/>', '<b/><a n="2"/>') == 70
    assert after(first + last, '<a n="1"/><b/>', '<a n="1"/><b/>') == 71


def after(body: str, first: str, second: str) -> int:
    """How many tokens a prompt finds under ``exact`` when another one has been asked before."""
    llm = LLM(tiny("llama"), kv_memory="8MiB", reuse="exact")
    llm.add_schema(Schema.from_string(f'<schema name="s">{body}</schema>'))
    ask = (Prompt.from_string(f'<prompt schema="s">{prompt}?</prompt>') for prompt in (first, second))
    return [llm.generate(prompt, ONE)[0].usage for prompt in ask][-1].cached_tokens


def test_equal_text_after_an_equal_prefix_is_stored_once():
    twice = text(30, "z") + "".join(f'<module name="{name}">{text(60)}</module>' for name in "ab")
    assert rules(twice) == []
    assert stored(twice)[0] == 30 + 60


def test_equal_text_after_a_different_prefix_is_stored_twice():
    apart = module("p", 20, f'<module name="a">{text(60)}</module>') + f'<module name="b">{text(60)}</module>'
    assert rules(apart) == ["repeated-text"]
    assert stored(apart)[0] == 20 + 60 + 60


def test_prefix_of_a_longer_text_is_stored_once():
    longer = "".join(f'<module name="{name}">{text(60)}{text(20, name)}</module>' for name in "xy")
    assert rules(longer) == []
    assert stored(longer)[0] == 60 + 20 + 20


def test_a_hidden_scaffold_changes_nothing():
    """A prompt that completes both finds the segments of the first."""
    modules = module("a", 20) + module("b", 20) + module("c", 20)
    first, second = '<scaffold modules="a b"/>', '<scaffold modules="a b c"/>'
    assert rules(modules + first + second) == ["hidden-scaffold"]
    assert rules(modules + second + first) == []
    alone, both, ordered = (
        usage(modules + scaffolds, "<a/><b/><c/>") for scaffolds in (first, first + second, second + first)
    )
    assert alone.exact_tokens == 40  # 'b' saw 'a', and 'c' nothing
    assert both.exact_tokens == 60  # the second one applies to 'c'
    assert ordered.exact_tokens == 60
