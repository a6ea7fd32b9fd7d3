"""Turns JSON into the nodes of a schema or a prompt. JSON and PML share the code of their common rules."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from inlay.pml import json_form as forms
from inlay.pml.attributes import TAGS
from inlay.pml.json_objects import JSONObject, JSONReader, StopError, parse_json
from inlay.pml.nodes import (
    ROLES,
    Argument,
    Import,
    ImportSet,
    Module,
    Param,
    PromptTurn,
    Scaffold,
    Text,
    Turn,
    Union,
    numbered,
)
from inlay.pml.problems import JSONPlace, Problems
from inlay.pml.readers import PromptParts
from inlay.pml.resolve_problems import nested_set, text_in_set
from inlay.pml.rules import SchemaParts, SchemaRules, Words
from inlay.pml.scopes import path_of
from inlay.pml.sources import Folder
from inlay.wording import quote, shown

_Node = Text | Param | Module | Union | Turn
_TEXT = "text"
_PIECES = frozenset((_TEXT, "module", "union"))
_MEMBERS = frozenset(("module",))
_SCHEMA = _PIECES | {"role"}
_WORDS = Words("the scaffold", "from_json")


def read_schema_json(data: bytes, source: str, folder: Folder | None) -> SchemaParts:
    """Read the parts of a schema in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    parts = None
    with suppress(StopError):
        parts = _JsonSchemaReader(folder, problems).read(parse_json(data, source), JSONPlace(source))
    problems.raise_any()
    assert parts is not None  # without a document there is a problem
    return parts


class _JsonSchemaReader(JSONReader):
    def __init__(self, folder: Folder | None, problems: Problems) -> None:
        super().__init__(problems)
        self._rules = SchemaRules(folder, problems, _WORDS)
        self._scope: tuple[str, ...] = ()  # names of the enclosing modules, outermost first
        self._in_turn = False

    def read(self, root: Any, place: JSONPlace) -> SchemaParts | None:
        if not isinstance(root, JSONObject):
            self.add(
                place,
                f'this is {shown(root, kind=True)}; a schema is an object: write {{"name": "…", "content": […]}}',
                code="pml.wrong_type",
            )
            return None
        if "schema" in root and "name" not in root:
            remedy = 'read it as a Prompt, or write "name" for a schema'
            self.add(place, f'this is a prompt, as it has the key "schema"; {remedy}', code="pml.wrong_document")
            return None
        self.check(root, forms.Schema, place, 1)
        nodes = self._content(root, "content", place, _SCHEMA, 2)
        children = numbered(tuple(node for node in nodes if isinstance(node, Text | Module | Union | Turn)))
        scaffolds = self._rules.checked_scaffolds(self._scaffolds(root, place), children)
        return SchemaParts(self.label(root, "name", place), children, scaffolds, self.meta(root, place))

    def _content(
        self, parent: JSONObject, key: str, place: JSONPlace, takes: frozenset[str], depth: int
    ) -> list[_Node]:
        """Return the nodes in a list. ``depth`` is the nesting depth of its members."""
        nodes: list[_Node] = []
        for raw, where in self.members(parent, key, place):
            if isinstance(raw, str):
                nodes += self._text(raw, where, takes)
            elif kind := self.kind(raw, where, takes):
                if kind not in takes:
                    self.add(where, _misplaced(kind, takes), code="pml.misplaced_object")
                # for the problems inside it and the names that it defines
                if kind in takes or kind in ("module", "union"):
                    nodes.append(self._node(kind, raw, where, depth))
        return nodes

    def _text(self, text: str, place: JSONPlace, takes: frozenset[str]) -> list[Text]:
        self.count_text(place)
        # an empty text is an error too: the published JSON Schema allows no text in a union
        if _TEXT not in takes:
            self.add(place, _misplaced(_TEXT, takes), code="pml.misplaced_text")
        return [Text(text, place)] if text else []

    def _node(self, kind: str, raw: JSONObject, place: JSONPlace, depth: int) -> _Node:
        if kind == "param":
            return self._param(raw, place, depth)
        if kind == "module":
            return self._module(raw, place, depth)
        if kind == "union":
            return self._union(raw, place, depth)
        role = raw["role"] if raw["role"] in ROLES else ""
        place = place.key(role) if role else place
        self.check(raw, forms.Turn, place, depth)
        self._in_turn = True
        takes = _PIECES | {"param"} if self._scope else _PIECES
        nodes = self._content(raw, "content", place, takes, depth + 1)
        self._in_turn = False  # turns do not nest
        children = tuple(node for node in nodes if isinstance(node, Text | Param | Module | Union))
        return Turn(role, children, place, meta=self.meta(raw, place))

    def _union(self, raw: JSONObject, place: JSONPlace, depth: int) -> Union:
        self.check(raw, forms.Union, place, depth)
        nodes = self._content(raw, "union", place, _MEMBERS, depth + 1)
        members = tuple(node for node in nodes if isinstance(node, Module))
        scaffold = raw.get("scaffold")
        if isinstance(scaffold, str):
            self._rules.check_member(scaffold, members, place.key("scaffold"), "the union")
        return Union(members, place, scaffold=scaffold, meta=self.meta(raw, place))

    def _module(self, raw: JSONObject, place: JSONPlace, depth: int) -> Module:
        if isinstance(raw["module"], str):
            place = place.named("module", raw["module"])
        self.check(raw, forms.Module, place, depth)
        name = self.name(raw["module"], place.key("module"), TAGS)
        scope, self._scope = self._scope, (*self._scope, name)
        if name:
            self._rules.define(self._scope, place, place)
        takes = _PIECES | {"param"} if self._in_turn else _PIECES | {"param", "role"}
        nodes = self._content(raw, "content", place, takes, depth + 1)
        children = tuple(node for node in nodes if isinstance(node, Text | Param | Module | Union | Turn))
        self._rules.check_params(path_of(self._scope), children)
        self._scope = scope
        if isinstance(src := raw.get("src"), str):
            if raw.get("content"):
                self.add(
                    place.key("src"),
                    "the module has both src and content; leave one of them out",
                    code="pml.src_and_content",
                )
            else:
                children = self._rules.file(src, place.key("src"))
        return Module(name, children, place, cache=raw.get("cache") is not False, meta=self.meta(raw, place))

    def _param(self, raw: JSONObject, place: JSONPlace, depth: int) -> Param:
        if isinstance(raw["param"], str):
            place = place.named("param", raw["param"])
        self.check(raw, forms.Param, place, depth)
        return Param(
            self.name(raw["param"], place.key("param")),
            raw.get("len", 1),
            raw.get("default"),
            place,
            scaffold=raw.get("scaffold"),
            meta=self.meta(raw, place),
        )

    def _scaffolds(self, root: JSONObject, place: JSONPlace) -> tuple[Scaffold, ...]:
        scaffolds = []
        for raw, where in self.members(root, "scaffolds", place):
            self.count_object(where)
            if isinstance(raw, list) and raw and all(isinstance(name, str) for name in raw):
                scaffolds.append(Scaffold(tuple(raw), where))
            else:
                self.add(
                    where,
                    f"this is {shown(raw, kind=True)}; write a list of at least two modules' names",
                    code="pml.wrong_type",
                )
        return tuple(scaffolds)


def _misplaced(kind: str, takes: frozenset[str]) -> str:
    """Return the error message for a misplaced object or text. ``takes`` lists the allowed kinds."""
    if kind == "import":
        return 'an import stands in a schema, but only prompts import; write {"module": …} to define a module'
    if kind == "set":
        return "a set stands in a schema, but only prompts have sets; write what stands in it without it"
    what = {"param": "a parameter", "role": "a turn"}.get(kind, f"a {kind}")
    if kind == "param":
        return f"{what} stands outside a module; move it into one"
    if kind == "role":
        return f"{what} stands in another turn or in a union; turns stand at the top level of a schema, or in a module"
    if kind == "union":
        return "a union stands directly in a union; list all members in one union, or put the inner one into a module"
    return "a text stands directly in a union; put it into a module"


_INSIDE = frozenset(("import", "set"))
_TOP_LEVEL = _INSIDE | {"role"}
_IN_SET = frozenset(("import",))


def read_prompt_json(data: bytes, source: str) -> PromptParts:
    """Read the parts of a prompt in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    parts = None
    with suppress(StopError):
        parts = _JsonPromptReader(problems).read(parse_json(data, source), JSONPlace(source))
    problems.raise_any()
    assert parts is not None  # without a document there is a problem
    return parts


class _JsonPromptReader(JSONReader):
    def read(self, root: Any, place: JSONPlace) -> PromptParts | None:
        if not isinstance(root, JSONObject):
            self.add(
                place,
                f'this is {shown(root, kind=True)}; a prompt is an object: write {{"schema": "…", "content": […]}}',
                code="pml.wrong_type",
            )
            return None
        if "name" in root and "schema" not in root:
            remedy = 'read it as a Schema, or write "schema" with the name of the prompt\'s schema'
            self.add(place, f'this is a schema, as it has the key "name"; {remedy}', code="pml.wrong_document")
            return None
        self.check(root, forms.Prompt, place, 1)
        given = [key for key in ("content", "imports", "text") if root.get(key) is not None]
        if given[:1] == ["content"] and len(given) > 1:
            self.add(
                place,
                f'a prompt has "content" or the short form, not both; leave {quote(given[1])} out',
                code="pml.conflicting_keys",
            )
        nodes = self._content(root, place, _TOP_LEVEL, 2) or (*self._short(root, place, 2), *self._text(root, place))
        return PromptParts(self.label(root, "schema", place), nodes, place.key("schema"))

    def _short(self, parent: JSONObject, place: JSONPlace, depth: int) -> tuple[Import | ImportSet, ...]:
        """Return the imports of the short form. ``depth`` is the nesting depth of the list's members."""
        nodes: list[Import | ImportSet] = []
        for raw, where in self.members(parent, "imports", place):
            if isinstance(raw, JSONObject) and "set" in raw:
                self.check(raw, forms.ShortSet, where, depth)
                of = [self._short_member(one, at, depth + 1) for one, at in self.members(raw, "set", where)]
                nodes.append(ImportSet(tuple(one for one in of if one is not None), where))
            elif (node := self._short_member(raw, where, depth)) is not None:
                nodes.append(node)
        return tuple(nodes)

    def _short_member(self, raw: Any, place: JSONPlace, depth: int) -> Import | None:
        if isinstance(raw, str):
            self.count_object(place)
            return Import(self.path(raw, place), (), (), place.named("import", raw))
        if isinstance(raw, JSONObject):
            return self._short_import(raw, place, depth)
        self.add(
            place,
            f'this is {shown(raw, kind=True)}; write the name of a module, or an object {{"name": …}}',
            code="pml.wrong_type",
        )
        return None

    def _short_import(self, raw: JSONObject, place: JSONPlace, depth: int) -> Import:
        if isinstance(raw.get("name"), str):
            place = place.named("import", raw["name"])
        self.check(raw, forms.ShortImport, place, depth)
        name = self.path(raw.get("name"), place.key("name"))
        return Import(name, self._arguments(raw.get("arguments"), place), self._short(raw, place, depth + 1), place)

    def _text(self, root: JSONObject, place: JSONPlace) -> tuple[Text, ...]:
        text = root.get("text")
        return (Text(text, place.key("text")),) if isinstance(text, str) and text else ()

    def _content(
        self, parent: JSONObject, place: JSONPlace, takes: frozenset[str], depth: int
    ) -> tuple[Text | Import | ImportSet | PromptTurn, ...]:
        """Return the nodes in a list. ``depth`` is the nesting depth of its members."""
        nodes: list[Text | Import | ImportSet | PromptTurn] = []
        for raw, where in self.members(parent, "content", place):
            if isinstance(raw, str):
                self.count_text(where)
                nodes += [Text(raw, where)] if raw else []
            elif kind := self.kind(raw, where, takes):
                if kind not in takes:
                    self.add(where, _misplaced_in_prompt(kind), code="pml.misplaced_object")
                elif kind == "import":
                    nodes.append(self._import(raw, where, depth))
                elif kind == "set":
                    nodes.append(self._set(raw, where, depth))
                else:
                    nodes.append(self._turn(raw, where, depth))
        return tuple(nodes)

    def _set(self, raw: JSONObject, place: JSONPlace, depth: int) -> ImportSet:
        self.check(raw, forms.ImportSet, place, depth)
        imports = []
        for each, where in self.members(raw, "set", place):
            if isinstance(each, str):
                self.add(where, text_in_set(), code="pml.misplaced_text")
            elif kind := self.kind(each, where, _IN_SET):
                if kind == "import":
                    imports.append(self._import(each, where, depth + 1))
                else:
                    self.add(
                        where,
                        nested_set() if kind == "set" else _misplaced_in_prompt(kind),
                        code="pml.nested_set" if kind == "set" else "pml.misplaced_object",
                    )
        return ImportSet(tuple(imports), place)

    def _inner(self, raw: JSONObject, place: JSONPlace, depth: int) -> tuple[Text | Import | ImportSet, ...]:
        nodes = self._content(raw, place, _INSIDE, depth + 1)
        return tuple(node for node in nodes if not isinstance(node, PromptTurn))

    def _turn(self, raw: JSONObject, place: JSONPlace, depth: int) -> PromptTurn:
        role = raw["role"] if raw["role"] in ROLES else ""
        place = place.key(role) if role else place
        self.check(raw, forms.PromptTurn, place, depth)
        return PromptTurn(role, self._inner(raw, place, depth), place)

    def _import(self, raw: JSONObject, place: JSONPlace, depth: int) -> Import:
        if isinstance(raw["import"], str):
            place = place.named("import", raw["import"])
        self.check(raw, forms.Import, place, depth)
        name = self.path(raw["import"], place.key("import"))
        return Import(name, self._arguments(raw.get("arguments"), place), self._inner(raw, place, depth), place)

    def _arguments(self, raw: Any, place: JSONPlace) -> tuple[Argument, ...]:
        if not isinstance(raw, JSONObject):
            return ()
        places = {name: place.named("arguments", name) for name in raw}
        return tuple(Argument(self.name(name, places[name]), value, places[name]) for name, value in raw.items())


def _misplaced_in_prompt(kind: str) -> str:
    if kind == "role":
        return "a turn stands inside something else; turns stand at the top level of a prompt"
    if kind == "module":
        return 'a module is defined in a prompt, but only schemas define; write {"import": …} to import one'
    what = {"param": "a parameter", "union": "a union"}[kind]
    return f"{what} stands in a prompt, but only schemas have them; write what the prompt imports"
