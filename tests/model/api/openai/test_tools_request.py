"""The tools of a request: the template's view of them, and the constraint that makes an answer a call."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from inlay import LLM
from inlay.api.call import Call
from inlay.api.failures import BodyError
from inlay.api.openai import Endpoint, read_body, respond, translate
from inlay.api.tools.formats import ModelTools, model_tools
from inlay.api.tools.offer import calls_schema, check_parameters, structure_failure
from inlay.errors import StructureError
from inlay.sampling.structured import Grammars
from tests.model.api.tool_templates import tool_model, tool_tokenizer

USER = {"role": "user", "content": "How is it in Rome?"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CLOSED = {"additionalProperties": False}
SEEN = {"type": "object", "properties": {"seen": {"type": "boolean"}}, "required": ["seen"], **CLOSED}
ROME, OPEN = '{"city": "Rome"}', '{"anything": "else"}'


def many(count: int) -> str:
    return json.dumps({f"n{number}": number for number in range(count)})


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {**CITY, **CLOSED}, **function}}


def model(family: str = "qwen") -> ModelTools:
    found = model_tools(tool_tokenizer(family))
    assert found is not None
    return found


def call(family: str = "qwen", **body: Any) -> Call:
    given = {"messages": [USER], "tools": [tool()], **body}
    return translate(read_body(given, Endpoint.CHAT), tools=model_tools(tool_tokenizer(family)))


def wide(properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property-{n}": {"type": "string"} for n in range(properties)}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_tools_are_passed_to_the_template():
    bare = {"type": "function", "function": {"name": "time", "description": None, "parameters": None, "strict": True}}
    asked = call(tools=[tool(description="Tells it.", strict=None), bare])
    assert asked.prompts == (
        {
            "messages": [USER],
            "tools": (
                tool(description="Tells it."),
                tool("time", parameters={"type": "object", "properties": {}}),
            ),
        },
    )
    assert asked.tools is not None
    assert asked.tools.functions.keys() == {"weather", "time"}
    assert (asked.tools.held, asked.tools.parallel, asked.params.structured_outputs) == (False, True, None)


def test_no_tools():
    for body in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        asked = call(**body, parallel_tool_calls=False)
        assert (asked.prompts, asked.tools) == (([USER],), None)
    translate(read_body({"messages": [USER], "tools": [tool()], "tool_choice": "none"}, Endpoint.CHAT), tools=None)


def test_special_tokens_are_kept_only_if_they_mark_calls():
    assert call("mistral").params.skip_special_tokens is False
    assert call("mistral", skip_special_tokens=True).params.skip_special_tokens is False
    assert call("mistral", tool_choice="required").params.skip_special_tokens is True
    assert call("mistral", tools=[]).params.skip_special_tokens is True
    assert call("qwen").params.skip_special_tokens is True


def test_tool_choice_sets_functions_and_constraint():
    two = [tool(), tool("time")]
    required = call(tools=two, tool_choice="required")
    single = call(tools=two, tool_choice="required", parallel_tool_calls=False)
    one = call(tools=two, tool_choice=named("time"))
    for asked, names, shape in (
        (required, {"weather", "time"}, "array"),
        (single, {"weather", "time"}, None),
        (one, {"time"}, None),
    ):
        assert asked.tools is not None
        assert asked.tools.held
        assert asked.tools.functions.keys() == names
        assert asked.params.structured_outputs is not None
        assert asked.params.structured_outputs["json"].get("type") == shape
        (prompt,) = asked.prompts
        assert isinstance(prompt, dict)
        assert len(prompt["tools"]) == 2  # all are shown, so that the prompt begins as others do
    # of a family that shows one call a turn, one is asked for
    llama = call("llama", tool_choice="required").params.structured_outputs
    assert llama is not None
    assert "type" not in llama["json"]
    assert "parameters" in llama["json"]["anyOf"][0]["properties"]


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def test_allowed_tools_are_a_subset_of_the_rendered_tools():
    three = [tool(), tool("time"), tool("place")]
    for mode in ("auto", "required"):
        asked = call(tools=three, tool_choice=allowed("place", "time", mode=mode))
        assert asked.tools is not None
        assert (set(asked.tools.functions), asked.tools.held) == ({"time", "place"}, mode == "required")
        (prompt,) = asked.prompts
        assert isinstance(prompt, dict)
        assert len(prompt["tools"]) == 3
    structure = asked.params.structured_outputs
    assert structure is not None
    called = [one["properties"]["name"]["const"] for one in structure["json"]["items"]["anyOf"]]
    assert called == ["time", "place"]


def test_format_with_tools_applies_to_answers_without_calls():
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/A", "$defs": {"A": SEEN}}},
    }
    asked = call(response_format=wanted)
    assert asked.tools is not None
    assert (asked.tools.held, asked.tools.formed) == (True, True)
    structure = asked.params.structured_outputs
    assert structure is not None
    for text in (
        '[{"name": "weather", "arguments": {"city": "Rome"}}]',
        '{"seen": true}',
    ):
        assert accepts(structure["json"], text), text
    for text in ('{"seen": 1}', '{"name": "weather"}', "Sunny."):
        assert not accepts(structure["json"], text), text
    forced = call(response_format=wanted, tool_choice="required")
    assert forced.params.structured_outputs == call(tool_choice="required").params.structured_outputs
    free = call(response_format={"type": "json_object"}).params.structured_outputs
    assert free is not None
    assert accepts(free["json"], '{"any": ["thing"]}')


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice asks for a call, and there are no tools"),
    ({"tools": None, "tool_choice": named("weather")}, "tool_choice", "tool_choice asks for a call, and there are no"),
    ({"tool_choice": named("time")}, "tool_choice", "tool_choice is 'time', and no tool has that name; name one of"),
    ({"tool_choice": "any"}, "tool_choice", 'tool_choice is \'any\'; it must be "none", "auto", "required", or'),
    (
        {"tool_choice": {"type": "allowed_tools"}},
        "tool_choice",
        "tool_choice.type is 'allowed_tools'; tool_choice must be",
    ),
    ({"tools": {"a": 1}}, "tools", "tools is an object of 1; it must be a list of at most 128 tools"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "tools is a list of 129; it must be a list of at most"),
    ({"tools": [3]}, "tools[0]", 'tools[0] is 3; it must be a tool {"type": "function", "function": {…}}'),
    (
        {"tools": [tool(), {"type": "custom", "custom": {"name": "x"}}]},
        "tools[1].type",
        "tools[1].type is 'custom'; it must be \"function\"; inlay knows no other tools",
    ),
    (
        {"tools": [{**tool(), "cache_control": {"type": "forever"}}]},
        "tools[0].cache_control",
        'tools[0].cache_control is an object of 1; it must be {"type": "ephemeral"}, with or without "ttl": "5m"',
    ),
    (
        {"tools": [{**tool(), "mood": "good"}]},
        "tools[0].mood",
        "tools[0] has the field 'mood', which is not supported; a tool has type, function",
    ),
    (
        {"tools": [tool("a b")]},
        "tools[0].function",
        'tools[0].function is an object of 2; it must be {"name": "…", "description": "…", "parameters": {a JSON',
    ),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", "tools[1].function.name is 'weather', as is that of tools"),
    (
        {"tools": [tool(parameters={"type": "string"})]},
        "tools[0].function.parameters",
        'tools[0].function.parameters is no JSON Schema of an object: its "type" must be "object"; correct it',
    ),
    (
        {"tools": [tool(parameters={"type": "object", "properties": {"a": {"type": "text"}}})], "tool_choice": "none"},
        "tools[0].function.parameters",
        'tools[0].function.parameters is no JSON Schema of an object: properties.a.type: "text" is not valid under',
    ),
    (
        {"tools": [tool(parameters={"required": [1]})]},
        "tools[0].function.parameters",
        'tools[0].function.parameters is no JSON Schema of an object: required.0: 1 is not of type "string"; correct',
    ),
    (
        {"tools": [tool(f"f{n}", description="x" * 10, parameters=wide(500)) for n in range(4)]}
        | {"tool_choice": "required"},
        "tools",
        "tool_choice asks for a call, and the parameters of 4 tools take ",
    ),
    (
        {"tools": [tool(parameters={"type": "object", "not": {}})], "tool_choice": "required"},
        "tools",
        "tool_choice asks for a call, and no grammar can hold one to the parameters of 'weather': a grammar cannot "
        'hold an answer to not; say what the value must be, with enum, pattern or anyOf; write "tool_choice": "auto"',
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        "response_format cannot be used: a grammar cannot hold an answer to not; say what the value must be, with enum",
    ),
    ({"tool_choice": allowed("time")}, "tool_choice", "tool_choice is 'time', and no tool has that name; name one of"),
    (
        {"tool_choice": allowed()},
        "tool_choice",
        "tool_choice.allowed_tools.tools is an empty list; tool_choice must be",
    ),
    ({"tools": [], "tool_choice": allowed("time")}, "tool_choice", "tool_choice asks for a call, and there are no"),
    (
        {"structured_outputs": {"regex": "a"}, "tool_choice": "required"},
        "structured_outputs",
        "structured_outputs and tools are both given",
    ),
    (
        {"messages": [], "prompt": {"schema": "trip"}},
        "tools",
        "tools are given with a prompt of a schema; give them with messages",
    ),
]


@pytest.mark.parametrize(("body", "param", "sentence"), WRONG)
def test_invalid_tool_request_is_rejected_with_one_sentence(body: dict[str, Any], param: str, sentence: str):
    with pytest.raises(BodyError) as caught:
        call(**body)
    assert caught.value.param == param
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_plain_text_with_tools_sets_no_format():
    assert call(response_format={"type": "text"}).tools is not None


def test_a_model_without_tools():
    with pytest.raises(
        BodyError, match="tools are given, and this model's chat template has no place for them"
    ) as caught:
        call("none")
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_field")


# schemas


def held(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return calls_schema([("f", parameters)], key="arguments", several=False)["$defs"]["0"]


def test_references_move_with_their_schema():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "city": {"$ref": "#/$defs/City"}}}
    parameters = {
        **node,
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.org/node",
        "$defs": {"City": {"enum": ["Rome", {"$ref": "#/$defs/City"}]}},
        "default": {"$ref": "#"},
    }
    moved = held(parameters)
    assert moved["properties"] == {"next": {"$ref": "#/$defs/0"}, "city": {"$ref": "#/$defs/0/$defs/City"}}
    assert moved["$defs"] == parameters["$defs"]  # the values of an enum are no references
    assert moved["default"] == parameters["default"]
    assert not {"$schema", "$id"} & moved.keys()


def test_tool_with_an_id_and_absolute_references_constrains_calls():
    parameters = {
        "$id": "https://example.org/weather.json",
        "type": "object",
        "properties": {
            "city": {"$ref": "https://example.org/weather.json#/$defs/City"},
            "unit": {"$ref": "unit.json"},
        },
        "required": ["city", "unit"],
        "$defs": {"City": {"enum": ["Rome"]}, "unit": {"$id": "unit.json", "enum": ["C"]}},
    }
    structure = call(tools=[tool(parameters=parameters)], tool_choice="required").params.structured_outputs
    assert structure is not None
    assert accepts(structure["json"], '[{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}]')
    assert not accepts(structure["json"], '[{"name": "weather", "arguments": {"city": "Oslo"')


def test_unique_items_are_rejected_only_for_strict_functions():
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert call(tools=[tool(parameters=parameters)], tool_choice="required").params.structured_outputs is not None
    with pytest.raises(
        BodyError, match=r"of 'weather': at properties\.a, a grammar cannot hold an answer to uniqueItems"
    ):
        call(tools=[tool(parameters=parameters, strict=True)], tool_choice="required")


@pytest.mark.parametrize(
    ("parameters", "yes", "no"),
    [
        pytest.param({"properties": CITY["properties"]}, ["{}", ROME], [OPEN], id="left open"),
        pytest.param({"properties": {}}, ["{}"], [OPEN], id="no arguments"),
        pytest.param({}, ["{}", OPEN, '{"a": {"b": [1, "c"]}}'], [many(17)], id="no restriction"),
        pytest.param({"additionalProperties": {"type": "integer"}}, [many(16)], [many(17), OPEN], id="by name"),
        pytest.param({**CITY, "additionalProperties": True}, [ROME, f'{ROME[:-1]}, "b": "c"}}'], [OPEN], id="beside"),
        pytest.param(
            {"properties": {"a": {"properties": {"b": {}}, "type": "object"}}},
            ['{"a": {}}', '{"a": {"b": null}}'],
            ['{"a": {"c": 1}}'],
            id="inside",
        ),
        pytest.param({"properties": {}, "required": ["b"]}, ['{"b": 1}'], ["{}"], id="required and not named"),
        pytest.param(
            {"allOf": [{"properties": {"b": {"const": 1}}}, {"properties": {"c": {"const": 2}}}]},
            ['{"b": 1, "c": 2}'],
            ['{"b": 2}'],
            id="several together",
        ),
        pytest.param(
            {"properties": {"b": {"$ref": "#/$defs/B"}}, "$defs": {"B": {"type": "array"}}},
            ['{"b": [1, [2]]}'],
            [f'{{"b": [{", ".join("1" * 17)}]}}'],
            id="lists",
        ),
    ],
)
def test_held_arguments_end(parameters: dict[str, Any], yes: list[str], no: list[str]):
    schema = calls_schema([("f", parameters)], key="arguments", several=False)
    for text in yes:
        jsonschema.validate(json.loads(text), parameters)
        assert accepts(schema, f'{{"name": "f", "arguments": {text}}}'), text
    for text in no:
        assert not accepts(schema, f'{{"name": "f", "arguments": {text}}}'), text


def test_a_model_that_would_go_on_ends_its_call(llm: LLM):
    """Most frameworks send parameters that do not forbid additional properties."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    asked = call(tools=[tool(parameters=parameters)], tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    (comma,) = llm.tokenizer.encode(",", add_special_tokens=False)
    (output,) = llm.generate(list(asked.prompts), replace(asked.params, logit_bias={comma: 100}))
    assert output.outputs[0].finish_reason == "stop"


def test_properties_may_be_named_like_keywords():
    parameters = {
        "properties": {"default": {"$ref": "#/$defs/A"}, "enum": {"$ref": "#/$defs/A"}, "$ref": {"type": "string"}},
        "$defs": {"A": {"type": "string"}},
    }
    assert held(parameters) == {
        "type": "object",
        "properties": {
            "default": {"$ref": "#/$defs/0/$defs/A"},
            "enum": {"$ref": "#/$defs/0/$defs/A"},
            "$ref": {"type": "string"},
        },
        "$defs": {"A": {"type": "string"}},
        "additionalProperties": False,
    }


def accepts(schema: dict[str, Any], text: str) -> bool:
    tokenizer = tool_tokenizer("qwen")
    guide = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).guide({"json": schema})
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(guide.matcher.consume_token(token) for token in tokens) and guide.matcher.is_accepting()


def test_call_schema_accepts_only_valid_calls():
    weather, time = {**CITY, **CLOSED}, {"type": "object", "properties": {}, **CLOSED}
    one = calls_schema([("weather", weather), ("time", time)], key="arguments", several=False)
    rome = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert accepts(one, rome)
    assert accepts(one, '{"name": "time", "arguments": {}}')
    for wrong in (
        rome.replace("Rome", "Bonn"),
        rome.replace("weather", "time"),
        rome.replace("arguments", "parameters"),
        rome.replace(": ", ":"),  # chat templates write calls with these spaces
        f"[{rome}]",
        '{"name": "time"}',
    ):
        assert not accepts(one, wrong), wrong
    several = calls_schema([("weather", weather)], key="arguments", several=True)
    assert accepts(several, f"[{rome}, {rome}]")
    assert not accepts(several, "[]")
    assert not accepts(several, rome)


leaves = st.sampled_from(
    [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"type": "boolean"}, {"enum": ["a", 1]}, {"const": None},
     {"$ref": "#/$defs/A"}]
)  # fmt: skip
objects = st.recursive(
    leaves,
    lambda inner: (
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties), **CLOSED},
            st.dictionaries(st.sampled_from(["a", "b", "default", "é"]), inner, max_size=3),
        )
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, reuse="exact")


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(inner={"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 2, "maxItems": 2}, seed=1)
@given(inner=objects, seed=st.integers(0, 2**32))
def test_arguments_of_a_required_call_are_valid(llm: LLM, inner: dict[str, Any], seed: int):
    parameters = {
        "type": "object",
        "properties": {"x": inner},
        "required": ["x"],
        **CLOSED,
        "$defs": {"A": {"enum": ["yes", "no"]}},
    }
    body = {"messages": [USER], "tools": [tool(parameters=parameters)], "tool_choice": "required", "seed": seed}
    body |= {"max_tokens": 160, "parallel_tool_calls": False}
    asked = translate(read_body(body, Endpoint.CHAT), tools=model_tools(llm.tokenizer))
    digits = dict.fromkeys(llm.tokenizer.encode("0123456789-"), -20)  # numbers of a random model hardly end
    outputs = llm.generate(list(asked.prompts), replace(asked.params, logit_bias=digits))
    (choice,) = respond(asked, outputs, name="x", created=1, model="m")["choices"]
    if choice["finish_reason"] == "length":
        return
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    for called in choice["message"]["tool_calls"]:
        jsonschema.validate(json.loads(called["function"]["arguments"]), parameters)


def test_dialects_and_no_network(monkeypatch: pytest.MonkeyPatch):
    """An unknown dialect is not downloaded, such as one on a client's own server."""
    old = {"type": "object", "properties": {"a": {"minimum": 3, "exclusiveMinimum": True}}}
    check_parameters({**old, "$schema": "http://json-schema.org/draft-04/schema#"}, "p")
    with pytest.raises(BodyError, match=r"properties\.a\.exclusiveMinimum: true is not of type"):
        check_parameters(old, "p")
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(0.05)
        where = f"http://127.0.0.1:{listening.getsockname()[1]}/schema"
        check_parameters({"$schema": where, "properties": {"a": {"$ref": where}}, "$ref": where}, "p")
        check_parameters({"$schema": ["x"]}, "p")
        with pytest.raises(TimeoutError):
            listening.accept()


def test_parameters_nested_too_deeply():
    parameters: dict[str, Any] = {}
    for _ in range(120):
        parameters = {"properties": {"a": parameters}}
    check_parameters(parameters, "p")
    with pytest.raises(BodyError, match="tools nests lists and objects too deeply"):
        call(tools=[tool(parameters=parameters)])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("form", [{}, {"response_format": {"type": "json_object"}, "tool_choice": "auto"}])
def test_grammar_error_names_the_tool_and_property(llm: LLM, number: int, form: dict[str, Any]):
    wrong = {"type": "object", "properties": {"when": {"type": "string", "pattern": "(?!a)b"}}, "required": ["when"]}
    tools = [tool("fine"), tool("other")]
    tools[number] = tool("guilty", parameters=wrong)
    asked = call(tools=tools, **{"tool_choice": "required", **form})
    with pytest.raises(StructureError) as caught:
        llm.generate([USER], asked.params)
    told = structure_failure(asked, caught.value)
    assert told.param == "tools"
    assert "'guilty': at properties.when, look-around, including look-ahead and look-behind, is not" in str(told)
