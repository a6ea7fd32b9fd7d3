"""The prefix of a prompt, which may be read in place of modules: its parts, and its scope."""

from __future__ import annotations

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.prompt.composed import CachedSpan, NewSpan, Prefix, prefix_of
from inlay.prompt.request import EngineRequest
from inlay.types import Scope
from tests.conftest import tiny

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First of all.</module><module name="b">Second '
    '<param name="p" len="8"/>.</module><module name="c">Third.</module><module name="d">Fourth.</module></schema>'
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM(tiny("llama"), kv_memory="4MiB")
    llm.add_schema(SCHEMA, encode=False)
    llm.add_schema(SCHEMA, encode=False, cache_salt="own")
    return llm


def request(llm: LLM, *names: str, reuse: str = "modular", salt: str = "", positions: str = "packed") -> EngineRequest:
    built = SCHEMA.prompt()
    for name in names:
        built = built.use(name, p="one") if name == "b" else built.use(name)
    return llm.processor.process(built.text("Well?"), SamplingParams(), llm.policy(reuse, positions), Scope(salt))


def prefix(llm: LLM, *names: str, **asked: str) -> Prefix:
    found = prefix_of(request(llm, *names, **asked))
    assert found is not None
    return found


def text(llm: LLM, found: Prefix) -> list[str]:
    return [llm.tokenizer.decode(list(node.run.ids)) for node in found.nodes]


def test_prefix_extends_to_the_last_module(llm):
    found = prefix(llm, "a", "b", "c")
    assert text(llm, found) == ["First of all.", "Second ", "one", ".", "Third."]  # modules have seen the primer
    assert [node.module for node in found.nodes] == [True, True, False, True, True]
    composed = found.composed(len(request(llm, "a", "b", "c").parts) - 1)
    assert [type(part) for part in composed] == [CachedSpan, NewSpan]
    assert composed[0].exact


def test_prompt_without_modules_has_no_prefix(llm):
    assert prefix_of(request(llm)) is None


def test_a_model_without_shifts_reads_its_first_module_exactly():
    llm = LLM(tiny("gpt2"), kv_memory="4MiB")
    llm.add_schema(SCHEMA, encode=False)
    assert prefix_of(request(llm, "a", positions="schema")) is None
    assert text(llm, prefix(llm, "a", "c", positions="schema")) == ["Third."]


@pytest.mark.parametrize("reuse", ["off", "exact", "anchored", "isolated", "modular+promote:off"])
def test_policies_without_promotion_have_no_prefix(llm, reuse):
    assert prefix_of(request(llm, "a", "b", "c", reuse=reuse)) is None


@pytest.mark.parametrize("positions", ["packed", "schema"])
def test_prefix_is_read_up_to_the_last_stored_module(llm, positions):
    found = prefix(llm, "a", "b", "c", "d", positions=positions)
    parts = request(llm, "a", "b", "c", "d", positions=positions).parts
    starts = [part.start for part in parts]
    tokens = [len(node.run.ids) for node in found.nodes]

    def stored(most: int) -> int:
        """How many nodes are, where so many tokens are."""
        left = most

        def longest(run):
            nonlocal left
            read = min(left, len(run.ids))
            left -= read
            return read

        return found.stored(longest)

    assert [stored(sum(tokens[:count])) for count in range(7)] == list(range(7))
    assert stored(sum(tokens) - 1) == len(tokens) - 1
    assert found.in_place(0).starts == frozenset()
    assert found.in_place(3).starts == set(starts[1:3])  # the argument is read after it like other text of the request
    assert found.in_place(5).starts == set(starts[1:6])


def test_common_prefixes_have_equal_keys(llm):
    one, other = prefix(llm, "a", "b", "c"), prefix(llm, "a", "b", "d")
    keys = [[node.key for node in found.nodes] for found in (one, other)]
    assert keys[0][:4] == keys[1][:4]
    assert keys[0][4] != keys[1][4]
    assert prefix(llm, "b", "c").nodes[-1].key not in keys[0]


def test_prefix_keys_are_private_even_with_a_public_schema(llm):
    llm.remove_schema("s", cache_salt="own")
    keys = {salt: [node.key for node in prefix(llm, "a", "b", "c", salt=salt).nodes] for salt in ("", "one", "own")}
    assert not {*keys[""]} & {*keys["one"]}
    assert not {*keys["own"]} & {*keys["one"]}
    llm.add_schema(SCHEMA, encode=False, cache_salt="own")
    private = [node.key for node in prefix(llm, "a", "b", "c", salt="own").nodes]
    assert not {*private} & {*keys["own"]}
