"""JSON → the nodes of a prompt."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from inlay.pml import json_models as forms
from inlay.pml.json_places import JSONPlace
from inlay.pml.json_reader import JSONReader, StopError, shown
from inlay.pml.json_text import JSONObject, parse_json
from inlay.pml.names import TAGS
from inlay.pml.nodes import ROLES, Argument, Import, PromptTurn, Text
from inlay.pml.problems import Problems, quote
from inlay.pml.prompt_reader import PromptParts

_INSIDE = frozenset(("import",))
_TOP_LEVEL = frozenset(("import", "role"))


def read_prompt_json(data: bytes, source: str) -> PromptParts:
    """The parts of a prompt in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    parts = None
    with suppress(StopError):
        parts = _PromptReader(problems).read(parse_json(data, source), JSONPlace(source))
    problems.raise_any()
    assert parts is not None  # without a document there is a problem
    return parts


class _PromptReader(JSONReader):
    def read(self, root: Any, place: JSONPlace) -> PromptParts | None:
        if not isinstance(root, JSONObject):
            self.add(place, f'this is {shown(root)}; a prompt is an object: write {{"schema": "…", "content": […]}}')
            return None
        if "name" in root and "schema" not in root:
            remedy = 'read it as a Schema, or write "schema" with the name of the prompt\'s schema'
            self.add(place, f'this is a schema, as it has the key "name"; {remedy}')
            return None
        self.check(root, forms.Prompt, place, 1)
        given = [key for key in ("content", "imports", "text") if root.get(key) is not None]
        if given[:1] == ["content"] and len(given) > 1:
            self.add(place, f'a prompt has "content" or the short form, not both; leave {quote(given[1])} out')
        nodes = self._content(root, place, _TOP_LEVEL, 2) or (*self._short(root, place, 2), *self._text(root, place))
        return PromptParts(self.label(root, "schema", place), nodes, place.key("schema"))

    def _short(self, parent: JSONObject, place: JSONPlace, depth: int) -> tuple[Import, ...]:
        """The imports of the short form. depth: how many objects are nested in its list, its own members counted."""
        nodes = []
        for raw, where in self.members(parent, "imports", place):
            if isinstance(raw, str):
                self.count_object(where)
                nodes.append(Import(self.name(raw, where, TAGS), (), (), where.named("import", raw)))
            elif isinstance(raw, JSONObject):
                nodes.append(self._short_import(raw, where, depth))
            else:
                self.add(where, f'this is {shown(raw)}; write the name of a module, or an object {{"name": …}}')
        return tuple(nodes)

    def _short_import(self, raw: JSONObject, place: JSONPlace, depth: int) -> Import:
        if isinstance(raw.get("name"), str):
            place = place.named("import", raw["name"])
        self.check(raw, forms.ShortImport, place, depth)
        name = self.name(raw.get("name"), place.key("name"), TAGS)
        return Import(name, self._arguments(raw.get("arguments"), place), self._short(raw, place, depth + 1), place)

    def _text(self, root: JSONObject, place: JSONPlace) -> tuple[Text, ...]:
        text = root.get("text")
        return (Text(text, place.key("text")),) if isinstance(text, str) and text else ()

    def _content(
        self, parent: JSONObject, place: JSONPlace, takes: frozenset[str], depth: int
    ) -> tuple[Text | Import | PromptTurn, ...]:
        """The nodes that a list holds. depth: how many objects are nested in it, its own members counted."""
        nodes: list[Text | Import | PromptTurn] = []
        for raw, where in self.members(parent, "content", place):
            if isinstance(raw, str):
                self.count_text(where)
                nodes += [Text(raw, where)] if raw else []
            elif kind := self.kind(raw, where, takes):
                if kind not in takes:
                    self.add(where, _misplaced(kind))
                elif kind == "import":
                    nodes.append(self._import(raw, where, depth))
                else:
                    nodes.append(self._turn(raw, where, depth))
        return tuple(nodes)

    def _inner(self, raw: JSONObject, place: JSONPlace, depth: int) -> tuple[Text | Import, ...]:
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
        name = self.name(raw["import"], place.key("import"), TAGS)
        return Import(name, self._arguments(raw.get("arguments"), place), self._inner(raw, place, depth), place)

    def _arguments(self, raw: Any, place: JSONPlace) -> tuple[Argument, ...]:
        if not isinstance(raw, JSONObject):
            return ()
        places = {name: place.named("arguments", name) for name in raw}
        return tuple(Argument(self.name(name, places[name]), value, places[name]) for name, value in raw.items())


def _misplaced(kind: str) -> str:
    if kind == "role":
        return "a turn stands inside something else; turns stand at the top level of a prompt"
    if kind == "module":
        return 'a module is defined in a prompt, but only schemas define; write {"import": …} to import one'
    what = {"param": "a parameter", "union": "a union"}[kind]
    return f"{what} stands in a prompt, but only schemas have them; write what the prompt imports"
