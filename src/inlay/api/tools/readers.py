"""Reads one call, or a list of calls, behind a format's mark in a growing text. ``CallReader`` reads calls in JSON.

A call begins as soon as its function is known and its arguments begin. From then on its arguments are returned as they
come, and an answer that is cut or malformed ends in cut or malformed arguments. Text that never begins a call is
refused, and its caller returns it unchanged.

Other calls are written like programs: Python's ``[weather(city="Rome")]``, and Gemma's ``call:weather{…}``. Such a call
is returned when it is complete, because only then its arguments are known to be literals.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import from_json

from inlay.strict_json import JSONError, read_json

_DEEPEST = 64  # brackets within each other; Python's own parser recurses
_FILE = "<tool call>"
_JSON_NAMES = {"true": True, "false": False, "null": None}  # models write these too

# Python warns of unknown escapes, and a model's text is no code of ours.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(_FILE))


@dataclass(frozen=True, slots=True)
class PythonSyntax:
    """A list of calls in Python, or calls in JSON, which models of the same families write too.

    Args:
        key: the key of the arguments in JSON.
    """

    key: str = "arguments"

    def reader(self, functions: Functions) -> CallReader:
        return PythonReader(functions, self.key)


_CALLEE = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]*)\s*\(")
_CALLEE_BEGUN = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]*\s*)?)?")
_MARKS = re.compile(r"[\"'()\[\]{}]")


class PythonReader:
    """A CallReader for PythonSyntax."""

    def __init__(self, names: Collection[str], key: str) -> None:
        self._names = names
        self._json: JSONReader | None = None
        self._key = key
        self._at = 0
        self._depth = 0
        self._quote = ""  # the quotes that end the current text
        self._known = False  # the first function is known

    def read(self, text: str, final: bool) -> Reading:
        if self._json is None and not self._known:
            head = _CALLEE.match(text)
            if head is not None:
                if head[1] not in self._names:
                    return Reading(over=True)
                self._known = True
            elif _CALLEE_BEGUN.fullmatch(text) and len(text) <= LONGEST_HEAD:
                return Reading(over=final)
            else:
                self._json = JSONReader(self._names, self._key)
        if self._json is not None:
            return self._json.read(text, final)
        end = self._end(text)
        if end is None:
            return Reading(over=final or self._depth > _DEEPEST)
        calls = calls_in_python(text[:end].strip(), self._names)
        return Reading(end if calls else 0, whole(calls), over=True)

    def _end(self, text: str) -> int | None:
        """Return the index after the list, or None. It reads each character once."""
        while self._at < len(text) and self._depth <= _DEEPEST:
            if self._quote:
                found = re.compile(rf"\\.|{self._quote}", re.DOTALL).search(text, self._at)
                if found is None:
                    self._at = max(self._at, len(text) - 3)  # an escape or a part of the quotes may be at the end
                    return None
                self._quote = "" if found[0] == self._quote else self._quote
                self._at = found.end()
                continue
            mark = _MARKS.search(text, self._at)
            if mark is None:
                self._at = len(text)
            elif mark[0] in "\"'":
                if len(text) < mark.start() + 3:
                    return None  # three of them may come
                self._quote = mark[0] * (3 if text.startswith(mark[0] * 3, mark.start()) else 1)
                self._at = mark.start() + len(self._quote)
            else:
                self._depth += 1 if mark[0] in "([{" else -1
                self._at = mark.end()
                if self._depth == 0:
                    return self._at
        return None


def calls_in_python(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the calls in a Python list, each as a name and its arguments in JSON; an empty list for any other text.

    Args:
        text: the list, with brackets at most _DEEPEST deep.
        names: the known functions.
    """
    try:
        tree = ast.parse(text, _FILE, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(one, names) for one in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr, names: Collection[str]) -> tuple[str, str]:
    """Return a call. Raises ValueError for any other expression."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    if name not in names:
        raise ValueError("an unknown function")
    arguments = {}
    for one in node.keywords:
        if one.arg is None:
            raise ValueError("arguments without a name")
        arguments[one.arg] = _literal(one.value)
    made = as_json(arguments)
    made.encode()  # raises ValueError for half a character
    return name, made


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=members) | ast.Tuple(elts=members):
            return [_literal(one) for one in members]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key that is no text")
    return node.value


@dataclass(frozen=True, slots=True)
class QuotedSyntax:
    """Gemma's calls: JSON without quotes around keys, and with a token of its own as the quote of texts.

    Args:
        quote: that token.
        closes: the mark behind a call.
    """

    quote: str
    closes: str

    def reader(self, functions: Functions) -> CallReader:
        return QuotedReader(functions, self.quote, self.closes)


_NAMED = re.compile(r"\s*call:\s*([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)")


class QuotedReader:
    """A CallReader for QuotedSyntax. A call ends at its closing mark, which stays in the text."""

    def __init__(self, names: Collection[str], quote: str, closes: str) -> None:
        self._names = names
        self._quote = quote
        self._marks = re.compile(f"{re.escape(quote)}|{re.escape(closes)}")
        self._overlap = max(len(quote), len(closes)) - 1
        self._at = 0
        self._in_text = False

    def read(self, text: str, final: bool) -> Reading:
        begun = text[: len("call:")]
        if not "call:".startswith(begun.lstrip()):
            return Reading(over=True)
        end = self._end(text)
        if end is None and not final:
            return Reading()
        found = _NAMED.fullmatch(text[:end])
        if found is None or found[1] not in self._names:
            return Reading(over=True)
        arguments = self._arguments(found[2])
        calls = [] if arguments is None else [(found[1], arguments)]
        return Reading(len(found[0]) if calls else 0, whole(calls), over=True)

    def _end(self, text: str) -> int | None:
        """Return the index of the closing mark outside of texts, or None."""
        while (found := self._marks.search(text, self._at)) is not None:
            if found[0] == self._quote:
                self._in_text = not self._in_text
            elif not self._in_text:
                return found.start()
            self._at = found.end()
        self._at = max(self._at, len(text) - self._overlap)
        return None

    def _arguments(self, text: str) -> str | None:
        """Return arguments in JSON, or None if they are malformed."""
        pieces = text.split(self._quote)
        pieces[::2] = [_BARE_KEY.sub(r'\1"\2"\3', piece) for piece in pieces[::2]]
        pieces[1::2] = [json.dumps(piece, ensure_ascii=False) for piece in pieces[1::2]]
        made = object_in("".join(pieces))
        return None if made is None or len(pieces) % 2 == 0 else as_json(made)


_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w.:,+-]')  # a mark, or a character that JSON has in strings alone
_IN_STRING = re.compile(r'["\\]')
_FIRST_LOOK = 64  # characters
_MAX_DEPTH = 200


class JSONEnd:
    """Finds the end of the object or list at the start of a growing text. It reads each character once.

    ``broken`` is True if the text can no longer become JSON. It is set at a character that JSON has in strings alone,
    and otherwise before the text has doubled since it was valid. ``at`` is the number of characters that were read.

    Args:
        first_look: the length in characters at the first check.
    """

    def __init__(self, first_look: int = _FIRST_LOOK) -> None:
        self.broken = False
        self.at = 0
        self._depth = 0
        self._in_string = False
        self._next_look = first_look

    def find(self, text: str) -> int | None:
        """Return the index after the last character, or None. ``text`` is everything so far, from its first brace."""
        while not self.broken:
            stop = min(len(text), self._next_look)
            while self.at < stop and not self.broken:
                if (end := self._step(text, stop)) is not None:
                    return end
            if stop < self._next_look:
                break
            self._next_look *= 2
            if not self.broken and not may_become_json(text[:stop]):
                self.at, self.broken = stop, True
        return None

    def _step(self, text: str, stop: int) -> int | None:
        """Read up to the next mark. Returns the end of the value if that mark ends it."""
        found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, self.at, stop)
        self.at = found.end() if found else stop
        if found is None:
            return None
        mark = found[0]
        if mark == "\\":
            self.at += 1  # the escaped character may not be there yet
        elif mark == '"':
            self._in_string = not self._in_string
        elif mark not in "{}[]":
            self.at, self.broken = found.start(), True
            return None
        else:
            self._depth += 1 if mark in "{[" else -1
        return self.at if self._depth == 0 and mark in "}]" else None


def parsed(text: str) -> Any:
    """Return the value of a JSON text. The last value of a repeated key wins. Raises JSONError."""
    return read_json(text.encode(errors="surrogatepass"), max_depth=_MAX_DEPTH, make_object=dict)


def object_in(text: str) -> dict[str, Any] | None:
    """Return the object in a JSON text. An empty text, which clients send for no arguments, is an empty object."""
    try:
        value = parsed(text) if text.strip() else {}
    except JSONError:
        return None
    return value if isinstance(value, dict) else None


def may_become_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False)  # json's own parser does not separate invalid from incomplete text
    except ValueError as error:
        # its partial mode does not fit: it accepts any text after a value in a list
        return str(error).startswith("EOF while parsing")
    return True


KEYS = ("arguments", "parameters")
"""The keys of a call's arguments, in different families."""
LONGEST_HEAD = 256  # characters before the arguments of a call
_OBJECT = '{"":0'  # the start of an object, in place of its members before the arguments
#: The parameters of the known functions, by name.
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Reading:
    """The result of one call of a reader.

    Args:
        used: characters that were read. 0 until a call has begun.
        pieces: new pieces of calls. A name begins a call; None continues it with arguments.
        over: nothing more belongs to the calls. Without any piece so far, the text is no call.
    """

    used: int = 0
    pieces: list[tuple[str | None, str]] = field(default_factory=list)
    over: bool = False


class CallReader(Protocol):
    """Reads the calls at the start of a text."""

    def read(self, text: str, final: bool) -> Reading:
        """Return the pieces of calls that no further text can change.

        Args:
            text: all text behind the mark, without the characters that were used before.
            final: True if no more text will come.
        """


class Syntax(Protocol):
    """The form of calls behind a mark."""

    def reader(self, functions: Functions) -> CallReader:
        """Return a reader of calls of these functions."""


def as_json(value: Any) -> str:
    """Return JSON as templates write it. Raises ValueError for a number that JSON cannot represent."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def whole(calls: list[tuple[str, str]]) -> list[tuple[str | None, str]]:
    """Return the pieces of complete calls, each given as a name and arguments."""
    return [piece for name, arguments in calls for piece in ((name, ""), (None, arguments))]


def calls_in(text: str, names: Collection[str], key: str) -> list[tuple[str, str]]:
    """Return the calls in a JSON object or a list of objects, each as a name and its arguments in JSON.

    It returns an empty list for any other text, and for a list with a member that is no call.

    Args:
        text: the JSON text.
        names: the known functions.
        key: the key of the arguments. The other one of KEYS is accepted too.
    """
    try:
        value = parsed(text)
        made = [_call(one, names, key) for one in (value if isinstance(value, list) else [value])]
    except (JSONError, ValueError):  # it is not JSON, or has a number that JSON cannot represent
        return []
    return [call for call in made if call is not None] if None not in made else []


def _call(value: Any, names: Collection[str], key: str) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    given = [value[name] for name in (key, *KEYS) if value.get(name) is not None]
    arguments = given[0] if given else {}
    return (value["name"], as_json(arguments)) if isinstance(arguments, dict) else None


@dataclass(frozen=True, slots=True)
class JSONSyntax:
    """A JSON object with a name and arguments, or a list of such.

    Args:
        key: the key of the arguments, one of KEYS.
        head: a pattern of a name in front of the arguments, in families that write ``name[ARGS]{…}``. Its first group
            is the name.
    """

    key: str = "arguments"
    head: str | None = None

    def reader(self, functions: Functions) -> CallReader:
        return JSONReader(functions, self.key, self.head)


_BETWEEN = re.compile(r"\s*,?\s*")  # between the members of a list
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:{"|".join(KEYS)})"\s*:\s*(?=\{{)')


class JSONReader:
    """A CallReader for JSONSyntax.

    Args:
        names: the known functions.
        key: the key of the arguments.
        head: see JSONSyntax.
    """

    def __init__(self, names: Collection[str], key: str, head: str | None = None) -> None:
        self._names = names
        self._key = key
        self._named = None if head is None else re.compile(head + r"\s*(?=\{)")
        self._step: Callable[[str, bool, Reading], bool] = self._start
        self._in_object = False  # the arguments are a member of an object
        self._in_list = False
        self._end = JSONEnd()
        self._sent = 0  # characters of the pending text that were returned as arguments

    def read(self, text: str, final: bool) -> Reading:
        reading = Reading()
        while not reading.over and self._step(text[reading.used :], final, reading):
            pass
        return reading

    def _start(self, text: str, final: bool, reading: Reading) -> bool:
        """Read the start of a call, of a list of calls, or of a name in front of the arguments."""
        rest = text.lstrip()
        if not rest:
            reading.over = final
            return False
        skipped = len(text) - len(rest)
        if self._named is not None and rest[0] not in "{[":
            return self._name(text, skipped, final, reading)
        opened = rest[0] == "["
        head = _HEAD.match(text, skipped + opened)
        if head is not None and head[1] in self._names:
            self._in_list = opened
            return self._begin(head[1], head.end(), reading)
        return self._whole(text, skipped, final, reading)

    def _name(self, text: str, skipped: int, final: bool, reading: Reading) -> bool:
        assert self._named is not None, "this format has names in front"
        head = self._named.match(text, skipped)
        if head is not None and head[1] in self._names:
            return self._begin(head[1], head.end(), reading, in_object=False)
        reading.over = final or "{" in text or len(text) - skipped > LONGEST_HEAD
        return False

    def _whole(self, text: str, skipped: int, final: bool, reading: Reading) -> bool:
        """Read a complete value behind ``skipped`` characters. Its members may have any order."""
        value = text[skipped:]
        end = self._end.find(value) if value[0] in "{[" else None
        if end is None:
            reading.over = final or self._end.broken or value[0] not in "{["
            return False
        calls = calls_in(value[:end], self._names, self._key)
        reading.pieces += whole(calls)
        reading.used += skipped + end if calls else 0
        reading.over = not (calls and self._in_list)
        self._step = self._next
        return not reading.over

    def _begin(self, name: str, end: int, reading: Reading, *, in_object: bool = True) -> bool:
        """Begin a call. ``end`` is the length of its head."""
        reading.pieces.append((name, ""))
        reading.used += end
        self._in_object, self._end, self._sent, self._step = in_object, JSONEnd(), 0, self._arguments
        return True

    def _arguments(self, text: str, final: bool, reading: Reading) -> bool:
        """Read arguments up to their end, or up to a character that no JSON has there."""
        end = self._end.find(text)
        if end is None and self._end.broken:
            end, self._step = self._end.at, self._done
        elif end is not None:
            self._step = self._behind if self._in_object else self._done
        elif final:
            end, self._step = len(text), self._done
        piece = text[self._sent : end]
        if piece:
            reading.pieces.append((None, piece))
        if end is None:
            self._sent = len(text)
            return False
        reading.used += end
        self._end = JSONEnd()
        return True

    def _behind(self, text: str, final: bool, reading: Reading) -> bool:
        """Read the rest of an object behind its arguments. Other text is left to the caller."""
        end = self._end.find(_OBJECT + text)
        if end is None:
            reading.over = final or self._end.broken
            return False
        reading.used += end - len(_OBJECT)
        self._step = self._next if self._in_list else self._done
        return True

    def _next(self, text: str, final: bool, reading: Reading) -> bool:
        """Read the next member of a list, a call, or the end of the list."""
        found = _BETWEEN.match(text)
        if found is None or found.end() == len(text):
            reading.over = final or found is None
            return False
        skipped = found.end()
        if text[skipped] == "]" and "," not in found[0]:
            reading.used += skipped + 1
            reading.over = True
            return False
        head = _HEAD.match(text, skipped)
        if head is not None and head[1] in self._names and "," in found[0]:
            return self._begin(head[1], head.end(), reading)
        if text[skipped] != "{" or "," not in found[0]:
            reading.over = True
            return False
        self._end = JSONEnd()
        return self._whole(text, skipped, final, reading)

    def _done(self, text: str, final: bool, reading: Reading) -> bool:
        reading.over = True
        return False
