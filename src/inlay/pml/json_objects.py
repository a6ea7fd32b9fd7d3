"""Where something stands in JSON: a path of keys and indices, with the names of modules in it.

What the readers of both JSON documents have in common: one object checked at a time, limits, and sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from inlay.errors import Place
from inlay.pml import nodes as limits
from inlay.pml.attributes import objection
from inlay.pml.json_documents import Form, Import, Module, Param, Prompt, PromptTurn, Schema, ShortImport, Turn, Union
from inlay.pml.json_text import JSONObject
from inlay.pml.nodes import ROLES
from inlay.pml.problems import Problems, clip, quote


@dataclass(frozen=True, slots=True)
class JSONPlace(Place):
    """A place in JSON, as in ``trip.json: content[1].user.content[0].module "plan".len``."""

    path: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source

    def key(self, key: str) -> JSONPlace:
        """The value of a key of this object."""
        return self._longer(f".{key}" if self.path else key)

    def index(self, index: int) -> JSONPlace:
        """A member of this list."""
        return self._longer(f"[{index}]")

    def named(self, kind: str, name: str) -> JSONPlace:
        """This very object, with what it is and what it is called."""
        return self.key(f"{kind} {quote(name)}")

    def _longer(self, part: str) -> JSONPlace:
        return JSONPlace(self.source, path=self.path + part)


def whereabouts(place: Place) -> str:
    """The place within its source, as a part of a sentence."""
    return f"at {place.path}" if isinstance(place, JSONPlace) else f"in line {place.line}"


KINDS = ("module", "param", "union", "role", "import")
"""The keys of which an object in ``content`` has one, which says what it is."""

_MOST_TEXTS = 2 * limits.MAX_ELEMENTS  # as many as PML can have between its tags
_MOST_PROBLEMS = 1_000  # after which reading on helps nobody
_CALLED: dict[type[Form], str] = {
    Schema: "a schema",
    Module: "a module",
    Param: "a parameter",
    Union: "a union",
    Turn: "a turn",
    Prompt: "a prompt",
    Import: "an import",
    PromptTurn: "a turn",
    ShortImport: "an import",
}
_VALUE = f"a text of at most {limits.MAX_ATTRIBUTE_CHARACTERS:,} characters"
_LABEL = f"the name of the schema, a text of 1 to {limits.MAX_ATTRIBUTE_CHARACTERS:,} characters"
_EXPECTED = {
    "name": _LABEL,
    "schema": _LABEL,
    "content": "a text, or a list of texts and objects",
    "scaffolds": "a list of lists of modules' names",
    "module": "a name",
    "src": "a text, the name of a file beside the schema",
    "param": "a name",
    "len": f"a whole number from 1 to {limits.MAX_PARAM_LENGTH:,}",
    "default": _VALUE,
    "union": "a list of modules, at least one",
    "role": " or ".join(map(quote, ROLES)),
    "import": "a name",
    "arguments": "an object with a text for each parameter",
    "imports": 'a list of names of modules, and objects {"name": …}',
    "text": "a text",
}
_EXPECTED_IN: dict[type[Form], dict[str, str]] = {ShortImport: {**_EXPECTED, "name": "a name"}}


class StopError(Exception):
    """Ends the reading after a problem that has been recorded."""


class JSONReader:
    """Checks objects one at a time; what is wrong goes to ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._reported = 0
        self._objects = 0
        self._texts = 0

    def add(self, place: Place, message: str) -> None:
        """Report a problem; raises StopError after many of them."""
        self._problems.add(place, message)
        self._reported += 1
        if self._reported >= _MOST_PROBLEMS:
            raise StopError

    def check(self, raw: JSONObject, form: type[Form], place: JSONPlace, depth: int) -> None:
        """Report what is wrong with the keys of an object and with their values, members of ``content`` left out.

        depth: how many objects are nested here, this one counted. Raises StopError where a limit is passed.
        """
        self.count_object(place)
        if depth > limits.MAX_DEPTH:
            self._stop(place, f"objects are nested more than {limits.MAX_DEPTH} deep; nest less deeply")
        self._check_keys(raw, place)
        if isinstance(arguments := raw.get("arguments"), JSONObject):
            self._check_keys(arguments, place.key("arguments"))
        try:
            form.model_validate(raw)
        except ValidationError as error:
            self._report(error, raw, form, place)

    def members(self, raw: JSONObject, key: str, place: JSONPlace) -> Iterator[tuple[Any, JSONPlace]]:
        """What a list holds, each with its place; as ``content``, a text alone is a list of one."""
        value, place = raw.get(key), place.key(key)
        if isinstance(value, str) and key == "content":
            yield value, place
        elif isinstance(value, list):
            for index, member in enumerate(value):
                yield member, place.index(index)

    def kind(self, raw: Any, place: JSONPlace, takes: Iterable[str]) -> str | None:
        """Which of KINDS an object is, or None after a problem. takes: what may stand here."""
        if not isinstance(raw, JSONObject):
            self.add(place, f"this is {shown(raw)}; write a text or an object")
            return None
        kind = next((key for key in raw if key in KINDS), None)
        if kind is None:
            keys = ", ".join(quote(key) for key in KINDS if key in takes)
            near = next((near for key in raw if (near := self._problems.near(key, KINDS))), None)
            remedy = f"did you mean {quote(near)}?" if near else f"give it one of {keys}"
            if "text" in raw:
                remedy = "write a text as a string alone"
            self.add(place, f"this object does not say what it is; {remedy}")
        return kind

    def count_object(self, place: JSONPlace) -> None:
        """An object or a scaffold stands here; raises StopError where there are too many."""
        self._objects += 1
        if self._objects > limits.MAX_ELEMENTS:
            self._stop(place, f"there are more than {limits.MAX_ELEMENTS} objects; split this into several files")

    def count_text(self, place: JSONPlace) -> None:
        """A text stands here; raises StopError where there are too many."""
        self._texts += 1
        if self._texts > _MOST_TEXTS:
            self._stop(place, f"there are more than {_MOST_TEXTS} texts; join neighbouring ones")

    def name(self, name: Any, place: JSONPlace, reserved: Iterable[str] = ()) -> str:
        """A name; empty where it is no good. Models have reported what is no text."""
        if not isinstance(name, str):
            return ""
        problem = objection(name)
        if problem is None and name in reserved:
            problem = f"{quote(name)} is a tag of PML, which no module is named like; write another name"
        if problem:
            self.add(place, problem)
        return "" if problem else name

    def label(self, raw: JSONObject, key: str, place: JSONPlace) -> str:
        """The name of a schema."""
        label = raw.get(key)
        if isinstance(label, str) and label and not label.strip():
            self.add(place.key(key), f"this is white space alone; write {_EXPECTED[key]}")
        return label if isinstance(label, str) else ""

    def _check_keys(self, raw: JSONObject, place: JSONPlace) -> None:
        for key in raw.twice:
            self.add(place, f"the key {quote(key)} stands here twice; keep one of them")
        if len(raw) > limits.MAX_ATTRIBUTES:
            self._stop(place, f"an object has more than {limits.MAX_ATTRIBUTES} keys; write fewer")

    def _report(self, error: ValidationError, raw: JSONObject, form: type[Form], place: JSONPlace) -> None:
        """What pydantic found, in sentences of our own."""
        found = error.errors(include_url=False, include_context=False, include_input=False)
        expected = _EXPECTED_IN.get(form, _EXPECTED)
        unknown = [str(one["loc"][0]) for one in found if one["type"] == "extra_forbidden"]
        missing = [str(one["loc"][0]) for one in found if one["type"] == "missing"]
        wrong = [one["loc"] for one in found if one["type"] not in ("extra_forbidden", "missing")]
        keys = [field.alias or name for name, field in form.model_fields.items()]
        meant = set()
        for key in unknown:
            near = self._problems.near(key, keys)
            meant.add(near)
            remedy = f"did you mean {quote(near)}?" if near else f"it takes {', '.join(map(quote, keys))}"
            self.add(place, f"{_CALLED[form]} takes no key {quote(key)}; {remedy}")
        for key in missing:
            if key not in meant:
                self.add(place, f"{_CALLED[form]} has no {quote(key)}; write {expected[key]}")
        # two entries where one value fits neither of two types
        for key, argument in dict.fromkeys((str(loc[0]), _argument(loc)) for loc in wrong):
            if argument is None:
                self.add(place.key(key), f"this is {shown(raw[key])}; write {expected[key]}")
            else:
                value = raw[key][argument]
                self.add(place.named(key, argument), f"this is {shown(value)}; write {_VALUE}")

    def _stop(self, place: Place, message: str) -> None:
        self._problems.add(place, message)
        raise StopError


def shown(value: Any) -> str:
    """A value in a few words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {quote(value)}" if value == clip(value) else f"a text of {len(value):,} characters"
    if isinstance(value, list):
        return f"a list of {len(value):,}" if value else "an empty list"
    return "an object" if isinstance(value, dict) else f"the number {value}"


def _argument(loc: tuple[int | str, ...]) -> str | None:
    """The name of the argument that an error is about, if it is about one."""
    return str(loc[1]) if loc[0] == "arguments" and len(loc) > 1 else None
