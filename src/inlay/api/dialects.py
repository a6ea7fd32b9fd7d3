"""Which dialect speaks at which path. A new one is one more row of DIALECTS."""

from __future__ import annotations

from inlay.api.dialect import Dialect
from inlay.api.openai import OpenAI

OPENAI: Dialect = OpenAI()

DIALECTS: tuple[Dialect, ...] = (OPENAI,)

_BY_ENDPOINT: dict[str, Dialect] = {path: dialect for dialect in DIALECTS for path in dialect.endpoints}


def dialect_of(path: str) -> Dialect:
    """The dialect of a path; OpenAI's where the path is no endpoint of any."""
    return _BY_ENDPOINT.get(path, OPENAI)
