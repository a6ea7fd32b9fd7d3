"""Nodes → PML that reads back to the same nodes.

Two things have no form in PML. Texts that are neighbours are joined: a run ends at a tag alone. What the model reads
stays the same, character by character; only where its tokens are cut at the seam may change, as each text is
tokenized alone. (The texts around a scaffold stay two.) And white space alone beside a chat tag is refused, since PML
takes it for layout. The JSON form keeps both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from inlay.errors import ParameterError, PMLError
from inlay.pml.limits import MAX_DEPTH
from inlay.pml.names import TAGS, is_name
from inlay.pml.nodes import ROLES, Import, Module, Param, PromptTurn, Scaffold, Text, Turn, Union
from inlay.pml.problems import quote
from inlay.pml.prompt_reader import read_prompt
from inlay.pml.schema_reader import read_schema
from inlay.pml.sources import document_from_string
from inlay.pml.whitespace import is_white
from inlay.pml.writer_layout import Flow, Tag, laid_out

if TYPE_CHECKING:
    from inlay.pml.prompt import Prompt
    from inlay.pml.schema import Schema

_Node = Text | Param | Module | Union | Turn | Scaffold | Import | PromptTurn

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_schema(schema: Schema) -> str:
    """The schema as PML that ends in a line break; reads back to the same nodes, all but their places.

    Text that came from ``src`` files stands in it. Raises ParameterError for what PML cannot express: characters that
    XML cannot carry, and nodes that break its rules.
    """
    what = f"schema {quote(schema.name)}"
    children = _between_texts(schema.children, schema.scaffolds)
    chat = any(isinstance(child, Turn) for child in schema.children)
    text = laid_out(
        Tag("schema", (_attribute("name", schema.name, what),), _content(children, what, 1), only_layout=chat)
    )
    _read_back(what, lambda: read_schema(document_from_string(text, "<pml>"), "<pml>", None, declaration_counts=False))
    return text


def write_prompt(prompt: Prompt) -> str:
    """The prompt as PML that ends in a line break; reads back to the same nodes, all but their places.

    Raises ParameterError for what PML cannot express: characters that XML cannot carry, white space alone beside a chat
    tag, and nodes that break PML's rules.
    """
    what = f"the prompt of schema {quote(prompt.schema)}"
    attributes = (_attribute("schema", prompt.schema, what),)
    text = laid_out(Tag("prompt", attributes, _content(prompt.children, what, 1)))
    _read_back(what, lambda: read_prompt(document_from_string(text, "<pml>"), "<pml>", declaration_counts=False))
    return text


def _read_back(what: str, read: Callable[[], object]) -> None:
    # nodes may come from anywhere; the readers know all the rules
    try:
        read()
    except PMLError as error:
        raise ParameterError(f"{what} cannot be written as PML: {error.problems[0].message}") from None


def _between_texts(children: Iterable[_Node], scaffolds: Iterable[Scaffold]) -> Iterator[_Node]:
    """The children and, as far as there are any, a scaffold between neighbouring texts; the other ones at the end."""
    left = list(scaffolds)
    after_text = False
    for child in children:
        is_text = isinstance(child, Text)
        if is_text and after_text and left:
            yield left.pop(0)
        yield child
        after_text = is_text
    yield from left


def _content(nodes: Iterable[_Node], what: str, depth: int) -> tuple[Tag | str, ...]:
    """The content of a tag that has ``depth`` - 1 tags around it."""
    content: list[Tag | str] = []
    for node in nodes:
        if not isinstance(node, Text):
            content.append(_tag(node, depth + 1))
        elif node.text:
            text = _carried(node.text, what)
            if content and isinstance(last := content[-1], str):
                content[-1] = last + text
            else:
                content.append(text)
    _refuse_layout(content, what)
    return tuple(content)


def _refuse_layout(content: list[Tag | str], what: str) -> None:
    for index, child in enumerate(content):
        if isinstance(child, str) and is_white(child):
            for other in content[max(index - 1, 0) : index + 2]:
                if isinstance(other, Tag) and other.flow is Flow.TURN:
                    beside = f"white space alone beside <{other.name}> is layout in PML"
                    raise ParameterError(f"{what} cannot be written as PML: {beside}; leave it out, or use to_json()")


def _tag(node: Param | Module | Union | Turn | Scaffold | Import | PromptTurn, depth: int) -> Tag:
    if depth > MAX_DEPTH:
        raise ParameterError(f"tags would be nested more than {MAX_DEPTH} deep; nest less deeply")
    if isinstance(node, Param):
        return _param(node)
    if isinstance(node, Scaffold):
        return Tag("scaffold", (("modules", " ".join(_name(name) for name in node.modules)),))
    if isinstance(node, Module):
        what = f"module {quote(node.name)}"
        return Tag("module", (_attribute("name", node.name, what),), _content(node.children, what, depth))
    if isinstance(node, Union):
        return Tag("union", children=_content(node.members, "a union", depth), only_layout=True)
    if isinstance(node, Import):
        return _import(node, depth)
    if node.role not in ROLES:
        raise ParameterError(f"{quote(node.role)} is no role; use one of {', '.join(ROLES)}")
    return Tag(node.role, children=_content(node.children, f"<{node.role}>", depth), flow=Flow.TURN)


def _param(param: Param) -> Tag:
    what = f"parameter {quote(param.name)}"
    attributes = [_attribute("name", param.name, what), ("len", str(param.length))]
    if param.default is not None:
        attributes.append(_attribute("default", param.default, what))
    return Tag("param", tuple(attributes), flow=Flow.INLINE)


def _import(node: Import, depth: int) -> Tag:
    if node.name in TAGS:
        raise ParameterError(f"{quote(node.name)} is a tag of PML, not a module that a prompt can import; rename it")
    what = f"module {quote(node.name)}"
    attributes = tuple(_attribute(_name(argument.name), argument.value, what) for argument in node.arguments)
    return Tag(_name(node.name), attributes, _content(node.children, what, depth), flow=Flow.IMPORT)


def _name(name: str) -> str:
    """A name that stands outside of quotation marks, or among others in them."""
    if not is_name(name):
        raise ParameterError(f"{quote(name)} is not a name of PML; rename it")
    return name


def _attribute(name: str, value: str, what: str) -> tuple[str, str]:
    return name, _carried(value, what)


def _carried(text: str, what: str) -> str:
    if found := _NO_XML.search(text):
        character = f"the character U+{ord(found[0]):04X} at index {found.start()} of a text or value"
        raise ParameterError(f"{what} holds {character}, which XML cannot carry; leave it out")
    return text
