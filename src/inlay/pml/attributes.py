"""The tags of PML and checks of their attributes: reserved names, allowed names and required attributes."""

from __future__ import annotations

import re
from xml.parsers import expat

from inlay.errors import Place
from inlay.pml.nodes import MAX_NAME_CHARACTERS, MAX_PARAM_LENGTH, ROLES, Meta
from inlay.pml.parser import Element
from inlay.pml.problems import Problems
from inlay.wording import listed, quote

TAGS = ("schema", "prompt", "module", "union", "param", "parameter", "scaffold", "meta", "set", *ROLES)

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_OTHER_ASCII = re.compile(r"(?![A-Za-z0-9_.\-])[\x00-\x7f]")


def is_name(name: str) -> bool:
    """Return True for an XML name without a colon. A prompt can write such a name as a tag or an attribute."""
    if _PLAIN.fullmatch(name):
        return True
    return not _OTHER_ASCII.search(name) and _expat_takes(name)


def objection(name: str) -> str | None:
    """Return the fault of a module's or parameter's name with its remedy, or None for a valid name."""
    if len(name) > MAX_NAME_CHARACTERS:
        return f"the name {quote(name)} has {len(name)} characters; write at most {MAX_NAME_CHARACTERS}"
    if not is_name(name):
        return f'{quote(name)} is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    return None


def is_in_namespace(name: str) -> bool:
    """Return True for an attribute name in a foreign namespace, such as ``app:author``."""
    prefix, colon, local = name.partition(":")
    return bool(colon) and prefix != "xml" and is_name(prefix) and is_name(local)


def _expat_takes(name: str) -> bool:
    # expat's table of letters is older and narrower than that of current XML, so the check asks expat, which reads
    # prompts.
    try:
        expat.ParserCreate("UTF-8").Parse(f"<{name}/>".encode(), True)
    except (expat.ExpatError, UnicodeEncodeError):
        return False
    return True


_SPACE = "xml:space"
_TAKES = {
    "schema": ("name", _SPACE),
    "prompt": ("schema", _SPACE),
    "module": ("name", "src", "cache", _SPACE),
    "union": ("scaffold",),
    "param": ("name", "len", "default", "scaffold"),
    "parameter": ("name", "length", "default", "scaffold"),
    "scaffold": ("modules",),
    "meta": ("name", "value"),
    "set": (),
    "system": (_SPACE,),
    "user": (_SPACE,),
    "assistant": (_SPACE,),
}
_USAGE = {
    "schema": '<schema name="…">',
    "prompt": '<prompt schema="…">',
    "module": '<module name="…">',
    "param": '<param name="…" len="…"/>',
    "parameter": '<parameter name="…" length="…"/>',
    "scaffold": '<scaffold modules="… …"/>',
    "meta": '<meta name="…" value="…"/>',
}
_CARRIES_META = ("schema", "module", "union", "param", "parameter", *ROLES)


class Attributes:
    """Reads the attributes of elements and reports errors to ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def check(self, element: Element) -> None:
        """Report attributes that the tag does not take, and required attributes that are missing or empty."""
        takes = _TAKES[element.tag]
        meant = set()
        carries = element.tag in _CARRIES_META
        for name in [name for name in element.attributes if name not in takes]:
            if carries and is_in_namespace(name):
                continue
            near = self._problems.near(name, takes)
            meant.add(near)
            remedy = f'did you mean "{near}"?' if near else _takes(takes)
            message = f"<{element.tag}> takes no attribute {quote(name)}; {remedy}"
            self._problems.add(element.attributes[name].place, message, code="pml.unknown_attribute")
        for name in _required(element.tag):
            usage = f"write {_USAGE[element.tag]}"
            attribute = element.attributes.get(name)
            if attribute is None and name not in meant:
                self._problems.add(
                    element.place, f"<{element.tag}> has no {name}; {usage}", code="pml.missing_attribute"
                )
            elif attribute is not None and not attribute.value.strip() and name != "value":
                self._problems.add(
                    attribute.place, f"<{element.tag}> has an empty {name}; {usage}", code="pml.empty_attribute"
                )

    def text(self, element: Element, name: str) -> str | None:
        """Return the value of an attribute, or None if it is missing or empty."""
        attribute = element.attributes.get(name)
        return attribute.value if attribute and attribute.value.strip() else None

    def name(self, element: Element) -> str | None:
        """Return the name of a module or a parameter, or None if it is missing or invalid."""
        name = self.text(element, "name")
        if name is None:
            return None
        problem = objection(name)
        if problem is None and element.tag == "module" and name in TAGS:
            problem = f"{quote(name)} is a tag of PML; choose another name for the module"
        if problem:
            self._problems.add(self.place(element, "name"), problem, code="pml.invalid_name")
        return None if problem else name

    def length(self, element: Element) -> int:
        """Return the length of a parameter in tokens, or 1 if it is missing or invalid."""
        name = _required(element.tag)[1]
        text = self.text(element, name)
        if text is None:
            return 1
        digits = text.strip().lstrip("0")
        # Python refuses to convert very long numbers
        if re.fullmatch("[0-9]{1,9}", digits) and int(digits) <= MAX_PARAM_LENGTH:
            return int(digits)
        wrong = f"{name}={quote(text)} is not a whole number from 1 to {MAX_PARAM_LENGTH}"
        self._problems.add(
            self.place(element, name), f"{wrong}; write how many tokens an argument may have", code="pml.invalid_length"
        )
        return 1

    def cache(self, element: Element) -> bool:
        """Return True if the module is encoded once and kept."""
        attribute = element.attributes.get("cache")
        if attribute is None or attribute.value in ("true", "false"):
            return attribute is None or attribute.value == "true"
        self._problems.add(
            attribute.place,
            f'cache={quote(attribute.value)} is unknown; write "true" or "false"',
            code="pml.invalid_attribute",
        )
        return True

    def meta(self, element: Element) -> list[Meta]:
        """Return the metadata in an element's namespaced attributes."""
        given = element.attributes.items() if element.tag in _CARRIES_META else ()
        return [Meta(name, one.value, one.place) for name, one in given if is_in_namespace(name)]

    def preserve(self, element: Element, inherited: bool) -> bool:
        """Return True if ``xml:space``, on this element or inherited, keeps all white space."""
        attribute = element.attributes.get(_SPACE)
        if attribute is None:
            return inherited
        if attribute.value not in ("preserve", "default"):
            message = f'xml:space={quote(attribute.value)} is unknown; write "preserve" or "default"'
            self._problems.add(attribute.place, message, code="pml.invalid_attribute")
        return attribute.value == "preserve"

    def place(self, element: Element, name: str) -> Place:
        """Return the place of an attribute, or of its tag if the attribute is missing."""
        attribute = element.attributes.get(name)
        return attribute.place if attribute else element.place


def _required(tag: str) -> tuple[str, ...]:
    if tag in ("param", "parameter", "meta"):
        return _TAKES[tag][:2]
    return _TAKES[tag][:1] if tag in _USAGE else ()


def _takes(names: tuple[str, ...]) -> str:
    return f"it takes {listed(names)}" if names else "it takes none"
