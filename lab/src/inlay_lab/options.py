"""Options that many commands have: numbers in a text, and the least value."""

from __future__ import annotations

from collections.abc import Sequence

from inlay.errors import ParameterError


def floats(option: str, text: str, example: str) -> tuple[float, ...]:
    """The numbers in a text, separated by commas. Raises ParameterError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"{option} is '{text}'; write a number, or several with commas: {example}") from None


def check_least(least: int, /, **options: int | Sequence[int] | None) -> None:
    """Raise ParameterError if an option is too small, or one number of a list. None is not checked."""
    for name, value in options.items():
        numbers = [value] if isinstance(value, int) else value
        if numbers is not None and not numbers:
            raise ParameterError(f"{name} is empty; give at least one number")
        for number in numbers or ():
            if number < least:
                raise ParameterError(f"{name} is {number}; it must be at least {least}")
