"""Writes nodes as readable PML that reads back to the same nodes.

The writer puts each run of text on indented lines if the white-space rule (``settle``) restores that exact text.
Otherwise the enclosing tag gets ``xml:space="preserve"``, and the writer adds no white space inside it.

PML cannot express two things. The JSON form keeps both:

- Neighbouring texts become one text, because only a tag ends a run. The characters stay the same, but the tokens at
  the seam may change, because each text is tokenized alone. Texts around a scaffold stay separate.
- White space alone beside a chat tag is layout in PML, so the writer raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import zip_longest

from inlay.errors import ParameterError, PMLError
from inlay.pml.attributes import TAGS, is_in_namespace, is_name
from inlay.pml.nodes import (
    MAX_DEPTH,
    ROLES,
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
)
from inlay.pml.parser import is_white, settle
from inlay.pml.readers import read_prompt, read_schema
from inlay.pml.rules import names_of, opened, path_of
from inlay.pml.sources import document_from_string
from inlay.wording import clip, quote

_Node = Text | Param | Module | Union | Turn | Scaffold | Import | ImportSet | PromptTurn

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_INDENTATION = "  "
_WIDTH = 100  # characters of a line that holds several imports
# XML parsers turn a bare carriage return into a line feed
_IN_TEXT = str.maketrans({"&": "&amp;", "<": "&lt;", "\r": "&#13;"})
_IN_VALUE = str.maketrans({"&": "&amp;", "<": "&lt;", '"': "&quot;", "\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})


class Flow(Enum):
    """The layout of a tag among its neighbours."""

    BLOCK = "on lines of its own"
    IMPORT = "on lines of its own, or beside others where there is little"
    INLINE = "in the middle of a text"
    TURN = "on lines of its own, and white space alone beside it is layout in any case"


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag to be written. Neighbouring texts in ``children`` are already joined, and none is empty.

    ``only_layout``: the tag holds no text, so white space alone in it is always layout.
    """

    name: str
    attributes: tuple[tuple[str, str], ...] = ()
    children: tuple[Tag | str, ...] = ()
    flow: Flow = Flow.BLOCK
    only_layout: bool = False


def write_schema(
    name: str,
    children: Iterable[Text | Module | Union | Turn],
    scaffolds: Iterable[Scaffold],
    meta: Iterable[Meta] = (),
) -> str:
    """Write a schema as PML that ends in a line break and reads back to the same nodes, except for their places.

    Text from ``src`` files is written inline.

    Raises:
        ParameterError: XML cannot carry a character, white space alone is beside a chat tag, or nodes break PML's
            rules.
    """
    what = f"schema {quote(name)}"
    nodes = list(_between_texts(children, scaffolds))
    chat = any(isinstance(node, Turn) for node in nodes) and not any(isinstance(node, Text) for node in nodes)
    root = Tag("schema", (_attribute("name", name, what),), _content(nodes, what, 1), only_layout=chat)
    text = _laid_out(_with_meta(root, meta, what))
    _read_back(what, lambda: read_schema(document_from_string(text, "<pml>"), "<pml>", None, declaration_counts=False))
    return text


def write_prompt(schema: str, children: Iterable[Text | Import | ImportSet | PromptTurn]) -> str:
    """Write a prompt as PML that ends in a line break and reads back to the same nodes, except for their places.

    Args:
        schema: The name of the prompt's schema.

    Raises:
        ParameterError: XML cannot carry a character, white space alone is beside a chat tag, or nodes break PML's
            rules.
    """
    what = f"the prompt of schema {quote(schema)}"
    attributes = (_attribute("schema", schema, what),)
    text = _laid_out(Tag("prompt", attributes, _content(children, what, 1)))
    _read_back(what, lambda: read_prompt(document_from_string(text, "<pml>"), "<pml>", declaration_counts=False))
    return text


def _read_back(what: str, read: Callable[[], object]) -> None:
    # callers may pass any nodes, and the readers check every rule
    try:
        read()
    except PMLError as error:
        raise ParameterError(
            f"{what} cannot be written as PML: {error.problems[0].message}", code="pml.not_writable"
        ) from None


def _between_texts(children: Iterable[_Node], scaffolds: Iterable[Scaffold]) -> Iterator[_Node]:
    """Yield the children with a scaffold between neighbouring texts, while scaffolds last, and the other scaffolds
    after them.
    """
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
    """Return the content of a tag at nesting depth ``depth``. The outermost tag has depth 1."""
    content: list[Tag | str] = []
    for node in opened(nodes):
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
                    raise ParameterError(
                        f"{what} cannot be written as PML: {beside}; leave it out, or use to_json()",
                        code="pml.not_writable",
                    )


def _tag(node: Param | Module | Union | Turn | Scaffold | Import | ImportSet | PromptTurn, depth: int) -> Tag:
    if depth > MAX_DEPTH:
        raise ParameterError(f"tags would be nested more than {MAX_DEPTH} deep; nest less deeply", code="pml.too_deep")
    if isinstance(node, Param):
        return _param(node)
    if isinstance(node, Scaffold):
        paths = (path_of(tuple(map(_name, names_of(path)))) for path in node.modules)
        return Tag("scaffold", (("modules", " ".join(paths)),))
    if isinstance(node, Module):
        what = f"module {quote(node.name)}"
        attributes = (_attribute("name", node.name, what), *(() if node.cache else (("cache", "false"),)))
        return _with_meta(Tag("module", attributes, _content(node.children, what, depth)), node.meta, what)
    if isinstance(node, Union):
        attributes = () if node.scaffold is None else (_attribute("scaffold", node.scaffold, "a union"),)
        union = Tag("union", attributes, _content(node.members, "a union", depth), only_layout=True)
        return _with_meta(union, node.meta, "a union")
    if isinstance(node, Import):
        return _import(node, depth)
    if isinstance(node, ImportSet):
        return Tag("set", children=_content(node.imports, "a set", depth), only_layout=True)
    if node.role not in ROLES:
        raise ParameterError(f"{quote(node.role)} is no role; use one of {', '.join(ROLES)}", code="pml.unknown_role")
    turn = Tag(node.role, children=_content(node.children, f"<{node.role}>", depth), flow=Flow.TURN)
    return _with_meta(turn, node.meta if isinstance(node, Turn) else (), f"<{node.role}>")


def _with_meta(tag: Tag, meta: Iterable[Meta], what: str) -> Tag:
    """Return the tag with its metadata, as namespaced attributes and leading <meta> tags."""
    told = [(one.name, _carried(one.value, what)) for one in meta]
    attributes = tuple(one for one in told if is_in_namespace(one[0]))
    tags = tuple(
        Tag("meta", (_attribute("name", name, what), ("value", value)))
        for name, value in told
        if not is_in_namespace(name)
    )
    return replace(tag, attributes=tag.attributes + attributes, children=tags + tag.children)


def _param(param: Param) -> Tag:
    what = f"parameter {quote(param.name)}"
    attributes = [_attribute("name", param.name, what), ("len", str(param.length))]
    for name, value in (("default", param.default), ("scaffold", param.scaffold)):
        if value is not None:
            attributes.append(_attribute(name, value, what))
    if told := [one.name for one in param.meta if not is_in_namespace(one.name)]:
        beyond = f"the metadata {quote(told[0])}, which in a parameter stands in a namespace"
        raise ParameterError(
            f"{what} has {beyond}; write app:{clip(told[0])}, or use to_json()", code="pml.not_writable"
        )
    return _with_meta(Tag("param", tuple(attributes), flow=Flow.INLINE), param.meta, what)


def _import(node: Import, depth: int) -> Tag:
    if node.name in TAGS:
        raise ParameterError(
            f"{quote(node.name)} is a tag of PML, not a module that a prompt can import; rename it",
            code="pml.invalid_name",
        )
    what = f"module {quote(node.name)}"
    attributes = tuple(_attribute(_name(argument.name), argument.value, what) for argument in node.arguments)
    return Tag(_name(node.name), attributes, _content(node.children, what, depth), flow=Flow.IMPORT)


def _name(name: str) -> str:
    """Return a name that is written without quotation marks or in a list; raises ParameterError if it is not a name."""
    if not is_name(name):
        raise ParameterError(f"{quote(name)} is not a name of PML; rename it", code="pml.invalid_name")
    return name


def _attribute(name: str, value: str, what: str) -> tuple[str, str]:
    return name, _carried(value, what)


def _carried(text: str, what: str) -> str:
    if found := _NO_XML.search(text):
        character = f"the character U+{ord(found[0]):04X} at index {found.start()} of a text or value"
        raise ParameterError(
            f"{what} holds {character}, which XML cannot carry; leave it out", code="pml.invalid_character"
        )
    return text


def _laid_out(root: Tag) -> str:
    """Return the document, which ends in a line break."""
    return _written(root, 0, preserve=False) + "\n"


def _written(tag: Tag, level: int, *, preserve: bool) -> str:
    """Return the tag with its content. ``preserve``: the enclosing tags keep white space."""
    if not tag.children:
        return f"<{tag.name}{_attributes(tag)}/>"
    if (line := _on_one_line(tag, level)) is not None:
        return line
    runs = _on_lines(tag, level)
    keeps = preserve if tag.only_layout else runs is None
    space = "" if keeps == preserve else f' xml:space="{"preserve" if keeps else "default"}"'
    runs = _verbatim(tag, level) if runs is None else runs
    inner = (_written(child, level + 1, preserve=keeps) for child in tag.children if isinstance(child, Tag))
    content = "".join(piece for pair in zip_longest(map(_text, runs), inner, fillvalue="") for piece in pair)
    return f"<{tag.name}{_attributes(tag)}{space}>{content}</{tag.name}>"


def _on_one_line(tag: Tag, level: int) -> str | None:
    """Return the whole tag on one line, which keeps every text without a line break, or None if lines read better."""
    inner = [child for child in tag.children if isinstance(child, Tag)]
    if any(child.flow is not Flow.INLINE and (child.flow is not Flow.IMPORT or child.children) for child in inner):
        return None
    if any("\n" in child for child in tag.children if isinstance(child, str)):
        return None
    pieces = (_text(child) if isinstance(child, str) else _written(child, 0, preserve=False) for child in tag.children)
    line = f"<{tag.name}{_attributes(tag)}>{''.join(pieces)}</{tag.name}>"
    crowded = level == 0 or len(line) > _WIDTH
    return None if crowded and any(child.flow is Flow.IMPORT for child in inner) else line


def _on_lines(tag: Tag, level: int) -> list[str] | None:
    """Return the runs of a tag on indented lines, or None if reading would not restore some text."""
    settled: list[str] = []
    for text, before, after in _runs(tag):
        own_line = any(one is None or one.flow is not Flow.INLINE for one in (before, after))
        end = _INDENTATION * (level if after is None else level + 1)
        run = _run(text, before, _INDENTATION * (level + 1), end) if text else _layout(own_line, end)
        if run is None:
            return None
        settled.append(run)
    return settled


def _verbatim(tag: Tag, level: int) -> list[str]:
    """Return the runs of a tag that keeps white space. Layout is added only beside chat tags."""
    kept: list[str] = []
    for text, before, after in _runs(tag):
        own_line = any(one is not None and one.flow is Flow.TURN for one in (before, after))
        kept.append(text or _layout(own_line, _INDENTATION * (level if after is None else level + 1)))
    return kept


def _runs(tag: Tag) -> Iterator[tuple[str, Tag | None, Tag | None]]:
    """Yield the texts before, between and after the inner tags, with the tags before and after each. Texts may be
    empty.

    None stands for the start and the end of ``tag`` itself.
    """
    text, before = "", None
    for child in tag.children:
        if isinstance(child, str):
            text = child
        else:
            yield text, before, child
            text, before = "", child
    yield text, before, None


def _layout(own_line: bool, indentation: str) -> str:
    return f"\n{indentation}" if own_line else ""


def _run(text: str, before: Tag | None, indentation: str, end: str) -> str | None:
    """Return a run that reads back as the text, or None.

    The run starts on a new line or directly after the tag before it.
    """
    lines = text.split("\n")
    indented = [line and indentation + line for line in lines]
    if len(lines) > 1 and not lines[-1]:
        indented[-1] = end
    here = "\n".join([lines[0], *indented[1:]])
    own = "\n" + "\n".join(indented)
    inline = before is not None and before.flow is Flow.INLINE
    runs = (here, own) if inline else (own, here)
    return next((run for run in runs if settle(run) == text), None)


def _attributes(tag: Tag) -> str:
    return "".join(f' {name}="{value.translate(_IN_VALUE)}"' for name, value in tag.attributes)


def _text(text: str) -> str:
    return text.translate(_IN_TEXT).replace("]]>", "]]&gt;")
