"""Parses XML text into elements with expat, and defines PML's white-space rule (``settle``).

DTDs and entities are off, every element carries its place in the source, and limits bound the work. This module knows
XML and nothing of schemas or prompts. Malformed XML ends the parse. The elements read so far are still returned, so the
readers can report further problems.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import StringIO
from itertools import takewhile
from typing import NoReturn
from xml.parsers import expat

from inlay.errors import Place
from inlay.pml import nodes as limits
from inlay.pml.nodes import Meta
from inlay.pml.problems import Problems, StopReadingError
from inlay.wording import clip

WHITE = " \t\r\n"
"""White space as XML defines it. A no-break space counts as text."""


def is_white(text: str) -> bool:
    """Return True if the text is empty or only white space."""
    return not text.strip(WHITE)


def settle(run: str) -> str:
    """Apply the white-space rule to a run of text between two tags, as in a here-document.

    A run of only white space is layout, and becomes "", if it holds a line break. Otherwise it is text. In any other
    run:

    - A blank first line is removed with its line break.

    - Lines of only white space become empty, including the indentation of the next tag.

    - The common indentation of the lines that begin in the run is removed.
    """
    if is_white(run):
        return "" if "\n" in run else run
    first, *lines = run.split("\n")
    lines = _without_indentation(lines)
    return "\n".join(lines if lines and is_white(first) else [first, *lines])


def _without_indentation(lines: list[str]) -> list[str]:
    indentations = {line[: len(line) - len(line.lstrip(" \t"))] for line in lines if not is_white(line)}
    common = _common_beginning(min(indentations, default=""), max(indentations, default=""))
    return ["" if is_white(line) else line[common:] for line in lines]


def _common_beginning(first: str, last: str) -> int:
    # In sorted order, the first and the last string share the shortest prefix of all.
    alike = (one == other for one, other in zip(first, last, strict=False))
    return sum(takewhile(bool, alike))


_ATTRIBUTE = re.compile(rb"""[ \t\r\n]+([^ \t\r\n=/>]+)[ \t\r\n]*=[ \t\r\n]*(?:"[^"]*"|'[^']*')""")
_BREAK = re.compile("\r\n|\r|\n")
_ENTITIES = "&lt; &gt; &amp; &quot; &apos;"
_REMEDIES = {
    expat.errors.XML_ERROR_INVALID_TOKEN: (
        "this is not well-formed XML; write &lt; for <, &amp; for &, quotation marks around attribute values, "
        "and no control characters"
    ),
    expat.errors.XML_ERROR_UNDEFINED_ENTITY: f"unknown entity; write one of {_ENTITIES} or the character itself",
    expat.errors.XML_ERROR_BAD_CHAR_REF: "this character cannot stand in XML; leave it out",
    expat.errors.XML_ERROR_DUPLICATE_ATTRIBUTE: "the same attribute stands twice in one tag; keep one of them",
    expat.errors.XML_ERROR_UNCLOSED_TOKEN: "a tag, comment or entity begins here and does not end; close it",
    expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION: "a CDATA section does not end; write ]]> where it should",
    expat.errors.XML_ERROR_MISPLACED_XML_PI: "the XML declaration is not at the very start; move it there or delete it",
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute's value and its place in the source."""

    value: str
    place: Place


@dataclass(frozen=True, slots=True)
class Run:
    """The text between two tags, before the white-space rule.

    ``place`` is the first character that is not white space. If there is none, it is the start of the run. ``exact``
    exempts the text from the white-space rule.
    """

    text: str
    place: Place
    exact: bool = False


@dataclass(slots=True)
class Element:
    """A tag with its attributes and content.

    Attributes:
        closed: False if the document ends before the closing tag.
        meta: The metadata of an object in the JSON form. In XML, attributes and <meta> tags hold it.
    """

    tag: str
    attributes: dict[str, Attribute]
    place: Place
    children: list[Element | Run] = field(default_factory=list)
    closed: bool = False
    meta: tuple[Meta, ...] = ()


def parse(data: bytes, problems: Problems, *, declaration_counts: bool = False) -> Element | None:
    """Parse a document in UTF-8 and report its errors to ``problems``.

    Args:
        declaration_counts: Report an XML declaration whose encoding is not UTF-8 or ASCII. False ignores the
            declaration.

    Returns:
        The outermost element, or None if there is none.
    """
    if (nul := data.find(b"\0")) >= 0:  # expat would read the document as UTF-16
        place = place_at(problems.source, data[:nul].decode())
        problems.add(
            place, "a NUL character is not text; leave it out, or save the file as UTF-8", code="pml.invalid_character"
        )
        return None
    builder = _TreeBuilder(data, problems, declaration_counts)
    try:
        builder.parser.Parse(data, True)
    except StopReadingError:
        pass
    except expat.ExpatError as error:
        builder.report(error)
    return builder.root


def place_at(source: str, text: str) -> Place:
    """Return the place that follows ``text``, the start of the source."""
    return _moved(Place(source, 1, 1), _BREAK.split(text))


class _TreeBuilder:
    """Receives expat's events."""

    def __init__(self, data: bytes, problems: Problems, declaration_counts: bool) -> None:
        self.root: Element | None = None
        self._data = data
        self._problems = problems
        self._open: list[Element] = []
        self._elements = 0
        self._run = StringIO()
        self._run_place: Place | None = None
        self.parser = expat.ParserCreate("UTF-8")
        self.parser.buffer_size = 2**16
        self.parser.buffer_text = False  # setting the size turns it on
        self.parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.ProcessingInstructionHandler = self._instruction
        if declaration_counts:
            self.parser.XmlDeclHandler = self._declaration

    def report(self, error: expat.ExpatError) -> None:
        """Report expat's error for a malformed document."""
        message = expat.ErrorString(error.code) or "not well-formed"
        place = Place(self._problems.source, error.lineno, error.offset + 1)
        innermost = self._open[-1] if self._open else None
        if message == expat.errors.XML_ERROR_NO_ELEMENTS and innermost:
            self._problems.add(
                innermost.place,
                f"<{clip(innermost.tag)}> is never closed; {_close(innermost)}",
                code="pml.unclosed_tag",
            )
        elif message == expat.errors.XML_ERROR_NO_ELEMENTS:
            self._problems.add(
                place,
                'there is nothing here; write <schema name="…"> or <prompt schema="…">',
                code="pml.empty_document",
            )
        elif message == expat.errors.XML_ERROR_TAG_MISMATCH and innermost:
            opened = f"<{clip(innermost.tag)}> of line {innermost.place.line} is still open here"
            self._problems.add(place, f"{opened}; {_close(innermost)} first", code="pml.mismatched_tag")
        elif message == expat.errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT and self.root:
            tag = clip(self.root.tag)
            self._problems.add(
                place,
                f"something stands after </{tag}>; keep one <{tag}> and nothing after it",
                code="pml.text_outside_root",
            )
        elif self._begins_with_text():
            self._problems.add(
                place,
                'there is text before any tag; begin with <schema name="…"> or <prompt schema="…">, '
                "or, if this is JSON, give its file a name that ends in .json",
                code="pml.text_outside_root",
            )
        else:
            remedy = _REMEDIES.get(message, f"this is not well-formed XML ({message}); correct it")
            self._problems.add(place, remedy, code="pml.malformed_xml")

    def _begins_with_text(self) -> bool:
        first = self._data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        return self.root is None and first != b"<"

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._end_run()
        place = self._place()
        self._elements += 1
        if len(self._open) >= limits.MAX_DEPTH:
            self._stop(
                place, f"tags are nested more than {limits.MAX_DEPTH} deep; nest less deeply", code="pml.too_deep"
            )
        if self._elements > limits.MAX_ELEMENTS:
            self._stop(
                place,
                f"there are more than {limits.MAX_ELEMENTS} tags; split this into several files",
                code="pml.too_large",
            )
        element = Element(tag, self._attributes(tag, attributes, place), place)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def _end(self, tag: str) -> None:
        self._end_run()
        self._open.pop().closed = True

    def _text(self, text: str) -> None:
        # Unbuffered, expat reports the place of each piece. Buffered, it is much faster. So the parser buffers only
        # after the first piece that is not white space, because that piece's place is the place of the run.
        if not is_white(text):
            if not self.parser.buffer_text:
                indentation = len(text) - len(text.lstrip(" \t"))
                self._run_place = self._place(indentation)
                self.parser.buffer_text = True
        elif self._run_place is None:
            self._run_place = self._place()
        self._run.write(text)

    def _end_run(self) -> None:
        if self._run_place is not None:
            self._open[-1].children.append(Run(self._run.getvalue(), self._run_place))
            self._run = StringIO()
            self._run_place = None
            self.parser.buffer_text = False

    def _attributes(self, tag: str, values: dict[str, str], place: Place) -> dict[str, Attribute]:
        if not values:
            return {}
        if len(values) > limits.MAX_ATTRIBUTES:
            self._stop(
                place,
                f"<{clip(tag)}> has more than {limits.MAX_ATTRIBUTES} attributes; write fewer",
                code="pml.too_large",
            )
        places = self._attribute_places(tag, place)
        attributes = {name: Attribute(value, places.get(name, place)) for name, value in values.items()}
        for name, attribute in attributes.items():
            if len(attribute.value) > limits.MAX_ATTRIBUTE_CHARACTERS:
                characters = limits.MAX_ATTRIBUTE_CHARACTERS
                self._stop(
                    attribute.place,
                    f'{clip(name)}="…" has more than {characters} characters; write fewer',
                    code="pml.too_large",
                )
        return attributes

    def _attribute_places(self, tag: str, place: Place) -> dict[str, Place]:
        places: dict[str, Place] = {}
        start = self.parser.CurrentByteIndex
        end = start + 1 + len(tag.encode())
        while match := _ATTRIBUTE.match(self._data, end):
            between = self._data[start : match.start(1)].decode()
            place = _moved(place, _BREAK.split(between))
            places[match.group(1).decode()] = place
            start, end = match.start(1), match.end()
        return places

    def _doctype(self, *_: object) -> None:
        before = self._data[: self._data.rfind(b"<!DOCTYPE", 0, self.parser.CurrentByteIndex + 1)].decode()
        remedy = f"delete it: PML needs none, and knows the entities {_ENTITIES}"
        self._stop(
            place_at(self._problems.source, before), f"a DOCTYPE is not allowed; {remedy}", code="pml.forbidden_xml"
        )

    def _instruction(self, target: str, _: str) -> None:
        self._stop(
            self._place(),
            f"processing instructions are not allowed; delete <?{clip(target)} …?>",
            code="pml.forbidden_xml",
        )

    def _declaration(self, version: str, encoding: str | None, standalone: int) -> None:
        if encoding is not None and encoding.upper() not in ("UTF-8", "UTF8", "US-ASCII", "ASCII"):
            declared = f"the file declares the encoding {clip(encoding)}"
            self._stop(
                self._place(),
                f'{declared}, but PML is UTF-8; save it as UTF-8 and write encoding="UTF-8"',
                code="pml.wrong_encoding",
            )

    def _place(self, offset: int = 0) -> Place:
        line, column = self.parser.CurrentLineNumber, self.parser.CurrentColumnNumber
        return Place(self._problems.source, line, column + 1 + offset)

    def _stop(self, place: Place, message: str, *, code: str) -> NoReturn:
        self._problems.add(place, message, code=code)
        raise StopReadingError


def _moved(place: Place, lines: list[str]) -> Place:
    """Return the place after text that begins at ``place`` and consists of ``lines``."""
    column = len(lines[-1]) + (1 if len(lines) > 1 else place.column or 1)
    return Place(place.source, (place.line or 1) + len(lines) - 1, column)


def _close(element: Element) -> str:
    return f"write </{clip(element.tag)}>"
