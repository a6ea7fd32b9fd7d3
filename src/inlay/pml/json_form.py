"""The JSON form of PML as pydantic models: the keys of each object, their values, and the names in them.

``validated`` checks a whole document and turns pydantic's errors into problems with places. The published JSON Schema
is made from the same models. Class names become the names in its ``$defs``.

Documents are strict JSON. Their errors have places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, LiteralString, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml import nodes as limits
from inlay.pml.attributes import TAGS, is_in_namespace, objection
from inlay.pml.nodes import (
    MAX_ATTRIBUTE_CHARACTERS,
    MAX_ATTRIBUTES,
    MAX_DEPTH,
    MAX_NAME_CHARACTERS,
    MAX_PARAM_LENGTH,
    MAX_SET,
)
from inlay.pml.parser import place_at
from inlay.pml.problems import JSONPlace, Problems
from inlay.pml.resolve_problems import nested_set, text_in_set
from inlay.pml.rules import names_of
from inlay.pml.sources import document_from_string
from inlay.strict_json import JSONError, JsonFault, Pairs, read_json, repeated
from inlay.wording import quote, shown

# Coarse bounds that keep validation short. The reader counts objects, depth and texts exactly, with their places.
_MAX_NESTING = 4 * limits.MAX_DEPTH  # lists and objects
_MAX_VALUES = 10 * limits.MAX_ELEMENTS
_DIGITS = 18  # longer integers become floats
_REMEDIES = {
    "Expecting property name enclosed in double quotes": (
        "a key in double quotation marks belongs here; write one, or delete the comma before it"
    ),
    "Expecting value": "a value belongs here; write one, or delete the comma before it",
    "Expecting ',' delimiter": "this value or its list or object does not end here; write a comma or close it",
    "Expecting ':' delimiter": 'a colon belongs here; write "key": value',
    "Illegal trailing comma before end of object": "nothing follows this comma; delete the comma",  # from Python 3.13
    "Illegal trailing comma before end of array": "nothing follows this comma; delete the comma",
    "Extra data": "something stands after the end of the document; keep one object and nothing after it",
    "Unterminated string starting at": "a string begins here and does not end; close it",
    "Invalid control character at": "a line break or control character stands in a string; write \\n or \\u00… for it",
    "Invalid \\escape": "no escape begins like this; write \\\\ for a backslash",
    "Invalid \\uXXXX escape": "this escape is not complete; write \\u and four hexadecimal digits",
}


class JSONObject(dict[str, Any]):
    """A JSON object. ``twice`` holds its duplicate keys."""

    twice: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: Pairs) -> JSONObject:
        """Build an object from its keys and values."""
        made = cls(pairs)
        if len(made) < len(pairs):
            made.twice = repeated(pairs)
        return made


def document_from_json(document: str | bytes | Mapping[str, Any], source: str) -> bytes:
    """Return a document as UTF-8 text.

    Raises:
        PMLError: It is not UTF-8, or too large.
        ParameterError: It is of another type, or the mapping cannot be written as JSON.
    """
    if isinstance(document, Mapping):
        return document_from_string(_dumped(document), source)
    if isinstance(document, str):
        return document_from_string(document, source)
    if not isinstance(document, bytes | bytearray):
        kind = type(document).__name__
        raise ParameterError(
            f"from_json takes a str, bytes or a mapping, not {kind}; give a path to from_file",
            code="parameter.wrong_type",
        )
    try:
        return document_from_string(bytes(document).decode(), source)
    except UnicodeDecodeError as error:
        place = place_at(source, document[: error.start].decode())
        raise PMLError([Problem(place, "this is not UTF-8; encode it as UTF-8", code="pml.wrong_encoding")]) from None


def parse_json(data: bytes, source: str) -> Any:
    """Parse a document in UTF-8, with objects as JSONObject; raises PMLError."""
    start = data.lstrip()[:1]
    if start in (b"", b"<"):
        message = "this is PML, not JSON; read it with from_string, or from a file that does not end in .json"
        nothing = 'there is nothing here; write {"name": "…"} for a schema, or {"schema": "…"} for a prompt'
        raise PMLError([Problem(Place(source, 1, 1), message if start else nothing, code="pml.malformed_json")])
    try:
        return read_json(
            data,
            max_depth=_MAX_NESTING,
            max_values=_MAX_VALUES,
            make_object=JSONObject.of,
            make_integer=_integer,
        )
    except JSONError as error:
        place = Place(source, error.line, error.column)
        code = "pml.too_large" if error.fault is JsonFault.VALUES else "pml.malformed_json"
        raise PMLError([Problem(place, _sentence(error), code=code)]) from None


def _dumped(document: Mapping[str, Any]) -> str:
    # Writing the mapping as text applies the same rules to it: only JSON, no NaN, and a bounded size.
    try:
        return json.dumps(dict(document), default=_as_dict, ensure_ascii=True)
    except RecursionError:
        raise ParameterError(
            f"the mapping is nested more than {limits.MAX_DEPTH} deep; nest less deeply", code="parameter.too_deep"
        ) from None
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"the mapping is no JSON ({error}); use str, int, list, dict and None", code="parameter.not_json"
        ) from None


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds {type(value).__name__}")


def _integer(digits: str) -> int | float:
    # Python refuses to convert very long integers, and PML needs none
    return int(digits) if len(digits) <= _DIGITS else float(digits)


def _sentence(error: JSONError) -> str:
    if error.fault is JsonFault.SYNTAX:
        return _REMEDIES.get(error.detail, f"this is not JSON ({error.detail}); correct it")
    if error.fault is JsonFault.HALF:
        return f"{error.detail} alone is half a character; write both halves, or leave it out"
    if error.fault is JsonFault.CONSTANT:
        return f"{error.detail} is no value of JSON; write a number, or leave it out"
    if error.fault is JsonFault.VALUES:
        return f"there are more than {_MAX_VALUES:,} values; split this into several files"
    return f"objects are nested more than {limits.MAX_DEPTH} deep; nest less deeply"


KINDS = ("module", "param", "union", "role", "import", "set")
"""The keys that give the kind of an object in ``content``. Each object has one of them."""


def _kind(raw: Any) -> str | None:
    """Return the tag of a member of ``content``. The brackets tell it from a key in the path of an error."""
    if isinstance(raw, dict):
        return f"<{next((key for key in raw if key in KINDS), '')}>"
    return "<text>" if isinstance(raw, str) else None


def _short_kind(raw: Any) -> str | None:
    """Return the tag of a member of ``imports``."""
    if isinstance(raw, dict):
        return "<names>" if "set" in raw else "<name>"
    return "<text>" if isinstance(raw, str) else None


def _list_or_text(raw: Any) -> str | None:
    return "<list>" if isinstance(raw, list) else "<text>" if isinstance(raw, str) else None


def _only(kind: str) -> BeforeValidator:
    """Refuse members of another kind in a list of one kind."""

    def check(raw: Any) -> Any:
        if (found := _kind(raw)) != kind:
            raise PydanticCustomError("union_tag_invalid" if found else "union_tag_not_found", "")
        return raw

    return BeforeValidator(check)


def _refusal(message: str, *, code: LiteralString) -> PydanticCustomError:
    return PydanticCustomError(code, "{message}", {"message": message})


def _checked_keys(raw: Any) -> Any:
    if isinstance(raw, JSONObject) and raw.twice:
        raise _refusal(f"the key {quote(raw.twice[0])} stands here twice; keep one of them", code="pml.duplicate_key")
    if isinstance(raw, dict) and len(raw) > MAX_ATTRIBUTES:
        raise _refusal(f"an object has more than {MAX_ATTRIBUTES} keys; write fewer", code="pml.too_large")
    return raw


def _checked_name(name: str) -> str:
    if problem := objection(name):
        raise _refusal(problem, code="pml.invalid_name")
    return name


def _checked_module(name: str) -> str:
    if name in TAGS:
        problem = f"{quote(name)} is a tag of PML, which no module is named like; write another name"
        raise _refusal(problem, code="pml.invalid_name")
    return _checked_name(name)


def _checked_path(path: str) -> str:
    if path.count("/") >= MAX_DEPTH:
        problem = f"this path has more than {MAX_DEPTH} names; modules are nested less deeply"
        raise _refusal(problem, code="pml.too_deep")
    for name in names_of(path):
        _checked_module(name)
    return path


def _checked_meta(name: str) -> str:
    return name if is_in_namespace(name) else _checked_name(name)


def _checked_label(label: str) -> str:
    if label.isspace():
        raise _refusal("this is white space alone; write the name of the schema", code="pml.empty_attribute")
    return label


_NAME = Field(
    description="An XML name without a colon, such as unit.py.",
    # the validators report names in more detail
    json_schema_extra={"minLength": 1, "maxLength": MAX_NAME_CHARACTERS},
)
Name = Annotated[str, AfterValidator(_checked_name), _NAME]
ModuleName = Annotated[str, AfterValidator(_checked_module), _NAME]
Path = Annotated[
    str,
    AfterValidator(_checked_path),
    Field(
        description="A module: its name, behind the names of those around it, as in age/child.",
        json_schema_extra={"minLength": 1, "maxLength": MAX_DEPTH * (MAX_NAME_CHARACTERS + 1)},
    ),
]
Label = Annotated[
    str,
    AfterValidator(_checked_label),
    Field(
        min_length=1,
        max_length=MAX_ATTRIBUTE_CHARACTERS,
        description="The name of a schema: any text but white space alone.",
    ),
]
Value = Annotated[str, Field(max_length=MAX_ATTRIBUTE_CHARACTERS)]
Meta = Annotated[
    dict[Annotated[str, AfterValidator(_checked_meta)], Value],
    Field(max_length=MAX_ATTRIBUTES),
    BeforeValidator(_checked_keys),
]
MetaField = Field(None, description="Metadata: values by name. No model sees it.")
Arguments = Annotated[
    dict[Annotated[str, AfterValidator(_checked_name)], Value],
    Field(max_length=MAX_ATTRIBUTES),
    BeforeValidator(_checked_keys),
]
ArgumentsField = Field(None, description="What fills the module's parameters, by name.")


class Form(BaseModel):
    """The base of all objects: unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    _keys = model_validator(mode="before")(_checked_keys)


class Param(Form):
    """A hole in a module, which a prompt fills with an argument."""

    param: Name
    len: int = Field(ge=1, le=MAX_PARAM_LENGTH, description="How many tokens an argument may have.")
    default: Value | None = Field(None, description="What stands there without an argument.")
    scaffold: Value | None = Field(None, description="What fills it while its module is encoded over placeholders.")
    meta: Meta | None = MetaField


class Module(Form):
    """A named piece of a schema that prompts import."""

    module: ModuleName
    content: ModuleContent | None = Field(None, description="What the module holds: nothing, if left out.")
    src: str | None = Field(
        None, description="Instead of content: the name of a UTF-8 file in the schema's folder or below it."
    )
    cache: bool | None = Field(None, description="false for a module that every request computes; true, if left out.")
    meta: Meta | None = MetaField


class Union(Form):
    """Modules of which a prompt imports at most one."""

    union: list[Annotated[Module, _only("<module>")]] = Field(min_length=1)
    scaffold: str | None = Field(None, description="A member, as Prompt Cache names it; without effect here.")
    meta: Meta | None = MetaField


class Turn(Form):
    """A chat turn of a schema or of a module. Only a turn inside a module may hold parameters."""

    role: Literal["system", "user", "assistant"]
    content: TurnContent | None = None
    meta: Meta | None = MetaField


class Schema(Form):
    """A schema of PML: the pieces of text that prompts are made of."""

    name: Label
    content: SchemaContent | None = Field(None, description="Text, modules, unions and turns.")
    # a scaffold of one module is reported with its name
    scaffolds: list[Annotated[list[Path], Field(min_length=1, json_schema_extra={"minItems": 2})]] | None = Field(
        None, description="Modules that are encoded together, for prompts that import all of them."
    )
    meta: Meta | None = MetaField


class Import(Form):
    """A module that a prompt imports."""

    module: Path = Field(alias="import")
    arguments: Arguments | None = ArgumentsField
    content: ImportContent | None = Field(None, description="Imports of the module's own modules, and new text.")


class ImportSet(Form):
    """Imports in free order."""

    set: list[Annotated[Import, _only("<import>")]] = Field(min_length=1, max_length=MAX_SET)


class PromptTurn(Form):
    """A chat turn that a prompt adds."""

    role: Literal["system", "user", "assistant"]
    content: ImportContent | None = None


class ShortImport(Form):
    """A module that a prompt in the short form imports."""

    name: Path
    arguments: Arguments | None = ArgumentsField
    imports: ShortImports | None = Field(None, description="The module's own modules that are imported.")


class ShortSet(Form):
    """Modules in free order that a prompt in the short form imports."""

    set: list[ShortMember] = Field(min_length=1, max_length=MAX_SET)


class Prompt(Form):
    """A prompt of PML: the modules that it imports from a schema, and its new text.

    The short form has no content. Its text follows all imports.
    """

    of: Label = Field(alias="schema")
    content: PromptContent | None = None
    imports: ShortImports | None = Field(None, description="The short form: the modules that are imported.")
    text: Text | None = Field(None, description="The short form: what the prompt says behind them.")


Text = Annotated[str, Field(description="Text, taken exactly as it is.")]
_Text = Annotated[Text, Tag("<text>")]
_Param = Annotated[Param, Tag("<param>")]
_Module = Annotated[Module, Tag("<module>")]
_Union = Annotated[Union, Tag("<union>")]
_Import = Annotated[Import, Tag("<import>")]
_Set = Annotated[ImportSet, Tag("<set>")]
_ShortName = Annotated[Path, Tag("<text>")]
_ShortImport = Annotated[ShortImport, Tag("<name>")]
_ByKind = Discriminator(_kind)
_Member = TypeVar("_Member")
_Content = Annotated[_Text | Annotated[list[_Member], Tag("<list>")], Discriminator(_list_or_text)]
ModuleContent = _Content[Annotated[_Text | _Param | _Module | _Union | Annotated[Turn, Tag("<role>")], _ByKind]]
TurnContent = _Content[Annotated[_Text | _Param | _Module | _Union, _ByKind]]
SchemaContent = _Content[Annotated[_Text | _Module | _Union | Annotated[Turn, Tag("<role>")], _ByKind]]
ImportContent = _Content[Annotated[_Text | _Import | _Set, _ByKind]]
PromptContent = _Content[Annotated[_Text | _Import | _Set | Annotated[PromptTurn, Tag("<role>")], _ByKind]]
ShortMember = Annotated[_ShortName | _ShortImport, Discriminator(_short_kind)]
ShortImports = list[
    Annotated[_ShortName | _ShortImport | Annotated[ShortSet, Tag("<names>")], Discriminator(_short_kind)]
]
for _form in (Param, Module, Union, Turn, Schema, Import, ImportSet, PromptTurn, ShortImport, ShortSet, Prompt):
    _form.model_rebuild()

_TAGGED: dict[str, type[Form]] = {
    "<param>": Param,
    "<module>": Module,
    "<union>": Union,
    "<role>": Turn,
    "<import>": Import,
    "<set>": ImportSet,
    "<name>": ShortImport,
    "<names>": ShortSet,
}
_UNTAGGED: dict[type[Form], type[Form]] = {Union: Module, ImportSet: Import}  # lists of one kind
_MOST_PROBLEMS = 1_000  # more would not help
_Document = TypeVar("_Document", Schema, Prompt)


def validated(root: JSONObject, form: type[_Document], source: str) -> _Document:
    """Return a document as a model; raises PMLError with every problem of its keys, values and names."""
    try:
        return form.model_validate(root)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    reports = _Reports(root, form, Problems(source))
    for one in found[:_MOST_PROBLEMS]:
        reports.add(one)
    reports.problems.raise_any()
    raise AssertionError("a document that is refused has a problem")


class _Reports:
    """Turns pydantic's errors of one document into problems."""

    def __init__(self, root: JSONObject, form: type[Form], problems: Problems) -> None:
        self.problems = problems
        self._root = root
        self._form = form

    def add(self, error: ErrorDetails) -> None:
        """Report one error."""
        kind, loc = error["type"], error["loc"]
        if kind in ("extra_forbidden", "missing"):
            self._add_key(str(loc[-1]), loc[:-1], missing=kind == "missing")
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            self._add_member(loc)
        elif kind.startswith("pml."):
            self.problems.add(self._at(loc)[0], error["msg"], code=kind)
        else:
            place, raw, _ = self._at(loc)
            expected = error["msg"][:1].lower() + error["msg"][1:]
            self.problems.add(place, f"this is {shown(raw, kind=True)}; {expected}", code="pml.wrong_type")

    def _add_key(self, key: str, loc: tuple[int | str, ...], *, missing: bool) -> None:
        place, raw, form = self._at(loc)
        keys = [field.alias or name for name, field in form.model_fields.items()]
        if not missing:
            near = self.problems.near(key, keys)
            remedy = f"did you mean {quote(near)}?" if near else f"it takes {', '.join(map(quote, keys))}"
            self.problems.add(place, f"this object takes no key {quote(key)}; {remedy}", code="pml.unknown_key")
        elif not any(self.problems.near(other, [key]) for other in raw if other not in keys):
            self.problems.add(place, f"this object has no {quote(key)}; add it", code="pml.missing_key")

    def _add_member(self, loc: tuple[int | str, ...]) -> None:
        """Report a value of the wrong type in a union of types, or a member of a list in the wrong place."""
        place, raw, _ = self._at(loc)
        kind = next((key for key in raw if key in KINDS), None) if isinstance(raw, dict) else None
        if not isinstance(loc[-1], int) or not isinstance(raw, str | dict):
            expected = "a text or an object" if isinstance(loc[-1], int) else "a text, or a list of texts and objects"
            self.problems.add(place, f"this is {shown(raw, kind=True)}; write {expected}", code="pml.wrong_type")
        elif isinstance(raw, str):
            text = text_in_set() if loc[-2] == "set" else "a text stands directly in a union; put it into a module"
            self.problems.add(place, text, code="pml.misplaced_text")
        elif kind == loc[-2] == "set":
            self.problems.add(place, nested_set(), code="pml.nested_set")
        elif kind is not None:
            self.problems.add(place, misplaced(kind, in_prompt=self._form is Prompt), code="pml.misplaced_object")
        else:
            near = next((near for key in raw if (near := self.problems.near(key, KINDS))), None)
            kinds = ("import", "set", "role") if self._form is Prompt else ("module", "param", "union", "role")
            remedy = f"did you mean {quote(near)}?" if near else f"give it one of {', '.join(map(quote, kinds))}"
            if "text" in raw:
                remedy = "write a text as a string alone"
            self.problems.add(place, f"this object does not say what it is; {remedy}", code="pml.unknown_object")

    def _at(self, loc: tuple[int | str, ...]) -> tuple[JSONPlace, Any, type[Form]]:
        """Return the place of an error, the value there, and the model of the innermost object around it."""
        place, form, key = JSONPlace(self.problems.source), self._form, ""
        value: Any = self._root
        for number, part in enumerate(loc, 1):
            if isinstance(part, int):
                place, value = place.index(part), value[part]
                if form in _UNTAGGED and isinstance(value, dict) and number < len(loc):
                    place, form = place.of(value), _UNTAGGED[form]
            elif part in _TAGGED:
                place, form = place.of(value), _TAGGED[part]
                form = PromptTurn if form is Turn and self._form is Prompt else form
            elif isinstance(value, dict) and part in value:
                place = place.entry(part) if key in ("arguments", "meta") else place.key(part)
                value, key = value[part], part
        return place, value, form


def misplaced(kind: str, *, in_prompt: bool = False) -> str:
    """Return the error message for a misplaced object of this kind."""
    if in_prompt and kind != "role":
        return f'a prompt takes no {quote(kind)}, which only schemas have; write {{"import": …}} to import a module'
    return {
        "import": 'an import stands in a schema, but only prompts import; write {"module": …} to define a module',
        "set": "a set stands in a schema, but only prompts have sets; write what stands in it without it",
        "module": "a module stands in a set; import one",
        "param": "a parameter stands outside a module; move it into one",
        "union": "a union stands directly in a union; list all its members there, or put it into a module",
        "role": "a turn stands inside something else; move it to the top level of the schema or prompt",
    }[kind]


class _Published(GenerateJsonSchema):
    """Leaves out redundant parts: titles made from keys, and null as the default."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of schemas and prompts."""
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "PML as JSON",
        "description": "A schema, or a prompt. A key that may be left out may also be null.",
        **TypeAdapter(Schema | Prompt).json_schema(schema_generator=_Published),
    }
