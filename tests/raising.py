"""Checks that an error has a code. The wording of messages is pinned by the error reference alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inlay.errors import InlayError


class PanicException(BaseException):
    """The exception that a panic in a Rust library raises: no Exception, and known by its name."""


@contextmanager
def raises(
    code: str,
    kind: type[InlayError] = InlayError,
    *,
    line: int | None = None,
    field: str | None = None,
    names: str | None = None,
) -> Iterator[Any]:
    """Fail unless the block raises this error.

    Args:
        code: Its code.
        kind: Its class.
        line: The line of its source, of a PMLError.
        field: The field or parameter that it blames: of a PolicyError, or of a server's error.
        names: A value that its message must hold, like a file, an option or a limit.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert error.code == code, error
    if line is not None:
        assert error.problems[0].place.line == line, error
    if field is not None:
        assert getattr(error, "field", getattr(error, "param", None)) == field, error
    if names is not None:
        assert names in str(error), error
