"""Answers as models of current families write them: calls, streamed calls, and text that only looks like a call."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.tools import Delta
from inlay.api.tools.formats import FORMATS, FreeParser, ModelTools, named_format
from inlay.api.tools.tagged import kinds_of, typed

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "near": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/place"},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    "now": {},
}

WEATHER = ("get_weather", {"city": "Rome", "days": 3})
NOW: tuple[str, dict[str, Any]] = ("now", {})
HTML = 'line 1\n<a href="x">\n</parameter>\ntext é "q" \\ end'

#: name: format, answer, text, calls
CALLS: dict[str, tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = {
    "qwen3_coder": (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "I look.",
        [WEATHER],
    ),
    "qwen3_coder, several": (
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\nDone.",
        "Done.",
        [NOW, WEATHER],
    ),
    "qwen3_coder, without the mark of the section": (
        "qwen3_coder",
        "I look.\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        [NOW],
    ),
    "qwen3_coder, a value with tags": (
        "qwen3_coder",
        f"<tool_call>\n<function=write>\n<parameter=path>\na.html\n</parameter>\n<parameter=content>\n{HTML}\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a.html", "content": HTML})],
    ),
    "qwen3_coder, values of all kinds": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>12</parameter><parameter=hourly>True</parameter>"
        "<parameter=units>null</parameter><parameter=near>[\"Ostia\"]</parameter><parameter=place>{\"a\": 1}"
        "</parameter><parameter=other>x</parameter></function></tool_call>",
        "",
        [
            (
                "get_weather",
                {"city": "12", "hourly": True, "units": None, "near": ["Ostia"], "place": {"a": 1}, "other": "x"},
            )
        ],
    ),
    "seed_oss": (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        [WEATHER],
    ),
    "glm45": (
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "I look.",
        [WEATHER],
    ),
    "glm45, version 4.7": (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [WEATHER, NOW],
    ),
    "minimax_m2": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [WEATHER, NOW],
    ),
    "deepseek_v32": (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [WEATHER],
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [WEATHER, NOW],
    ),
    "deepseek_v31": (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [WEATHER, NOW],
    ),
    "kimi_k2": (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        [WEATHER, NOW],
    ),
    "mistral, old": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
        "",
        [WEATHER],
    ),
    "mistral, new": ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}', "", [WEATHER]),
    "lfm2": (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Rome", days=3), now()]<|tool_call_end|>I look.',
        "I look.",
        [WEATHER, NOW],
    ),
    "lfm2, in JSON": (
        "lfm2",
        '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]<|tool_call_end|>',
        "",
        [WEATHER],
    ),
    "gemma4": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "",
        [WEATHER, NOW],
    ),
    "gemma4, values of all kinds": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>a, {b: "c"}<|"|>,hourly:true,near:[<|"|>x<|"|>,<|"|>y<|"|>],'
        "place:{lat:1.5,at:{n:null}}}<tool_call|>",
        "",
        [
            (
                "get_weather",
                {"city": 'a, {b: "c"}', "hourly": True, "near": ["x", "y"], "place": {"lat": 1.5, "at": {"n": None}}},
            )
        ],
    ),
    "functiongemma": (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:3}<end_function_call>",
        "",
        [WEATHER],
    ),
    "llama4_pythonic": ("llama4_pythonic", "[get_weather(city='Rome', days=3), now()]", "", [WEATHER, NOW]),
    "llama4_pythonic, behind its mark": (
        "llama4_pythonic",
        'I look.<|python_start|>[get_weather(city="Rome", days=3)]<|python_end|>',
        "I look.",
        [WEATHER],
    ),
    "llama4_pythonic, in JSON": (
        "llama4_pythonic",
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}<|python_end|>',
        "",
        [WEATHER],
    ),
    "pythonic": (
        "pythonic",
        "[write(path='a', content=\"it's ]) \\\"q\\\"\\n\"), get_weather(near=['x', ('y',)], place={'a': {'b': -1.5}}, "
        "hourly=False, units=None)]",
        "",
        [
            ("write", {"path": "a", "content": 'it\'s ]) "q"\n'}),
            ("get_weather", {"near": ["x", ["y"]], "place": {"a": {"b": -1.5}}, "hourly": False, "units": None}),
        ],
    ),
    "pythonic, long text": ("pythonic", '[write(content="""a\n"b"\n""")]', "", [("write", {"content": 'a\n"b"\n'})]),
    "hermes": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        "",
        [WEATHER],
    ),
    "granite": (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, {"arguments": {}, "name": '
        '"now"}]<|/tool_call|>',
        "",
        [WEATHER, NOW],
    ),
}  # fmt: skip

#: Texts that are no call of their format.
NONE = [
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\nget_weather\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=get_weather> and more"),
    ("qwen3_coder", "<tool_call>\n<function=get_wea"),
    ("qwen3_coder", "a <function= b"),
    ("qwen3_coder", "<tool_call>"),
    ("glm45", "<tool_call>get_weather it is</tool_call>"),
    ("glm45", "<tool_call>unknown</tool_call>"),
    ("glm45", "<tool_call>" + "x" * 300),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="unknown">\n</invoke>'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜> well <｜tool▁call▁begin｜>no"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}"),
    ("lfm2", "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
    ("pythonic", "[get_weather(city=open('x'))]"),
    ("pythonic", "[get_weather(city='Rome'"),
    ("pythonic", "[get_weather(city='Rome'), 3]"),
    ("pythonic", "[get_weather(city='\\ud800')]"),
    ("pythonic", "[get_weather(near=" + "[" * 1000),
    ("pythonic", "[1] says that"),
    ("pythonic", "[see] says that"),
    ("gemma4", "<|tool_call>call:unknown{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:get_weather{city:Rome}<tool_call|>"),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Rome}<tool_call|>'),
    ("gemma4", "<|tool_call>get_weather"),
]

#: Calls that began and did not end well → the text, the name, the arguments.
CUT = [
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=content>\nHel", "", "write", '{"content": "Hel'),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=con", "", "write",
     '{"path": "a\\n</parameter>\\n<parameter=con'),
    ("glm45", "<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>a</arg_val", "", "write",
     '{"content": "a</arg_val'),
    ("kimi_k2", '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"a": <|tool_call_end|> Well.',
     "Well.", "write", '{"a": '),
]  # fmt: skip


def parser_of(name: str, *, parallel: bool = True) -> FreeParser:
    row = named_format(name)
    assert row is not None
    return FreeParser(ModelTools(row), FUNCTIONS, parallel=parallel)


def read(parser: FreeParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of an answer in pieces, and its calls."""
    deltas: list[Delta] = [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.call == len(calls)
            calls.append([delta.name, ""])
        elif delta.call is not None:
            assert delta.call == len(calls) - 1
            calls[-1][1] += delta.arguments
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls]


def test_every_format_has_a_sample() -> None:
    sampled = {name for name, *_ in CALLS.values()}
    elsewhere = {"json", "llama3_json", "openai"}
    assert sampled | elsewhere == {row.name for row in FORMATS}


@pytest.mark.parametrize(("name", "answer", "content", "calls"), CALLS.values(), ids=CALLS.keys())
def test_calls_of_a_family(name: str, answer: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    for pieces in ([answer], list(answer)):
        text, found = read(parser_of(name), pieces)
        assert (text, [(called, json.loads(arguments)) for called, arguments in found]) == (content, calls)


@given(st.sampled_from(list(CALLS.values())), st.lists(st.integers(0, 500), max_size=8), st.integers(0, 400))
def test_splitting_the_answer_does_not_change_the_result(
    case: tuple[str, str, str, Any], cuts: list[int], length: int
) -> None:
    name, answer, _, _ = case
    for text in (answer, answer[:length]):
        edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
        pieces = [text[first:last] for first, last in pairwise(edges)]
        assert read(parser_of(name), pieces) == read(parser_of(name), [text])


@pytest.mark.parametrize(("name", "answer"), NONE)
def test_text_without_a_call_is_unchanged(name: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        assert read(parser_of(name), pieces) == (answer, [])


@pytest.mark.parametrize(("name", "answer", "content", "called", "arguments"), CUT)
def test_a_call_that_ends_early_keeps_its_arguments(
    name: str, answer: str, content: str, called: str, arguments: str
) -> None:
    for pieces in ([answer], list(answer)):
        assert read(parser_of(name), pieces) == (content, [(called, arguments)])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseek_v31", "kimi_k2", "mistral, new", "hermes"])
def test_long_arguments_are_streamed(name: str) -> None:
    """A text argument of 2,000 characters is streamed: at most 100 of them are pending at any time."""
    form, answer, _, _ = CALLS[name]
    answer = answer.replace("Rome", "x" * 2_000)
    parser = parser_of(form)
    told = ""
    for character in answer:
        told += "".join(delta.arguments for delta in parser.feed(character))
        given_so_far = answer[: answer.index(character)].count("x")
        assert told.count("x") >= given_so_far - 100
    assert told.count("x") == 2_000


def test_single_call_ends_the_answer() -> None:
    _, answer, _, _ = CALLS["minimax_m2"]
    assert read(parser_of("minimax_m2", parallel=False), [answer])[1] == [
        ("get_weather", '{"city": "Rome", "days": 3}')
    ]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": ["string", "null"]}, "5"),
        ("None", {"type": ["string", "null"]}, None),
        ("[1]", {"oneOf": [{"type": "array"}, {"type": "string"}]}, [1]),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("a", {"const": "a"}, "a"),
        ('{"a": NaN}', {}, '{"a": NaN}'),
        ("true", {}, True),
        ("words", {}, "words"),
        ("1", {"$ref": "#/$defs/nowhere"}, 1),
        ("1", {"anyOf": [{}, {"type": "string"}]}, 1),
        ("1", True, 1),
    ],
)
def test_the_schema_decides_the_type_of_a_value(text: str, schema: Any, value: Any) -> None:
    found = typed(text, kinds_of(schema, {}))
    assert (found, type(found)) == (value, type(value))


def test_a_schema_that_refers_to_itself_has_no_known_type() -> None:
    root = {"$ref": "#"}
    assert kinds_of({"$ref": "#/a"}, {"a": {"$ref": "#/a"}}) is None
    assert kinds_of(root, root) is None
