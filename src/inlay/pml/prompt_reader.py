"""Elements → the nodes of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.errors import Place
from inlay.pml.attributes import Attributes
from inlay.pml.names import TAGS
from inlay.pml.nodes import ROLES, Argument, Import, PromptTurn, Text
from inlay.pml.parser import Element, Run, parse
from inlay.pml.problems import Problems, clip
from inlay.pml.whitespace import is_white, settle


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a prompt file holds."""

    schema: str
    children: tuple[Text | Import | PromptTurn, ...]
    place: Place


def read_prompt(data: bytes, source: str, *, declaration_counts: bool) -> PromptParts:
    """The parts of a prompt in UTF-8; raises PMLError with every problem found."""
    problems = Problems(source)
    root = parse(data, problems, declaration_counts=declaration_counts)
    parts = None if root is None else _PromptReader(problems).read(root)
    problems.raise_any()
    assert parts is not None  # without a root there is a problem
    return parts


class _PromptReader:
    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._attributes = Attributes(problems)

    def read(self, root: Element) -> PromptParts | None:
        if root.tag != "prompt":
            self._problems.add(root.place, _not_a_prompt(root.tag))
            return None
        self._attributes.check(root)
        preserve = self._attributes.preserve(root, inherited=False)
        children: list[Text | Import | PromptTurn] = []
        for index, child in enumerate(root.children):
            if isinstance(child, Element) and child.tag in ROLES:
                children.append(self._turn(child, preserve))
            elif not self._separates_turns(root, index):
                children += self._child(child, root, preserve)
        schema = self._attributes.text(root, "schema") or ""
        return PromptParts(schema, tuple(children), self._attributes.place(root, "schema"))

    def _separates_turns(self, root: Element, index: int) -> bool:
        """Whether this is white space alone beside a chat tag: layout, with or without a line break."""
        run = root.children[index]
        neighbours = root.children[max(index - 1, 0) : index + 2]
        beside = any(isinstance(child, Element) and child.tag in ROLES for child in neighbours)
        return isinstance(run, Run) and is_white(run.text) and beside

    def _turn(self, element: Element, preserve: bool) -> PromptTurn:
        self._attributes.check(element)
        preserve = self._attributes.preserve(element, preserve)
        return PromptTurn(element.tag, self._content(element, preserve), element.place)

    def _content(self, parent: Element, preserve: bool) -> tuple[Text | Import, ...]:
        return tuple(node for child in parent.children for node in self._child(child, parent, preserve))

    def _child(self, child: Element | Run, parent: Element, preserve: bool) -> list[Text | Import]:
        if isinstance(child, Run):
            text = child.text if preserve else settle(child.text)
            return [Text(text, child.place)] if text else []
        if child.tag in TAGS:
            self._problems.add(child.place, _misplaced(child.tag, parent.tag))
            return []
        return [self._import(child, preserve)]

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
    if tag == "prompt":
        return "<prompt> stands inside another; keep one <prompt> in a file, as its outermost tag"
    return f"<{tag}> is a tag of schemas; to import a module write its name as a tag, as in <miami/>"


def _not_a_prompt(tag: str) -> str:
    remedy = "read it as a Schema" if tag == "schema" else 'write <prompt schema="…"> around everything'
    return f"the outermost tag is <{clip(tag)}>, not <prompt>; {remedy}"
