"""Turns elements into the nodes of a schema or a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.errors import Place
from inlay.pml.attributes import TAGS, Attributes, is_in_namespace
from inlay.pml.nodes import (
    ROLES,
    Argument,
    Import,
    ImportSet,
    Meta,
    Module,
    Param,
    PromptTurn,
    Scaffold,
    Text,
    Turn,
    Union,
    numbered,
)
from inlay.pml.parser import Element, Run, is_white, parse, settle
from inlay.pml.problems import Problems
from inlay.pml.resolve_problems import misplaced_tag, misplaced_text, nested_set, text_in_set
from inlay.pml.rules import SchemaParts, SchemaRules, Words, path_of
from inlay.pml.sources import Folder
from inlay.wording import clip

_Node = Text | Param | Module | Union | Turn | Scaffold
_TEXT = "text"  # cannot collide with a tag, because PML has no such tag
_PIECES = frozenset((_TEXT, "module", "union"))
_PARAMS = frozenset(("param", "parameter"))
_TURNS = frozenset(ROLES)
_MEMBERS = frozenset(("module",))
_SCHEMA = _PIECES | _TURNS | {"scaffold"}
_WORDS = Words("<scaffold>", "<union>", "from_string")


def read_schema(data: bytes, source: str, folder: Folder | None, *, declaration_counts: bool) -> SchemaParts:
    """Read the parts of a schema in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    root = parse(data, problems, declaration_counts=declaration_counts)
    parts = None if root is None else SchemaReader(folder, problems, _WORDS).read(root)
    problems.raise_any()
    assert parts is not None  # without a root there is a problem
    return parts


class SchemaReader:
    """Reads one schema, and reports its problems to ``problems``. ``words`` are the terms of its written form."""

    def __init__(self, folder: Folder | None, problems: Problems, words: Words) -> None:
        self._problems = problems
        self._attributes = Attributes(problems)
        self._rules = SchemaRules(folder, problems, words)
        self._scope: tuple[str, ...] = ()  # names of the enclosing modules, outermost first
        self._turn: str | None = None  # role of the enclosing turn

    def read(self, root: Element) -> SchemaParts | None:
        """Return the parts of a schema, or None if the outermost element is another."""
        if root.tag != "schema":
            self._problems.add(root.place, _not_a_schema(root.tag), code="pml.wrong_document")
            return None
        self._attributes.check(root)
        preserve = self._attributes.preserve(root, inherited=False)
        meta = self._meta(root)
        nodes = self._content(root, preserve, _SCHEMA)
        children = numbered(tuple(node for node in nodes if isinstance(node, Text | Module | Union | Turn)))
        scaffolds = tuple(node for node in nodes if isinstance(node, Scaffold))
        if root.closed:
            scaffolds = self._rules.checked_scaffolds(scaffolds, children)
        return SchemaParts(self._attributes.text(root, "name") or "", children, scaffolds, meta)

    def _content(self, parent: Element, preserve: bool, takes: frozenset[str]) -> list[_Node]:
        nodes: list[_Node] = []
        for index in range(_front(parent), len(parent.children)):
            child = parent.children[index]
            if isinstance(child, Run):
                if not _is_beside_turn(parent, index):
                    nodes += self._text(child, parent, preserve, takes)
            elif child.tag in takes:
                nodes.append(self._node(child, preserve))
            else:
                message = misplaced_tag(child.tag, parent.tag, self._problems, turn=self._turn)
                self._problems.add(
                    child.place, message, code="pml.misplaced_tag" if child.tag in TAGS else "pml.unknown_tag"
                )
                if child.tag in ("module", "union"):
                    self._node(child, preserve)  # for the problems inside it and the names that it defines
        return nodes

    def _meta(self, element: Element) -> tuple[Meta, ...]:
        """Return the metadata of an element, with namespaced names first."""
        found = sorted(element.meta, key=lambda one: not is_in_namespace(one.name)) + self._attributes.meta(element)
        for child in element.children[: _front(element)]:
            if isinstance(child, Element):
                self._attributes.check(child)
                if child.children:
                    self._problems.add(
                        child.place, '<meta> is not empty; write <meta name="…" value="…"/>', code="pml.not_empty"
                    )
                value = child.attributes.get("value")
                found.append(Meta(self._attributes.name(child) or "", value.value if value else "", child.place))
        self._rules.check_meta(found)
        return tuple(found)

    def _text(self, run: Run, parent: Element, preserve: bool, takes: frozenset[str]) -> list[Text]:
        if _TEXT in takes:
            return _texts(run, preserve)
        if not is_white(run.text):
            self._problems.add(run.place, misplaced_text(parent.tag), code="pml.misplaced_text")
        return []

    def _node(self, element: Element, preserve: bool) -> _Node:
        self._attributes.check(element)
        if element.tag in ("param", "parameter"):
            return self._param(element)
        if element.tag == "scaffold":
            return self._scaffold(element)
        preserve = self._attributes.preserve(element, preserve) if element.tag != "union" else preserve
        if element.tag == "module":
            return self._module(element, preserve)
        if element.tag == "union":
            return self._union(element, preserve)
        return self._chat_turn(element, preserve)

    def _chat_turn(self, element: Element, preserve: bool) -> Turn:
        meta = self._meta(element)
        self._turn = element.tag
        nodes = self._content(element, preserve, _PIECES | _PARAMS if self._scope else _PIECES)
        self._turn = None  # turns do not nest
        children = tuple(node for node in nodes if isinstance(node, Text | Param | Module | Union))
        return Turn(element.tag, children, element.place, meta=meta)

    def _module(self, element: Element, preserve: bool) -> Module:
        name = self._attributes.name(element)
        scope, self._scope = self._scope, (*self._scope, name or "")
        if name is not None:
            self._rules.define(self._scope, element.place, self._attributes.place(element, "name"))
        cache, meta = self._attributes.cache(element), self._meta(element)
        takes = _PIECES | _PARAMS if self._turn else _PIECES | _PARAMS | _TURNS
        nodes = self._content(element, preserve, takes)
        children = tuple(node for node in nodes if isinstance(node, Text | Param | Module | Union | Turn))
        self._rules.check_params(path_of(self._scope), children)
        if "src" in element.attributes:
            children = self._file(element)
        self._scope = scope
        return Module(name or "", children, element.place, cache=cache, meta=meta)

    def _file(self, element: Element) -> tuple[Text, ...]:
        src = element.attributes["src"]
        content = element.children[_front(element) :]
        if any(isinstance(child, Element) or child.exact or not is_white(child.text) for child in content):
            self._problems.add(
                src.place, "the module has both src and content; leave one of them out", code="pml.src_and_content"
            )
            return ()
        return self._rules.file(src.value, src.place)

    def _union(self, element: Element, preserve: bool) -> Union:
        meta = self._meta(element)
        members = tuple(node for node in self._content(element, preserve, _MEMBERS) if isinstance(node, Module))
        content = element.children[_front(element) :]
        if element.closed and not any(isinstance(child, Element) for child in content):
            self._problems.add(
                element.place, "<union> is empty; put a <module> for each choice into it", code="pml.empty_union"
            )
        scaffold = element.attributes.get("scaffold")
        if scaffold is None:
            return Union(members, element.place, meta=meta)
        if element.closed:
            self._rules.check_member(scaffold.value, members, scaffold.place)
        return Union(members, element.place, scaffold=scaffold.value, meta=meta)

    def _param(self, element: Element) -> Param:
        name = self._attributes.name(element)
        if any(isinstance(child, Element) or not is_white(child.text) for child in element.children):
            remedy = f'write <{element.tag} …/>, and a default as default="…"'
            self._problems.add(element.place, f"<{element.tag}> is not empty; {remedy}", code="pml.not_empty")
        default, scaffold = element.attributes.get("default"), element.attributes.get("scaffold")
        return Param(
            name or "",
            self._attributes.length(element),
            default.value if default else None,
            element.place,
            scaffold=scaffold.value if scaffold else None,
            meta=self._meta(element),
        )

    def _scaffold(self, element: Element) -> Scaffold:
        if element.children:
            self._problems.add(
                element.place, '<scaffold> is not empty; write <scaffold modules="… …"/>', code="pml.not_empty"
            )
        return Scaffold(tuple((self._attributes.text(element, "modules") or "").split()), element.place)


def _front(element: Element) -> int:
    """Return the number of leading children that are <meta> tags or white space before them."""
    front = 0
    for number, child in enumerate(element.children, 1):
        if isinstance(child, Element) and child.tag == "meta":
            front = number
        elif isinstance(child, Element) or not is_white(child.text):
            break
    return front


def _texts(run: Run, preserve: bool) -> list[Text]:
    text = run.text if preserve or run.exact else settle(run.text)
    return [Text(text, run.place)] if text else []


def _is_beside_turn(parent: Element, index: int) -> bool:
    """Return True for a run of only white space beside a chat tag. It is layout even without a line break."""
    run = parent.children[index]
    neighbours = parent.children[max(index - 1, 0) : index + 2]
    beside = any(isinstance(child, Element) and child.tag in ROLES for child in neighbours)
    return isinstance(run, Run) and not run.exact and is_white(run.text) and beside


def _not_a_schema(tag: str) -> str:
    remedy = "read it as a Prompt" if tag == "prompt" else 'write <schema name="…"> around everything'
    return f"the outermost tag is <{clip(tag)}>, not <schema>; {remedy}"


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The contents of a prompt file."""

    schema: str
    children: tuple[Text | Import | ImportSet | PromptTurn, ...]
    place: Place


def read_prompt(data: bytes, source: str, *, declaration_counts: bool) -> PromptParts:
    """Read the parts of a prompt in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    root = parse(data, problems, declaration_counts=declaration_counts)
    parts = None if root is None else PromptReader(problems).read(root)
    problems.raise_any()
    assert parts is not None  # without a root there is a problem
    return parts


class PromptReader:
    """Reads one prompt, and reports its problems to ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._attributes = Attributes(problems)

    def read(self, root: Element) -> PromptParts | None:
        """Return the parts of a prompt, or None if the outermost element is another."""
        if root.tag != "prompt":
            self._problems.add(root.place, _not_a_prompt(root.tag), code="pml.wrong_document")
            return None
        self._attributes.check(root)
        preserve = self._attributes.preserve(root, inherited=False)
        children: list[Text | Import | ImportSet | PromptTurn] = []
        for index, child in enumerate(root.children):
            if isinstance(child, Element) and child.tag in ROLES:
                children.append(self._turn(child, preserve))
            elif not _is_beside_turn(root, index):
                children += self._child(child, root, preserve)
        schema = self._attributes.text(root, "schema") or ""
        return PromptParts(schema, tuple(children), self._attributes.place(root, "schema"))

    def _turn(self, element: Element, preserve: bool) -> PromptTurn:
        self._attributes.check(element)
        preserve = self._attributes.preserve(element, preserve)
        return PromptTurn(element.tag, self._content(element, preserve), element.place)

    def _content(self, parent: Element, preserve: bool) -> tuple[Text | Import | ImportSet, ...]:
        return tuple(node for child in parent.children for node in self._child(child, parent, preserve))

    def _child(self, child: Element | Run, parent: Element, preserve: bool) -> list[Text | Import | ImportSet]:
        if isinstance(child, Run):
            return [*_texts(child, preserve)]
        if child.tag == "set":
            return [self._set(child, preserve)]
        if child.tag in TAGS:
            self._problems.add(child.place, _misplaced(child.tag, parent.tag), code="pml.misplaced_tag")
            return []
        return [self._import(child, preserve)]

    def _set(self, element: Element, preserve: bool) -> ImportSet:
        self._attributes.check(element)
        imports: list[Import] = []
        for child in element.children:
            if isinstance(child, Run):
                if not is_white(child.text):
                    self._problems.add(child.place, text_in_set(), code="pml.misplaced_text")
            elif child.tag in TAGS:
                self._problems.add(child.place, _misplaced(child.tag, element.tag), code="pml.misplaced_tag")
            else:
                imports.append(self._import(child, preserve))
        return ImportSet(tuple(imports), element.place)

    def _import(self, element: Element, preserve: bool) -> Import:
        arguments = tuple(
            Argument(name, attribute.value, attribute.place)
            for name, attribute in element.attributes.items()
            if name != "xml:space"
        )
        preserve = self._attributes.preserve(element, preserve)
        return Import(element.tag, arguments, self._content(element, preserve), element.place)


def _misplaced(tag: str, parent: str) -> str:
    if tag in ROLES:
        remedy = f"close <{clip(parent)}> first"
        return f"<{tag}> stands inside <{clip(parent)}>; chat tags stand at the top level of a prompt: {remedy}"
    if tag == "set":
        return nested_set()
    if tag == "prompt":
        return "<prompt> stands inside another; keep one <prompt> in a file, as its outermost tag"
    return f"<{tag}> is a tag of schemas; to import a module write its name as a tag, as in <miami/>"


def _not_a_prompt(tag: str) -> str:
    remedy = "read it as a Schema" if tag == "schema" else 'write <prompt schema="…"> around everything'
    return f"the outermost tag is <{clip(tag)}>, not <prompt>; {remedy}"
