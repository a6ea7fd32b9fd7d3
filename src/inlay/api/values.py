"""Checks of JSON values in bodies for values that no tokenizer, template or grammar accepts.

The checks process lists in pieces, and compare the types of a whole piece at once. A body may hold a million token ids,
and other threads can run between two pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from inlay.api.failures import MAX_NAME, BodyError
from inlay.wording import clip, lone_surrogate

MAX_NESTING = 128  # lists and objects, with the body's own

MAX_FIELDS = 256  # of a body, and of each object in it with known fields

_PIECE = 2**15  # members of a list that are checked together


def all_of(kind: type, values: Sequence[Any]) -> bool:
    """True if all values have exactly this type. Stops after the first piece with another type."""
    return all(kinds == {kind} for kinds in map(_kinds, _pieces(values)))


def walk(value: Any) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield the depth and members of every list and object in a value, in pieces. Keys of objects are included."""
    level, depth = [[value]], 1
    while level:
        inside: list[Any] = []
        for container in level:
            lists = (list(container), list(container.values())) if isinstance(container, dict) else (container,)
            for piece in (piece for members in lists for piece in _pieces(members)):
                yield depth, piece
                if _kinds(piece) & {dict, list}:
                    inside += (one for one in piece if isinstance(one, dict | list))
        level, depth = inside, depth + 1


def check_values(name: str, value: Any, most: int | None = None) -> None:
    """Raise BodyError for lone surrogates, NaN, Infinity, or too deep nesting in a field.

    Args:
        name: the field's name.
        value: its value.
        most: the most values that the field may hold; None for no limit.
    """
    if problem := lone_surrogate(name):
        raise BodyError(f"the name of a field holds {problem}")
    said, count = clip(name, MAX_NAME), 0
    for depth, piece in walk(value):
        count += len(piece)
        if most is not None and count > most:
            raise BodyError(f"{said} holds more than {most:,} values; leave some of them out", param=name)
        if depth > MAX_NESTING:
            raise BodyError(f"{said} nests lists and objects too deeply; nest them less deeply", param=name)
        if problem := _half_character(piece):
            raise BodyError(f"{said} holds {problem}", param=name)
        if float in _kinds(piece) and not all(math.isfinite(one) for one in piece if isinstance(one, float)):
            raise BodyError(f"{said} holds NaN or Infinity, which are not JSON values; write a number", param=name)


def _half_character(piece: Sequence[Any]) -> str | None:
    if str not in _kinds(piece):
        return None
    texts = (one for one in piece if isinstance(one, str) and not one.isascii())
    return next((problem for text in texts if (problem := lone_surrogate(text))), None)


def _kinds(piece: Sequence[Any]) -> set[type]:
    return set(map(type, piece))


def _pieces(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[start : start + _PIECE] for start in range(0, len(values), _PIECE))
