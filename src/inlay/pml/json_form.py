"""The JSON form of PML as pydantic models: the keys of each object and the types of their values.

A model validates a single object and skips the members of its lists, because the readers validate these one by one.
This gives each problem a place and a message, reports several at once, and stops early on hostile input. The published
JSON Schema is made from the same models and covers the whole tree. Class names become the names in its ``$defs``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from inlay.pml.nodes import (
    MAX_ATTRIBUTE_CHARACTERS,
    MAX_ATTRIBUTES,
    MAX_DEPTH,
    MAX_NAME_CHARACTERS,
    MAX_PARAM_LENGTH,
    MAX_SET,
)

Name = Annotated[
    str,
    Field(
        description="An XML name without a colon, such as unit.py.",
        # the readers check names and report errors in more detail
        json_schema_extra={"minLength": 1, "maxLength": MAX_NAME_CHARACTERS},
    ),
]
Label = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_ATTRIBUTE_CHARACTERS,
        description="The name of a schema: any text but white space alone.",
    ),
]
Value = Annotated[str, Field(max_length=MAX_ATTRIBUTE_CHARACTERS)]


Path = Annotated[
    str,
    Field(
        description="A module: its name, behind the names of those around it, as in age/child.",
        json_schema_extra={"minLength": 1, "maxLength": MAX_DEPTH * (MAX_NAME_CHARACTERS + 1)},
    ),
]
Meta = dict[str, Value]
MetaField = Field(None, max_length=MAX_ATTRIBUTES, description="What is told about it, by name; no model sees it.")
Arguments = dict[str, Value]
ArgumentsField = Field(None, max_length=MAX_ATTRIBUTES, description="What fills the module's parameters, by name.")


class Form(BaseModel):
    """The base of all objects: unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Param(Form):
    """A hole in a module, which a prompt fills with an argument."""

    param: Name
    len: int = Field(ge=1, le=MAX_PARAM_LENGTH, description="How many tokens an argument may have.")
    default: Value | None = Field(None, description="What stands there without an argument.")
    scaffold: Value | None = Field(None, description="What fills it while its module is encoded over placeholders.")
    meta: Meta | None = MetaField


class Module(Form):
    """A named piece of a schema that prompts import."""

    module: Name
    content: ModuleContent | None = Field(None, description="What the module holds: nothing, if left out.")
    src: str | None = Field(
        None, description="Instead of content: the name of a UTF-8 file in the schema's folder or below it."
    )
    cache: bool | None = Field(None, description="false for a module that every request computes; true, if left out.")
    meta: Meta | None = MetaField


class Union(Form):
    """Modules of which a prompt imports at most one."""

    union: list[SkipValidation[Module]] = Field(min_length=1)
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
    scaffolds: list[SkipValidation[Annotated[list[Path], Field(min_length=2)]]] | None = Field(
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

    set: list[SkipValidation[Import]] = Field(min_length=1, max_length=MAX_SET)


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

    set: ShortMembers = Field(min_length=1, max_length=MAX_SET)


class Prompt(Form):
    """A prompt of PML: the modules that it imports from a schema, and its new text.

    The short form has no content. Its text follows all imports.
    """

    of: Label = Field(alias="schema")
    content: PromptContent | None = None
    imports: ShortImports | None = Field(None, description="The short form: the modules that are imported.")
    text: Text | None = Field(None, description="The short form: what the prompt says behind them.")


Text = Annotated[str, Field(description="Text, taken exactly as it is.")]
ModuleContent = Text | list[SkipValidation[Text | Param | Module | Union | Turn]]
TurnContent = Text | list[SkipValidation[Text | Param | Module | Union]]
SchemaContent = Text | list[SkipValidation[Text | Module | Union | Turn]]
ImportContent = Text | list[SkipValidation[Text | Import | ImportSet]]
PromptContent = Text | list[SkipValidation[Text | Import | ImportSet | PromptTurn]]
ShortMembers = list[SkipValidation[Path | ShortImport]]
ShortImports = list[SkipValidation[Path | ShortImport | ShortSet]]

for _form in (Param, Module, Union, Turn, Schema, Import, ImportSet, PromptTurn, ShortImport, ShortSet, Prompt):
    _form.model_rebuild()


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
