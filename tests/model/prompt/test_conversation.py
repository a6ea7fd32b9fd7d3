"""Messages in parts: modules that a request marks, and text that is found by its content."""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, Prompt, SamplingParams, Schema
from inlay.prompt.inputs import with_marked_parts
from tests.conftest import tiny
from tests.model.api.tool_templates import tool_model

SYSTEM = "Answer from the documents."
DOCUMENTS = [
    f"Document {name}: the {name} lies between two rivers. " for name in ("town", "harbour", "mountain", "bridge")
]
QUESTION = "Where does it lie?"
ONE = SamplingParams(temperature=0, max_tokens=1)
EPHEMERAL = {"type": "ephemeral"}
SCHEMA = Schema.from_string(
    f"<schema name='s'><system>{SYSTEM}</system><user>"
    + "".join(f"<module name='m{i}'>{text}</module>" for i, text in enumerate(DOCUMENTS))
    + "</user></schema>"
)


def part(text: str, *, marked: bool = False) -> dict:
    return {"type": "text", "text": text} | ({"cache_control": EPHEMERAL} if marked else {})


def conversation(*order: int, marked: bool = True) -> list[dict]:
    documents = [part(DOCUMENTS[i], marked=marked) for i in order]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [*documents, part(QUESTION)]}]


def with_schema(*order: int) -> Prompt:
    return Prompt.from_string(f"<prompt schema='s'>{''.join(f'<m{i}/>' for i in order)}{QUESTION}</prompt>")


def make(name: str = "llama", **settings) -> LLM:
    return LLM(tiny(name), kv_memory="16MiB", seed=0, **settings)


def ids_of(llm: LLM, order) -> tuple[int, ...]:
    return llm.lay_out(conversation(*order)).ids


@pytest.mark.parametrize("reuse", ["isolated", "anchored", "primed"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (3, 1, 0, 2)])
def test_marked_parts_equal_modules_of_a_schema(reuse, order):
    """The system turn is to them what text outside modules is to a schema: the same tokens, the same states."""
    parts, schema = make(reuse=reuse), make(reuse=reuse)
    schema.add_schema(SCHEMA)
    say = [[5, 6, 7]]
    assert ids_of(parts, order) == schema.lay_out(with_schema(*order)).ids
    (got,), (expected,) = (
        parts.distributions([conversation(*order)], say),
        schema.distributions([with_schema(*order)], say),
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    (exact,) = parts.distributions([conversation(*order)], say, reuse="exact")
    assert not torch.allclose(got, exact, atol=1e-3)


def test_marked_parts_are_found_in_any_order():
    llm = make()
    first = llm.generate(conversation(0, 1, 2), ONE)[0].usage
    assert (first.module_tokens, first.exact_tokens) == (0, 0)
    usage = llm.generate(conversation(2, 0), ONE)[0].usage
    ids = [len(llm.encoder.text(DOCUMENTS[i])) for i in range(4)]
    assert usage.module_tokens == usage.shifted_tokens == usage.primed_tokens == ids[0] + ids[2]
    llm.add_schema(SCHEMA, encode=False)
    usage = llm.generate(with_schema(3, 1), ONE)[0].usage  # the schema's module is the same text in the same context
    assert usage.module_tokens == usage.shifted_tokens == ids[1]


def test_the_first_of_several_marked_parts_is_exact_under_anchored():
    llm = make(reuse="anchored")
    llm.generate(conversation(0, 1, 2), ONE)
    usage = llm.generate(conversation(2, 0), ONE)[0].usage
    assert usage.module_tokens == len(llm.encoder.text(DOCUMENTS[0]))
    assert usage.exact_tokens >= len(llm.encoder.text(DOCUMENTS[2]))  # right after all that it has seen


def test_lone_marked_part_is_exact():
    """Directly after the system turn it has no primer. Beside another document, it is encoded as any other."""
    llm = make()
    first = llm.generate(conversation(0), ONE)[0].usage
    assert first.computed_tokens == first.prompt_tokens
    again = conversation(0)
    again[1]["content"][-1] = part("Why?")
    usage = llm.generate(again, ONE)[0].usage
    ids = [len(llm.encoder.text(text)) for text in DOCUMENTS]
    assert usage.module_tokens == 0
    assert usage.exact_tokens >= ids[0]
    usage = llm.generate(conversation(0, 1), ONE)[0].usage
    assert (usage.exact_tokens >= ids[0], usage.primed_tokens) == (True, 0)
    assert llm.generate(conversation(1, 0), ONE)[0].usage.primed_tokens == ids[1]
    usage = llm.generate(conversation(2, 1, 0), ONE)[0].usage
    assert usage.primed_tokens == ids[0] + ids[1]


def test_lone_marked_part_is_primed_until_promoted():
    llm = make()
    llm.generate(conversation(0, 1), ONE)
    tokens = len(llm.encoder.text(DOCUMENTS[1]))
    assert [llm.generate(conversation(1), ONE)[0].usage.primed_tokens for _ in range(2)] == [tokens] * 2
    llm.promote()
    usage = llm.generate(conversation(1), ONE)[0].usage
    assert (usage.primed_tokens, usage.promoted_tokens >= tokens) == (0, True)


def test_lone_marked_part_without_promotion_is_primed():
    llm = make(reuse="modular", promote=False)
    for _ in range(2):
        usage = llm.generate(conversation(0), ONE)[0].usage
    assert usage.primed_tokens == len(llm.encoder.text(DOCUMENTS[0]))


def test_unmarked_parts_are_looked_up_and_not_stored_as_modules():
    llm = make()
    llm.add_schema(SCHEMA)
    ids = [len(llm.encoder.text(text)) for text in DOCUMENTS]
    other = "Document lake: nobody has stored this one anywhere. "
    messages = conversation(2, 0, marked=False)
    messages[1]["content"].insert(1, part(other))
    usage = llm.generate(messages, ONE, reuse="modular")[0].usage
    assert usage.module_tokens == ids[0] + ids[2]
    assert usage.computed_tokens >= len(llm.encoder.text(other))
    again = conversation(1, marked=False)
    again[1]["content"].insert(1, part(other))
    usage = llm.generate(again, ONE, reuse="modular")[0].usage
    assert usage.module_tokens == ids[1]
    assert usage.computed_tokens >= len(llm.encoder.text(other))


def test_parts_of_the_system_turn_have_no_primer():
    llm = make(reuse="primed")

    def asked(*rules: str):
        system = {"role": "system", "content": [part(rule, marked=True) for rule in rules]}
        user = {"role": "user", "content": [part(DOCUMENTS[1], marked=True), part(QUESTION)]}
        (output,) = llm.generate([[system, user]], ONE)
        return output.usage

    asked("Be short. ", "Be kind. ")
    assert asked("Be short. ", "Be kind. ").primed_tokens == len(DOCUMENTS[1])
    usage = asked("Be kind. ", "Be short. ")  # after other rules, the document is another module
    assert (usage.anchored_tokens, usage.primed_tokens) == (len("Be short. "), 0)


def test_an_exact_request_never_reads_a_module():
    llm = make(reuse="exact")
    llm.generate(conversation(0, 1, 2), ONE, reuse="anchored")
    usage = llm.generate(conversation(1, 0), ONE)[0].usage
    assert usage.module_tokens == usage.shifted_tokens == 0
    assert usage.exact_tokens < len(llm.lay_out(conversation(1, 0)).ids) - len(llm.encoder.text(DOCUMENTS[0]))
    assert llm.generate(conversation(1, 0), ONE)[0].usage.computed_tokens == 1


def test_exact_reuse_of_parts_equals_the_stock_model():
    llm = make(reuse="exact")
    ids = ids_of(llm, (0, 1))
    with torch.inference_mode():
        expected = llm.loaded.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    for _ in range(2):
        (got,) = llm.distributions([conversation(0, 1)], [[5]])
        torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=0)


def test_conversation_continues_over_its_parts():
    llm = make()
    messages = conversation(2, 0)
    (answer,) = llm.generate(messages, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    before = len(answer.prompt_token_ids)
    turns = [
        *messages,
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "And why?"},
    ]
    usage = llm.generate(turns, ONE)[0].usage
    assert usage.cached_tokens >= before


def test_a_model_without_shifts_keeps_parts_at_their_positions():
    llm = make("gpt2")
    llm.generate(conversation(0, 1), ONE)
    usage = llm.generate(conversation(0, 2), ONE)[0].usage
    assert usage.cached_tokens >= len(llm.encoder.text(DOCUMENTS[0]))
    assert usage.shifted_tokens == 0
    moved = llm.generate(conversation(1, 0), ONE)[0].usage  # elsewhere it is another segment
    assert moved.cached_tokens < len(llm.encoder.text(DOCUMENTS[1])) + len(llm.encoder.text(SYSTEM))


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
DOCUMENT = "Document island: the island lies far out in the sea, behind the fog. "


def turn(role: str, content) -> dict:
    return {"role": role, "content": content}


def asked(document: dict, *before: dict) -> list[dict]:
    return [*before, turn("user", [document, part(QUESTION)])]


def shapes(system: list[dict], filler: str) -> dict[str, list[dict]]:
    """Conversations with one marked document, each in another place. filler: the other text."""
    document = part(DOCUMENT, marked=True)
    user, answer = turn("user", filler), turn("assistant", f"{filler} I think.")
    calls = {**turn("assistant", ""), "tool_calls": [CALL]}
    return {
        "first": asked(document, *system),
        "second": asked(document, *system, user, answer),
        "fourth": asked(document, *system, *[user, answer] * 3),
        "in parts": asked(document, *system, turn("user", [part(filler)]), turn("assistant", [part(filler)])),
        "answer": [*system, user, turn("assistant", [document]), user],
        "tool result": [*system, user, calls, {**turn("tool", [document]), "tool_call_id": "c"}],
        "tool result again": [*system, user, calls, {**turn("tool", [document]), "tool_call_id": "c"}, answer, user],
        "answer first": asked(document, *system, answer),
    }


@pytest.mark.parametrize("reuse", ["modular", "anchored", "isolated"])
@pytest.mark.parametrize(
    "system",
    [
        [],
        [turn("system", SYSTEM)],
        [turn("developer", SYSTEM)],
        [turn("system", SYSTEM), turn("system", "Be brief.")],
        [turn("system", [part(SYSTEM), part(" Be brief.")])],
        [turn("system", [part(SYSTEM, marked=True)])],
        [turn("system", [part(SYSTEM, marked=True), part(" Be brief. ", marked=True)])],
    ],
)
def test_marked_part_is_found_in_other_conversations_with_its_system_turn(reuse, system):
    llm = make(reuse=reuse)
    tokens = len(llm.encoder.text(DOCUMENT.strip()))
    for number, (name, messages) in enumerate(shapes(system, "Where are we?").items()):
        llm.generate(messages, ONE)
        other = shapes(system, f"Tell me {'more, ' * number}please!")[name]
        usage = llm.generate(other, ONE)[0].usage
        assert usage.module_tokens + usage.exact_tokens >= tokens, name
        assert usage.module_tokens >= tokens * (name != "first"), name
    stored = llm.generate(shapes(system, "Another one?")["second"], ONE, cache_salt="other")[0].usage
    assert stored.cached_tokens == 0  # of another salt nothing is found


def test_part_after_another_system_turn_is_not_found():
    llm = make(reuse="anchored")
    llm.generate(shapes([turn("system", SYSTEM)], "Hm?")["second"], ONE)
    usage = llm.generate(shapes([turn("system", "Guess.")], "Hm?")["second"], ONE)[0].usage
    assert usage.module_tokens == 0


def test_system_text_after_its_last_marked_part_may_change():
    """The recipe for a date: the stable text is marked, and changing text comes after it."""
    llm = make(reuse="anchored")

    def messages(date: str) -> list[dict]:
        system = turn("system", [part(SYSTEM, marked=True), part(f" It is {date}.")])
        return asked(part(DOCUMENT, marked=True), system)

    llm.generate(messages("Monday, 9:00"), ONE)
    usage = llm.generate(messages("Tuesday, 10:01"), ONE)[0].usage
    assert usage.module_tokens == len(llm.encoder.text(DOCUMENT))
    assert usage.exact_tokens >= len(llm.encoder.text(SYSTEM))


def test_marked_parts_of_the_system_turn_are_found_in_any_combination():
    llm = make()

    def messages(*order: int) -> list[dict]:
        system = turn("system", [part(SYSTEM), *(part(DOCUMENTS[i], marked=True) for i in order)])
        return [system, turn("user", QUESTION)]

    ids = [len(llm.encoder.text(text)) for text in DOCUMENTS]
    llm.generate(messages(0, 1, 2), ONE)
    usage = llm.generate(messages(2, 1), ONE)[0].usage
    assert usage.module_tokens + usage.exact_tokens >= ids[1] + ids[2] - 1  # the last one is stripped of a space


@pytest.mark.parametrize("name", ["second", "tool result", "answer first"])
def test_exact_reuse_after_earlier_turns_equals_the_stock_model(name):
    llm = make()
    messages = shapes([turn("system", SYSTEM)], "Where are we?")[name]
    llm.generate(shapes([turn("system", SYSTEM)], "And now?")[name], ONE, reuse="modular")
    ids = llm.lay_out(messages).ids
    with torch.inference_mode():
        expected = llm.loaded.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    for reuse in ("off", "exact"):
        (got,) = llm.distributions([messages], [[5]], reuse=reuse)
        torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=0)


def test_model_without_shifts_finds_parts_at_equal_positions():
    llm = make("gpt2", reuse="anchored")
    system = [turn("system", SYSTEM)]
    llm.generate(shapes(system, "Where are we?")["second"], ONE)
    usage = llm.generate(shapes(system, "Where are we!")["second"], ONE)[0].usage
    assert usage.module_tokens >= len(llm.encoder.text(DOCUMENT))


@pytest.mark.parametrize("content", [DOCUMENT, [part("Read this. "), part(DOCUMENT)]])
def test_mark_on_a_message_marks_its_last_part(content):
    llm = make()

    def messages(filler: str, mark: dict | None) -> list[dict]:
        document = {**turn("user", content), "cache_control": mark}
        return [turn("system", SYSTEM), turn("user", filler), turn("assistant", "Yes."), document]

    tokens = len(llm.encoder.text(DOCUMENT.strip()))
    llm.generate(messages("Hm?", EPHEMERAL), ONE)
    usage = llm.generate(messages("Who are you?", EPHEMERAL), ONE)[0].usage
    assert usage.module_tokens >= tokens - 1  # the last one of a prompt is always computed
    assert llm.generate(messages("Where?", None), ONE)[0].usage.module_tokens == 0
    assert llm.lay_out(messages("Hm?", EPHEMERAL)).text == llm.lay_out(messages("Hm?", None)).text


def test_marks_on_empty_contents_and_calls_are_ignored():
    llm = make()
    calls = {**turn("assistant", ""), "tool_calls": [CALL], "cache_control": EPHEMERAL}
    result = {**turn("tool", "Sunny."), "tool_call_id": "c", "cache_control": EPHEMERAL}
    plain = [{key: value for key, value in one.items() if key != "cache_control"} for one in (calls, result)]
    empty = {**turn("system", ""), "cache_control": EPHEMERAL}
    question = turn("user", QUESTION)
    assert (
        llm.lay_out([empty, question, calls, result]).text == llm.lay_out([turn("system", ""), question, *plain]).text
    )


def test_mark_on_a_tool_does_not_change_the_prompt():
    llm = make()
    marked = {**TOOL, "cache_control": EPHEMERAL, "function": {**TOOL["function"], "cache_control": EPHEMERAL}}
    for messages in (conversation(0), [turn("user", QUESTION)]):
        laid = [llm.lay_out({"messages": messages, "tools": [tool]}) for tool in (TOOL, marked)]
        assert laid[0].ids == laid[1].ids


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("parts", [False, True])
def test_past_reasoning_reaches_a_template_that_renders_it(name, parts):
    shows = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=shows)
    content = [part("Sunny.")] if parts else "Sunny."
    thought = {**turn("assistant", content), name: "I need <|im_end|> it."}
    layout = llm.lay_out([turn("user", QUESTION), thought, turn("user", "So?")])
    assert "<assistant>[I need <|im_end|> it.]Sunny.<user>" in layout.text
    assert llm.tokenizer.convert_tokens_to_ids("<|im_end|>") not in layout.ids


def test_mark_on_a_message_applies_to_its_unmarked_parts():
    mark = {"type": "ephemeral"}
    other = {"type": "ephemeral", "ttl": "5m"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    parts[2]["cache_control"] = other
    marked = with_marked_parts({"role": "user", "content": parts, "cache_control": mark})
    assert [part.get("cache_control") for part in marked["content"]] == [mark, None, other]
    assert "cache_control" not in marked
    assert with_marked_parts({"role": "user", "content": "a", "cache_control": mark})["content"] == [
        {"type": "text", "text": "a", "cache_control": mark}
    ]
