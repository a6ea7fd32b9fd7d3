"""JSON Schemas as clients write them: each is held, or refused with one sentence that names the place."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import typing
import uuid
from collections import deque
from typing import Annotated, Any, Literal

import jsonschema
import llguidance
import pydantic
import pytest
import typing_extensions

from inlay.errors import StructureError
from inlay.sampling.json_schemas import GrammarError, bounded_document, holdable, self_contained
from inlay.sampling.structured import Grammars
from tests.tokenizers_for_tests import family


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(pydantic.BaseModel):
    kind: Literal[1]
    name: str


class Dog(pydantic.BaseModel):
    kind: Literal[2]
    breed: Color


class Bird(pydantic.BaseModel):
    kind: Literal["bird"]


class Fish(pydantic.BaseModel):
    kind: Literal["fish", "shark"]


class Node(pydantic.BaseModel):
    value: int
    children: list[Node] = []


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    x: float = pydantic.Field(ge=0, le=1)


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    x: int


@dataclasses.dataclass
class Point:
    x: int
    y: float | None = None


class Movie(typing_extensions.TypedDict, total=False):
    name: str
    year: typing_extensions.Required[int]


class Pair(typing.NamedTuple):
    left: int
    right: str


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
T = typing.TypeVar("T")


class Box(pydantic.BaseModel, typing.Generic[T]):
    content: T


HELD: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": type(None),
    "bytes": bytes,
    "Any": Any,
    "object": object,
    "Decimal": decimal.Decimal,
    "a Decimal with digits": Annotated[decimal.Decimal, pydantic.Field(max_digits=6, decimal_places=2, ge=0)],
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "AwareDatetime": pydantic.AwareDatetime,
    "PastDate": pydantic.PastDate,
    "UUID": uuid.UUID,
    "UUID1": pydantic.UUID1,
    "UUID4": pydantic.UUID4,
    "UUID7": pydantic.UUID7,
    "Path": pathlib.Path,
    "FilePath": pydantic.FilePath,
    "DirectoryPath": pydantic.DirectoryPath,
    "NewPath": pydantic.NewPath,
    "Pattern": re.Pattern,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Interface": ipaddress.IPv6Interface,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "IPvAnyNetwork": pydantic.IPvAnyNetwork,
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "RedisDsn": pydantic.RedisDsn,
    "KafkaDsn": pydantic.KafkaDsn,
    "SecretStr": pydantic.SecretStr,
    "SecretBytes": pydantic.SecretBytes,
    "Base64Bytes": pydantic.Base64Bytes,
    "Base64UrlStr": pydantic.Base64UrlStr,
    "Json": pydantic.Json,
    "Json of a type": pydantic.Json[list[int]],
    "ByteSize": pydantic.ByteSize,
    "ImportString": pydantic.ImportString,
    "StrictInt": pydantic.StrictInt,
    "PositiveInt": pydantic.PositiveInt,
    "NegativeFloat": pydantic.NegativeFloat,
    "FiniteFloat": pydantic.FiniteFloat,
    "int64": Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)],
    "uint64": Annotated[int, pydantic.Field(ge=0, le=2**64 - 1)],
    "a wide float": Annotated[float, pydantic.Field(ge=-1e300, le=1e300)],
    "a tiny float": Annotated[float, pydantic.Field(gt=1e-300, lt=0.5)],
    "a multiple": Annotated[float, pydantic.Field(multiple_of=0.25)],
    "a text of a length": Annotated[str, pydantic.StringConstraints(min_length=2, max_length=10, to_lower=True)],
    "a text of a pattern": Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z]+\d?$")],
    "an Enum": Color,
    "an IntEnum": Level,
    "Literal": Literal["a", 1, None, True],
    "list": list[int],
    "list of anything": list,
    "a list of a length": Annotated[list[str], pydantic.Field(min_length=1, max_length=3)],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[int, ...],
    "an empty tuple": tuple[()],
    "dict": dict[str, int],
    "dict of anything": dict,
    "dict by int": dict[int, str],
    "dict by Literal": dict[Literal["a", "b"], int],
    "dict by Enum": dict[Color, int],
    "dict by UUID": dict[uuid.UUID, int],
    "dict by date": dict[datetime.date, int],
    "dict by pattern": dict[Annotated[str, pydantic.StringConstraints(pattern="^x")], int],
    "dict by length": dict[Annotated[str, pydantic.StringConstraints(min_length=1, max_length=4)], int],
    "dict by float": dict[float, int],
    "dict by bool": dict[bool, int],
    "a dict of a length": Annotated[dict[str, int], pydantic.Field(min_length=1, max_length=3)],
    "nested dicts": dict[str, dict[str, list[Color]]],
    "Optional": int | None,
    "Union": int | str | list[bool],
    "discriminated by int": Pet,
    "discriminated by str": Annotated[Bird | Fish, pydantic.Field(discriminator="kind")],
    "a list of discriminated": list[Pet],
    "a union of models": Cat | Dog | Bird,
    "a recursive model": Node,
    "a closed model": Closed,
    "an open model": Open,
    "a generic model": Box[int],
    "a generic of a model": Box[Box[Color]],
    "a dataclass": Point,
    "a TypedDict": Movie,
    "a NamedTuple": Pair,
    "deque": deque[int],
    "Sequence": typing.Sequence[str],
    "Mapping": typing.Mapping[str, float],
    "Iterable": typing.Iterable[int],
    "EmailStr as a format": Annotated[str, pydantic.Field(json_schema_extra={"format": "email"})],
    "a format of one's own": Annotated[str, pydantic.Field(json_schema_extra={"format": "color"})],
    "deprecated and examples": Annotated[str, pydantic.Field(deprecated=True, examples=["a"], title="T")],
}
REFUSED: dict[str, Any] = {
    "set": set[int],
    "frozenset": frozenset[str],
    "set of Literal": set[Literal["a", "b"]],
    "look-ahead": Annotated[str, pydantic.Field(json_schema_extra={"pattern": "^(?!x)"})],
    "not": Annotated[str, pydantic.Field(json_schema_extra={"not": {"const": "x"}})],
}


def schema_of(kind: Any) -> dict[str, Any]:
    return pydantic.create_model("Answer", value=(kind, ...)).model_json_schema()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = family("llama3")
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.mark.parametrize("name", HELD)
def test_schemas_of_python_s_and_pydantic_s_types_are_held(grammars: Grammars, name: str):
    schema = schema_of(HELD[name])
    grammars.guide({"json": schema})
    assert holdable(holdable(schema)) == holdable(schema)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_schemas_are_rejected_with_their_place(grammars: Grammars, name: str):
    with pytest.raises(StructureError) as caught:
        grammars.guide({"json": schema_of(REFUSED[name])})
    assert re.fullmatch(
        r"structured_outputs\['json'\] cannot be used: at properties\.value, [^\n.]{20,120}\.", str(caught.value)
    )


def test_set_is_accepted_as_a_list_if_allowed():
    assert "uniqueItems" not in json.dumps(holdable(schema_of(set[int]), sets_as_lists=True))
    assert "uniqueItems" not in json.dumps(holdable({"type": "array", "uniqueItems": False}))
    assert "uniqueItems" not in json.dumps(holdable({"type": "array", "uniqueItems": True, "maxItems": 1}))


def takes(schema: Any, text: str) -> bool:
    """Whether an answer under a schema may be this text."""
    tokenizer = family("llama3")
    trie = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).vocabulary_trie()  # to walk a text
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(holdable(schema)))
    matcher = llguidance.LLMatcher(trie, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(trie.tokenize_str(text))) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "string", "format": "path"}, ['"/a b"'], ["3"]),
        ({"type": "string", "format": "uuid4"}, ['"8b2c0a2e-3f0e-4c55-9a55-0123456789ab"'], ['"8b"']),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-9223372036854774784", "0"], ['"a"', "1.5"]),
        ({"type": "number", "minimum": -1e300, "maximum": 1e300}, ["-100000000000000", "0.5"], ['"a"']),
        ({"type": "number", "exclusiveMinimum": 1e-300}, ["0.001", "5"], ["0", "-1"]),
        ({"type": "number", "maximum": -1e-300}, ["-0.001", "-5"], ["0.1"]),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
            ['{"a":1}', '{"a":1,"b":2}', "{}"],
            ['{"c":1}', '{"a":"x"}'],
        ),
        (
            {"oneOf": [{"const": 1}, {"enum": [2, "x"]}, {"type": "null"}]},
            ["1", "2", '"x"', "null"],
            ["3"],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "$defs": {
                    name: {
                        "type": "object",
                        "properties": {"kind": {"const": number, "type": "integer"}},
                        "required": ["kind"],
                        "additionalProperties": False,
                    }
                    for number, name in enumerate(("Cat", "Dog"))
                },
            },
            ['{"kind":0}', '{"kind":1}'],
            ['{"kind":2}', "{}"],
        ),
        ({"type": "array", "items": {"enum": [1]}, "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1,1]"], ["[]"]),
        ({"type": "array", "contains": {}, "items": {"enum": [1]}}, ["[1]"], ["[]"]),
        (
            {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
            ['{"a":1}'],
            ['{"b":1}'],
        ),
        (
            {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
            ['"-1.5"', '".5"', "2"],
            ['"-"', '"."', '"x"'],
        ),
        ({"$ref": "#/$defs/Box[int]", "$defs": {"Box[int]": {"enum": [1]}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": [1]}}}, ["1"], ["2"]),
        ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "enum": [1]}}}, ["1"], ["2"]),
        (
            {
                "$id": "https://example.org/a",
                "$ref": "https://example.org/a#/$defs/x",
                "$defs": {"x": {"$id": "b", "$ref": "c"}, "y": {"$id": "https://example.org/c", "enum": [1]}},
            },
            ["1"],
            ["2"],
        ),
    ],
    ids=str,
)
def test_grammar_accepts_exactly_the_schema(schema: Any, yes: list[str], no: list[str]):
    for text in yes:
        assert takes(schema, text), text
    for text in no:
        assert not takes(schema, text), text


def test_bounds_may_be_larger_than_any_float():
    schema = {"type": "integer", "minimum": -(10**400), "maximum": 10**400}
    assert takes(schema, "7")


def test_grammar_accepts_nothing_outside_the_schema():
    for number in ("-9223372036854774784", "9223372036854774784", "0.000000002", "-0.000000002"):
        for schema in (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            {"type": "number", "minimum": 1e-300},
            {"type": "number", "exclusiveMaximum": -1e-300},
        ):
            if takes(schema, number):
                jsonschema.validate(json.loads(number), schema)


@pytest.mark.parametrize(
    ("schema", "place", "part"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "properties.a.items", "not"),
        ({"anyOf": [{}, {"if": {}, "then": {"const": 1}}]}, "anyOf.1", "if"),
        ({"type": "string", "minLength": 10**12}, "minLength", "1000000000000"),
        ({"type": "string", "minLength": 10**5000}, "minLength", "1.000e+5000"),
        ({"type": "integer", "minimum": 10**30}, "minimum", "9,223,372,036,854,774,784"),
        ({"type": "integer", "minimum": 10**5000}, "minimum", "9,223,372,036,854,774,784"),
        ({"properties": {"a": {"$ref": "https://example.org/x"}}}, "properties.a", "https://example.org/x"),
    ],
)
def test_errors_name_the_position(schema: Any, place: str, part: str):
    with pytest.raises(GrammarError) as caught:
        holdable(schema)
    assert str(caught.value).startswith(f"at {place}, ")
    assert len(str(caught.value)) < 300
    assert part in str(caught.value)


def test_keywords_may_be_names_and_data():
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"$ref": "#x", "$id": "a"}}, "uniqueItems": {"type": "integer"}, "$ref": True},
        "required": ["not"],
    }
    assert holdable(schema) == schema
    assert self_contained(schema) == schema


@pytest.mark.parametrize("name", ["x-free", "x-free-0", "x"])
def test_a_definition_may_have_any_name(name: str):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": f"#/$defs/{name}"}, "b": {}},
        "required": ["a", "b"],
        "$defs": {"x-free": {"const": 0}, name: {"enum": [1]}},
    }
    bounded = bounded_document(schema)
    assert takes(bounded, '{"a":1,"b":["x"]}')
    assert not takes(bounded, '{"a":"x","b":1}')
    assert bounded_document(bounded) == bounded
    assert schema["$defs"].items() <= bounded["$defs"].items()


def test_schema_is_closed_in_every_structure_form(grammars: Grammars):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a"]}
    for structure, before, after in (({"json": schema}, "", ""), ({"structural_tag": tag}, "<a>", "</a>")):
        for value in (structure, {kind: json.dumps(one) for kind, one in structure.items()}):
            assert follows(grammars, value, f'{before}{{"city":"Oslo"}}{after}')
            assert not follows(grammars, value, f'{before}{{"city":"Oslo","more":1')


def follows(grammars: Grammars, structure: dict[str, Any], text: str) -> bool:
    guide = grammars.guide(structure)
    return all(guide.follows(token) for token in family("llama3").encode(text, add_special_tokens=False))
