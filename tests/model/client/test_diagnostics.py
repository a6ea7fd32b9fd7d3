"""Diagnostics: the source of each module, and one cause for each kind of computed tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inlay import LLM, AsyncLLM, Prompt, SamplingParams, Schema
from inlay.diagnostics import CAUSES, Diagnostics, SpanRead
from inlay.events import TokenEvent, events_from_bytes, events_to_bytes
from inlay.prompt.request import EngineRequest
from inlay.types import MISS_REASONS, Scope
from tests.adapters import write_adapter
from tests.conftest import tiny
from tests.model.families.configs import tiny as tiny_recurrent

ONE = SamplingParams(temperature=0, max_tokens=1)
TEMPLATE = (
    "{% if date %}Date: {{ date }}\n{% endif %}{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RULES = "Answer from the documents alone, in one short sentence."
ISLAND = "Document island: the island lies far out in the sea, behind the fog. "
BRIDGE = "Report on bridges: a bridge leads over the river to the other side. "
QUESTION = "Where does it lie?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0, chat_template=TEMPLATE)


def asked(system: str = RULES, text: str = ISLAND + BRIDGE, question: str = QUESTION) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    return [{"role": "system", "content": system}, *turns, {"role": "user", "content": question}]


def marked(*texts: str, system: str = RULES) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]},
    ]


def explained(llm: LLM, prompt: Any, salt: str = "", **fields: Any) -> Diagnostics:
    fields = {"reuse": "exact", "cache_salt": salt or None, "diagnostics": True, **fields}
    (output,) = llm.generate([prompt], ONE, **fields)
    found = output.diagnostics
    assert found is not None
    modules = sum(each.computed_tokens for each in found.modules)
    known = sum(cause.tokens for cause in found.causes)
    assert modules <= known <= output.usage.computed_tokens
    if "recompute" not in fields:
        assert known >= output.usage.computed_tokens - 1  # the last token has no cause
    assert [cause.tokens for cause in found.causes] == sorted((c.tokens for c in found.causes), reverse=True)
    return found


def kinds(found: Diagnostics) -> list[str]:
    return [cause.kind for cause in found.causes]


CHANGES = {
    "date or number": (asked("It is 25 November. " + RULES), asked("It is 4 December. " + RULES)),
    "changed system text": (asked("Be brief. " + RULES), asked("Be friendly and say more. " + RULES)),
    "moved document": (asked(text=ISLAND + BRIDGE), asked(text=BRIDGE + ISLAND)),
    "changed message": (asked(text="The first draft. " + ISLAND), asked(text="Another version. " + ISLAND)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_prompt_is_explained(llm: LLM, kind: str):
    before, after = CHANGES[kind]
    assert kinds(explained(llm, before, kind)) == ["new"]
    found = explained(llm, after, kind)
    assert kinds(found)[0] == kind
    departure = found.departure
    assert departure is not None
    assert departure.kind == kind
    assert departure.lost_tokens == found.causes[0].tokens > 50
    place = "messages[0]" if "system" in kind or "date" in kind else "messages[1]"
    assert departure.place == found.causes[0].place == place
    assert departure.stored_text != departure.new_text
    assert max(len(departure.stored_text), len(departure.new_text)) <= 40


def test_a_date_of_the_template_is_explained(llm: LLM):
    for date in ("Mon 1 Jun", "Tue 2 Jun"):
        prompt = {"messages": asked(), "chat_template_kwargs": {"date": date}}
        found = explained(llm, prompt, "header")
    assert kinds(found)[0] == "template date"
    assert found.causes[0].place == "template"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"It does {name}.", "parameters": {}}}


TOOL_SETS = {
    "another order": ([tool("search"), tool("fetch")], [tool("fetch"), tool("search")]),
    "one more": ([tool("search")], [tool("search"), tool("fetch")]),
    "none any more": ([tool("search")], None),
    "none before": (None, [tool("search")]),
}


@pytest.mark.parametrize("change", TOOL_SETS)
def test_changed_tool_set_is_explained(llm: LLM, change: str):
    for tools in TOOL_SETS[change]:
        found = explained(llm, {"messages": asked(), **({} if tools is None else {"tools": tools})}, change)
    assert kinds(found)[0] == "tool set"
    assert found.departure is not None
    assert found.departure.place in ("tools", "template")


def test_dropped_reasoning_is_explained(llm: LLM):
    for more in ({"reasoning_content": "They ask about the island. " * 3}, {}):
        answer = {"role": "assistant", "content": "It lies far out in the sea, behind the fog.", **more}
        messages = [{"role": "user", "content": ISLAND}, answer, {"role": "user", "content": QUESTION}]
        found = explained(llm, messages, "thinking")
    assert kinds(found)[0] == "dropped thinking"
    assert found.causes[0].place == "messages[1]"


def test_answer_with_dropped_reasoning_is_explained(llm: LLM):
    processor = llm.processor
    policy = llm.policy("exact", modules=False)
    turn = {"role": "user", "content": ISLAND}
    _, noted = processor.process_noted([turn], ONE, policy)
    noted.answered(llm.encoder.text("<think>They ask about islands.</think>It lies far out in the sea, so far."))
    answer = {"role": "assistant", "content": "It lies far out in the sea, so far."}
    request, noted = processor.process_noted([turn, answer, turn], ONE, policy, diagnostics=True)
    found = noted.diagnostics(request, ())
    assert found is not None
    assert found.departure is not None
    assert (found.departure.kind, found.departure.place) == ("dropped thinking", "messages[1]")


def test_an_evicted_prompt_is_explained(llm: LLM):
    explained(llm, asked(), "evicted")
    llm.reset_prefix_cache()
    found = explained(llm, asked(), "evicted")
    assert kinds(found) == ["evicted"]
    assert found.departure is None


def test_a_stored_prompt_has_no_cause(llm: LLM):
    explained(llm, asked(), "again")
    assert explained(llm, asked(), "again") == Diagnostics()


def test_the_next_turn_is_new(llm: LLM):
    explained(llm, asked(), "turns")
    found = explained(llm, [*asked(), {"role": "assistant", "content": "Far out."}, asked()[1]], "turns")
    assert kinds(found) == ["new"]


def test_an_unrelated_prompt_is_new(llm: LLM):
    explained(llm, asked(), "unrelated")
    found = explained(llm, [{"role": "user", "content": "Quite another question, of no relation."}], "unrelated")
    assert kinds(found) == ["new"]
    assert found.departure is not None
    assert found.departure.lost_tokens == 0


def test_a_prompt_kept_out_of_the_cache_is_explained(llm: LLM):
    explained(llm, asked(), "policy")
    found = explained(llm, asked(), "policy", reuse="off")
    assert kinds(found) == ["policy"]
    explained(llm, asked("Rules."), "policy", reuse="off")
    assert kinds(explained(llm, asked("Rules."), "policy"))[0] == "policy"


def test_a_text_prompt_is_explained(llm: LLM):
    for day in (25, 26):
        found = explained(llm, f"Written on day {day}.\n{ISLAND}{BRIDGE}", "text")
    assert kinds(found)[0] == "date or number"
    assert found.causes[0].place == "prompt"


def test_changed_adapter_is_explained(tmp_path):
    loaded = tiny("llama")
    write_adapter(tmp_path, loaded)
    llm = LLM(loaded, kv_memory="16MiB", seed=0, adapters={"polite": tmp_path})
    explained(llm, ISLAND + BRIDGE)
    found = explained(llm, ISLAND + BRIDGE, adapter="polite")
    assert kinds(found) == ["other adapter"]


def test_the_text_of_another_salt_is_never_shown(llm: LLM):
    secret = "The password is swordfish. "
    explained(llm, asked(text=secret + ISLAND), "theirs")
    assert explained(llm, asked(text="The password is hidden. " + ISLAND), "mine").departure is None
    (departure,) = {explained(llm, asked(text="The password is gone. " + ISLAND), "mine").departure}
    assert departure is not None
    assert "hidden"[:4] in departure.stored_text
    assert "swordfish" not in str(departure)


def test_tenants_of_one_salt_do_not_see_each_other(llm: LLM):
    policy = llm.policy("exact", modules=False)
    llm.processor.process_noted(asked(), ONE, policy, Scope("shared", tenant="theirs"))
    request, noted = llm.processor.process_noted(
        asked("Other rules."), ONE, policy, Scope("shared", tenant="mine"), diagnostics=True
    )
    found = noted.diagnostics(request, ())
    assert found is not None
    assert found.departure is None


def test_marked_parts_are_listed(llm: LLM):
    first = explained(llm, marked(ISLAND, BRIDGE), "parts", reuse="anchored")
    places = [f"messages[1].content[{number}]" for number in range(2)]
    assert [(each.name, each.form, each.tier, each.reason) for each in first.modules] == [
        (place, "new", "", "never seen") for place in places
    ]
    assert kinds(first) == ["new"]
    second = explained(llm, marked(BRIDGE, ISLAND), "parts", reuse="anchored")
    tokens = [len(llm.encoder.text(text)) for text in (BRIDGE, ISLAND)]
    assert [(each.name, each.tokens, each.computed_tokens) for each in second.modules] == [
        (place, size, 0) for place, size in zip(places, tokens, strict=True)
    ]
    assert {each.tier for each in second.modules} == {"pool"}
    assert {each.form for each in second.modules} <= {"anchored", "exact"}
    assert second.modules[1].shift == tokens[0]


def test_modules_of_a_schema_are_listed(llm: LLM):
    llm.add_schema(
        Schema.from_string(f'<schema name="places"><module name="island">{ISLAND}</module></schema>'), reuse="isolated"
    )
    for _ in range(2):
        found = explained(llm, llm_prompt(), reuse="isolated")
        (module,) = found.modules
        assert (module.name, module.tier, module.computed_tokens, module.reason) == ("island", "pool", 0, "")
    llm.reset_prefix_cache()
    (module,) = explained(llm, llm_prompt(), reuse="isolated").modules
    assert (module.form, module.tier, module.reason) == ("new", "", "evicted")
    assert module.computed_tokens == module.tokens


def llm_prompt() -> Any:
    return Prompt.from_string('<prompt schema="places"><island/>Where does it lie?</prompt>')


def test_recomputed_tokens_are_counted(llm: LLM):
    explained(llm, marked(ISLAND, BRIDGE), "recompute", reuse="isolated", recompute="linked:4")
    found = explained(llm, marked(BRIDGE, ISLAND), "recompute", reuse="isolated", recompute="linked:4")
    assert max(each.recomputed_tokens for each in found.modules) == 4


def test_diagnostics_are_left_out_unless_requested(llm: LLM):
    (output,) = llm.generate([asked()], ONE)
    assert output.diagnostics is None
    assert not llm.processor.process(asked(), ONE, llm.policy("exact")).diagnostics


def test_diagnostics_come_with_the_last_output():
    async def main() -> list[Diagnostics | None]:
        llm = AsyncLLM(tiny("llama"), kv_memory="16MiB", seed=0)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = [output async for output in llm.generate("Hello there", params, diagnostics=True)]
        llm.shutdown()
        return [output.diagnostics for output in outputs]

    *earlier, last = asyncio.run(main())
    assert earlier
    assert set(earlier) == {None}
    assert last is not None
    assert kinds(last) == ["new"]


def test_each_reason_has_a_message_and_a_remedy():
    assert set(MISS_REASONS) - {"never seen"} <= CAUSES.keys()
    assert all(message.endswith(".") and remedy.endswith(".") for message, remedy in CAUSES.values())


def test_an_expired_prompt_is_explained(llm: LLM, clock):
    prompt = marked(ISLAND)
    prompt[1]["content"][0]["cache_control"]["ttl"] = "5m"
    explained(llm, prompt, "expired")
    clock.advance(301)
    llm.reset_prefix_cache()
    assert kinds(explained(llm, prompt, "expired")) == ["expired"]


def test_requests_and_events_carry_diagnostics_between_processes(llm: LLM):
    policy = llm.policy("exact", modules=False)
    request, _ = llm.processor.process_noted("Hello", ONE, policy, diagnostics=True)
    again = EngineRequest.from_bytes(request.to_bytes(), llm.client.model.keys)
    assert (again.ids, again.diagnostics) == (request.ids, True)
    event = TokenEvent("a", 0, reads=[SpanRead(3, 2, 1, module=True, form="isolated", recomputed=(0, 1))])
    assert events_from_bytes(events_to_bytes([event])) == [event]


def test_text_between_the_states_of_a_recurrent_model_is_explained():
    llm = LLM(tiny_recurrent("qwen3_5_text"), kv_memory="16MiB", seed=0, chat_template=TEMPLATE)
    explained(llm, asked(question="Where does it lie?"))
    found = explained(llm, asked(question="Where does it lead?"))
    assert kinds(found)[0] == "between states"
    assert found.departure is not None
    assert found.departure.place == "messages[3]"


def test_reordered_parts_keep_their_names(llm: LLM):
    explained(llm, marked(ISLAND, BRIDGE), "free")
    prompt = marked(BRIDGE, ISLAND)
    prompt[1]["order"] = "any"
    found = explained(llm, prompt, "free")
    assert [each.name for each in found.modules] == ["messages[1].content[1]", "messages[1].content[0]"]
    assert [each.form for each in found.modules] == ["exact", "exact"]
    assert found.departure is None
