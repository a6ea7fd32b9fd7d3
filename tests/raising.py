"""Checks that an error has a code. The wording of messages is pinned by the error reference alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inlay.errors import InlayError


@contextmanager
def raises(code: str, kind: type[InlayError] = InlayError, *, line: int | None = None) -> Iterator[Any]:
    """Fail unless the block raises an error of this code and class, at this line of its source if one is given."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    if line is not None:
        assert caught.value.problems[0].place.line == line, caught.value  # type: ignore[attr-defined]
