"""Reads calls whose arguments stand between tags, such as ``<parameter=city>Rome</parameter>``.

A value has no quotes, so the function's schema decides whether it is a text or JSON. A text is returned as it comes.
Any other value is returned when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inlay.api.tools.readers import LONGEST_HEAD, CallReader, Functions, Reading, as_json, parsed
from inlay.strict_json import JSONError

_PYTHON = {"True": True, "False": False, "None": None}  # models write these too
_DEEPEST = 8  # references and combinations followed in a schema
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """A name, then each argument between tags.

    Args:
        name: a pattern of the name and what ends it. Its first group is the name.
        key: a pattern of the tag in front of a value. Its first group is the key. The group ``text``, if there is one,
            is "true" for a text and "false" for JSON.
        value_ends: the tag behind a value.
        ends: the tags behind the last value, which stay in the text.
    """

    name: str
    key: str
    value_ends: str
    ends: tuple[str, ...]

    def reader(self, functions: Functions) -> CallReader:
        return TagReader(self, functions)


class TagReader:
    """A CallReader for TagSyntax.

    A line break behind the first tag and one before the second belong to the tags. A value ends at its tag only if
    another argument or the end of the call follows, so it may hold such a tag itself.
    """

    def __init__(self, syntax: TagSyntax, functions: Functions) -> None:
        ends = "|".join(map(re.escape, syntax.ends))
        self._functions = functions
        self._head = re.compile(rf"\s*{syntax.name}\s*(?={syntax.key}|{ends})")
        self._key = re.compile(rf"\s*{syntax.key}\n?")
        self._closing = re.compile(rf"\n?{re.escape(syntax.value_ends)}(?=\s*(?:{syntax.key}|{ends}))")
        self._value_ends = "\n" + syntax.value_ends
        self._step: Callable[[str, bool, Reading], bool] = self._start
        self._schema: Mapping[str, Any] = {}
        self._as_text: bool | None = None  # the form of the current value; None if only its end shows it
        self._kinds: frozenset[str] | None = None
        self._first = True
        self._sent = 0

    def read(self, text: str, final: bool) -> Reading:
        reading = Reading()
        while self._step(text[reading.used :], final, reading):
            pass
        return reading

    def _start(self, text: str, final: bool, reading: Reading) -> bool:
        head = self._head.match(text)
        if head is None or head[1] not in self._functions:
            reading.over = head is not None or final or len(text) > LONGEST_HEAD
            return False
        self._schema = self._functions[head[1]]
        reading.pieces += [(head[1], ""), (None, "{")]
        reading.used += head.end()
        self._step = self._next
        return True

    def _next(self, text: str, final: bool, reading: Reading) -> bool:
        """Read the tag of the next argument, or the end of the call.

        Returns True if the next step can run at once, False if the call has ended or more text is needed.
        """
        found = self._key.match(text)
        if found is None:
            reading.pieces.append((None, "}"))
            reading.used += len(text) - len(text.lstrip())
            reading.over = True
            return False
        if found.end() == len(text) and not found[0].endswith("\n") and not final:
            return False  # a line break may follow
        marked = found.groupdict().get("text")
        self._kinds = kinds_of(property_of(self._schema, found[1]), self._schema)
        self._as_text = marked == "true" if marked else (True if self._kinds == frozenset(("string",)) else None)
        separator = "" if self._first else ", "
        quote = '"' if self._as_text else ""
        reading.pieces.append((None, f"{separator}{as_json(found[1])}: {quote}"))
        reading.used += found.end()
        self._first, self._sent, self._step = False, 0, self._value
        return True

    def _value(self, text: str, final: bool, reading: Reading) -> bool:
        found = self._closing.search(text, max(0, self._sent - len(self._value_ends)))
        end = found.start() if found else None
        if end is None and final:
            end = len(text)
        if self._as_text:
            told = end if end is not None else self._certain(text)
            piece = text[self._sent : told]
            if piece:
                reading.pieces.append((None, as_json(piece)[1:-1]))
            self._sent = max(self._sent, told)
        if end is None:
            return False
        if found is None:  # the answer ends within the value
            if not self._as_text:
                reading.pieces.append((None, text))
            reading.used, reading.over = reading.used + len(text), True
            return False
        if self._as_text:
            reading.pieces.append((None, '"'))
        else:
            reading.pieces.append((None, as_json(typed(text[:end], self._kinds))))
        reading.used += found.end()
        self._step = self._next
        return True

    def _certain(self, text: str) -> int:
        """Return the number of characters that are no part of the closing tag."""
        tag = self._value_ends
        at = text.find(tag[1:], self._sent)
        while at >= 0 and not self._may_close(text, at):
            at = text.find(tag[1:], at + 1)
        if at >= 0:
            return at - 1 if at > self._sent and text[at - 1] == "\n" else at
        held = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith((tag[:n], tag[1 : n + 1]))), 0)
        return max(self._sent, len(text) - held)

    def _may_close(self, text: str, at: int) -> bool:
        """True if the tag at this place may be the end of the value once more text has come."""
        rest = text[at + len(self._value_ends) - 1 :].lstrip()
        return len(rest) <= LONGEST_HEAD and (not rest or rest[0] == "<")


def typed(text: str, kinds: frozenset[str] | None) -> Any:
    """Return the value that a text between tags stands for.

    Args:
        text: the text.
        kinds: the JSON types that the schema allows; None for any. A text that is none of them stays a text.
    """
    stripped = text.strip()
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else parsed(stripped)
        json.dumps(value, allow_nan=False)
    except (JSONError, ValueError):
        return text
    kind = next(name for form, name in _KINDS if isinstance(value, form))
    if kinds is None or kind in kinds or (kind == "integer" and "number" in kinds):
        return value
    return text


def property_of(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of a property, or an empty one."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return {} if found is None else found


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the JSON types that a schema allows; None if it does not say.

    Args:
        schema: of a value.
        root: the schema that references begin at.
        depth: of this schema below the first one.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return kinds_of(_referred(root, reference), root, depth + 1)
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset((said,))
    if isinstance(said, list):
        return frozenset(one for one in said if isinstance(one, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            made = [kinds_of(one, root, depth + 1) for one in schema[name]]
            known = [one for one in made if one is not None]
            return frozenset().union(*known) if len(known) == len(made) else None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(next((name for form, name in _KINDS if isinstance(value, form)), "null") for value in values)
    return None


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
