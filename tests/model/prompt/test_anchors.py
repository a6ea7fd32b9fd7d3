"""Changing text before marked parts: it is noticed and reported once, and modules are still read."""

from __future__ import annotations

import logging

import pytest
import torch

from inlay import LLM, SamplingParams
from inlay.prompt.anchors import SeenAnchors
from inlay.prompt.inputs import ChatOptions, Conversation
from inlay.prompt.request import EngineRequest
from tests.conftest import tiny
from tests.model.api.tool_templates import tool_model

ONE = SamplingParams(temperature=0, max_tokens=1)
RULES = "Answer from the documents alone, in one short sentence, and say where you found it. "
DOCUMENT = "Document island: the island lies far out in the sea, behind the fog. "
OTHER = "Document bridge: the bridge leads over the river, and back again. "
SYSTEMS = {
    "in front": "It is {}. " + RULES,
    "in the middle": RULES + "It is {}. " + RULES,
    "at the end": RULES + "It is {}.",
}


def make(**settings) -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0, **settings)


def asked(system, *documents: str, question: str = "Where does it lie?") -> list[dict]:
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in documents]
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [*marked, {"type": "text", "text": question}]},
    ]


def usage(llm: LLM, messages: list[dict], **settings):
    return llm.generate(messages, ONE, **settings)[0].usage


@pytest.mark.parametrize("place", SYSTEMS)
def test_a_date_in_the_system_turn_loses_no_module(place, caplog):
    llm = make()
    system = SYSTEMS[place]
    tokens = len(llm.encoder.text(DOCUMENT))
    with caplog.at_level(logging.WARNING):
        usage(llm, asked(system.format("09:00"), DOCUMENT))
        assert not caplog.records
        for minute in range(1, 4):
            used = usage(llm, asked(system.format(f"09:0{minute}"), DOCUMENT))
            assert used.reanchored_tokens == used.anchored_tokens == used.module_tokens == tokens
    (record,) = caplog.records
    assert "mark the stable part of the system turn with cache_control" in record.message
    usage(llm, asked(system.format("09:04"), OTHER, DOCUMENT))  # after another document, it is encoded as a later one
    for order in ((DOCUMENT, OTHER), (OTHER, DOCUMENT)):
        used = usage(llm, asked(system.format("09:05"), *order))
        assert used.module_tokens == tokens + len(llm.encoder.text(OTHER))  # stored after the same version


def test_change_is_logged_once_per_salt(caplog):
    llm = make()
    with caplog.at_level(logging.WARNING):
        for salt in ("a", "b"):
            for minute in range(3):
                usage(llm, asked(SYSTEMS["at the end"].format(minute), DOCUMENT), cache_salt=salt)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("reuse", ["anchored", "modular+promote:off", "exact", "off"])
def test_policy_of_one_form_reads_no_other_version(reuse):
    llm = make()
    system = SYSTEMS["at the end"]
    usage(llm, asked(system.format("09:00"), DOCUMENT))
    used = usage(llm, asked(system.format("09:01"), DOCUMENT), reuse=reuse)
    assert (used.module_tokens, used.reanchored_tokens) == (0, 0)


def test_exact_request_reads_no_module_of_another_version():
    llm = make()
    system = SYSTEMS["in front"]
    for minute in range(3):
        usage(llm, asked(system.format(minute), DOCUMENT))
    messages = asked(system.format(3), DOCUMENT)
    ids = llm.lay_out(messages).ids
    with torch.inference_mode():
        expected = llm.loaded.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    (got,) = llm.distributions([messages], [[5]], reuse="exact")
    torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=0)


def test_isolated_module_is_read_if_nothing_else_is_stored():
    llm = make()
    system = SYSTEMS["at the end"]
    tokens = len(llm.encoder.text(DOCUMENT))
    usage(llm, asked(system.format("09:00"), DOCUMENT), reuse="isolated")
    used = usage(llm, asked(system.format("09:01"), DOCUMENT))
    assert (used.isolated_tokens, used.module_tokens, used.reanchored_tokens) == (tokens, tokens, 0)


def test_missing_module_is_encoded_after_the_first_version():
    """The states are the same, whether stored before the text changed or encoded after that."""
    system = SYSTEMS["in the middle"]
    before, after = make(), make()
    usage(before, asked(system.format("09:00"), DOCUMENT))
    usage(after, asked(system.format("09:00"), OTHER))
    messages = asked(system.format("09:01"), DOCUMENT)
    (stored,), (encoded,) = (llm.distributions([messages], [[5, 6]], reuse="modular") for llm in (before, after))
    torch.testing.assert_close(stored, encoded, atol=1e-4, rtol=0)


def test_different_system_turn_is_not_a_version():
    llm = make()
    usage(llm, asked(RULES, DOCUMENT))
    other = "You are a poet who never looks at any of these papers; write verses about whatever you are asked. "
    used = usage(llm, asked(other, DOCUMENT))
    assert used.module_tokens == 0
    assert usage(llm, asked(other, DOCUMENT)).reanchored_tokens == 0


def test_a_version_of_another_salt_is_not_read():
    llm = make()
    system = SYSTEMS["at the end"]
    usage(llm, asked(system.format("09:00"), DOCUMENT), cache_salt="a")
    assert usage(llm, asked(system.format("09:01"), DOCUMENT), cache_salt="b").cached_tokens == 0


def test_advice_in_the_warning_gives_the_best_form(caplog):
    llm = make()

    def recipe(date: str) -> list[dict]:
        stable = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}
        return asked([stable, {"type": "text", "text": f"It is {date}."}], DOCUMENT)

    with caplog.at_level(logging.WARNING):
        usage(llm, recipe("09:00"))
        used = usage(llm, recipe("09:01"))
    assert (used.anchored_tokens, used.reanchored_tokens) == (len(llm.encoder.text(DOCUMENT)), 0)
    assert not caplog.records


def test_a_request_with_other_versions_survives_the_wire():
    llm = make()
    processor, system = llm.processor, SYSTEMS["at the end"]
    policy = llm.policy("modular")
    for minute in range(2):
        request = processor.process(asked(system.format(minute), DOCUMENT), ONE, policy)
    read = EngineRequest.from_bytes(request.to_bytes(), processor.model.keys)
    assert [part.forms for part in read.parts] == [part.forms for part in request.parts]
    assert [[spec.key for spec in part.candidates] for part in read.parts] == [
        [spec.key for spec in part.candidates] for part in request.parts
    ]


FAMILIES = ("qwen", "llama", "mistral")
SHORT = ("You are a cook.", "Translate into French.", "You sell cars, and never say a price.", "Be brief.", "")
LONG = (
    "You answer questions about the harbour for the crew of a ship. Use the documents below, and nothing else. It is "
    "Monday. Say so if no document has the answer. Write two sentences at most, and name the document."
)


@pytest.mark.parametrize("family", FAMILIES)
def test_short_texts_of_two_applications_are_no_versions_under_any_template(family):
    llm = LLM(tool_model(family), kv_memory="16MiB", seed=0)
    for text in SHORT:
        for documents in ((DOCUMENT, OTHER), (OTHER, DOCUMENT)):
            assert usage(llm, asked(text, *documents)).reanchored_tokens == 0, text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Monday", "Thursday"),
        ("nothing else. ", "nothing else. The harbour master is on leave. "),
        ("Say so ", "Tell "),
    ],
)
def test_a_small_edit_of_a_long_text_is_a_version_under_every_template(family, old, new):
    llm = LLM(tool_model(family), kv_memory="16MiB", seed=0)
    usage(llm, asked(LONG, DOCUMENT, OTHER))
    used = usage(llm, asked(LONG.replace(old, new), DOCUMENT, OTHER))
    assert used.reanchored_tokens == len(llm.encoder.text(DOCUMENT)) + len(llm.encoder.text(OTHER))


def test_text_rewritten_by_the_template_counts_as_the_callers():
    rewrites = (
        "{{ messages[0].content | upper }}" + "-" * 200 + "{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    )
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=rewrites)
    for text in SHORT[:-1]:
        assert usage(llm, asked(text, DOCUMENT, OTHER)).reanchored_tokens == 0, text
    usage(llm, asked(LONG, DOCUMENT, OTHER))
    assert usage(llm, asked(LONG.replace("Monday", "Thursday"), DOCUMENT, OTHER)).reanchored_tokens > 0


def test_values_of_template_variables_count_as_the_callers():
    named = "{{ persona }}" + "-" * 200 + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=named)
    for persona in ("a cook", "the captain of a ship"):
        options = ChatOptions(variables={"persona": persona})
        chat = Conversation(asked("Be brief.", DOCUMENT, OTHER), options=options)
        assert usage(llm, chat).reanchored_tokens == 0


def test_lookup_records_nothing():
    seen = SeenAnchors()
    first, second = anchor(*range(40)), anchor(*range(39), 99)
    assert seen.base_of("", *first) is None
    seen.note("", *first)
    for _ in range(40):
        assert seen.base_of("", *second) == first[0]
    for _ in range(31):
        assert seen.note("", *second) is not None
    assert seen.base_of("", *second) is None, "it becomes the base now"
    assert seen.note("", *second) is None


def anchor(*tokens: int):
    """An anchor of one part, and its tokens as the caller's."""
    return ((tokens, False),), tokens


def test_repeated_version_becomes_the_base():
    seen = SeenAnchors()
    first, second, third = (anchor(*range(20), number, *range(20, 30)) for number in (100, 101, 102))
    assert seen.note("", *first) is None
    for time in range(31):
        changed = seen.note("", *second)
        assert changed is not None, time
        assert (changed.base, changed.first, changed.tokens, changed.news) == (first[0], 20, 31, time == 0)
    assert seen.note("", *second) is None
    changed = seen.note("", *third)
    assert changed is not None
    assert (changed.base, changed.news) == (second[0], False)


def test_parts_of_an_anchor_keep_their_marks():
    seen = SeenAnchors()
    parts = (((1, 2, 3), False), ((4, 5), True), ((6, 7, 8, 9), False))
    own = range(20)
    seen.note("", parts, own)
    changed = seen.note("", (*parts[:2], ((6, 7, 8, 10), False)), own)
    assert changed is not None
    assert changed.base == parts


def test_the_table_is_bounded():
    seen = SeenAnchors(max_bytes=20_000)
    for number in range(1_000):
        seen.note(f"salt {number}", *anchor(*range(number, number + 100)))
    assert seen.note("salt 0", *anchor(*range(99), 7)) is None, "forgotten"
    assert seen.note("salt 999", *anchor(*range(999, 1_098), 7)) is not None
    for number in range(1_000):
        seen.note("one", *anchor(*range(number * 1_000, number * 1_000 + 100)))
    assert seen.note("one", *anchor(*range(100))) is None, "of one salt, a few are kept"
    seen.note("long", *anchor(*range(100_000)))
    assert seen.note("long", *anchor(*range(99_999), 1)) is None, "an anchor beyond the bound is not kept"
