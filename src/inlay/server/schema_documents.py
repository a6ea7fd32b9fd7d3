"""The request bodies that hold a schema, as PML or JSON with options, and their description in the OpenAPI document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inlay.api.failures import MAX_PROBLEMS, BodyError
from inlay.api.reading import MAX_FIELDS, walk
from inlay.errors import PolicyError
from inlay.pml import Schema
from inlay.pml.attributes import objection
from inlay.pml.json_document import document_from_json
from inlay.pml.json_readers import read_schema_json
from inlay.pml.readers import read_schema
from inlay.pml.sources import Folder, UnreadableError, document_from_string
from inlay.policy import FIELDS, PolicyFields, check_schema_fields
from inlay.server.metrics import text_tokens
from inlay.wording import shown

MAX_TAGS = 50_000  # of a schema as PML; parsing that many takes a second or two
MAX_VALUES = 200_000  # values and field names of a schema as JSON; a module has about 8
SOURCE = "schema"  # the name of a document without a file, in problems


class SchemaOptions(BaseModel):
    """The options beside a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    public: bool | None = Field(None, description="true or false")
    encode: bool | Literal["background"] = Field(True, description='true, false or "background"')
    reuse: str | None = Field(None, description='"isolated", "anchored", "primed", "modular" or "auto"')
    tolerance: float | str | None = Field(None, description=PolicyFields.help("tolerance"))
    positions: str | None = Field(None, description='"schema" or "packed"')
    ttl: str | None = Field(None, description='a lifetime such as "5m", "1h" or "inf"', max_length=32)


class SchemaBody(SchemaOptions):
    """The JSON body of a request that creates a schema or a new version."""

    pml: str | None = Field(None, description="a schema as PML: <schema name=…>…</schema>")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description='a schema as JSON: {"name": "…", "content": […]}'
    )


_OPTIONS = frozenset(SchemaOptions.model_fields)


#: OpenAPI descriptions of routes with and without a schema in the body, and the meaning of each status.
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": SchemaBody.model_json_schema() | {"oneOf": [{"required": ["pml"]}, {"required": ["schema"]}]}
            },
            "application/xml": {"schema": {"type": "string", "description": "PML; options stand in the query"}},
        },
    },
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in SchemaOptions.model_fields
    ],
}
NO_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"enum": [{}]}}}}}
_WRONG = {
    400: "A field or the schema is wrong; error.problems lists what is wrong with the schema.",
    401: "The key is wrong.",
    403: "More than the key or the server allows.",
    404: "There is no such schema.",
    408: "The body came too slowly.",
    409: "There is one of that name; or it was deleted or replaced while it was encoded.",
    412: "If-Match names another version.",
    413: "The body is too large.",
    415: "The body is neither JSON nor XML, or there is none and no Content-Type.",
    429: "Too many requests.",
    503: "The server is stopping.",
    507: "The device has no memory left.",
}
RESPONSES: dict[int | str, dict[str, Any]] = {status: {"description": says} for status, says in _WRONG.items()}


@dataclass(frozen=True, slots=True)
class SchemaSource:
    """The source of a schema.

    Args:
        form: "pml" or "schema" (JSON).
        text: the text in that form.
        schema: the parsed schema.
        size: bytes of the text in UTF-8.
        sha256: of the text.
    """

    form: Literal["pml", "schema"]
    text: str
    schema: Schema
    size: int
    sha256: str

    def document(self) -> str | dict[str, Any]:
        """Return the source as a request body gives it."""
        document: str | dict[str, Any] = self.text if self.form == "pml" else json.loads(self.text)
        return document


def of_schema(schema: Schema) -> SchemaSource:
    """Return the source of a schema from an operator's file. The text of files that it names is included."""
    return _source("schema", schema.to_json(), schema)


def of_text(form: Literal["pml", "schema"], text: str) -> SchemaSource:
    """Parse a text of this form and return its source, with the text unchanged. Raises PMLError."""
    read = _of_pml(text) if form == "pml" else _of_json(json.loads(text))
    return _source(form, text, read.schema)


class GivenSchema:
    """The schema of a request, taken out of the request's state. It is dropped once it is parsed.

    ``options`` are the options beside it. ``field`` is the body's field that holds it.
    """

    def __init__(self, state: dict[str, Any], query: Mapping[str, str]) -> None:
        body = read_body(state["body"], query)
        state["body"] = None
        self.field = "pml" if body.pml is not None else "schema"
        self.options = SchemaOptions.model_validate(body.model_dump(include=body.model_fields_set & _OPTIONS))
        self._body: SchemaBody | None = body

    def tokens(self) -> int:
        """Estimate its tokens before it is parsed."""
        assert self._body is not None, "it was not read yet"
        pml = self._body.pml
        return text_tokens(pml) if pml is not None else sum(map(text_tokens, _texts(self._body.schema_)))

    def taken(self) -> SchemaBody:
        """Return the body that holds it. Call it once."""
        body, self._body = self._body, None
        assert body is not None, "a schema is read once"
        return body


def read_body(body: Any, query: Mapping[str, str]) -> SchemaBody:
    """Return the fields of a request body: a JSON object, or PML as text with its options in the query.

    Raises BodyError, which names every problem.
    """
    if isinstance(body, str):
        words: dict[str, Any] = {"true": True, "false": False}
        if "pml" in query or "schema" in query:
            raise BodyError("the query and the body both hold a schema; leave it out of the query", param="query")
        return _validated({"pml": body, **{name: words.get(value, value) for name, value in query.items()}})
    if not isinstance(body, Mapping):
        raise BodyError(f'the body is {shown(body)}; it must be an object {{"pml": "…"}} or {{"schema": {{…}}}}')
    if query:
        raise BodyError(
            f"the query holds {shown(next(iter(query)))}; with a body of JSON, options stand in the body", param="query"
        )
    return _validated({name: value for name, value in body.items() if value is not None})


def read_source(body: SchemaBody) -> SchemaSource:
    """Parse the schema of a body. It never reads files. It is slow. Raises BodyError and PMLError."""
    if (body.pml is None) == (body.schema_ is None):
        raise BodyError('there is no schema, or there are two; give one of "pml" and "schema"', param="pml")
    _check_size(body)
    source = _of_pml(body.pml) if body.pml is not None else _of_json(body.schema_ or {})
    wrong = objection(source.schema.name)
    if wrong is not None:
        raise BodyError(f"a server's schemas are named like modules, and {wrong}", param="name", code="invalid_name")
    return source


def check_name(source: SchemaSource, name: str) -> None:
    """Raise BodyError if the schema's name differs from the path's."""
    given = source.schema.name
    if given != name:
        message = f"the schema is named {given!r:.100} and the path says {name!r:.100}; write the same name in both"
        raise BodyError(message, param="name", code="invalid_name")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(member)


def _of_pml(text: str) -> SchemaSource:
    parts = read_schema(document_from_string(text, SOURCE), SOURCE, _NoFiles(), declaration_counts=False)
    return _source("pml", text, Schema(parts.name, parts.children, parts.scaffolds, SOURCE, parts.meta))


def _of_json(given: Mapping[str, Any]) -> SchemaSource:
    document = document_from_json(given, SOURCE)
    parts = read_schema_json(document, SOURCE, _NoFiles())
    return _source("schema", document.decode(), Schema(parts.name, parts.children, parts.scaffolds, SOURCE, parts.meta))


def _source(form: Literal["pml", "schema"], text: str, schema: Schema) -> SchemaSource:
    data = text.encode()
    return SchemaSource(form, text, schema, len(data), hashlib.sha256(data).hexdigest())


def _check_size(body: SchemaBody) -> None:
    """Raise BodyError for a schema that would take long to parse.

    Other requests wait for the same Python threads.
    """
    if body.pml is not None and body.pml.count("<") > MAX_TAGS:
        message = f"pml holds more than {MAX_TAGS:,} tags; make several schemas of it"
        raise BodyError(message, param="pml")
    counts = accumulate(len(piece) for _, piece in walk(body.schema_))
    if any(count > MAX_VALUES for count in counts):
        message = f"schema holds more than {MAX_VALUES:,} values and names; make several schemas of it"
        raise BodyError(message, param="schema")


class _NoFiles(Folder):
    """The folder of a schema from the network. It reads no file from the server's disk."""

    def __init__(self) -> None:
        super().__init__("")

    def read(self, src: str) -> NoReturn:
        raise UnreadableError(
            "src names a file, but the server reads no files for requests; put the text into the module"
        )


def _validated(given: dict[str, Any]) -> SchemaBody:
    if len(given) > MAX_FIELDS:
        raise BodyError(
            f"the body has {len(given):,} fields; it may have at most {MAX_FIELDS}, so leave out the others"
        )
    try:
        check_schema_fields((name for name in given if name in FIELDS and name not in _OPTIONS), "a schema")
    except PolicyError as error:
        raise BodyError(str(error), param=error.field, code=error.code) from None
    try:
        return SchemaBody.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    problems = {str(one["loc"][0]): one["type"] for one in found[:MAX_PROBLEMS]}
    raise BodyError(
        ". Also: ".join(_sentence(name, kind, given) for name, kind in problems.items()),
        param=next(iter(problems)),
        code="unknown_field" if "extra_forbidden" in problems.values() else "invalid_value",
    )


def _sentence(name: str, kind: str, given: Mapping[str, Any]) -> str:
    fields = {field.alias or key: field.description for key, field in SchemaBody.model_fields.items()}
    if kind == "extra_forbidden":
        return f"a schema takes no field {shown(name)}; it takes {', '.join(fields)}"
    return f"{name} is {shown(given[name])}; it must be {fields[name]}"
