"""Reads schemas and prompts in their JSON form.

A document is checked against the models of ``json_form`` and turned into elements, as those that the XML parser makes.
The readers of PML make nodes of them, so that both forms have the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from inlay.errors import Place, PMLError, Problem
from inlay.pml import json_form as forms
from inlay.pml import nodes as limits
from inlay.pml.json_form import JSONObject, parse_json
from inlay.pml.nodes import Meta
from inlay.pml.parser import Attribute, Element, Run
from inlay.pml.problems import JSONPlace, Problems, StopReadingError
from inlay.pml.readers import PromptParts, PromptReader, SchemaReader
from inlay.pml.rules import SchemaParts, Words
from inlay.pml.sources import Folder
from inlay.wording import quote, shown

_WORDS = Words("the scaffold", "the union", "from_json")
_MAX_TEXTS = 2 * limits.MAX_ELEMENTS  # the most that PML can have between its tags
_ATTRIBUTES = {
    "module": "name",
    "param": "name",
    "name": "name",
    "of": "schema",
    "len": "len",
    "default": "default",
    "scaffold": "scaffold",
    "src": "src",
    "cache": "cache",
}
"""The attribute of PML for each field of a model."""


def read_schema_json(data: bytes, source: str, folder: Folder | None) -> SchemaParts:
    """Read the parts of a schema in UTF-8; raises PMLError with the problems found."""
    place, problems = JSONPlace(source), Problems(source)
    root = _root(data, place, 'a schema is an object: write {"name": "…", "content": […]}')
    if "schema" in root and "name" not in root:
        remedy = 'read it as a Prompt, or write "name" for a schema'
        message = f'this is a prompt, as it has the key "schema"; {remedy}'
        raise PMLError([Problem(place, message, code="pml.wrong_document")])
    schema = forms.validated(root, forms.Schema, source)
    parts = None
    with suppress(StopReadingError):
        parts = SchemaReader(folder, problems, _WORDS).read(_Elements(problems).schema(schema, place))
    problems.raise_any()
    assert parts is not None  # a reading that stops leaves a problem
    return parts


def read_prompt_json(data: bytes, source: str) -> PromptParts:
    """Read the parts of a prompt in UTF-8; raises PMLError with the problems found."""
    place, problems = JSONPlace(source), Problems(source)
    root = _root(data, place, 'a prompt is an object: write {"schema": "…", "content": […]}')
    if "name" in root and "schema" not in root:
        remedy = 'read it as a Schema, or write "schema" with the name of the prompt\'s schema'
        message = f'this is a schema, as it has the key "name"; {remedy}'
        raise PMLError([Problem(place, message, code="pml.wrong_document")])
    prompt = forms.validated(root, forms.Prompt, source)
    parts = None
    with suppress(StopReadingError):
        parts = PromptReader(problems).read(_Elements(problems).prompt(prompt, place))
    problems.raise_any()
    assert parts is not None  # a reading that stops leaves a problem
    return parts


def _root(data: bytes, place: JSONPlace, expected: str) -> JSONObject:
    root = parse_json(data, place.source)
    if not isinstance(root, JSONObject):
        raise PMLError([Problem(place, f"this is {shown(root, kind=True)}; {expected}", code="pml.wrong_type")])
    return root


class _Elements:
    """Makes the elements of one document, and reports exceeded limits and misplaced objects to ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._elements = 0
        self._texts = 0
        self._modules = 0  # around the current object
        self._in_turn = False

    def schema(self, schema: forms.Schema, place: JSONPlace) -> Element:
        """Return the outermost element of a schema."""
        root = self._element("schema", schema, place, 1)
        for index, names in enumerate(schema.scaffolds or ()):
            where = place.key("scaffolds").index(index)
            self._count(where)
            modules = Attribute(" ".join(names), where)
            root.children.append(Element("scaffold", {"modules": modules}, where, closed=True))
        return root

    def prompt(self, prompt: forms.Prompt, place: JSONPlace) -> Element:
        """Return the outermost element of a prompt."""
        given = [key for key in ("content", "imports", "text") if getattr(prompt, key) is not None]
        if given[:1] == ["content"] and len(given) > 1:
            self._problems.add(
                place,
                f'a prompt has "content" or the short form, not both; leave {quote(given[1])} out',
                code="pml.conflicting_keys",
            )
        root = self._element("prompt", prompt, place, 1)
        if prompt.text is not None:
            root.children += self._members(prompt.text, place.key("text"), 2)
        return root

    def _element(self, tag: str, form: forms.Form, place: JSONPlace, depth: int) -> Element:
        """Return the element of an object at this nesting depth. The outermost object has depth 1."""
        self._count(place, depth)
        if isinstance(form, forms.Import | forms.ShortImport):
            arguments = (form.arguments or {}).items()
            attributes = {name: Attribute(value, place.named("arguments", name)) for name, value in arguments}
        else:
            attributes = _attributes(form, place)
        children: list[Element | Run] = []
        for key in ("content", "union", "set", "imports"):
            imports = key == "imports" or isinstance(form, forms.ShortSet)
            children += self._members(getattr(form, key, None), place.key(key), depth + 1, imports=imports)
        return Element(tag, attributes, place, children, closed=True, meta=_meta(getattr(form, "meta", None), place))

    def _members(
        self, members: str | Iterable[str | forms.Form] | None, place: JSONPlace, depth: int, *, imports: bool = False
    ) -> list[Element | Run]:
        """Return the members of a list at this nesting depth. A single text counts as a list of one.

        Args:
            imports: Texts are names of modules to import.
        """
        if isinstance(members, str):
            return self._run(members, place)
        nodes: list[Element | Run] = []
        for index, member in enumerate(members or ()):
            where = place.index(index)
            if not isinstance(member, str):
                nodes += self._member(member, where, depth)
            elif imports:
                self._count(where)
                nodes.append(Element(member, {}, where.named("import", member), closed=True))
            else:
                nodes += self._run(member, where)
        return nodes

    def _run(self, text: str, place: JSONPlace) -> list[Element | Run]:
        self._texts += 1
        if self._texts > _MAX_TEXTS:
            self._stop(place, f"there are more than {_MAX_TEXTS} texts; join neighbouring ones", code="pml.too_large")
        return [Run(text, place, exact=True)] if text else []

    def _member(self, form: forms.Form, place: JSONPlace, depth: int) -> list[Element]:
        """Return the element of an object, or none for a misplaced one."""
        tag = "union" if isinstance(form, forms.Union) else "set"
        if isinstance(form, forms.Module):
            self._modules += 1
            element = self._element("module", form, place.named("module", form.module), depth)
            self._modules -= 1
            return [element]
        if isinstance(form, forms.Param):
            if not self._modules:
                self._problems.add(place, forms.misplaced("param"), code="pml.misplaced_object")
                return []
            tag, place = "param", place.named("param", form.param)
        elif isinstance(form, forms.Turn | forms.PromptTurn):
            if self._in_turn:
                self._problems.add(place, forms.misplaced("role"), code="pml.misplaced_object")
                return []
            self._in_turn = True  # turns do not nest
            element = self._element(form.role, form, place.key(form.role), depth)
            self._in_turn = False
            return [element]
        elif isinstance(form, forms.Import | forms.ShortImport):
            tag = form.module if isinstance(form, forms.Import) else form.name
            place = place.named("import", tag)
        return [self._element(tag, form, place, depth)]

    def _count(self, place: JSONPlace, depth: int = 1) -> None:
        """Count an object or a scaffold; raises StopReadingError if a limit is exceeded."""
        self._elements += 1
        if depth > limits.MAX_DEPTH:
            self._stop(
                place, f"objects are nested more than {limits.MAX_DEPTH} deep; nest less deeply", code="pml.too_deep"
            )
        if self._elements > limits.MAX_ELEMENTS:
            self._stop(
                place,
                f"there are more than {limits.MAX_ELEMENTS} objects; split this into several files",
                code="pml.too_large",
            )

    def _stop(self, place: Place, message: str, *, code: str) -> None:
        self._problems.add(place, message, code=code)
        raise StopReadingError


def _attributes(form: forms.Form, place: JSONPlace) -> dict[str, Attribute]:
    found = {}
    for key, name in _ATTRIBUTES.items():
        if (value := getattr(form, key, None)) is not None:
            text = value if isinstance(value, str) else str(value).lower()  # True becomes "true"
            found[name] = Attribute(text, place.key(type(form).model_fields[key].alias or key))
    return found


def _meta(meta: Mapping[str, str] | None, place: JSONPlace) -> tuple[Meta, ...]:
    return tuple(Meta(name, value, place.named("meta", name)) for name, value in (meta or {}).items())
