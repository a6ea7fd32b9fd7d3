"""Reads calls that are written like programs: Python's ``[weather(city="Rome")]``, and Gemma's ``call:weather{…}``.

Such a call is returned when it is complete, because only then its arguments are known to be literals.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from inlay.api.tools.readers import LONGEST_HEAD, CallReader, Functions, JSONReader, Reading, as_json, object_in, whole

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
