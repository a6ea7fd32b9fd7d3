"""Calls are separated from text, whole and piece by piece."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inlay.api.openai.respond import as_delta, as_message, finish_reason
from inlay.api.pieces import WholeAnswer
from inlay.api.tools import Delta, ToolUse
from inlay.api.tools.formats import ModelTools, model_tools
from tests.counting import calls_of
from tests.model.api.tool_templates import tool_tokenizer

NAMES: dict[str, dict[str, Any]] = {"weather": {}, "time": {}}
FAMILIES = ("qwen", "llama", "mistral", "simple")


def use(family: str, *, held: bool = False, parallel: bool = True) -> ToolUse:
    model = model_tools(tool_tokenizer(family))
    assert model is not None
    return ToolUse(model, NAMES, held, parallel)


def parts(tools: ToolUse, pieces: list[str]) -> list[Delta]:
    parser = tools.parser()
    return [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]


def parsed(tools: ToolUse, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer and its calls."""
    return joined(parts(tools, [text]))


def joined(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.call == len(calls)
            calls.append([delta.name, delta.arguments])
        elif delta.call is not None:
            assert delta.call == len(calls) - 1
            calls[-1][1] += delta.arguments
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls]


ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
LLAMA = ROME.replace("arguments", "parameters")
SUNNY = ("weather", '{"city": "Rome"}')
CALLS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    # name: family, answer, text, calls
    "one call": ("qwen", f"<tool_call>\n{ROME}\n</tool_call>", "", [SUNNY]),
    "text around it": ("qwen", f"Let me see.\n<tool_call>\n{ROME}\n</tool_call>\nDone. ", "Let me see.Done. ", [SUNNY]),
    "several": ("qwen", f"<tool_call>\n{ROME}\n</tool_call>\n<tool_call>{ROME}</tool_call>", "", [SUNNY, SUNNY]),
    "no closing mark": ("qwen", f"<tool_call>\n{ROME}", "", [SUNNY]),
    "no closing mark, and text": ("qwen", f"<tool_call>{ROME} So.", "So.", [SUNNY]),
    "half a closing mark": ("qwen", f"<tool_call>{ROME}</tool", "</tool", [SUNNY]),
    "no arguments": ("qwen", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    "null for arguments": ("qwen", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
    "arguments first": ("qwen", '<tool_call>{"arguments": {}, "name": "time"}</tool_call>', "", [("time", "{}")]),
    "the other key": ("qwen", f"<tool_call>{LLAMA}</tool_call>", "", [SUNNY]),
    "marks inside arguments": (
        "qwen",
        '<tool_call>{"name": "time", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>',
        "",
        [("time", '{"a": "</tool_call><tool_call>"}')],
    ),
    "escapes": (
        "qwen",
        '<tool_call>{"name": "time", "arguments": {"a": "\\"}\\\\", "\\u00e9": "é\\n"}}</tool_call>',
        "",
        [("time", '{"a": "\\"}\\\\", "\\u00e9": "é\\n"}')],
    ),
    "text alone": ("qwen", "  Hello, <tool> and <b>you</b> \n", "  Hello, <tool> and <b>you</b> \n", []),
    "nothing": ("qwen", "", "", []),
    "white space": ("qwen", " \n ", " \n ", []),
    "Llama": ("llama", LLAMA, "", [SUNNY]),
    "Llama, with another key": ("llama", "\n" + LLAMA.replace("{", '{"type": "function", ', 1), "", [SUNNY]),
    "Llama, behind its mark": ("llama", f"I look.<|python_tag|>{LLAMA}<|eot_id|>", "I look.", [SUNNY]),
    "Llama, text alone": ("llama", "It is {hot}.<|eot_id|>", "It is {hot}.", []),
    "Llama, other JSON": ("llama", '{"name": "Rome"} is it', '{"name": "Rome"} is it', []),
    "Llama, text first": ("llama", f"So: {LLAMA}", f"So: {LLAMA}", []),
    "Mistral": ("mistral", f"[TOOL_CALLS] [{ROME}, {ROME}]<|end|>", "", [SUNNY, SUNNY]),
    "Mistral, one object": ("mistral", f"Well.[TOOL_CALLS]{ROME}", "Well.", [SUNNY]),
    "Mistral, the name in front": (
        "mistral",
        '[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{"city": "Rome"}[TOOL_CALLS]time{}',
        "",
        [SUNNY, ("time", "{}")],
    ),
    "Mistral, with ids": ("mistral", f'[TOOL_CALLS] [{ROME[:-1]}, "id": "abc123456"}}]', "", [SUNNY]),
    "no known family": ("simple", ROME, "", [SUNNY]),
    "no known family, a list": ("simple", f" [{ROME}]\n", "", [SUNNY]),
    "no known family, semicolons": ("simple", f"{ROME}; {ROME} ;\n{ROME}; no", "; no", [SUNNY] * 3),
}  # fmt: skip


@pytest.mark.parametrize(("family", "answer", "content", "calls"), CALLS.values(), ids=CALLS.keys())
def test_calls(family: str, answer: str, content: str, calls: list[tuple[str, str]]):
    assert parsed(use(family), answer) == (content, calls)
    assert joined(parts(use(family), list(answer))) == (content, calls)  # a character at a time


MALFORMED = [
    ("qwen", "<tool_call>"),
    ("qwen", "<tool_call>\n"),
    ("qwen", "<tool_call>weather(city='Rome')</tool_call>"),
    ("qwen", '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>'),
    ("qwen", '<tool_call>{"arguments": {"city": NaN}, "name": "weather"}</tool_call>'),
    ("qwen", '<tool_call>{"arguments": {"city": "\\ud800"}, "name": "weather"}</tool_call>'),
    ("qwen", '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'),
    ("qwen", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>'),
    ("qwen", '<tool_call>{"arguments": {}}</tool_call>'),
    ("qwen", "<tool_call>[]</tool_call>"),
    ("qwen", "<tool_call>" + "[" * 1000),
    ("qwen", "<tool_call><tool_call><tool_call"),
    ("qwen", "</tool_call>"),
    ("llama", "{"),
    ("llama", " {}"),
    ("llama", '{"name": "Rome", "arguments": {}}'),
    ("llama", "<|python_tag|>weather.call()"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] weather"),
    ("mistral", "[TOOL_CALLS] not a name {}"),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("simple", "[1, 2]"),
]


@pytest.mark.parametrize(("family", "answer"), MALFORMED)
def test_text_without_a_call_is_returned_unchanged(family: str, answer: str):
    assert parsed(use(family), answer) == (answer, [])
    assert joined(parts(use(family), list(answer))) == (answer, [])


#: Answers whose calls began and did not end well → the text, the calls.
CUT: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("qwen", f"<tool_call>{ROME[:-5]}", "", [("weather", '{"city": "Ro')]),
    ("qwen", f"<tool_call>{ROME[:-2]}</tool_call> Sorry.", "Sorry.", [("weather", '{"city": "Rome"')]),
    ("qwen", f"<tool_call>[{ROME}, 3]</tool_call>", ", 3]</tool_call>", [SUNNY]),
    ("qwen", f"<tool_call>[{ROME}, ", ", ", [SUNNY]),
    ("qwen", f"<tool_call>{ROME[:-1]}, why?", ", why?", [SUNNY]),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{city}", "", [("weather", "{city}")]),
    ("qwen", f"<tool_call>{ROME[:-2]}'", "'", [("weather", '{"city": "Rome"')]),
]


@pytest.mark.parametrize(("family", "answer", "content", "calls"), CUT)
def test_unfinished_call_keeps_its_arguments(family: str, answer: str, content: str, calls: list[tuple[str, str]]):
    assert parsed(use(family), answer) == (content, calls)
    assert joined(parts(use(family), list(answer))) == (content, calls)


def test_call_after_an_invalid_call_is_parsed():
    answer = f"<tool_call>{{bad}}</tool_call>\n<tool_call>{ROME}</tool_call>"
    assert parsed(use("qwen"), answer) == ("<tool_call>{bad}</tool_call>", [SUNNY])


def test_text_and_arguments_are_streamed():
    parser = use("qwen").parser()
    assert parser.feed("Let me see") == [Delta("Let me see")]
    assert parser.feed(" \n<tool_") == []  # white space, and a possible mark
    assert parser.feed("box>") == [Delta(" \n<tool_box>")]
    assert parser.feed('<tool_call>{"name": "weather", "arguments": ') == []
    assert parser.feed('{"ci') == [Delta(call=0, name="weather"), Delta(call=0, arguments='{"ci')]
    assert parser.feed('ty": "Rome"}') == [Delta(call=0, arguments='ty": "Rome"}')]
    assert parser.feed("}</tool_call>") == []
    assert parser.finish() == []


def test_single_call_ends_the_answer():
    answer = f"So.<tool_call>{ROME}</tool_call> And <tool_call>{ROME}</tool_call>"
    assert parsed(use("qwen", parallel=False), answer) == ("So.", [SUNNY])
    assert parsed(use("mistral", parallel=False), f"[TOOL_CALLS][{ROME}, {ROME}]") == ("", [SUNNY])


def test_end_token_is_removed_where_special_tokens_are_kept():
    model = use("mistral").model
    assert "<|end|>" in model.ends
    assert "[TOOL_CALLS]" not in model.ends
    assert parsed(use("mistral"), "Hello. <|end|>") == ("Hello. ", [])
    assert parsed(use("mistral"), "It is <|bos|>, not <|end|>.<|end|>") == ("It is <|bos|>, not <|end|>.", [])
    assert parsed(use("qwen"), "Hello.<|end|>") == (
        "Hello.<|end|>",
        [],
    )  # its marks are plain: the engine leaves it out


# held to calls

HELD: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "one": (ROME, "", [SUNNY]),
    "a list": (f"[{ROME}, {LLAMA}]", "", [SUNNY, SUNNY]),
    "white space": (f"[\n {ROME[:-1]}\n}}\n]\n", "", [SUNNY]),
    "cut off in the arguments": (ROME[:-5], "", [("weather", '{"city": "Ro')]),
    "cut off in the name": (ROME[:12], "", [("weather", "")]),
    "cut off behind the name": (f"[{ROME[:24]}", "", [("weather", "")]),
    "cut off before the name": (f"[{ROME[:6]}", "", []),
    "cut off in the second": (f"[{ROME}, {ROME[:14]}", "", [SUNNY, ("weather", "")]),
    "cut off behind the first": (f"[{ROME}, ", "", [SUNNY]),
    "nothing": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "content", "calls"), HELD.values(), ids=HELD.keys())
def test_answers_constrained_to_calls(answer: str, content: str, calls: list[tuple[str, str]]):
    held = use("qwen", held=True)
    assert parsed(held, answer) == (content, calls)
    assert joined(parts(held, list(answer))) == (content, calls)


EITHER = [
    (f"[{ROME}]", "", [SUNNY]),
    (ROME, "", [SUNNY]),
    ('{"name": "weather", "arguments": 3}', '{"name": "weather", "arguments": 3}', []),
    ('{"name": "rain", "arguments": {}}', '{"name": "rain", "arguments": {}}', []),
    ('[{"name": "weather"', "", [("weather", "")]),
    ('[{"name": "wea', '[{"name": "wea', []),
    ('{"seen": true}', '{"seen": true}', []),
    ("", "", []),
]


@pytest.mark.parametrize(("answer", "content", "calls"), EITHER)
def test_answer_is_calls_or_structured_output(answer: str, content: str, calls: list[tuple[str, str]]):
    either = replace(use("qwen", held=True), formed=True)
    assert parsed(either, answer) == (content, calls)
    assert joined(parts(either, list(answer))) == (content, calls)


def test_structured_output_is_streamed_at_once():
    parser = replace(use("qwen", held=True), formed=True).parser()
    assert [parser.feed(piece) for piece in ('{"', "seen", '": ', "true}")] == [
        [],
        [Delta('{"seen')],
        [Delta('": ')],
        [Delta("true}")],
    ]


def test_constrained_arguments_are_streamed_unchanged():
    parser = use("qwen", held=True).parser()
    assert parser.feed('{"name": "weather", "argum') == []
    assert parser.feed('ents": {"ci') == [Delta(call=0, name="weather"), Delta(call=0, arguments='{"ci')]
    assert parser.feed('ty": "}') == [Delta(call=0, arguments='ty": "}')]
    assert parser.feed('"}}') == [Delta(call=0, arguments='"}')]
    assert parser.finish() == []


def test_forced_function_is_named_in_a_truncated_answer():
    one = replace(use("qwen", held=True), functions={"weather": {}})
    for length in range(1, ROME.index("{", 1)):
        assert parsed(one, ROME[:length]) == ("", [("weather", "")]), ROME[:length]


# any text in any pieces

fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|end|>", "[ARGS]", "<tool", "_call>"),
        *(ROME, LLAMA, f"[{ROME}]", '{"name": "weather", "arguments": {', '"city": "Rome"}}', "}", "{", "]", "["),
        *('"', "\\", "[TOOL", "weather", " ", "\n", ";", "Hello", ".", "é😀"),
    ]
)  # fmt: skip


@given(
    st.sampled_from(FAMILIES),
    st.booleans(),
    st.booleans(),
    st.lists(fragments, max_size=14).map("".join),
    st.lists(st.integers(0, 500), max_size=10),
)
@example("qwen", False, True, "<tool_call>{'" * 20, [7])
def test_splitting_the_text_does_not_change_the_result(
    family: str, held: bool, parallel: bool, text: str, cuts: list[int]
):
    tools = use(family, held=held, parallel=parallel)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[first:last] for first, last in pairwise(edges)]
    whole = parsed(tools, text)
    assert joined(parts(tools, pieces)) == whole
    for name, _ in whole[1]:
        assert name in NAMES or held
    if not whole[1] and not (held and whole[0] == ""):  # a call that ends before its name tells nothing
        assert whole[0] == text or (tools.model.ends and whole[0] == text.removesuffix("<|end|>"))


def test_time_grows_with_the_text_alone(monkeypatch: pytest.MonkeyPatch):
    """Text that keeps looking like a call is not scanned repeatedly."""
    from inlay.api.tools import readers

    scanned = calls_of(monkeypatch, readers, "may_become_json")
    for attack in ('<tool_call>["', '<tool_call>{"a":["x",', '<tool_call>{"', "<tool_call>[", '<tool_call>"'):
        scanned.clear()
        text = attack * 1000
        assert parsed(use("qwen"), text) == (text, [])
        assert sum(len(piece) for (piece,) in scanned) < 12 * len(text)


# OpenAI's form


def message_of(tools: ToolUse, text: str, response: str, choice: int) -> dict[str, Any]:
    return as_message(WholeAnswer.of(parts(tools, [text])), response, choice)


def test_a_message_with_calls():
    tools = use("qwen")
    text = f"See.\n<tool_call>{ROME}</tool_call><tool_call>{ROME}</tool_call>"
    message = message_of(tools, text, "abc", 0)
    first, second = message["tool_calls"]
    assert message["content"] == "See."
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    others = [message_of(tools, text, *where)["tool_calls"][0]["id"] for where in (("abc", 1), ("abd", 0))]
    assert len({first["id"], second["id"], *others}) == 4
    assert message_of(tools, text, "abc", 0) == message
    assert message_of(tools, f"<tool_call>{ROME}</tool_call>", "abc", 0)["content"] is None
    assert message_of(tools, "Hello", "abc", 0) == {"content": "Hello"}
    assert message_of(tools, "", "abc", 0) == {"content": ""}


def test_deltas_add_up_to_the_message():
    tools = use("qwen")
    text = f"See.\n<tool_call>{ROME}</tool_call>"
    deltas = [as_delta(delta, "abc", 0) for delta in parts(tools, list(text))]
    message = message_of(tools, text, "abc", 0)
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    pieces: list[dict[str, Any]] = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert {piece["index"] for piece in pieces} == {0}
    assert pieces[0] == {"index": 0, **message["tool_calls"][0], "function": {"name": "weather", "arguments": ""}}
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Rome"}'


def test_finish_reasons():
    assert finish_reason("stop", calls=True) == "tool_calls"
    assert finish_reason("length", calls=True) == "length"
    assert finish_reason("stop", calls=False) == "stop"
    assert finish_reason(None, calls=True) is None


def test_model_with_one_call_per_turn_is_detected():
    model = model_tools(tool_tokenizer("llama"))
    assert isinstance(model, ModelTools)
    assert not model.parallel
