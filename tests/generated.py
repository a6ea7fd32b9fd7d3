"""How many examples a test is tried on: of a property, and of a product of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

_SHARE = 4


def examples(number: int) -> int:
    """Return this number for `make test-all`, and a quarter of it for targets that try the same examples every time."""
    return max(number // _SHARE, 10) if settings.get_current_profile_name() == "ci" else number


def in_pairs(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters. Those that `make test` does not need to meet every pair are `long`.

    Args:
        axes: The values of each parameter. The last one has the fewest values.
    """
    lists = [list(axis) for axis in axes]
    fewest = len(lists[-1])
    return [
        pytest.param(*(values[at] for values, at in zip(lists, places, strict=True)), marks=_mark(sum(places) % fewest))
        for places in product(*(range(len(values)) for values in lists))
    ]


def _mark(rest: int) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.long,) if rest else ()
