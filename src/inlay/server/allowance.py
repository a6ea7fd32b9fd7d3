"""What a tenant may use. ``inlay keys`` writes it down, and limits.py sees to it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from inlay.errors import ParameterError

#: How much approximation requests may ask for, from none to all; the words of ``--max-reuse``.
CEILINGS = ("off", "exact", "modular")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may use, all its keys together; None for no limit. Raises ParameterError.

    requests_per_minute, tokens_per_minute: of prompts and of answers together.
    max_concurrent: answers at the same time; a request without answers of its own counts as one.
    max_reuse: the most approximation that a request may ask for, a word of CEILINGS.
    max_tokens: the most that one answer may have.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_reuse: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "max_reuse":
                if value not in CEILINGS:
                    raise ParameterError(f"max_reuse is {value!r}; use one of {', '.join(CEILINGS)}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{field.name} is {value!r}; it must be a whole number of at least 1")


NO_LIMITS = Limits()
