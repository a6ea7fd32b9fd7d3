"""Operations on Python objects that a program may use while it is translated.

Only operations with a fixed outcome are allowed, so nothing may depend on the order of a set. Foreign code runs only in
the comparison and formatting of Enums and dataclasses. Anything else raises Unusable with the reason and a remedy.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

from inlay.pml.nodes import MAX_ELEMENTS
from inlay.pml.program.inputs import Selected, Template
from inlay.wording import lone_surrogate, shown_python

SCALARS = (str, int, float, complex, bool, type(None), Enum)
SETS = (set, frozenset)
_CONTAINERS = (tuple, list, dict, range, *SETS)

_ASIDE = "compute it outside the program and use the result in it"

OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ITERATING = (enumerate, list, reversed, tuple, zip)
_PLAIN = (frozenset, len, range, sorted, str)
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "endswith", "join", "lower", "lstrip", "removeprefix", "removesuffix"),
            *("replace", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"),
        )
    ),
    dict: frozenset(("get", "items", "keys", "values")),
}

_RECKONED = "an argument that only a call knows is reckoned with; text can be added to text alone"


class Unusable(Exception):  # noqa: N818  # carries a message to the place that it is about
    """A program cannot use this. The message gives the reason and the remedy."""


def is_constant(value: object) -> bool:
    """Return True for a number, a str, a container, an Enum member or a dataclass."""
    if isinstance(value, (*SCALARS, *_CONTAINERS, bytes)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_symbolic(value: object) -> bool:
    """Return True if the value contains an argument that only a call knows."""
    if isinstance(value, Template | Selected):
        return True
    if isinstance(value, dict):
        return any(map(is_symbolic, value.values()))
    return isinstance(value, tuple | list) and any(map(is_symbolic, value))


def truth(value: object) -> bool:
    """Return the truth value of a constant."""
    if not is_constant(value):
        raise Unusable(f"a condition hangs on {kind(value)}; write it with arguments and constants")
    return bool(attempt(lambda: bool(value)))


def items(value: object) -> tuple[Any, ...]:
    """Return the items of a for loop over the value."""
    if isinstance(value, SETS):
        raise Unusable("the order of a set is not fixed; loop over a tuple, or over sorted(…)")
    if isinstance(value, Selected):
        name = value.selection.name
        remedy = f"loop over a tuple and ask of each whether it is in '{name}'"
        raise Unusable(f"the order of '{name}' is not fixed; {remedy}")
    if isinstance(value, range) and len(value) > MAX_ELEMENTS:
        raise Unusable(f"the loop runs {len(value):,} times; the limit is {MAX_ELEMENTS:,}")
    if not isinstance(value, tuple | list | dict | range | str):
        raise Unusable(f"a loop runs over {kind(value)}; loop over a constant tuple, list, dict, str or range")
    return tuple(value)


def text(value: object) -> str:
    """Check a yielded str and return it."""
    if not isinstance(value, str):
        raise Unusable(f"{kind(value)} is not text; write it into an f-string, or yield a str")
    plain = "".join((value,))  # turns an Enum member that is also a str into its text
    if found := lone_surrogate(plain):
        raise Unusable(f"the text cannot be used: it holds {found}")
    return plain


def formatted(value: object, conversion: int, spec: str) -> str:
    """Format the value as an f-string does."""
    if not isinstance(value, SCALARS):
        raise Unusable(f"{kind(value)} has no text of its own; write its parts one by one")
    conversions: dict[int, Callable[[Any], str]] = {ord("r"): repr, ord("s"): str, ord("a"): ascii}
    convert = conversions.get(conversion)
    return str(attempt(lambda: format(convert(value) if convert else value, spec)))


def attempt(compute: Callable[[], Any]) -> Any:
    """Compute an operation on constants, and turn its exceptions into Unusable."""
    try:
        return compute()
    except Exception as error:  # constants may raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        said = f"not there: {reason}" if isinstance(error, LookupError | AttributeError) else reason
        raise Unusable(f"this fails ({said}); correct it") from None


def compared(kind_of: ast.cmpop, left: object, right: object) -> bool:
    """Compare two constants."""
    for side in (left, right):
        if is_symbolic(side):
            remedy = "a program sees no more of it than whether it is empty: write if … or if not …"
            raise Unusable(f"{kind(side)} is compared; {remedy}")
        if not is_constant(side):
            raise Unusable(f"{kind(side)} is compared; compare arguments and constants")
    if isinstance(kind_of, ast.Is | ast.IsNot) and not any(
        side is None or isinstance(side, bool | Enum) for side in (left, right)
    ):
        raise Unusable("is compares objects, not values; write == or !=")
    return bool(attempt(lambda: OPERATORS[type(kind_of)](left, right)))


def combined(kind_of: ast.operator, left: Any, right: Any) -> Any:
    """Compute an arithmetic operation. A text with holes can be added to a text."""
    if isinstance(kind_of, ast.Add) and isinstance(left, str | Template) and isinstance(right, str | Template):
        return merged_parts((left, right))
    if isinstance(left, Template | Selected) or isinstance(right, Template | Selected):
        raise Unusable(_RECKONED)
    if isinstance(kind_of, ast.Mod) and isinstance(left, str | bytes):
        raise Unusable("% on text; write an f-string")
    return attempt(lambda: OPERATORS[type(kind_of)](left, right))


def signed(kind_of: ast.unaryop, value: Any) -> Any:
    """Apply a sign to a number."""
    if is_symbolic(value):
        raise Unusable(_RECKONED)
    return attempt(lambda: -value if isinstance(kind_of, ast.USub) else +value)


def item(value: Any, key: Any) -> Any:
    """Return an element of a constant container."""
    if not isinstance(value, str | tuple | list | dict | range):
        raise Unusable(f"{kind(value)} is subscripted; take elements of a constant str, tuple, list or dict")
    if is_symbolic(key):
        raise Unusable(f"{kind(key)} is a key; make it a Literal[…], one of a few values")
    return attempt(lambda: value[key])


def attribute(value: object, name: str) -> Any:
    """Read an attribute of a module, a class, an Enum member, a dataclass or a named tuple."""
    if isinstance(value, Template):
        raise Unusable("a text argument goes into the text as it is; change it before the program is called")
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    named = isinstance(value, ModuleType | type | Enum) or name in fields or name in getattr(type(value), "_fields", ())
    if not named:
        raise Unusable(f"{kind(value)} has attributes that a program does not read; {_ASIDE}")
    return attempt(lambda: getattr(value, name))


def called(function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call one of the builtin functions that a program may call."""
    _check_arguments(kind(function), [*arguments, *keywords.values()])
    if any(function is one for one in _ITERATING):
        runs = [one if isinstance(one, int) else items(one) for one in arguments]
        result = attempt(lambda: tuple(function(*runs, **keywords)))
        return list(result) if function is list else result
    if not any(function is one for one in _PLAIN):
        raise Unusable(f"a program cannot call {kind(function)}; {_ASIDE}")
    if any(map(is_symbolic, arguments)):
        raise Unusable(f"an argument that only a call knows goes into {kind(function)}; a program uses it as it is")
    if function is str and not all(isinstance(argument, SCALARS) for argument in arguments):
        raise Unusable("str is asked of something that has no text of its own; write its parts one by one")
    return attempt(lambda: function(*arguments, **keywords))


def method(value: object, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call a method of a constant str or dict."""
    names = next((names for of, names in _METHODS.items() if isinstance(value, of)), frozenset())
    if name not in names:
        raise Unusable(f"a program cannot call .{name} of {kind(value)}; {_ASIDE}")
    if any(map(is_symbolic, arguments)):
        raise Unusable("a text argument goes into a method; yield it, or write it into an f-string")
    if any(isinstance(argument, SETS) for argument in arguments):
        raise Unusable("the order of a set is not fixed; write sorted(…)")
    _check_arguments(f".{name}", [*arguments, *keywords.values()])
    result = attempt(lambda: getattr(value, name)(*arguments, **keywords))
    return tuple(result) if isinstance(value, dict) and name != "get" else result


def _check_arguments(function: str, arguments: list[Any]) -> None:
    for argument in arguments:
        if not is_symbolic(argument) and not is_constant(argument):
            raise Unusable(f"{kind(argument)} goes into {function}, which takes constants alone here; {_ASIDE}")


def kind(value: object) -> str:
    """Describe a value for messages."""
    if isinstance(value, SCALARS):
        return shown_python(value)
    if isinstance(value, Selected):
        return f"the set argument '{value.selection.name}'"
    if isinstance(value, Template):
        words = value.parts[0] if len(value.parts) == 1 else ""
        return "a text with arguments in it" if isinstance(words, str) else f"the text argument '{words.name}'"
    if isinstance(value, type | ModuleType) or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    name = type(value).__name__
    return f"a {name}" if isinstance(value, _CONTAINERS) else f"an object of type {name}"


def merged_parts(parts: Iterable[str | Template]) -> str | Template:
    """Join pieces of text into a str, or into a Template if they have holes."""
    flat = [part for piece in parts for part in (piece.parts if isinstance(piece, Template) else (piece,))]
    joined: list[Any] = []
    for part in flat:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    if any(not isinstance(part, str) for part in joined):
        return Template(tuple(joined))
    return "".join(joined)
