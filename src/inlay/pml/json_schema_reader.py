"""JSON → the nodes of a schema. Held to the same rules as PML, by the same code where the two meet."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from inlay.pml import json_models as forms
from inlay.pml.json_places import JSONPlace
from inlay.pml.json_reader import JSONReader, StopError, shown
from inlay.pml.json_text import JSONObject, parse_json
from inlay.pml.names import TAGS
from inlay.pml.nodes import ROLES, Module, Param, Scaffold, Text, Turn, Union, numbered
from inlay.pml.problems import Problems
from inlay.pml.schema_rules import SchemaParts, SchemaRules, Words
from inlay.pml.sources import Folder

_Node = Text | Param | Module | Union | Turn
_TEXT = "text"
_TAKES = {
    "module": frozenset((_TEXT, "module", "union", "param")),
    "union": frozenset(("module",)),
    "turn": frozenset((_TEXT, "module", "union")),
}
_CHAT_SCHEMA = frozenset(("role",))
_PLAIN_SCHEMA = frozenset((_TEXT, "module", "union"))
_WORDS = Words("the scaffold", "from_json")


def read_schema_json(data: bytes, source: str, folder: Folder | None) -> SchemaParts:
    """The parts of a schema in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    parts = None
    with suppress(StopError):
        parts = _SchemaReader(folder, problems).read(parse_json(data, source), JSONPlace(source))
    problems.raise_any()
    assert parts is not None  # without a document there is a problem
    return parts


class _SchemaReader(JSONReader):
    def __init__(self, folder: Folder | None, problems: Problems) -> None:
        super().__init__(problems)
        self._rules = SchemaRules(folder, problems, _WORDS)

    def read(self, root: Any, place: JSONPlace) -> SchemaParts | None:
        if not isinstance(root, JSONObject):
            self.add(place, f'this is {shown(root)}; a schema is an object: write {{"name": "…", "content": […]}}')
            return None
        if "schema" in root and "name" not in root:
            remedy = 'read it as a Prompt, or write "name" for a schema'
            self.add(place, f'this is a prompt, as it has the key "schema"; {remedy}')
            return None
        self.check(root, forms.Schema, place, 1)
        content = root.get("content")
        has_turns = isinstance(content, list) and any(isinstance(raw, JSONObject) and "role" in raw for raw in content)
        nodes = self._content(root, "content", place, _CHAT_SCHEMA if has_turns else _PLAIN_SCHEMA, 2)
        children = numbered(tuple(node for node in nodes if isinstance(node, Text | Module | Union | Turn)))
        scaffolds = self._scaffolds(root, place)
        self._rules.check_scaffolds(scaffolds, children)
        return SchemaParts(self.label(root, "name", place), children, scaffolds)

    def _content(
        self, parent: JSONObject, key: str, place: JSONPlace, takes: frozenset[str], depth: int
    ) -> list[_Node]:
        """The nodes that a list holds. depth: how many objects are nested in it, its own members counted."""
        nodes: list[_Node] = []
        for raw, where in self.members(parent, key, place):
            if isinstance(raw, str):
                nodes += self._text(raw, where, takes)
            elif kind := self.kind(raw, where, takes):
                if kind not in takes:
                    self.add(where, _misplaced(kind, takes))
                if kind in takes or kind in ("module", "union"):  # for what is wrong inside, and for names it defines
                    nodes.append(self._node(kind, raw, where, depth))
        return nodes

    def _text(self, text: str, place: JSONPlace, takes: frozenset[str]) -> list[Text]:
        self.count_text(place)
        # an empty text is nothing; but the published JSON Schema has no text in a union at all
        if _TEXT not in takes and (text or takes == _TAKES["union"]):
            self.add(place, _misplaced(_TEXT, takes))
        return [Text(text, place)] if text else []

    def _node(self, kind: str, raw: JSONObject, place: JSONPlace, depth: int) -> _Node:
        if kind == "param":
            return self._param(raw, place, depth)
        if kind == "module":
            return self._module(raw, place, depth)
        if kind == "union":
            self.check(raw, forms.Union, place, depth)
            members = self._content(raw, "union", place, _TAKES["union"], depth + 1)
            return Union(tuple(node for node in members if isinstance(node, Module)), place)
        role = raw["role"] if raw["role"] in ROLES else ""
        place = place.key(role) if role else place
        self.check(raw, forms.Turn, place, depth)
        nodes = self._content(raw, "content", place, _TAKES["turn"], depth + 1)
        return Turn(role, tuple(node for node in nodes if isinstance(node, Text | Module | Union)), place)

    def _module(self, raw: JSONObject, place: JSONPlace, depth: int) -> Module:
        if isinstance(raw["module"], str):
            place = place.named("module", raw["module"])
        self.check(raw, forms.Module, place, depth)
        name = self.name(raw["module"], place.key("module"), TAGS)
        if name:
            self._rules.define(name, place, place)
        nodes = self._content(raw, "content", place, _TAKES["module"], depth + 1)
        children = tuple(node for node in nodes if isinstance(node, Text | Param | Module | Union))
        self._rules.check_params(name, (node for node in children if isinstance(node, Param)))
        if isinstance(src := raw.get("src"), str):
            if raw.get("content"):
                self.add(place.key("src"), "the module has both src and content; leave one of them out")
            else:
                children = self._rules.file(src, place.key("src"))
        return Module(name, children, place)

    def _param(self, raw: JSONObject, place: JSONPlace, depth: int) -> Param:
        if isinstance(raw["param"], str):
            place = place.named("param", raw["param"])
        self.check(raw, forms.Param, place, depth)
        return Param(self.name(raw["param"], place.key("param")), raw.get("len", 1), raw.get("default"), place)

    def _scaffolds(self, root: JSONObject, place: JSONPlace) -> tuple[Scaffold, ...]:
        scaffolds = []
        for raw, where in self.members(root, "scaffolds", place):
            self.count_object(where)
            if isinstance(raw, list) and raw and all(isinstance(name, str) for name in raw):
                scaffolds.append(Scaffold(tuple(raw), where))
            else:
                self.add(where, f"this is {shown(raw)}; write a list of at least two modules' names")
        return tuple(scaffolds)


def _misplaced(kind: str, takes: frozenset[str]) -> str:
    """About something that may not stand here. takes: what may."""
    if kind == "import":
        return 'an import stands in a schema, but only prompts import; write {"module": …} to define a module'
    what = {"param": "a parameter", "role": "a turn"}.get(kind, f"a {kind}")
    if kind == "param":
        return f"{what} stands outside a module; move it into one"
    if kind == "role":
        return f"{what} stands inside something else; turns stand at the top level of a schema"
    if takes == _CHAT_SCHEMA:
        return f"{what} stands outside the turns of this schema; move it into one of them"
    if kind == "union":
        return "a union stands directly in a union; list all members in one union, or put the inner one into a module"
    return "a text stands directly in a union; put it into a module"
